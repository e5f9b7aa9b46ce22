"""Excludes a process's startup objects from Python's garbage collection."""

import gc


def skip_startup_objects() -> None:
    """Freezes all live objects. Call it at the end of a process's startup.

    The libraries create some 136,000 objects in an ingress, and more with torch. A full collection over them blocks the
    process for a tenth of a second. Ray triggers a collection in every process of a node when the node's object store
    fills.
    """
    gc.collect()
    gc.freeze()
