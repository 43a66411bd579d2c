# SPDX-License-Identifier: Apache-2.0
"""Which host holds the longest prefix of a prompt: the directory's interface, and the embedded one.

What a directory says is a hint. A host that is said to hold rows and does not computes them, so
nothing here has to be exact or to survive.
"""

from __future__ import annotations

import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

from hillinfer.errors import HillInferError
from hillinfer.store.keys import CHUNK_GROUPS, KEY_BYTES

# Of a key, what a directory keeps: of a million million prefixes two are alike with 1 in 10^14.
HELD_BYTES = 16
# A host that says nothing for so long is not asked any more.
SILENT_SECONDS = 15.0
# A header tells it.
_NAME = re.compile(r"[!-~]{1,200}")
# Variables of one query.
_BATCH = 512


class HostsError(HillInferError):
    """A host, a directory or a router is set up in a way that does not work."""


def checked_url(url: str, what: str) -> str:
    """Return the URL of a replica, an agent or a router; HostsError where it leads to none.

    Parameters
    ----------
    url
        As `http://10.0.0.7:8000`.
    what
        What errors call it.
    """
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_one = is_one and not (parts.query or parts.fragment or "@" in parts.netloc)
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        is_one = False
    if not is_one:
        raise HostsError(f"{what} {url!r} is no URL of a host: give one as http://10.0.0.7:8000")
    return url.rstrip("/")


@dataclass(frozen=True)
class Host:
    """A replica and the store beneath it.

    Parameters
    ----------
    name
        What it is called, unique among hosts.
    replica
        Where it answers, as `http://10.0.0.7:8000`.
    agent
        Where its store is asked for extents; empty where nobody serves them.
    session
        Another one after each start of its agent: differences of an older one are not taken.
    namespaces
        Digests of the namespaces that its store has rows of.
    """

    name: str
    replica: str
    agent: str = ""
    session: str = ""
    namespaces: tuple[bytes, ...] = ()

    def told(self) -> dict[str, Any]:
        """Return it as JSON can say it."""
        return {
            "name": self.name,
            "replica": self.replica,
            "agent": self.agent,
            "session": self.session,
            "namespaces": [one.hex() for one in self.namespaces],
        }

    @classmethod
    def of(cls, texts: Sequence[str], joined: bytes) -> Host:
        """Return it of its first four parts, and of its namespaces one behind the other."""
        name, replica, agent, session = texts
        digests = (joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES))
        return cls(name, replica, agent, session, tuple(digests))

    @classmethod
    def read(cls, told: Any) -> Host:
        """Return what `told` said; HostsError where it is nothing of that kind."""
        try:
            texts = [str(told[name]) for name in ("name", "replica", "agent", "session")]
            digests = [bytes.fromhex(one) for one in told["namespaces"]]
        except (KeyError, TypeError, ValueError) as error:
            raise HostsError(f"that is no host: {type(error).__name__}") from error
        if not _NAME.fullmatch(texts[0]) or any(len(one) != KEY_BYTES for one in digests):
            raise HostsError("that is no host: it has no name, or a namespace is no digest")
        for url in filter(None, texts[1:3]):
            checked_url(url, "that is no host:")
        if not texts[1]:
            raise HostsError("that is no host: it has no replica")
        return cls.of(texts, b"".join(digests))


@dataclass(frozen=True)
class Change:
    """What a host's store holds more, and what no longer, since it said so last.

    Parameters
    ----------
    held, gone
        First bytes of the keys of prefixes, `HELD_BYTES` each.
    is_whole
        `held` is all that it holds; what was said before does not count.
    """

    held: Sequence[bytes] = ()
    gone: Sequence[bytes] = ()
    is_whole: bool = False


class Announcements(Protocol):
    """Where a host says what it holds."""

    def announce(self, host: Host, change: Change) -> bool:
        """Take what a host says; False where it has to say everything anew.

        Said without a change from time to time, it says that the host is there.

        Raises
        ------
        HostsError
            Where the directory cannot be reached.
        """
        ...


