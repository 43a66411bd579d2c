# SPDX-License-Identifier: Apache-2.0
"""What a server allows: addresses, keys, and how much of everything."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hillinfer.errors import SettingsError, reason_of
from hillinfer.values import format_bytes

# --- Keys ---

KEY_VARIABLE = "HILLINFER_API_KEY"
_LEAST_LETTERS = 8
_MOST_KEYS_BYTES = 1 << 20
_LETTERS = re.compile(r"[!-~]+")
# Salts of tenants are made with it, so that no key can be guessed from one.
_TENANT = b"hillinfer tenant 1"


class ApiKeys:
    """Keys that requests must carry one of; with none, whoever reaches the server may use it.

    Parameters
    ----------
    keys
        Each of 8 visible ASCII characters at least. Only their digests are kept.

    Raises
    ------
    SettingsError
        Where one is too short, or no header can carry it.
    """

    def __init__(self, keys: Sequence[str] = ()) -> None:
        for key in keys:
            if len(key) < _LEAST_LETTERS or not _LETTERS.fullmatch(key):
                raise SettingsError(
                    f"an API key has fewer than {_LEAST_LETTERS} characters, or others than "
                    "visible ASCII: make one, for example with openssl rand -hex 32"
                )
        self._digests = tuple(dict.fromkeys(_digest(key) for key in keys))

    @classmethod
    def read(cls, file: Path | None, variables: Mapping[str, str]) -> ApiKeys:
        """Return the keys of a file, one a line, and of the variable `HILLINFER_API_KEY`.

        Empty lines and those that begin with # are left out.

        Raises
        ------
        SettingsError
            Where the file cannot be read, has none, or has one that is not allowed.
        """
        keys = [variables[KEY_VARIABLE]] if variables.get(KEY_VARIABLE) else []
        if file is not None:
            lines = [line.strip() for line in _text(file).splitlines()]
            found = [line for line in lines if line and not line.startswith("#")]
            if not found:
                raise SettingsError(f"{file} has no API key: write one a line")
            keys += found
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, given: str | None) -> bytes | None:
        """Return what keeps this key's stored prompts apart; None where the key is none of these.

        Takes as long for a key that is nearly right as for any other. Without keys it is empty,
        whatever is given.
        """
        if not self._digests:
            return b""
        digest = _digest(given or "")
        # All of them, whichever it is.
        equal = [hmac.compare_digest(digest, own) for own in self._digests]
        return hmac.digest(digest, _TENANT, "sha256") if any(equal) else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(_MOST_KEYS_BYTES).decode()
    except OSError as error:
        raise SettingsError(
            f"cannot read the API keys in {file}: {reason_of(error)}; check --api-key-file"
        ) from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{file} is not text: write one API key a line") from error


# --- Rules ---

_MOST_PARALLEL = 256
_LOCAL_NAMES = frozenset({"localhost"})


@dataclass(frozen=True)
class ServerRules:
    """What a server allows.

    Raises SettingsError where a value is out of range, or others than this machine could use the
    server without a key.

    Parameters
    ----------
    host, port
        Address to listen at; port 0 takes a free one.
    keys
        What requests must carry.
    parallel
        Sequences that take steps together; 1 gives every request the bits that it has alone.
    queue
        Requests that wait beside those that are worked on.
    chunk_tokens
        Prompt tokens of one forward pass. A value decides bits, so that it is fixed.
    answer_tokens
        Most tokens of an answer whose request names no number.
    context_tokens
        Most tokens of prompt and answer; None for the model's positions.
    body_bytes
        Largest body of a request.
    seconds
        Most time of a request, from its arrival to its end.
    ping_seconds
        How long a stream is silent at most.
    drain_seconds
        How long requests may go on after a signal to end.
    alias
        What the model is called; None for its own name.
    files
        Directory that files of clients are kept in; None: as long as the server runs.
    files_bytes, most_files
        Most bytes of all of them, and most files: those that wait to be read are looked at in each
        turn.
    pause_seconds
        So long nothing is to be done before documents move: who asks on at once waits for no form.
    rest_seconds
        How often documents are planned anew while nothing else is to be done.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys: ApiKeys = field(default_factory=ApiKeys)
    parallel: int = 4
    queue: int = 64
    chunk_tokens: int = 1024
    answer_tokens: int = 1024
    context_tokens: int | None = None
    body_bytes: int = 32 << 20
    seconds: float = 3600.0
    ping_seconds: float = 15.0
    drain_seconds: float = 30.0
    alias: str | None = None
    files: Path | None = None
    files_bytes: int = 1 << 30
    most_files: int = 10_000
    pause_seconds: float = 0.3
    rest_seconds: float = 10.0

    def __post_init__(self) -> None:
        """Refuse values that mean nothing, and doors that stand open."""
        for name, value, least, most in (
            ("port", self.port, 0, 65535),
            ("parallel", self.parallel, 1, _MOST_PARALLEL),
            ("queue", self.queue, 0, 1 << 20),
            ("prefill_chunk", self.chunk_tokens, 2, 1 << 20),
            ("answer_tokens", self.answer_tokens, 1, 1 << 30),
            ("context", self.context_tokens or 2, 2, 1 << 30),
            ("max_files", self.files_bytes, 0, 1 << 50),
            ("most_files", self.most_files, 1, 1 << 20),
            ("max_body", self.body_bytes, 1 << 10, 1 << 40),
        ):
            if not least <= value <= most:
                raise SettingsError(f"{name}={value} must be between {least} and {most}")
        for name, number in (
            ("max_seconds", self.seconds),
            ("ping_seconds", self.ping_seconds),
            ("drain_seconds", self.drain_seconds),
            ("pause_seconds", self.pause_seconds),
            ("rest_seconds", self.rest_seconds),
        ):
            if not 0 < number < float("inf"):
                raise SettingsError(f"{name}={number} must be above 0")
        if not self.is_local and not self.keys:
            raise SettingsError(
                f"--host {self.host} lets other machines in, and no API key is asked for: name "
                f"keys with --api-key-file or {KEY_VARIABLE}"
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return is_local(self.host)

    @property
    def body_limit(self) -> str:
        """The largest body, for people."""
        return format_bytes(self.body_bytes)


def is_local(host: str) -> bool:
    """Return whether an address is of this machine alone."""
    if host in _LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


# --- Where requests are from, and how large they are ---


def names_this_machine(host: str) -> bool:
    """Return whether a header `Host` is a name of this machine, and of no other."""
    try:
        return is_local(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def is_of_other_place(origin: str | None, host: str) -> bool:
    """Return whether a page of another place sent a request.

    Parameters
    ----------
    origin, host
        Its headers; `origin` is None where no page sent it.
    """
    if origin is None:
        return False
    try:
        return urlsplit(origin).netloc != host
    except ValueError:
        return True


def bounded(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    most_bytes: int,
    too_large: Callable[[], Exception],
) -> Callable[[], Awaitable[MutableMapping[str, Any]]]:
    """Return what receives a body of ASGI no larger than allowed.

    Parameters
    ----------
    receive
        Gives its parts.
    most_bytes
        Of all parts together.
    too_large
        Makes what is raised by the part that is too much.
    """
    taken = 0

    async def receiving() -> MutableMapping[str, Any]:
        nonlocal taken
        message = await receive()
        if message["type"] == "http.request":
            taken += len(message.get("body", b""))
            if taken > most_bytes:
                raise too_large()
        return message

    return receiving
