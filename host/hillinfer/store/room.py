# SPDX-License-Identifier: Apache-2.0
"""Allocates extents for chunks to be written, and evicts others where there is no room."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from hillinfer.drive.files import PAGE_BYTES, aligned_buffer, sweep
from hillinfer.statistics import StoreMeter
from hillinfer.store.database import Chunk, Database, State
from hillinfer.store.eviction import (
    DEFAULT_ADMISSION,
    Admission,
    ChunkFacts,
    EvictionPolicy,
    Turns,
    WriteBudget,
    hits_after,
    make_admission,
)
from hillinfer.store.extent import Header
from hillinfer.store.index import AlreadyStoredError, Index
from hillinfer.store.keys import CHUNK_GROUPS, UNIT_BYTES, ExtentShape, Namespace
from hillinfer.store.pool_files import PoolFile, StoreError, StorePlaces
from hillinfer.store.retirement import Retirement
from hillinfer.store_rules import StoreRules

# Leaves that give way for one chunk, at most: extents of other models are of other sizes.
_MOST_EVICTED = 64
# What was found is noted this often.
_TOUCH_SECONDS = 1.0
# By these names the index notes what was written when, what was learned of admission, and of
# conversations.
_WRITES, _ADMISSION, _TURNS = "writes", "admission", "turns"
# The newest chunks, whose costs say what computing a group of a namespace takes.
_COSTS = 1024


class Intake:
    """Says which chunks come in, and counts what is written.

    The bytes of each hour are those of all processes, and stay in the index with what was learned.

    Parameters
    ----------
    database, files
        The store's.
    rules
        The cap and the way to admit.
    policy, turns
        Ranks what is to go, and knows which turns conversations are at.
    meter
        Told of chunks that were refused.
    clock
        Returns the time in seconds.

    Raises
    ------
    SettingsError
        Where the rules name no admission.
    """

    def __init__(
        self,
        database: Database,
        files: Sequence[PoolFile],
        rules: StoreRules,
        policy: EvictionPolicy,
        turns: Turns,
        meter: StoreMeter,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._files = files
        self._cap = rules.max_writes_per_day
        self._name = rules.admission or DEFAULT_ADMISSION
        self._policy, self._turns = policy, turns
        self.meter = meter
        self._clock = clock
        self._lock = threading.Lock()
        self._noted = 0
        self._budget = WriteBudget(self._cap)
        make_admission(self._name, 1, policy, self._budget)
        self._admission: Admission | None = None
        # What earlier processes learned of conversations, where it is to be had.
        with suppress(ValueError, TypeError, AttributeError):
            self._turns.resume(json.loads(str(database.note(_TURNS))))

    def admitted(
        self,
        digest: bytes,
        extent_bytes: int,
        keys: Sequence[bytes],
        groups: int,
        turn: int,
    ) -> int:
        """Return how many first groups of a prompt may be stored, or are; learn from it.

        Parameters
        ----------
        digest, extent_bytes
            Of the namespace, and bytes of one chunk of it.
        keys
            Of all prefixes that end with a full group.
        groups
            How many of them are stored.
        turn
            As in `ChunkFacts`.
        """
        ends = [*keys[CHUNK_GROUPS - 1 :: CHUNK_GROUPS]]
        if len(keys) % CHUNK_GROUPS:
            ends.append(keys[-1])
        stored = len(ends) if groups == len(keys) else groups // CHUNK_GROUPS
        cost = CHUNK_GROUPS * self.seconds_per_group(digest) or 1.0
        now = self._clock()
        with self._lock:
            self._take_up()
            if self._admission is None:
                self._admission = self._made(extent_bytes)
            asked = [
                self._admission.admits(key, turn, position, cost, now)
                for position, key in enumerate(ends)
            ]
        missing = (at for at in range(stored, len(ends)) if not asked[at])
        admitted = next(missing, len(ends))
        if admitted < len(ends):
            self.meter.add(refused_chunks=len(ends) - admitted)
            return max(admitted * CHUNK_GROUPS, groups)
        return len(keys)

    def has_room_for(self, size: int) -> bool:
        """Say whether so many bytes may still be written, all extents that are being filled too."""
        if self._cap is None:
            return True
        ((units,),) = self._database.rows(
            "SELECT coalesce(sum(units), 0) FROM chunk WHERE owner IS NOT NULL AND state <> ?",
            (State.TOMBED,),
        )
        with self._lock:
            self._take_up()
            return self._budget.allows(int(units) * UNIT_BYTES + size, self._clock())

    def note_written(self) -> None:
        """Add what this process wrote to what the index says of all."""
        with self._lock:
            written = sum(file.written_bytes for file in self._files)
            fresh = written - self._noted
            if not fresh:
                return
            with self._database.transaction() as db:
                row = db.execute("SELECT value FROM meta WHERE name = ?", (_WRITES,)).fetchone()
                said = self._resumed(None if row is None else row[0])
                now = self._clock()
                self._budget.wrote(fresh, now)
                self._budget.written(now)
                said = {**self._budget.state(), "all": said.get("all", 0) + fresh}
                db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_WRITES, json.dumps(said)))
            self._noted = written

    def statistics(self) -> dict[str, int | float]:
        """Return the bytes that were ever written, and those of the last 24 hours."""
        self.note_written()
        with self._lock:
            said = self._take_up()
            day = self._budget.written(self._clock())
        return {"written_bytes": int(said.get("all", 0)), "written_day_bytes": day}

    def seconds_per_group(self, digest: bytes) -> float:
        """Return what computing a group of a namespace took lately; 0 where none is stored."""
        ((mean,),) = self._database.rows(
            "SELECT avg(c.cost / c.groups) FROM (SELECT * FROM chunk ORDER BY id DESC LIMIT ?) c "
            "JOIN namespace n ON n.id = c.namespace WHERE n.digest = ? AND c.state = ?",
            (_COSTS, digest, State.READY),
        )
        return float(mean or 0.0)

    def leave(self) -> None:
        """Note what was written and learned."""
        self.note_written()
        self._database.set_notes({_TURNS: json.dumps(self._turns.state())})
        if self._admission is not None:
            said = {"name": self._name, "state": self._admission.state()}
            self._database.set_notes({_ADMISSION: json.dumps(said)})

    # --- inside ----------------------------------------------------------------------------

    def _made(self, extent_bytes: int) -> Admission:
        """Return the admission with what earlier processes learned, where it is to be had."""
        chunks = sum(file.units for file in self._files) * UNIT_BYTES // extent_bytes
        made = make_admission(self._name, max(chunks, 1), self._policy, self._budget)
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            said = json.loads(str(self._database.note(_ADMISSION)))
            if said["name"] == self._name:
                made.resume(said["state"])
        return made

    def _take_up(self) -> dict[str, Any]:
        """Take up what all processes wrote; return what the index says of it."""
        return self._resumed(self._database.note(_WRITES))

    def _resumed(self, noted: object) -> dict[str, Any]:
        # What nobody can read counts as nothing written: a cap is no reason to fail.
        with suppress(ValueError, TypeError):
            said = json.loads(str(noted))
            if isinstance(said, dict) and isinstance(said.get("all"), int):
                self._budget.resume(said)
                return said
        self._budget.resume({"hours": []})
        return {}


def facts_of(header: Header, now: float) -> ChunkFacts:
    """Return what is known of a chunk that was never found since it was stored."""
    return ChunkFacts(header.position, 0.0, header.turn, header.cost, now, now)


class ExtentRoom:
    """Hands out extents, publishes what was written to them, and evicts.

    Any thread may use it.

    Parameters
    ----------
    places, index, retirement, files
        The store's.
    owner
        This process' number in the index.
    policy
        Ranks what is to go.
    intake
        Says what comes in, and counts.
    clock
        Returns the time in seconds.
    """

    def __init__(
        self,
        places: StorePlaces,
        index: Index,
        retirement: Retirement,
        files: Sequence[PoolFile],
        owner: int,
        policy: EvictionPolicy,
        intake: Intake,
        clock: Callable[[], float],
    ) -> None:
        self.intake, self.meter = intake, intake.meter
        self._places = places
        self._index = index
        self._retirement = retirement
        self._files = files
        self._owner = owner
        self._policy = policy
        self._clock = clock
        self._lock = threading.Lock()
        self._namespaces: dict[bytes, int] = {}
        self._touched: dict[int, Chunk] = {}
        self._touched_at = clock()
        self._next_drive = 0

    # --- for writers -----------------------------------------------------------------------

    def begin(
        self,
        namespace: Namespace,
        position: int,
        parent: int | None,
        parent_key: bytes,
        target: bytes,
        extra_bytes: int = 0,
    ) -> Chunk | None:
        """Return an extent for a chunk, evicting others for it.

        None where there is no room, another process stores the same, or enough was written today.

        Parameters
        ----------
        namespace
            Of its rows.
        position, parent, parent_key
            Its place in its chain: its number, and what is before it.
        target
            Key of the longest prefix that it will hold.
        extra_bytes
            Room behind its planes.
        """
        number = self._number(namespace)
        shape = ExtentShape.of(namespace, self._places.tag_bytes, extra_bytes)
        if not self.intake.has_room_for(shape.byte_count):
            self.meter.add(refused_chunks=1)
            return None
        # Room that this process makes is its own until it is taken or given up.
        made: list[Chunk] = []
        try:
            for _ in range(_MOST_EVICTED):
                # Chunks that follow one another lie on different drives, which all serve each
                # layer.
                self._next_drive = (self._next_drive + 1) % len(self._files)
                found = self._index.begin(
                    number, self._owner, shape.units, self._next_drive, position, parent,
                    parent_key, target, made, self._ends(),
                )  # fmt: skip
                if found is not None:
                    made = []
                    return found
                more = self._made_room()
                if not more:
                    self._check_drives()
                    break
                made += more
        except AlreadyStoredError:
            pass
        finally:
            self._retirement.freed(made, self._owner)
        return None

    def extend(self, number: int, groups: int, target: bytes) -> bool:
        """Say whether a chunk of so many groups may be filled further by this process."""
        if not self.intake.has_room_for(self._index.extent_bytes(number)):
            return False
        return self._index.extend(number, self._owner, groups, target)

    def generation(self) -> int:
        """Return a number higher than any that a header has."""
        return self._index.take_generation()

    def publish(self, written: Sequence[tuple[int, Header, Sequence[bytes]]]) -> int:
        """Let everybody find chunks whose bytes are on their drives; see `Index.publish`."""
        now, age = self._clock(), self._age()
        return self._index.publish(
            [
                (number, header, keys, self._policy.worth(facts_of(header, now), age))
                for number, header, keys in written
            ],
            self._owner,
            now,
        )

    def end_writing(self, chunks: Sequence[int]) -> None:
        """Let chunks go; the room of what was not published is free again."""
        # While the chunks are its own, the cap counts their extents whole.
        self.intake.note_written()
        self._index.end_writing(self._owner, chunks)
        self.clear_tombed()

    def keep(self, chunks: Sequence[int]) -> None:
        """Let chunks stay until `release`, whatever is stored meanwhile."""
        if chunks:
            self._index.lease(self._owner, chunks)

    def release(self, chunks: Sequence[int]) -> None:
        """Let chunks be evicted again."""
        if chunks:
            self._index.release(self._owner, chunks)

    # --- giving room back ------------------------------------------------------------------

    def collect(self) -> int:
        """Free what dead processes held and what is quarantined; return how many chunks went."""
        self._bury()
        return self.clear_tombed()

    def check_alone(self) -> None:
        """Refuse, with StoreError, where another living process has the store open."""
        self.collect()
        if any(number != self._owner for number in self._index.owners().values()):
            raise StoreError(
                f"other processes have the store {self._places.directory} open and may have the "
                "key: end them first"
            )

    def drop(self, chunks: Sequence[int]) -> int:
        """Let nobody find chunks any more and free their room; return how many they are."""
        for number in chunks:
            self._retirement.quarantine(number)
        self.collect()
        return len(chunks)

    def clear_tombed(self) -> int:
        """Take the headers of tombed chunks from their drives, then give their room back."""
        chunks = self._claimed()
        self._retirement.freed(chunks, self._owner)
        return len(chunks)

    def statistics(self) -> dict[str, int | float]:
        """Return what the store holds now, by name."""
        return (
            self._retirement.statistics(self._places.tag_bytes)
            | self.intake.statistics()
            | {
                "drive_bytes": sum(file.byte_count for file in self._files),
                "size_bytes": self._places.size,
            }
        )

    # --- worth -----------------------------------------------------------------------------

    def touch(self, chunks: Iterable[Chunk]) -> None:
        """Note that chunks were found; `write_due` writes it to the index."""
        with self._lock:
            self._touched.update((chunk.number, chunk) for chunk in chunks)

    def write_due(self) -> None:
        """Write what was found to the index, once a second."""
        with self._lock:
            due = self._touched and self._clock() - self._touched_at >= _TOUCH_SECONDS
        if due:
            self.write_touched()

    def write_touched(self) -> None:
        """Write what was found to the index."""
        with self._lock:
            chunks, self._touched = self._touched, {}
            now = self._touched_at = self._clock()
        age = self._age()
        rows = []
        for chunk in chunks.values():
            hits = hits_after(chunk.hits, now - chunk.last)
            facts = ChunkFacts(chunk.position, hits, chunk.turn, chunk.cost, chunk.last, now)
            rows.append((chunk.number, hits, now, self._policy.worth(facts, age)))
        if rows:
            self._index.touch(rows)

    # --- inside ----------------------------------------------------------------------------

    def _made_room(self) -> list[Chunk]:
        """Return chunks without headers whose room is this process' now; none where none may go.

        The chunk of least worth is evicted where nothing else is to be had.
        """
        self._bury()
        chunks = self._claimed()
        if not chunks:
            chunks = self._retirement.evict(1, self._owner)
            self.meter.add(evicted_chunks=len(chunks))
            self._blank(chunks)
        return chunks

    def _bury(self) -> None:
        """Tomb what dead processes were writing and what is quarantined."""
        sweep(self._places.owners)
        for token, number in self._index.owners().items():
            if number != self._owner and not (self._places.owners / token).exists():
                self._index.remove_owner(number)
        self._retirement.drop_quarantined()

    def _claimed(self) -> list[Chunk]:
        """Return tombed chunks that were nobody's and are this process' now, without headers."""
        # Of two processes that do the same, one finds nothing.
        chunks = self._retirement.claim(self._owner)
        self._blank(chunks)
        return chunks

    def _blank(self, chunks: Sequence[Chunk]) -> None:
        """Take the headers of this process' tombed chunks from their drives."""
        try:
            blank = aligned_buffer(2 * PAGE_BYTES)
            for chunk in chunks:
                file = self._files[chunk.span.drive]
                # A file that never grew there has no header to take.
                if chunk.span.offset < file.byte_count:
                    file.write(blank, chunk.span.offset)
            for drive in {chunk.span.drive for chunk in chunks}:
                self._files[drive].settle()
        except BaseException:
            self._retirement.disclaim(chunks, self._owner)
            raise

    def _ends(self) -> list[int]:
        """Return of each drive the unit behind the last one that it has room for.

        On one that is full chunks take the places of others, as in a full store.
        """
        sizes = [file.byte_count + max(0, file.growth_bytes) for file in self._files]
        return [size // UNIT_BYTES for size in sizes]

    def _check_drives(self) -> None:
        """Raise OSError where a drive is full before the store is."""
        for file, end in zip(self._files, self._ends(), strict=True):
            if end < file.units:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.path))

    def _number(self, namespace: Namespace) -> int:
        digest = namespace.digest
        if digest not in self._namespaces:
            self._namespaces[digest] = self._index.namespace(namespace)
        return self._namespaces[digest]

    def _age(self) -> float:
        return self._retirement.age()