class Directory(Announcements, Protocol):
    """Says which hosts are there and what each holds; any thread may ask it."""

    def hosts(self) -> list[Host]:
        """Return the hosts that said something lately."""
        ...

    def longest(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Return how many groups of a prompt each host holds, by its name; none of them is 0.

        Parameters
        ----------
        keys
            Of all prefixes of the prompt that end with a full group, shortest first.
        """
        ...

    def forget(self, name: str) -> None:
        """Let go of a host that does not answer, and of what it holds; it may come back."""
        ...

    def close(self) -> None:
        """Let the directory go."""
        ...


def probed(
    keys: Sequence[bytes], holders: Callable[[Sequence[bytes]], dict[bytes, set[str]]]
) -> dict[str, int]:
    """Return how many groups of a prompt each host holds, by asking for few keys.

    First for the ends of chunks, then for the groups behind the deepest one that somebody holds. A
    host whose own last chunk lies before it counts up to the end of that chunk's last full one.

    Parameters
    ----------
    keys
        As in `Directory.longest`.
    holders
        Returns the names of those who hold each of some keys.
    """
    found: dict[str, int] = {}

    def ask(first: int, step: int, stop: int) -> None:
        places = {keys[at][:HELD_BYTES]: at + 1 for at in range(first, stop, step)}
        wanted = list(places)
        for start in range(0, len(wanted), _BATCH):
            for key, names in holders(wanted[start : start + _BATCH]).items():
                for name in names:
                    found[name] = max(found.get(name, 0), places[key])

    ask(CHUNK_GROUPS - 1, CHUNK_GROUPS, len(keys))
    deepest = max(found.values(), default=0)
    ask(deepest, 1, min(deepest + CHUNK_GROUPS, len(keys)))
    if deepest:
        # Hosts that hold less than a chunk of it.
        ask(0, 1, min(CHUNK_GROUPS - 1, len(keys)))
    return found


class EmbeddedDirectory:
    """A directory inside its only router: a database in memory, or in a file.

    Parameters
    ----------
    file
        Where it lies; in memory where None.
    silent_seconds
        After so much silence a host is not there.
    clock
        Returns the time in seconds.
    """

    def __init__(
        self,
        file: str | None = None,
        silent_seconds: float = SILENT_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._silent_seconds, self._clock = silent_seconds, clock
        self._lock = threading.Lock()
        self._name = file or "in memory"
        with self._failing_as_a_directory():
            self._db = sqlite3.connect(file or ":memory:", check_same_thread=False)
        with self._alone() as db:
            db.executescript(_SCHEMA)

    def announce(self, host: Host, change: Change) -> bool:
        """Take what a host says; False where it has to say everything anew."""
        with self._alone() as db:
            known = db.execute(
                "SELECT id, session FROM host WHERE name = ?", (host.name,)
            ).fetchone()
            if not change.is_whole and (known is None or known[1] != host.session):
                return False
            own = (host.replica, host.agent, host.session, b"".join(host.namespaces), self._clock())
            if known is None:
                added = db.execute(
                    "INSERT INTO host(replica, agent, session, namespaces, seen, name) "
                    "VALUES (?, ?, ?, ?, ?, ?)",
                    (*own, host.name),
                )
                number = added.lastrowid
            else:
                number = known[0]
                db.execute(
                    "UPDATE host SET replica = ?, agent = ?, session = ?, namespaces = ?, "
                    "seen = ? WHERE id = ?",
                    (*own, number),
                )
            if change.is_whole:
                db.execute("DELETE FROM held WHERE host = ?", (number,))
            db.executemany(
                "DELETE FROM held WHERE key = ? AND host = ?",
                [(key[:HELD_BYTES], number) for key in change.gone],
            )
            db.executemany(
                "INSERT OR IGNORE INTO held VALUES (?, ?)",
                [(key[:HELD_BYTES], number) for key in change.held],
            )
        return True

    def hosts(self) -> list[Host]:
        """Return the hosts that said something lately."""
        with self._alone() as db:
            rows = db.execute(
                "SELECT name, replica, agent, session, namespaces FROM host WHERE seen >= ? "
                "ORDER BY name",
                (self._clock() - self._silent_seconds,),
            ).fetchall()
        return [Host.of(texts, joined) for *texts, joined in rows]

    def longest(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Return how many groups of a prompt each host holds."""
        return probed(keys, self._holders)

    def forget(self, name: str) -> None:
        """Let go of a host, and of what it holds."""
        with self._alone() as db:
            db.execute(
                "DELETE FROM held WHERE host = (SELECT id FROM host WHERE name = ?)", (name,)
            )
            db.execute("DELETE FROM host WHERE name = ?", (name,))

    def count(self) -> int:
        """Return how many prefixes are entered, those that several hosts hold as often."""
        with self._alone() as db:
            return int(db.execute("SELECT count(*) FROM held").fetchone()[0])

    def byte_count(self) -> int:
        """Return the bytes of the database."""
        with self._alone() as db:
            pages, size = (
                int(db.execute(f"PRAGMA {name}").fetchone()[0])
                for name in ("page_count", "page_size")
            )
        return pages * size

    def close(self) -> None:
        """Let the database go."""
        with self._lock:
            self._db.close()

    @contextmanager
    def _alone(self) -> Iterator[sqlite3.Connection]:
        """Give the database to one thread, for one transaction."""
        with self._lock, self._failing_as_a_directory(), self._db as db:
            yield db

    @contextmanager
    def _failing_as_a_directory(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise HostsError(f"the directory {self._name} cannot be used: {error}") from error

    def _holders(self, keys: Sequence[bytes]) -> dict[bytes, set[str]]:
        found: dict[bytes, set[str]] = {}
        if not keys:
            return found
        marks = ", ".join("?" * len(keys))
        with self._alone() as db:
            rows = db.execute(
                "SELECT held.key, host.name FROM held JOIN host ON host.id = held.host "
                f"WHERE held.key IN ({marks}) AND host.seen >= ?",
                [*keys, self._clock() - self._silent_seconds],
            ).fetchall()
        for key, name in rows:
            found.setdefault(key, set()).add(name)
        return found


_SCHEMA = """
CREATE TABLE IF NOT EXISTS host(
  id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE, replica TEXT, agent TEXT, session TEXT,
  namespaces BLOB, seen REAL);
CREATE TABLE IF NOT EXISTS held(key BLOB, host INTEGER, PRIMARY KEY (key, host)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS held_by ON held(host);
"""
