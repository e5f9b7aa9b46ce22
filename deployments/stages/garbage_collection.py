"""Keeps what a process has imported out of Python's garbage collection."""

import gc


def skip_startup_objects() -> None:
    """Leaves what is alive now out of every later collection; to be called when a process has started.

    The libraries are some 136,000 objects in an ingress, and more where torch is imported. To look at all of them takes
    a tenth of a second, in which the process does nothing else, and Ray asks every process of a node for it when the
    node's object store fills.
    """
    gc.collect()
    gc.freeze()
