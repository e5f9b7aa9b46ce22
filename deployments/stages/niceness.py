"""The priorities of a machine's processes: decoding and those that answer clients run before work on pictures, see
nice(1)."""

import os

PREPROCESS_NICENESS = 15
"""Of all its threads. Where the thread that works on items had more than the others, it was kept from its core while it
held the interpreter, and they waited up to 0.3 s for it. Beside large pictures, the 99th percentile of first tokens of
another client's texts was 165 to 227 ms with 5 or 10, and 118 to 134 ms with 15."""
ENCODER_NICENESS = 10
"""With 5, one in ten steps that compute prompts beside the encoder took half as long again as the median."""


def give_way_to_answers(niceness: int) -> None:
    """Makes this thread, and those that it starts from now on, give way to decoding and to those that answer clients.

    Generate, the ingress and HAProxy keep their niceness, and so do Ray's own threads of a stage."""
    os.nice(niceness)
