"""The headers by which a client gives orders to Ray Serve.

Ray 2.60: Ray Serve reads these headers before the application does. They shorten a request's time, route it, or let the
server go on with it after its client has left. A byte beyond ASCII in one ends the request with a bare 500 that no log
has.

Needed: Ray Serve sees none of them but the request's id (`deployments/endpoint/request_headers.py`).

Test: `tests/deployments/ray_internals/test_http_headers.py` reads Ray Serve's source for headers.

Way back: an option of Ray Serve to ignore them. ray-project/ray#62867 brought them to each way into Ray Serve."""

from ray.serve._private.constants import (
    SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
    SERVE_HTTP_REQUEST_ID_HEADER,
    SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
    SERVE_MULTIPLEXED_MODEL_ID,
    SERVE_SESSION_ID,
)

REQUEST_ID: str = SERVE_HTTP_REQUEST_ID_HEADER
ORDERS: tuple[str, ...] = (
    SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
    SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
    SERVE_MULTIPLEXED_MODEL_ID,
    SERVE_SESSION_ID,
)
