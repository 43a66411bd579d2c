# SPDX-License-Identifier: Apache-2.0
"""The index of a store: which chunk lies where, who uses it, and what room is free.

SQLite holds it, so that several processes may look and change at once and a kill leaves it whole.
It says nothing that the drives do not say too: `rebuild.py` makes it anew from their headers, and
whatever it says is compared with them before a byte is used.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from hillinfer.store.database import CHUNK_COLUMNS, UNREACHABLE, Chunk, Database, State, chunk_of
from hillinfer.store.extent import Header
from hillinfer.store.keys import CHUNK_GROUPS, UNIT_BYTES, ExtentShape, Namespace
from hillinfer.store.pool_files import Span, StoreError
from hillinfer.store.retirement import give_back, tomb

# Variables of one query; SQLite takes many more.
_BATCH = 512


class _ChangedError(Exception):
    """A chunk went or went on between being found and being leased."""


class _NoRoomError(Exception):
    """No room is free that is long enough."""


class AlreadyStoredError(StoreError):
    """What was to be stored is stored already, or about to be."""


class Index:
    """Finds chunks by the keys of prefixes, and enters those that are written.

    Any thread may use it.

    Parameters
    ----------
    database
        The one behind it.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._shapes: dict[int, ExtentShape] = {}

    def namespace(self, namespace: Namespace) -> int:
        """Return the number of a namespace, a new one where it is."""
        row = (
            namespace.digest,
            namespace.about,
            namespace.layers,
            namespace.row_bytes,
            namespace.shadow_bytes,
        )
        with self._database.transaction() as db:
            db.execute(
                "INSERT INTO namespace(digest, about, layers, row_bytes, shadow_bytes) "
                "VALUES (?, ?, ?, ?, ?) ON CONFLICT(digest) DO UPDATE SET about = excluded.about",
                row,
            )
            found = db.execute("SELECT id FROM namespace WHERE digest = ?", row[:1]).fetchone()
            return int(found[0])

    def extent_bytes(self, number: int) -> int:
        """Return the bytes of a chunk's extent, 0 where there is no such chunk."""
        rows = self._database.rows("SELECT units FROM chunk WHERE id = ?", (number,))
        return int(rows[0][0]) * UNIT_BYTES if rows else 0

    def shape(self, namespace: int) -> ExtentShape:
        """Return the shape of a namespace's extents."""
        if namespace not in self._shapes:
            (row,) = self._database.rows(
                "SELECT layers, row_bytes, shadow_bytes FROM namespace WHERE id = ?", (namespace,)
            )
            self._shapes[namespace] = ExtentShape(*row)
        return self._shapes[namespace]

    # --- owners ----------------------------------------------------------------------------

    def add_owner(self, token: str, pid: int, now: float) -> int:
        """Enter a process that will lease and write; return its number."""
        with self._database.transaction() as db:
            added = db.execute(
                "INSERT INTO owner(token, pid, since) VALUES (?, ?, ?)", (token, pid, now)
            )
            assert added.lastrowid is not None
            return added.lastrowid

    def owners(self) -> dict[str, int]:
        """Return the numbers of all processes that have entered, by their tokens."""
        return dict(self._database.rows("SELECT token, id FROM owner"))

    def end_owner(self, owner: int) -> None:
        """End a process' leases and take what it was writing away; it may still clear room."""
        with self._database.transaction() as db:
            _end(db, owner)

    def remove_owner(self, owner: int) -> None:
        """Forget a process: its leases end, and what it was writing goes."""
        with self._database.transaction() as db:
            _end(db, owner)
            db.execute("DELETE FROM owner WHERE id = ?", (owner,))

    # --- looking up ------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], owner: int) -> list[tuple[Chunk, int]]:
        """Return the chunks of the longest stored prefix, leased, and how many groups of each.

        All but the last are full.

        Parameters
        ----------
        keys
            Of all prefixes of a prompt that end with a full group, shortest first.
        owner
            Who leases them; `release` ends that.
        """
        # Nobody waits while the index is searched: what was found is leased where it is still so.
        while found := self._longest(keys):
            with suppress(_ChangedError), self._database.brief_transaction() as db:
                self._lease_found(db, owner, [chunk for chunk, _ in found])
                return found
        return []

    def release(self, owner: int, chunks: Iterable[int]) -> None:
        """End one lease of each of some chunks."""
        with self._database.transaction() as db:
            self._unlease(db, owner, list(chunks))

    def lease(self, owner: int, chunks: Iterable[int]) -> None:
        """Lease chunks that stay meanwhile, because they are leased or being filled."""
        with self._database.transaction() as db:
            db.executemany(
                "INSERT INTO lease VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET n = n + 1",
                [(owner, number) for number in chunks],
            )

    def touch(self, worths: Iterable[tuple[int, float, float, float]]) -> None:
        """Note of chunks, by number, their decayed hits, when they were last found, their worth.

        What was quarantined meanwhile stays as it is, and so does what follows that.
        """
        with self._database.transaction() as db:
            db.executemany(
                "UPDATE chunk SET hits = ?2, last = ?3, worth = ?4 WHERE id = ?1 "
                f"AND state = {State.READY:d} AND worth > ?5",
                [(*one, UNREACHABLE) for one in worths],
            )

    def _longest(self, keys: Sequence[bytes]) -> list[tuple[Chunk, int]]:
        ends = keys[CHUNK_GROUPS - 1 :: CHUNK_GROUPS]
        found: list[tuple[Chunk, int]] = []
        for start in range(0, len(ends), _BATCH):
            part = ends[start : start + _BATCH]
            full = {
                key: chunk for key, groups, chunk in self._ready(part) if groups == CHUNK_GROUPS
            }
            for key in part:
                if key not in full:
                    break
                found.append((full[key], CHUNK_GROUPS))
            if len(found) < start + len(part):
                break
        first = len(found) * CHUNK_GROUPS
        rest = {key: groups for groups, key in enumerate(keys[first : first + CHUNK_GROUPS], 1)}
        partial = [
            (groups, chunk)
            for key, groups, chunk in self._ready(list(rest))
            if rest[key] == groups and chunk.position == len(found)
        ]
        if partial:
            groups, chunk = max(partial, key=lambda one: one[0])
            found.append((chunk, groups))
        return found

    def _ready(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, int, Chunk]]:
        if not keys:
            return
        # Few numbers of marks, so that few texts of this query are kept prepared.
        count = 1 << (len(keys) - 1).bit_length()
        marks = ", ".join("?" * count)
        for key, groups, *row in self._database.rows(
            f"SELECT p.hash, p.groups, {CHUNK_COLUMNS} "
            "FROM prefix p JOIN chunk c ON c.id = p.chunk "
            f"WHERE p.hash IN ({marks}) AND c.state = {State.READY:d}",
            [*keys, *[keys[-1]] * (count - len(keys))],
        ):
            yield key, groups, chunk_of(row)

    @staticmethod
    def _lease_found(db: sqlite3.Connection, owner: int, chunks: Sequence[Chunk]) -> None:
        leased = db.executemany(
            "INSERT INTO lease SELECT ?, id, 1 FROM chunk WHERE id = ? AND generation = ? "
            f"AND state = {State.READY:d} ON CONFLICT DO UPDATE SET n = n + 1",
            [(owner, chunk.number, chunk.generation) for chunk in chunks],
        )
        if leased.rowcount < len(chunks):
            raise _ChangedError

    @staticmethod
    def _unlease(db: sqlite3.Connection, owner: int, chunks: Sequence[int]) -> None:
        places = [(owner, chunk) for chunk in chunks]
        db.executemany("UPDATE lease SET n = n - 1 WHERE owner = ? AND chunk = ?", places)
        db.executemany("DELETE FROM lease WHERE owner = ? AND chunk = ? AND n <= 0", places)

    # --- writing ---------------------------------------------------------------------------

    def begin(
        self,
        namespace: int,
        owner: int,
        units: int,
        drive: int,
        position: int,
        parent: int | None,
        parent_key: bytes,
        target: bytes,
        given: Sequence[Chunk] = (),
        ends: Sequence[int] = (),
    ) -> Chunk | None:
        """Take an extent for a chunk that is about to be written; None where no room is free.

        Parameters
        ----------
        namespace, owner
            Whose.
        units, drive
            How long it is, and which drive is preferred.
        position, parent, parent_key
            Where it comes in its chain.
        target
            Key of the longest prefix that it is to hold.
        given
            Tombed chunks of the owner, without headers on their drives. Their room is freed and
            taken from at once, so that nobody else gets it in between; it stays the owner's where
            None is returned.
        ends
            Of each drive the unit behind the last one that it has room for; none: it has for all.

        Raises
        ------
        AlreadyStoredError
            Where another process has stored that, or is about to.
        """
        with suppress(_NoRoomError), self._database.transaction() as db:
            other = db.execute(
                "SELECT 1 FROM chunk WHERE target = ?1 "
                "UNION ALL SELECT 1 FROM prefix WHERE hash = ?1",
                (target,),
            ).fetchone()
            if other is not None:
                raise AlreadyStoredError("another process stores the same prefix")
            give_back(db, given, owner)
            last = [part for at, end in enumerate(ends) for part in (at, end - units)]
            place = db.execute(
                "SELECT drive, unit, units FROM free WHERE units >= ? "
                f"{'AND NOT (drive = ? AND unit > ?) ' * len(ends)}"
                "ORDER BY drive <> ?, unit LIMIT 1",
                (units, *last, drive),
            ).fetchone()
            if place is None:
                raise _NoRoomError
            own, unit, room = place
            taken = db.execute(
                "SELECT unit + units FROM chunk WHERE drive = ? AND unit < ? "
                "ORDER BY unit DESC LIMIT 1",
                (own, unit + units),
            ).fetchone()
            if taken is not None and taken[0] > unit:
                raise StoreError(
                    "the store's index gives room away that is in use: remove it, and it is made "
                    "anew from what the drives hold"
                )
            db.execute("DELETE FROM free WHERE drive = ? AND unit = ?", (own, unit))
            if room > units:
                db.execute("INSERT INTO free VALUES (?, ?, ?)", (own, unit + units, room - units))
            generation = self._database.generation(db)
            added = db.execute(
                "INSERT INTO chunk(namespace, drive, unit, units, generation, state, owner, key, "
                "target, parent, parent_key, position, groups, children, hits, last, cost, turn, "
                "pinned, worth) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0, 0, 0, 0, 0)",
                (
                    namespace, own, unit, units, generation, State.WRITING, owner, parent_key,
                    target, parent, parent_key, position,
                ),
            )  # fmt: skip
            if parent is not None:
                db.execute("UPDATE chunk SET children = children + 1 WHERE id = ?", (parent,))
            number = added.lastrowid
            assert number is not None
            return Chunk(
                number, namespace, Span(own, unit, units), generation, parent_key, position, 0, 0.0,
                0, 0.0, 0.0,
            )  # fmt: skip
        return None

    def take_generation(self) -> int:
        """Return a number higher than any that a header has."""
        with self._database.transaction() as db:
            return self._database.generation(db)

    def is_being_written(self, target: bytes) -> bool:
        """Return whether some process is about to store a prefix."""
        return bool(self._database.rows("SELECT 1 FROM chunk WHERE target = ?", (target,)))

    def extend(self, number: int, owner: int, groups: int, target: bytes) -> bool:
        """Let a process fill more groups of a chunk; False where it is not its alone to do.

        It leases it and knows all its groups; nothing follows it, nobody else leases it or is
        filling it, or has stored what it is to hold.
        """
        with self._database.transaction() as db:
            changed = db.execute(
                "UPDATE chunk SET owner = ?2, target = ?3 WHERE id = ?1 AND state = ?4 "
                "AND groups < ?5 AND groups = ?6 AND children = 0 AND owner IS NULL AND NOT EXISTS "
                "(SELECT 1 FROM lease WHERE chunk = ?1 AND owner <> ?2) AND NOT EXISTS "
                "(SELECT 1 FROM chunk WHERE target = ?3 UNION ALL "
                "SELECT 1 FROM prefix WHERE hash = ?3)",
                (number, owner, target, State.READY, CHUNK_GROUPS, groups),
            )
            return changed.rowcount == 1

    def publish(
        self,
        written: Sequence[tuple[int, Header, Sequence[bytes], float]],
        owner: int,
        now: float,
    ) -> int:
        """Let everybody find chunks whose bytes are on their drives.

        One that was dropped or quarantined while it was filled stays so, and ends it.

        Parameters
        ----------
        written
            Of each its number, its header, the keys of all its groups, and its worth; in the order
            of the prompt.
        owner
            Who filled them.
        now
            The time, in seconds.

        Returns
        -------
        How many of them, from the first on, everybody finds.
        """
        with self._database.transaction() as db:
            for done, (number, header, keys, worth) in enumerate(written):
                changed = db.execute(
                    "UPDATE chunk SET state = ?, key = ?, groups = ?, generation = ?, cost = ?, "
                    "turn = ?, last = ?, worth = ? WHERE id = ? AND owner = ? "
                    f"AND state IN ({State.WRITING:d}, {State.READY:d})",
                    (
                        State.READY, header.key, header.groups, header.generation, header.cost,
                        header.turn, now, worth, number, owner,
                    ),
                )  # fmt: skip
                if not changed.rowcount:
                    return done
                db.executemany(
                    "INSERT OR IGNORE INTO prefix VALUES (?, ?, ?)",
                    [(key, number, groups) for groups, key in enumerate(keys, 1)],
                )
                if header.is_full:
                    _adopt(db, number, header, worth)
            return len(written)

    def end_writing(self, owner: int, chunks: Iterable[int]) -> None:
        """Let chunks go that a process has filled; what it did not publish is thrown away."""
        with self._database.transaction() as db:
            for number in chunks:
                row = db.execute(
                    "SELECT state FROM chunk WHERE id = ? AND owner = ?", (number, owner)
                ).fetchone()
                if row is not None and row[0] == State.WRITING:
                    tomb(db, number)
                db.execute(
                    "UPDATE chunk SET owner = NULL, target = NULL WHERE id = ? AND owner = ?",
                    (number, owner),
                )


