# SPDX-License-Identifier: Apache-2.0
"""How chunks leave a store's index: evicted, removed or quarantined, and their room is free."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

from hillinfer.drive.files import PAGE_BYTES, aligned_buffer
from hillinfer.secrecy.store_keys import Envelope
from hillinfer.store.database import CHUNK_COLUMNS, UNREACHABLE, Chunk, Database, State, chunk_of
from hillinfer.store.keys import UNIT_BYTES, ExtentShape
from hillinfer.store.pool_files import PoolFile, Span
from hillinfer_model.kernel_spec import GROUP_TOKENS


class Retirement:
    """Takes chunks out of an index.

    A chunk is tombed first: nobody finds it any more, and its headers are to go from its drive.
    Only then is its room free, or a rebuild would find an old header over a new writer's rows.

    One process takes a tombed chunk's headers, and its room is that process' until it gives it
    away: another one could put a chunk of its own there meanwhile. A tombed chunk without an owner
    is for whoever claims it, and so are those that dead processes leave.

    Parameters
    ----------
    database
        The index'.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def evict(self, most: int, owner: int) -> list[Chunk]:
        """Take up to so many chunks of least worth out of the index, leaves only, and return them.

        Their room is the owner's and not free before `freed`: their headers must go from the drive
        first. What is pinned, leased or being filled stays.
        """
        with self._database.transaction() as db:
            rows = db.execute(
                f"SELECT {CHUNK_COLUMNS}, c.worth FROM chunk c WHERE state = {State.READY:d} "
                "AND children = 0 AND pinned = 0 AND owner IS NULL AND NOT EXISTS "
                "(SELECT 1 FROM lease WHERE chunk = c.id) ORDER BY worth LIMIT ?",
                (most,),
            ).fetchall()
            for *row, worth in rows:
                tomb(db, int(row[0]), owner)
                if worth > UNREACHABLE:
                    db.execute(
                        "INSERT INTO meta VALUES ('age', ?1) "
                        "ON CONFLICT DO UPDATE SET value = max(value, ?1)",
                        (worth,),
                    )
            return [chunk_of(row[:-1]) for row in rows]

    def remove(self, number: int) -> bool:
        """Take a chunk out of the index unless somebody uses it or something follows it."""
        with self._database.transaction() as db:
            row = db.execute(
                "SELECT 1 FROM chunk c WHERE id = ? AND children = 0 AND owner IS NULL "
                "AND NOT EXISTS (SELECT 1 FROM lease WHERE chunk = c.id)",
                (number,),
            ).fetchone()
            if row is not None:
                tomb(db, number)
            return row is not None

    def quarantine(self, number: int) -> None:
        """Let nobody find a chunk any more whose bytes are wrong, nor what follows it.

        One that is tombed stays so: whoever owns it takes its headers away.
        """
        with self._database.transaction() as db:
            db.execute("DELETE FROM prefix WHERE chunk = ?", (number,))
            db.execute(
                "UPDATE chunk SET state = ?, target = NULL WHERE id = ? AND state <> ?",
                (State.QUARANTINED, number, State.TOMBED),
            )
            db.execute(
                # By the key, which has an index.
                "WITH RECURSIVE below(id, key) AS (SELECT c.id, c.key FROM chunk c "
                "JOIN chunk a ON c.parent_key = a.key WHERE a.id = ?1 AND c.parent = a.id "
                "UNION SELECT c.id, c.key FROM chunk c JOIN below b ON c.parent_key = b.key "
                "AND c.parent = b.id) "
                "UPDATE chunk SET worth = ?2 WHERE id IN (SELECT id FROM below)",
                (number, UNREACHABLE),
            )

    def drop_quarantined(self) -> None:
        """Give the room of quarantined chunks up that nobody uses; `claim` has them then."""
        with self._database.transaction() as db:
            rows = db.execute(
                # Whoever fills one still writes to it.
                f"SELECT id FROM chunk c WHERE state = {State.QUARANTINED:d} AND owner IS NULL "
                "AND NOT EXISTS (SELECT 1 FROM lease WHERE chunk = c.id)"
            ).fetchall()
            for (number,) in rows:
                tomb(db, number)

    def claim(self, owner: int) -> list[Chunk]:
        """Make all tombed chunks that are nobody's an owner's; it takes their headers away."""
        query = f"FROM chunk c WHERE state = {State.TOMBED:d} AND owner IS NULL"
        # There are none most of the time, and nobody needs to wait to learn that.
        if not self._database.rows(f"SELECT 1 {query} LIMIT 1"):
            return []
        with self._database.transaction() as db:
            rows = db.execute(f"SELECT {CHUNK_COLUMNS} {query}").fetchall()
            db.executemany(
                "UPDATE chunk SET owner = ? WHERE id = ?", [(owner, row[0]) for row in rows]
            )
        return [chunk_of(row) for row in rows]

    def disclaim(self, chunks: Iterable[Chunk], owner: int) -> None:
        """Let others take the headers of tombed chunks away that an owner could not."""
        with self._database.transaction() as db:
            db.executemany(
                "UPDATE chunk SET owner = NULL WHERE id = ? AND owner = ? "
                f"AND state = {State.TOMBED:d}",
                [(chunk.number, owner) for chunk in chunks],
            )

    def freed(self, chunks: Sequence[Chunk], owner: int) -> None:
        """Let everybody use the room of an owner's tombed chunks; their headers are gone."""
        if chunks:
            with self._database.transaction() as db:
                give_back(db, chunks, owner)

    def age(self) -> float:
        """Return the worth of the last chunk that was evicted, the most of all; 0 for none."""
        age = self._database.note("age")
        return float(age) if isinstance(age, int | float) else 0.0

    def statistics(self, tag_bytes: int = 0) -> dict[str, int | float]:
        """Return how many chunks there are in each state, and their tokens and units.

        `tag_bytes` is that of the store's extents.
        """
        found: dict[str, int | float] = {}
        states = {State.READY: "chunks", State.WRITING: "writing", State.QUARANTINED: "quarantined"}
        for state, name in states.items():
            ((count, groups, units),) = self._database.rows(
                "SELECT count(*), coalesce(sum(groups), 0), coalesce(sum(units), 0) FROM chunk "
                "WHERE state = ?",
                (state,),
            )
            found[name] = int(count)
            if state is State.READY:
                found["tokens"] = int(groups) * GROUP_TOKENS
                found["chunk_bytes"] = int(units) * UNIT_BYTES
        rows = self._database.rows(
            "SELECT count(*), sum(c.groups), c.units, n.layers, n.row_bytes, n.shadow_bytes "
            "FROM chunk c JOIN namespace n ON n.id = c.namespace WHERE c.state = ? "
            "GROUP BY n.id, c.units",
            (State.READY,),
        )
        used = (used_bytes(tag_bytes, *own) for own in rows)
        found["waste_bytes"] = found["chunk_bytes"] - sum(used)
        ((free,),) = self._database.rows("SELECT coalesce(sum(units), 0) FROM free")
        found["free_bytes"] = int(free) * UNIT_BYTES
        ((leases,),) = self._database.rows("SELECT count(*) FROM lease")
        found["leases"] = int(leases)
        return found


