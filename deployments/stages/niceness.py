"""The priorities of a machine's processes: those that answer clients run before those that compute, see nice(1)."""

import os

STAGE_NICENESS = 5


def give_way_to_answers() -> None:
    """To be called once in a stage's process, before it starts threads: they inherit the niceness of the one that
    starts them. The ingress and HAProxy, which answer, have none, nor have Ray's own threads of a stage."""
    os.nice(STAGE_NICENESS)
