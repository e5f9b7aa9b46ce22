"""Ray imported in a process that forks workers.

Ray 2.60: `_raylet.so` reads all `RAY_` variables when it is loaded, the job and the raylet's pid among them. Its random
generator is seeded at the first draw, so workers that are forked later would draw equal ids, which name their objects.
`import ray.serve` draws an id for each class of actors.
Needed: replicas start without these imports, which take each of them a second of a core. The import has the variables
of the first worker, and draws nothing.
Test: `tests/deployments/test_worker_template.py`, `test_two_workers_draw_different_ids`.
Way back: workers that Ray forks from a process with given imports (ray-project/ray#31915, closed)."""

import gc
import importlib
import os
from collections.abc import Mapping

_MODULES = ("raylens.deployments.app", "ray.serve._private.replica", "uvicorn.protocols.http.httptools_impl")


class RayBeforeFork:
    """Ray in this process, imported for the first worker."""

    def __init__(self) -> None:
        self._variables: dict[str, str] | None = None

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Returns whether a worker with `environment` may be forked: its `RAY_` variables are those of the import."""
        variables = {name: value for name, value in environment.items() if name.startswith("RAY_")}
        if self._variables is None:
            self._variables = variables
            os.environ.update(variables)
            _import()
            gc.collect()
            gc.freeze()  # a collection in a worker would write to shared memory pages
        return variables == self._variables


def _import() -> None:
    from ray import actor

    drawing = actor.ActorClassID

    class DrawnBySystem:
        @staticmethod
        def from_random() -> object:
            return drawing(os.urandom(drawing.size()))

    actor.ActorClassID = DrawnBySystem
    try:
        for module in _MODULES:
            importlib.import_module(module)
    finally:
        actor.ActorClassID = drawing
