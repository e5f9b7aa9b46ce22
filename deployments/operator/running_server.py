"""HTTP client of a running server, with plain error messages."""

import argparse
import http.client
import json
import os
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any, Self
from urllib.parse import urlsplit

KEY_VARIABLE = "RAYLENS_API_KEY"
_DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_SECONDS = 10.0


class NoAnswerError(RuntimeError):
    """The server did not give the requested answer. The message has the reason."""


def add_server_options(parser: argparse.ArgumentParser) -> None:
    add: Any = parser.add_argument
    add("--url", type=_address, default=_DEFAULT_URL, help="the server's address (default: %(default)s)")
    add(
        "--api-key", metavar="KEY", help=f"an admin's key (default: {KEY_VARIABLE}, hidden from others on this machine)"
    )


class RunningServer:
    """`url`: the server's address, without a path."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """Raises NoAnswerError if a request cannot carry the key's characters."""
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise NoAnswerError("the API key has characters that no API key has")
        self.url = url
        self._api_key = api_key

    @classmethod
    def named_by(cls, args: argparse.Namespace) -> Self:
        """Takes the options of `add_server_options`."""
        return cls(args.url, args.api_key or os.environ.get(KEY_VARIABLE) or None)

    @property
    def headers(self) -> dict[str, str]:
        return {} if self._api_key is None else {"Authorization": f"Bearer {self._api_key}"}

    def get(self, path: str) -> str:
        """Returns the body of an answer with status 200. Raises NoAnswerError."""
        request = urllib.request.Request(f"{self.url}{path}")
        for name, value in self.headers.items():  # sent to this server only, never to a redirect's target
            request.add_unredirected_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
                content: bytes = response.read()
        except urllib.error.HTTPError as error:
            raise NoAnswerError(self._why_refused(path, error)) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise NoAnswerError(f"{self.url} does not answer: {_told(reason)}") from error
        return content.decode(errors="replace")

    def _why_refused(self, path: str, error: urllib.error.HTTPError) -> str:
        if error.code == 401 and self._api_key is None:
            return f"{self.url} wants an API key: set {KEY_VARIABLE}, or give --api-key"
        message = _message(error)
        if message is None:
            return f"{self.url}{path} answers {error.code} {error.reason}"
        return f"{self.url} refuses: {message}" if error.code in (401, 403) else f"{self.url}: {message}"


def _address(text: str) -> str:
    """Accepts the server's address and the API's address, which ends in /v1."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address like {_DEFAULT_URL}")
    return text.rstrip("/").removesuffix("/v1")


def _message(error: urllib.error.HTTPError) -> str | None:
    with suppress(ValueError, OSError, http.client.HTTPException):
        return message_of(json.load(error))
    return None


def message_of(body: Any) -> str | None:
    """Returns the message of an error in OpenAI's form, None for any other form."""
    with suppress(TypeError, KeyError):
        return str(body["error"]["message"])
    return None


def _told(reason: object) -> str:
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return " ".join(str(text).lower().split())
