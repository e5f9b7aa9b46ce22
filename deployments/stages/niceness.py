"""Process priorities, see nice(1): decoding and answering clients run before image work."""

import os

PREPROCESS_NICENESS = 15
"""For all threads of the replica. With a higher niceness only for the item thread, that thread was descheduled while it
held the interpreter, and the other threads waited up to 0.3 s. Beside large images, the 99th percentile of another
client's time to first token was 165 to 227 ms with 5 or 10, and 118 to 134 ms with 15."""
ENCODER_NICENESS = 10
"""With 5, one in ten prefill steps beside the encoder took 1.5 times the median."""


def give_way_to_answers(niceness: int) -> None:
    """Lowers the priority of this thread and of threads it starts later.

    Generate, the ingress, HAProxy and Ray's own threads of a stage keep their niceness."""
    os.nice(niceness)
