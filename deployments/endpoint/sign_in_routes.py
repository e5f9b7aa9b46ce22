"""Signing in at the web pages: the browser keeps the API key in a cookie, which no script can read."""

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.requests import cookie_parser

from raylens.deployments.endpoint.call import HttpCall

SIGN_IN, SIGN_OUT = "/sign-in", "/sign-out"
_COOKIE = "raylens_key"
_KEPT_SECONDS = 30 * 86_400


def key_in_cookie(headers: Headers) -> str | None:
    """Returns the API key with which the browser signed in."""
    return cookie_parser(headers.get("cookie", "")).get(_COOKIE) or None


def add_sign_in_routes(api: FastAPI) -> None:
    api.add_api_route(SIGN_IN, _sign_in, methods=["POST"], include_in_schema=False)
    api.add_api_route(SIGN_OUT, _sign_out, methods=["POST"], include_in_schema=False)


async def _sign_in(request: Request, call: HttpCall) -> Response:
    """Puts the request's key, which the gate has checked, into a cookie. Other sites' pages cannot use it."""
    response = JSONResponse({"admin": call.caller.is_admin})
    _, _, key = request.headers.get("authorization", "").partition(" ")
    is_secure = request.headers.get("x-forwarded-proto", request.url.scheme) == "https"
    response.set_cookie(_COOKIE, key, max_age=_KEPT_SECONDS, httponly=True, secure=is_secure, samesite="strict")
    return response


async def _sign_out() -> Response:
    response = Response(status_code=204)
    response.delete_cookie(_COOKIE, httponly=True, samesite="strict")
    return response
