"""The headers by which a client controls Ray Serve.

Ray 2.60: Ray Serve reads them before the application does. They shorten a request's time, route it, or let the server
go on after its client has left. A byte beyond ASCII in one ends the request with a bare 500 that no log has.
Needed: Ray Serve sees the request's id only (`deployments/endpoint/request_headers.py`).
Test: `tests/deployments/ray_internals/test_http_headers.py` reads Ray Serve's source for headers.
Way back: an option to ignore them. ray-project/ray#62867 brought them to each way into Ray Serve."""

from ray.serve._private import constants

REQUEST_ID: str = constants.SERVE_HTTP_REQUEST_ID_HEADER
ORDERS: tuple[str, ...] = (
    constants.SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
    constants.SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
    constants.SERVE_MULTIPLEXED_MODEL_ID,
    constants.SERVE_SESSION_ID,
)
