"""Reads a server's /metrics over HTTP, and says what is in the way."""

import http.client
import json
import urllib.error
import urllib.request

from deployments.summary.metrics_page import MetricsPage

_TIMEOUT_SECONDS = 5.0


class UnreachableError(RuntimeError):
    """The server does not answer now. It may later."""


class RefusedError(RuntimeError):
    """What answers does not give its metrics to this key, or is not a server of Raylens."""


class MetricsReader:
    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url
        self._request = urllib.request.Request(f"{self.url}/metrics")
        self._has_key = api_key is not None
        if api_key is not None:  # which is for this server, and for none that it may redirect to
            self._request.add_unredirected_header("Authorization", f"Bearer {api_key}")

    def read(self) -> MetricsPage:
        """Raises UnreachableError or RefusedError."""
        try:
            with urllib.request.urlopen(self._request, timeout=_TIMEOUT_SECONDS) as response:
                text = response.read().decode()
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from error
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise UnreachableError(f"{self.url} does not answer: {_told(reason)}") from error
        try:
            return MetricsPage.of_text(text)
        except ValueError as error:
            raise RefusedError(f"{self.url}/metrics is not a page of metrics") from error

    def _refusal(self, error: urllib.error.HTTPError) -> RuntimeError:
        told = _message(error)
        if error.code == 401 and not self._has_key:
            return RefusedError(f"{self.url} wants an API key: set RAYLENS_API_KEY, or give --api-key")
        if error.code in (401, 403):
            return RefusedError(f"{self.url} refuses: {told}")
        if error.code >= 500:
            return UnreachableError(f"{self.url} is not ready: {told}")
        return RefusedError(f"{self.url}/metrics answers {error.code}: {told}")


def _message(error: urllib.error.HTTPError) -> str:
    """Returns what an answer in OpenAI's form says, or the name of its status."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, TypeError, KeyError, OSError):
        return f"{error.code} {error.reason}"


def _told(reason: object) -> str:
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return str(text).lower()
