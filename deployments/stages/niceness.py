"""The priorities of a machine's processes: those that answer clients run before those that compute, see nice(1)."""

import os

STAGE_NICENESS = 5


def give_way_to_answers() -> None:
    """Makes this process give way to those that answer clients. Call this once in a stage's process before it starts
    threads, because a thread inherits the niceness of the thread that starts it. The ingress and HAProxy, which answer
    clients, keep theirs, and so do Ray's own threads of a stage."""
    os.nice(STAGE_NICENESS)
