# SPDX-License-Identifier: Apache-2.0
"""The database behind a store's index: its tables, its transactions and its notes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.directories import alone_in, keep_names
from hillinfer.drive.files import ScratchPath, sweep
from hillinfer.errors import reason_of, way_out
from hillinfer.store.keys import STORE_VERSION
from hillinfer.store.pool_files import ABOUT, Span, StoreError, StorePlaces
from hillinfer.system.sqlite_file import FileKind, SqliteFile, is_broken

_INDEX = FileKind(
    "the store's index",
    StoreError,
    "end what uses it, and whoever opens it next makes it anew from what the drives hold",
)
_SCHEMA = """
PRAGMA journal_mode = WAL;
CREATE TABLE meta(name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE namespace(
  id INTEGER PRIMARY KEY, digest BLOB UNIQUE, about TEXT, layers INT, row_bytes INT,
  shadow_bytes INT);
CREATE TABLE owner(id INTEGER PRIMARY KEY, token TEXT UNIQUE, pid INT, since REAL);
CREATE TABLE chunk(
  id INTEGER PRIMARY KEY, namespace INT, drive INT, unit INT, units INT, generation INT,
  state INT, owner INT, key BLOB, target BLOB, parent INT, parent_key BLOB, position INT,
  groups INT, children INT, hits REAL, last REAL, cost REAL, turn INT, pinned INT, worth REAL,
  UNIQUE(drive, unit));
CREATE INDEX leaves ON chunk(worth) WHERE state = 2 AND children = 0;
CREATE INDEX quarantined ON chunk(id) WHERE state = 3;
CREATE INDEX tombed ON chunk(id) WHERE state = 4;
CREATE INDEX branches ON chunk(parent_key);
CREATE INDEX targets ON chunk(target) WHERE target IS NOT NULL;
CREATE INDEX owned ON chunk(owner) WHERE owner IS NOT NULL;
CREATE TABLE prefix(
  hash BLOB, chunk INT, groups INT, PRIMARY KEY(hash, chunk)) WITHOUT ROWID;
CREATE INDEX prefixes ON prefix(chunk);
CREATE TABLE lease(
  owner INT, chunk INT, n INT, PRIMARY KEY(owner, chunk)) WITHOUT ROWID;
CREATE INDEX leased ON lease(chunk);
CREATE TABLE free(drive INT, unit INT, units INT, PRIMARY KEY(drive, unit))
  WITHOUT ROWID;
"""
# The log is copied into the database when it has so many pages, SQLite's own default.
_LOG_PAGES = 1000
_MOST_LOG_PAGES = 1500
# An index up to this size is looked at as a whole when it is opened, in well below a second; a
# larger one by `check`. What is wrong in either is compared with the drives before it is used.
_CHECKED_BYTES = 32 << 20
# Texts of queries that are kept prepared.
_PREPARED = 256
# Of what nobody can find: it goes before everything else.
UNREACHABLE = -1e300


class State(IntEnum):
    """What a chunk's extent is used for."""

    WRITING = 1
    READY = 2
    QUARANTINED = 3
    TOMBED = 4


# A tuple, because a lookup makes one for every chunk.
class Chunk(NamedTuple):
    """What the index knows of a chunk.

    Parameters
    ----------
    number
        Its own in the index.
    namespace
        The number of its namespace.
    span
        Where it lies.
    generation, key, position, groups, cost, turn
        As in its header.
    hits, last
        How often it was found, decayed, and when the last time, in seconds.
    """

    number: int
    namespace: int
    span: Span
    generation: int
    key: bytes
    position: int
    groups: int
    cost: float
    turn: int
    hits: float
    last: float


CHUNK_COLUMNS = (
    "c.id, c.namespace, c.drive, c.unit, c.units, c.generation, c.key, c.position, c.groups, "
    "c.cost, c.turn, c.hits, c.last"
)


def chunk_of(row: Sequence[object]) -> Chunk:
    """Return the chunk of a row of `CHUNK_COLUMNS`."""
    number, namespace, drive, unit, units, *rest = row
    return Chunk(number, namespace, Span(drive, unit, units), *rest)  # type: ignore[arg-type]


class Database(SqliteFile):
    """One process' connection; any of its threads may use it.

    Parameters
    ----------
    path
        An existing database.
    pool
        Identity of the store, 16 bytes.

    Raises
    ------
    StoreError
        Where the file is no index, or another store's or version's.
    """

    def __init__(self, path: Path, pool: bytes) -> None:
        super().__init__(_INDEX, path, _identity(pool), _CHECKED_BYTES, _PREPARED)
        # What a power cut loses of the last transactions the drives' headers contradict.
        self.rows("PRAGMA synchronous = NORMAL")

    @classmethod
    def create(cls, path: Path, pool: bytes, capacity: Sequence[int]) -> Database:
        """Make a new, empty database and return a connection to it.

        Parameters
        ----------
        path, pool
            As above; the file does not exist.
        capacity
            Units of each drive.

        Raises
        ------
        OSError
            Where the file cannot be made.
        StoreError
            Where SQLite refuses.
        """

        def fill(db: sqlite3.Connection) -> None:
            # The first unit says whose file it is.
            db.executemany("INSERT INTO free VALUES (?, 1, ?)", [*enumerate(capacity)])

        cls.make(_INDEX, path, _SCHEMA, _identity(pool), fill)
        return cls(path, pool)

    @contextmanager
    def brief_transaction(self) -> Iterator[sqlite3.Connection]:
        """Change all or nothing like `transaction`, and leave the log's copying to a later one.

        Copying the log into the database waits for the drive, which a lookup should not.
        """
        with self.alone():
            self.rows(f"PRAGMA wal_autocheckpoint = {_MOST_LOG_PAGES}")
            try:
                with self.transaction() as db:
                    yield db
            finally:
                self.rows(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")

    def note(self, name: str) -> object:
        """Return what was noted by a name, None where nothing was."""
        rows = self.rows("SELECT value FROM meta WHERE name = ?", (name,))
        return rows[0][0] if rows else None

    def set_notes(self, notes: dict[str, object]) -> None:
        """Note things by their names."""
        with self.transaction() as db:
            db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", notes.items())

    @staticmethod
    def generation(db: sqlite3.Connection) -> int:
        """Return a number higher than any that a header has, inside a transaction."""
        (value,) = db.execute(
            "INSERT INTO meta VALUES ('generation', 1) "
            "ON CONFLICT DO UPDATE SET value = value + 1 RETURNING value"
        ).fetchone()
        return int(value)


def _identity(pool: bytes) -> str:
    return f"{STORE_VERSION}:{pool.hex()}"


# --- Opening it, or making it anew ---


def opened_database(
    places: StorePlaces, units: Sequence[int], fill: Callable[[Database], object]
) -> Database:
    """Return the database of a store's index, made anew where it is lost or broken.

    Parameters
    ----------
    places
        The store's.
    units
        Of each drive.
    fill
        Puts into an empty one what the drives hold.

    Raises
    ------
    StoreError
        Where it can be neither used nor made, or other processes use one that is lost or broken.
    """
    path = places.index
    try:
        known = _known_database(places)
        if known is not None:
            return known
        # One process at a time: of what one stores already, another that still looks at the
        # drives would take headers away.
        with alone_in(places.directory / ABOUT, DriveCalls()):
            known = _known_database(places)
            if known is not None:
                return known
            sweep(places.directory)
            scratch = ScratchPath.make_directory(places.directory, DriveCalls())
            try:
                beside = scratch.path / path.name
                with closing(Database.create(beside, places.pool, units)) as new:
                    fill(new)
                # Not before: where no new one can be made, the old one may be mended.
                if path.exists():
                    path.replace(path.with_suffix(".broken"))
                for suffix in ("-wal", "-shm"):
                    path.with_name(path.name + suffix).unlink(missing_ok=True)
                beside.rename(path)
                keep_names(places.directory, DriveCalls())
            finally:
                scratch.remove()
    except OSError as error:
        raise StoreError(
            f"the index of the store {places.directory} cannot be made anew: "
            f"{reason_of(error)}; {way_out(error, 'choose another --store')}"
        ) from error
    return Database(path, places.pool)


def _known_database(places: StorePlaces) -> Database | None:
    """Return the index' database as it is; None where it must be made anew."""
    index = places.index
    # Looked for again: another process may have made it, and begun to use it, since the first look.
    if not index.exists() and places.is_shared and not index.exists():
        raise StoreError(
            f"the index of the store {places.directory} is gone while other processes use "
            "it: end them, and it is made anew from what the drives hold"
        )
    if not index.exists():
        return None
    try:
        return Database(index, places.pool)
    except StoreError as error:
        if not is_broken(error.__cause__):
            # It alone knows what is pinned, how much was written, and how often chunks were found.
            raise StoreError(
                f"{error}; it stays as it is: free what its drive, memory or descriptors lack, or "
                "end what uses it, and try again"
            ) from error
        if places.is_shared:
            raise
    return None
