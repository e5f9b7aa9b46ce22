"""The priorities of a machine's processes: decoding and those that answer clients run before work on pictures, see
nice(1)."""

import os

STAGE_NICENESS = 5


def give_way_to_answers() -> None:
    """Makes this thread, and those that it starts from now on, give way to decoding and to those that answer clients.

    Generate, the ingress and HAProxy keep their niceness, and so do Ray's own threads of a stage."""
    os.nice(STAGE_NICENESS)
