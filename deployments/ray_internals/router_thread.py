"""The end of the thread in which Ray Serve routes a driver's calls.

Ray 2.60: the first handle of a driver starts an event loop in a thread. Neither `serve.shutdown()` nor `ray.shutdown()`
ends it. It records metrics every few seconds, in a later session and while the process ends.

Needed: no thread of a session outlives the session.

Test: `tests/deployments/test_ray_session.py`, `test_no_thread_of_python_is_left`;
`tests/deployments/ray_internals/test_driver.py`, `test_serve_keeps_the_router_s_loop_where_it_is_looked_for`.

Way back: a `serve.shutdown()` that ends the thread. No issue is known. Handles that route on the caller's own loop by
default (ray-project/ray#61226) would not help: a driver has no loop."""

import asyncio
import sys
import threading

_END_SECONDS = 10.0


def end_router_thread() -> None:
    """Ends the thread, if there is one. Handles of a later session start another."""
    router = sys.modules.get("ray.serve._private.router")
    loop: asyncio.AbstractEventLoop | None = None if router is None else router.SingletonThreadRouter._asyncio_loop
    if router is None or loop is None:
        return
    router.SingletonThreadRouter._asyncio_loop = None
    threads = [thread for thread in threading.enumerate() if "(_run_router_event_loop)" in thread.name]
    asyncio.run_coroutine_threadsafe(_stop_loop(), loop)
    for thread in threads:
        thread.join(_END_SECONDS)


async def _stop_loop() -> None:
    """Ends all tasks of the loop, and the loop."""
    loop = asyncio.get_running_loop()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    loop.call_soon(loop.stop)