def _adopt(db: sqlite3.Connection, number: int, header: Header, worth: float) -> None:
    """Let chunks follow a full one that is there again, inside a transaction.

    They can be found again, and are worth as much.
    """
    db.execute(
        "UPDATE chunk SET parent = ? WHERE parent_key = ? AND position = ? "
        f"AND state <> {State.TOMBED:d}",
        (number, header.key, header.position + 1),
    )
    db.execute(
        "UPDATE chunk SET children = (SELECT count(*) FROM chunk b "
        "WHERE b.parent_key = ?2 AND b.parent = ?1) WHERE id = ?1",
        (number, header.key),
    )
    db.execute(
        "WITH RECURSIVE below(id, key) AS (SELECT id, key FROM chunk WHERE id = ?1 "
        "UNION SELECT c.id, c.key FROM chunk c JOIN below b ON c.parent_key = b.key "
        f"AND c.parent = b.id WHERE c.state = {State.READY:d} AND c.worth = ?3) "
        "UPDATE chunk SET worth = ?2 WHERE id IN (SELECT id FROM below)",
        (number, worth, UNREACHABLE),
    )


def _end(db: sqlite3.Connection, owner: int) -> None:
    """Let all of an owner's chunks go, inside a transaction."""
    db.execute("DELETE FROM lease WHERE owner = ?", (owner,))
    rows = db.execute(
        "SELECT id FROM chunk WHERE owner = ? AND state = ?", (owner, State.WRITING)
    ).fetchall()
    for (number,) in rows:
        tomb(db, number)
    db.execute("UPDATE chunk SET owner = NULL, target = NULL WHERE owner = ?", (owner,))
