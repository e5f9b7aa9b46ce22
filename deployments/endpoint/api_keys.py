"""The API keys of the endpoint's clients. The server keeps only hashes, and reloads a changed file."""

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

logger = logging.getLogger(f"ray.serve.{__name__}")

ENVIRONMENT_VARIABLE = "RAYLENS_API_KEYS"
_LOOK_SECONDS = 1.0
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C reads a thousand keys in 10 ms


class ApiKeysError(ValueError):
    """The key file or the variable with keys is unusable. The message says why and never contains a key."""


class ApiKey(BaseModel):
    """An entry of the key file. `sha256`: the key's hash in hexadecimal. Keys have 256 random bits, so a fast hash is
    safe. `max_requests`: the limit on concurrent requests; null: the limit in `admission.per_key`. `priority`: added to
    the priority of the key's requests. `admin`: the key may read operator data, such as the usage of every key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    max_requests: int | None = Field(None, ge=1)
    priority: int = Field(0, ge=0, le=1000)
    admin: bool = False


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. Callers with different `cache_salt` share no cache entries, so neither can find out the
    other's inputs. `name`: None if anybody may call. `is_admin`: the caller may read operator data. `is_batch`: the
    request is a batch's, which live ones precede."""

    name: str | None
    cache_salt: str
    max_requests: int | None = None
    priority: int = 0
    is_admin: bool = False
    is_batch: bool = False


def new_key() -> str:
    return "rl-" + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(file: Path) -> dict[str, ApiKey]:
    """Returns the keys of a YAML file, a list of ApiKey, by their hash. Raises ApiKeysError."""
    try:
        entries = TypeAdapter(list[ApiKey]).validate_python(yaml.load(file.read_text(), _LOADER) or [])
    except OSError as error:
        raise ApiKeysError(f"{file}: {error.strerror}") from error
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_input=False))
        raise ApiKeysError(f"{file}: {problems}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also undecodable bytes and invalid dates
        raise ApiKeysError(f"{file}: not YAML") from error
    if len({entry.name for entry in entries}) < len(entries) or len({entry.sha256 for entry in entries}) < len(entries):
        raise ApiKeysError(f"{file}: two entries have the same name or the same key")
    return {entry.sha256: entry for entry in entries}


def add_key(file: Path, name: str, *, is_admin: bool = False) -> str:
    """Creates a key, adds its entry to the file and returns the key. Afterwards only the file's owner may read it.
    Raises ApiKeysError, and changes nothing, if the name is taken or not allowed."""
    old = read_keys(file) if file.exists() else {}
    if any(entry.name == name for entry in old.values()):
        raise ApiKeysError(f"{file}: there is a key of {name!r} already")
    key = new_key()
    try:
        entry = ApiKey(name=name, sha256=hash_key(key), admin=is_admin)
    except ValidationError as error:
        raise ApiKeysError(f"{name!r} is no name for a key: letters, digits, '.', '_' and '-', at most 64") from error
    entries = [one.model_dump(exclude_defaults=True) for one in [*old.values(), entry]]
    new = file.with_name(f".{file.name}.new")
    try:
        new.write_text(yaml.safe_dump(entries, sort_keys=False))
        new.chmod(0o600)
        new.replace(file)  # atomic: a server may be reading it
    except OSError as error:
        raise ApiKeysError(f"{file}: {error.strerror}") from error
    return key


class ApiKeys:
    """The keys of a file and of the environment. With neither, anybody may call."""

    def __init__(self, file: str | None, environment: Mapping[str, str] = os.environ) -> None:
        """RAYLENS_API_KEYS holds the operator's own keys, separated by commas: all are admins. Raises ApiKeysError."""
        self._file = None if file is None else Path(file)
        given = [key.strip() for key in environment.get(ENVIRONMENT_VARIABLE, "").split(",") if key.strip()]
        hashes = map(hash_key, given)
        self._given = {sha: ApiKey(name=f"env-{n}", sha256=sha, admin=True) for n, sha in enumerate(hashes)}
        self.is_open = self._file is None and not self._given
        self._keys = self._given if self._file is None else self._given | read_keys(self._file)
        self._state = self._seen = (0, 0, 0) if self._file is None else _state(self._file)
        self._next_look = 0.0

    @property
    def names(self) -> list[str]:
        return [key.name for key in self._keys.values()]

    def find(self, key: str | None) -> Caller | None:
        """Returns the caller with this key, or None. The lookup by hash takes the same time for every key."""
        return self.of_tenant(hash_key(key or "")) if self.is_open or key is not None else None

    def of_tenant(self, cache_salt: str) -> Caller | None:
        """Returns the caller with this `cache_salt`, or None if its key is not valid any more."""
        if self.is_open:
            return Caller(None, cache_salt, is_admin=True)
        self._read_again()
        if (found := self._keys.get(cache_salt)) is None:
            return None
        return Caller(found.name, found.sha256, found.max_requests, found.priority, found.admin)

    def _read_again(self) -> None:
        """Reloads a changed file once two looks in a row agree, because it may be half-written."""
        now = time.monotonic()
        if self._file is None or now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        try:
            state = _state(self._file)
            is_settled, self._seen = state == self._seen, state
            if is_settled and state != self._state:
                self._keys = self._given | read_keys(self._file)
                self._state = state
                logger.info("API keys read again: %d", len(self._keys))
        except (OSError, ApiKeysError) as error:
            logger.error("API keys not read again, the old ones hold: %s", error)


def _state(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino
