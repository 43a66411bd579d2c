# SPDX-License-Identifier: Apache-2.0
"""A host says what its store holds: once a second what changed, everything where it is unknown."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from hillinfer.errors import HillInferError
from hillinfer_hosts.directory import HELD_BYTES, Change, Host, HostsError, checked_url
from hillinfer_hosts.held import HeldPrefixes

ANNOUNCE = "/hosts/announce"
# A host that changed nothing says that it is there after so much silence of its own.
BEAT_SECONDS = 3.0
# Of one announcement; more come in parts.
_MOST_KEYS = 1 << 20


def packed(host: Host, change: Change) -> dict[str, Any]:
    """Return what a host says as JSON can say it."""
    return {
        "host": host.told(),
        "held": base64.b64encode(b"".join(one[:HELD_BYTES] for one in change.held)).decode(),
        "gone": base64.b64encode(b"".join(one[:HELD_BYTES] for one in change.gone)).decode(),
        "is_whole": change.is_whole,
    }


def unpacked(told: Any) -> tuple[Host, Change]:
    """Return what `packed` made; HostsError where it is nothing of that kind."""
    try:
        host, whole = Host.read(told["host"]), told["is_whole"] is True
        held, gone = (base64.b64decode(told[name], validate=True) for name in ("held", "gone"))
    except (KeyError, TypeError, ValueError) as error:
        raise HostsError(f"that is no announcement: {type(error).__name__}") from error
    if len(held) % HELD_BYTES or len(gone) % HELD_BYTES:
        raise HostsError("that is no announcement: keys are cut")
    return host, Change(_keys(held), _keys(gone), whole)


def parts(change: Change, most_keys: int = _MOST_KEYS) -> Iterator[Change]:
    """Yield a change in parts of so many keys, of which the first one says whether it is whole."""
    for start in range(0, max(len(change.held), len(change.gone), 1), most_keys):
        own = slice(start, start + most_keys)
        yield Change(change.held[own], change.gone[own], change.is_whole and not start)


def _keys(joined: bytes) -> list[bytes]:
    return [joined[at : at + HELD_BYTES] for at in range(0, len(joined), HELD_BYTES)]


def host_client(url: str, key: str, seconds: float) -> httpx.Client:
    """Return a client of another host, which no proxy of the environment comes between.

    Parameters
    ----------
    url
        Of the host.
    key
        What hosts share; empty for none.
    seconds
        That an answer may take.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # Reading certificates takes longer than most requests, and plain HTTP needs none.
    is_sealed = url.startswith("https://")
    return httpx.Client(
        base_url=url, headers=headers, timeout=seconds, trust_env=False, verify=is_sealed
    )


class RouterDirectory:
    """The directory inside a router, reached over HTTP.

    Parameters
    ----------
    url
        Of the router.
    key
        What its hosts share; empty for none.
    most_keys
        Of one announcement.

    Raises
    ------
    HostsError
        Where the URL is none.
    """

    def __init__(self, url: str, key: str = "", most_keys: int = _MOST_KEYS) -> None:
        self._client = host_client(checked_url(url, "the directory"), key, 10.0)
        self._most_keys = most_keys

    def announce(self, host: Host, change: Change) -> bool:
        """Say it; False where everything has to be said anew."""
        return all(self._say(host, part) for part in parts(change, self._most_keys))

    def close(self) -> None:
        """Let the connection go."""
        self._client.close()

    def _say(self, host: Host, change: Change) -> bool:
        try:
            answer = self._client.post(ANNOUNCE, json=packed(host, change))
        except httpx.HTTPError as error:
            raise HostsError(f"the router does not answer: {error}") from error
        if answer.status_code == httpx.codes.CONFLICT:
            return False
        if answer.status_code != httpx.codes.OK:
            raise HostsError(f"the router answers with status {answer.status_code}")
        return True


class Announcer:
    """Says what a store holds, in a thread of its own, until it is closed.

    Parameters
    ----------
    host
        Who says it; its namespaces are the store's, whatever it has.
    held
        What is said.
    directory
        To whom.
    seconds
        Between two looks at the store.
    is_there
        Whether the replica answers; while it does not, nothing is said.
    say
        Told once of each failure, and when it is over.
    beat_seconds
        After which it says that it is there, where nothing changed.
    """

    def __init__(
        self,
        host: Host,
        held: HeldPrefixes,
        directory: Any,
        seconds: float = 1.0,
        is_there: Callable[[], bool] = lambda: True,
        say: Callable[[str], None] = lambda line: None,
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        self._host, self._held, self._directory = host, held, directory
        self._seconds, self._is_there, self._say = seconds, is_there, say
        self._beat_seconds = beat_seconds
        self._is_known, self._silent, self._failure = False, 0.0, ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hillinfer-hosts-announce")
        self._thread.start()

    def close(self) -> None:
        """End, and say nothing more."""
        self._ended.set()
        self._thread.join()

    # --- inside ----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                self._once()
                self._told("")
            except (HillInferError, OSError) as error:
                self._is_known = False
                self._told(str(error))
            except Exception as error:
                # Whatever it is: a host that falls silent for ever would get no request again.
                self._is_known = False
                self._told(f"announcing failed: {type(error).__name__}: {error}")
            if self._ended.wait(self._seconds):
                return

    def _once(self) -> None:
        if not self._is_there():
            self._is_known = False
            self._told("the replica does not answer yet")
            return
        if self._is_known:
            change = self._held.change()
            self._silent += self._seconds
            if not (change.held or change.gone) and self._silent < self._beat_seconds:
                return
        else:
            change = self._held.everything()
        self._is_known = self._directory.announce(self._named(), change)
        self._silent = 0.0
        if not self._is_known:
            self._is_known = self._directory.announce(self._named(), self._held.everything())

    def _named(self) -> Host:
        one = self._host
        return Host(one.name, one.replica, one.agent, one.session, self._held.namespaces())

    def _told(self, failure: str) -> None:
        if failure != self._failure:
            self._failure = failure
            self._say(failure or "the directory knows what this host holds")