def used_bytes(
    tag_bytes: int,
    chunks: int,
    groups: int,
    units: int,
    layers: int,
    row_bytes: int,
    shadow_bytes: int,
) -> int:
    """Return what is filled of extents of one namespace and size: rows, shadows and extra room.

    Parameters
    ----------
    tag_bytes, layers, row_bytes, shadow_bytes
        As in `ExtentShape`.
    chunks, groups, units
        How many, with how many groups in all; units of each.
    """
    extra = max(0, units - ExtentShape(layers, row_bytes, shadow_bytes, tag_bytes).units)
    rows = layers * (groups * GROUP_TOKENS * row_bytes + chunks * shadow_bytes)
    return rows + chunks * extra * UNIT_BYTES


def give_back(db: sqlite3.Connection, chunks: Iterable[Chunk], owner: int) -> None:
    """Let the room of an owner's tombed chunks be used again, inside a transaction."""
    for chunk in chunks:
        gone = db.execute(
            "DELETE FROM chunk WHERE id = ? AND state = ? AND owner = ?",
            (chunk.number, State.TOMBED, owner),
        )
        if gone.rowcount:
            _give(db, chunk.span)


def _give(db: sqlite3.Connection, span: Span) -> None:
    unit, units = span.unit, span.units
    before = db.execute(
        "SELECT unit, units FROM free WHERE drive = ? AND unit < ? ORDER BY unit DESC LIMIT 1",
        (span.drive, unit),
    ).fetchone()
    if before is not None and before[0] + before[1] == unit:
        unit, units = before[0], units + before[1]
    after = db.execute(
        "DELETE FROM free WHERE drive = ? AND unit = ? RETURNING units",
        (span.drive, span.unit + span.units),
    ).fetchone()
    if after is not None:
        units += after[0]
    db.execute("INSERT OR REPLACE INTO free VALUES (?, ?, ?)", (span.drive, unit, units))


def tomb(db: sqlite3.Connection, number: int, owner: int | None = None) -> None:
    """Take a chunk out of everybody's reach, inside a transaction; its room is the owner's."""
    db.execute("DELETE FROM prefix WHERE chunk = ?", (number,))
    db.execute(
        "UPDATE chunk SET children = children - 1 "
        "WHERE id = (SELECT parent FROM chunk WHERE id = ?)",
        (number,),
    )
    # What follows it is found by the key, which has an index; another chunk may get its number.
    db.execute(
        "UPDATE chunk SET parent = NULL "
        "WHERE parent_key = (SELECT key FROM chunk WHERE id = ?1) AND parent = ?1",
        (number,),
    )
    db.execute(
        "UPDATE chunk SET state = ?, owner = ?, target = NULL, parent = NULL WHERE id = ?",
        (State.TOMBED, owner, number),
    )


def sealed_by(
    database: Database, files: Sequence[PoolFile], pool: bytes, number: bytes
) -> list[int]:
    """Return the numbers of the chunks that a data key seals, by what their drives say.

    Raises
    ------
    OSError
        Where a drive cannot be read.
    """
    found = []
    memory = aligned_buffer(2 * PAGE_BYTES)
    for chunk, drive, unit in database.rows(
        f"SELECT id, drive, unit FROM chunk WHERE state = {State.READY:d}"
    ):
        files[drive].read(memory, unit * UNIT_BYTES)
        pages = memory.tobytes()
        seals = (Envelope.read(pages[at : at + PAGE_BYTES], pool) for at in (0, PAGE_BYTES))
        if any(seal is not None and seal.key_id == number for seal in seals):
            found.append(chunk)
    return found
