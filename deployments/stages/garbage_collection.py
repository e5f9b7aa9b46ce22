"""Keeps what a process has imported out of Python's garbage collection."""

import gc


def skip_startup_objects() -> None:
    """Leaves all objects that are alive now out of every later collection. Call this when a process has started.

    The libraries make some 136,000 objects in an ingress, and more where torch is imported. A collection that looks at
    all of them takes a tenth of a second, in which the process does nothing else. Ray asks every process of a node for
    a collection when the node's object store fills.
    """
    gc.collect()
    gc.freeze()
