"""Asks the Hugging Face hub for a model's configuration before a server starts, without a long wait."""

import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

_ANSWER_SECONDS = 2.0
_VARIABLE = "HF_HUB_ETAG_TIMEOUT"
"""Names the seconds instead, as in huggingface_hub, whose own limit is 10 s for each of up to six tries."""
_REMEDY = "name a folder, or download the model where there is a connection"


class HubError(Exception):
    """The hub has no such model, or does not answer and the cache has none. The message is the reason."""


def fetch_config(model: str, revision: str | None) -> Path:
    """Returns the file config.json of a hub id: from the hub, or from the cache if the hub does not answer. Raises
    HubError."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    is_offline = constants.HF_HUB_OFFLINE
    why_not = "HF_HUB_OFFLINE is set, and the cache has no such model" if is_offline else _why_away(model, revision)
    if why_not is None:
        try:
            return Path(hf_hub_download(model, "config.json", revision=revision))
        except RepositoryNotFoundError as error:
            raise HubError("no such model on the hub, or it requires a token") from error
        except RevisionNotFoundError as error:
            raise HubError(f"the hub has no revision {revision!r} of it") from error
        except (LocalEntryNotFoundError, OSError) as error:
            raise HubError(f"cannot be fetched from the hub: {_first_line(error)}") from error
    cached = try_to_load_from_cache(model, "config.json", revision=revision)
    if not isinstance(cached, str):
        raise HubError(f"{why_not}; {_REMEDY}")
    return Path(cached)


def _why_away(model: str, revision: str | None) -> str | None:
    """Asks the hub once. Returns why it does not answer, or None if it answers, also with a refusal."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    limit = float(os.environ.get(_VARIABLE) or _ANSWER_SECONDS)
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            url = hf_hub_url(model, "config.json", revision=revision)
            answer.set_result(get_hf_file_metadata(url, timeout=limit + 1))
        except Exception as error:
            answer.set_exception(error)

    # A daemon thread, because no timeout of a library bounds the look-up of names and several addresses.
    threading.Thread(target=ask, daemon=True).start()
    try:
        answer.result(timeout=limit)
    except HfHubHTTPError as error:
        is_of_hub = type(error) is not HfHubHTTPError  # a refusal, such as RepositoryNotFoundError
        return None if is_of_hub else f"{constants.ENDPOINT} answers with status {error.response.status_code}"
    except TimeoutError:
        return f"{constants.ENDPOINT} does not answer within {limit:g} s ({_VARIABLE})"
    except Exception as error:
        return f"{constants.ENDPOINT} cannot be reached: {_first_line(error)}"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
