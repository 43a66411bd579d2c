# SPDX-License-Identifier: Apache-2.0
"""A directory in Redis, shared by several routers: a set of prefixes for each host."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from hillinfer_hosts.directory import HELD_BYTES, SILENT_SECONDS, Change, Host, HostsError, probed

_NAMES = "hillinfer:hosts"
_HOST, _HELD = "hillinfer:host:", "hillinfer:held:"
_TEXTS = (b"replica", b"agent", b"session")
# What else the key signs begins otherwise.
_SIGNED = b"hillinfer host 2\n"
# A host signs anew with each beat. What is older somebody repeats, maybe with an address that is
# another's by now; clocks of hosts may differ by the rest.
_SIGNED_SECONDS = 60.0
# Names that are told: who may write to Redis fills no log.
_MOST_TOLD = 1000
# Members of one command.
_BATCH = 1000
_Answer = TypeVar("_Answer")


class RedisDirectory:
    """Keeps what hosts hold in Redis, which lets go of a silent host by itself.

    A lookup asks the set of every host, in one round trip: right for dozens of hosts.

    Parameters
    ----------
    url
        As `redis://directory:6379/0`.
    silent_seconds
        After so much silence a host is not there.
    client
        Of Redis, in place of one that is made.
    key
        What hosts share. With it a host is signed with its time. One that is not, or wrongly, or
        more than a minute ago, is not there: whoever may write to Redis alone leads no request to
        a place of his own. Without it everybody is believed who may write there.
    clock
        Returns the time in seconds, as the clocks of other hosts tell it.
    say
        Told once of each host that is not there for that.

    Raises
    ------
    HostsError
        Where the extra `redis` is not installed.
    """

    def __init__(
        self,
        url: str,
        silent_seconds: float = SILENT_SECONDS,
        client: Any = None,
        key: str = "",
        clock: Callable[[], float] = time.time,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        try:
            import redis
        except ImportError as error:
            raise HostsError(
                "the directory is in Redis and its client is not installed: "
                "pip install 'hillinfer-hosts[redis]'"
            ) from error
        self._errors = redis.RedisError
        self._key, self._clock, self._say = key.encode(), clock, say
        self._told: set[str] = set()
        self._milliseconds = max(1, int(1000 * silent_seconds))
        # Answers are bytes, which its types leave open.
        self._redis: Any = client or redis.Redis.from_url(
            url, socket_timeout=5, socket_connect_timeout=2
        )

    def announce(self, host: Host, change: Change) -> bool:
        """Take what a host says; False where it has to say everything anew."""
        return self._asked(lambda: self._announce(host, change))

    def hosts(self) -> list[Host]:
        """Return the hosts that said something lately."""
        return self._asked(self._hosts)

    def longest(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Return how many groups of a prompt each host holds."""
        return self._asked(lambda: probed(keys, self._holders))

    def forget(self, name: str) -> None:
        """Let go of a host, and of what it holds."""
        self._asked(lambda: self._redis.unlink(_HOST + name, _HELD + name))

    def close(self) -> None:
        """Let the connection go."""
        self._redis.close()

    # --- inside ----------------------------------------------------------------------------

    def _asked(self, what: Callable[[], _Answer]) -> _Answer:
        try:
            return what()
        except self._errors as error:
            raise HostsError(f"the directory in Redis does not answer: {error}") from error

    def _announce(self, host: Host, change: Change) -> bool:
        name, held = _HOST + host.name, _HELD + host.name
        said = f"{self._clock():.3f}".encode()
        if not change.is_whole:
            known = self._redis.hget(name, "session")
            if known is None or known.decode() != host.session:
                return False
        with self._redis.pipeline(transaction=True) as steps:
            if change.is_whole:
                steps.unlink(held)
            for part in _parts(change.gone):
                steps.srem(held, *part)
            for part in _parts(change.held):
                steps.sadd(held, *part)
            steps.hset(
                name,
                mapping={
                    "replica": host.replica,
                    "agent": host.agent,
                    "session": host.session,
                    "namespaces": b"".join(host.namespaces),
                    "said": said,
                    "signature": self._signature(host, said),
                },
            )
            steps.sadd(_NAMES, host.name)
            steps.pexpire(name, self._milliseconds)
            steps.pexpire(held, self._milliseconds)
            steps.execute()
        return True

    def _names(self) -> list[str]:
        # Who writes what is no text stops no lookup.
        return sorted(name.decode(errors="replace") for name in self._redis.smembers(_NAMES))

    def _hosts(self) -> list[Host]:
        names = self._names()
        with self._redis.pipeline(transaction=False) as steps:
            for name in names:
                steps.hgetall(_HOST + name)
            told = steps.execute()
        found = []
        for name, own in zip(names, told, strict=True):
            if not own:
                self._redis.srem(_NAMES, name)
                continue
            host = self._signed(name, own)
            if host is not None:
                found.append(host)
        return found

    def _signed(self, name: str, own: dict[bytes, bytes]) -> Host | None:
        """Return a host as it was said; None where it was not said lately, or without the key."""
        told = [own.get(key, b"").decode(errors="replace") for key in _TEXTS]
        host = Host.of([name, *told], own.get(b"namespaces", b""))
        why = self._why_unbelieved(host, own.get(b"said", b""), own.get(b"signature", b""))
        if not why:
            return host
        if name not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(name)
            self._say(f"the host {name!r} in Redis gets no requests: {why}")
        return None

    def _why_unbelieved(self, host: Host, said: bytes, signature: bytes) -> str:
        """Return why a host is not believed; empty where it is."""
        if not self._key:
            return ""
        if not hmac.compare_digest(signature, self._signature(host, said)):
            return "it is not signed with the key of this router, or by another version"
        # Signed, it is a number.
        if abs(self._clock() - float(said)) > _SIGNED_SECONDS:
            return (
                f"it was signed more than {_SIGNED_SECONDS:.0f} s from now: somebody repeats it, "
                "or the clocks of its machine and this one differ"
            )
        return ""

    def _signature(self, host: Host, said: bytes) -> bytes:
        """Return the HMAC of all that is said of a host, and when; empty without a key."""
        told = json.dumps(host.told(), sort_keys=True).encode() + b"\n" + said
        return hmac.digest(self._key, _SIGNED + told, hashlib.sha256) if self._key else b""

    def _holders(self, keys: Sequence[bytes]) -> dict[bytes, set[str]]:
        names = self._names()
        found: dict[bytes, set[str]] = {}
        if not keys or not names:
            return found
        with self._redis.pipeline(transaction=False) as steps:
            for name in names:
                steps.smismember(_HELD + name, list(keys))
            told = steps.execute()
        for name, own in zip(names, told, strict=True):
            for key, is_held in zip(keys, own, strict=True):
                if is_held:
                    found.setdefault(key, set()).add(name)
        return found


def _parts(keys: Sequence[bytes]) -> Iterator[list[bytes]]:
    for start in range(0, len(keys), _BATCH):
        yield [key[:HELD_BYTES] for key in keys[start : start + _BATCH]]
