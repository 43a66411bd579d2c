# SPDX-License-Identifier: Apache-2.0
"""Room for chunks that are to be written: extents, and what goes where there are none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from hillinfer.drive.files import PAGE_BYTES, aligned_buffer
from hillinfer.drive.leftovers import sweep
from hillinfer.store.database import Chunk
from hillinfer.store.eviction import ChunkFacts, EvictionPolicy, hits_after
from hillinfer.store.extent import Header
from hillinfer.store.index import AlreadyStoredError, Index
from hillinfer.store.keys import ExtentShape, Namespace
from hillinfer.store.pool_files import PoolFile, StoreError, StorePlaces
from hillinfer.store.retirement import Retirement

# Leaves that give way for one chunk, at most: extents of other models are of other sizes.
_MOST_EVICTED = 64
# What was found is noted this often.
_TOUCH_SECONDS = 1.0


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
    clock
        Returns the time in seconds.

    Attributes
    ----------
    evicted_chunks
        How many gave way.
    """

    def __init__(
        self,
        places: StorePlaces,
        index: Index,
        retirement: Retirement,
        files: Sequence[PoolFile],
        owner: int,
        policy: EvictionPolicy,
        clock: Callable[[], float],
    ) -> None:
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
        self.evicted_chunks = 0

    # --- for writers -----------------------------------------------------------------------

    def begin(
        self,
        namespace: Namespace,
        position: int,
        parent: int | None,
        parent_key: bytes,
        target: bytes,
    ) -> Chunk | None:
        """Return an extent for a chunk, evicting others for it.

        None where there is no room, or another process stores the same.

        Parameters
        ----------
        namespace
            Of its rows.
        position, parent, parent_key
            Its place in its chain: its number, and what is before it.
        target
            Key of the longest prefix that it will hold.
        """
        number = self._number(namespace)
        shape = ExtentShape.of(namespace, self._places.tag_bytes)
        for _ in range(_MOST_EVICTED):
            # Chunks that follow one another lie on different drives, which all serve each layer.
            self._next_drive = (self._next_drive + 1) % len(self._files)
            try:
                found = self._index.begin(
                    number, self._owner, shape.units, self._next_drive, position, parent,
                    parent_key, target,
                )  # fmt: skip
            except AlreadyStoredError:
                return None
            if found is not None or not self.make_room():
                return found
        return None

    def extend(self, number: int, groups: int, target: bytes) -> bool:
        """Say whether a chunk of so many groups may be filled further by this process."""
        return self._index.extend(number, self._owner, groups, target)

    def generation(self) -> int:
        """Return a number higher than any that a header has."""
        return self._index.take_generation()

    def publish(self, written: Sequence[tuple[int, Header, Sequence[bytes]]]) -> None:
        """Let everybody find chunks whose bytes are on their drives."""
        now, age = self._clock(), self._age()
        self._index.publish(
            [
                (number, header, keys, self._policy.worth(self._facts_of(header, now), age))
                for number, header, keys in written
            ],
            now,
        )

    def end_writing(self, chunks: Sequence[int]) -> None:
        """Let chunks go; the room of what was not published is free again."""
        self._index.end_writing(self._owner, chunks)
        self.clear_tombed()

    # --- giving room back ------------------------------------------------------------------

    def make_room(self) -> bool:
        """Evict the chunk of least worth; say whether there was any room to be had."""
        if self.collect():
            return True
        gone = self._retirement.evict(1)
        self.evicted_chunks += len(gone)
        return bool(self.clear_tombed())

    def collect(self) -> int:
        """Free what dead processes held and what is quarantined; return how many chunks went."""
        sweep(self._places.owners)
        for token, number in self._index.owners().items():
            if number != self._owner and not (self._places.owners / token).exists():
                self._index.remove_owner(number)
        self._retirement.drop_quarantined()
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
        # Of two processes that do the same, one finds nothing to give back.
        chunks = self._retirement.tombed()
        blank = aligned_buffer(2 * PAGE_BYTES)
        for chunk in chunks:
            file = self._files[chunk.span.drive]
            # A file that never grew there has no header to take.
            if chunk.span.offset < file.byte_count:
                file.write(blank, chunk.span.offset)
        for drive in {chunk.span.drive for chunk in chunks}:
            self._files[drive].settle()
        self._retirement.freed(chunks)
        return len(chunks)

    def statistics(self) -> dict[str, int | float]:
        """Return what the store holds now, by name."""
        return self._retirement.statistics() | {
            "drive_bytes": sum(file.byte_count for file in self._files),
            "size_bytes": self._places.size,
        }

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

    def _number(self, namespace: Namespace) -> int:
        digest = namespace.digest
        if digest not in self._namespaces:
            self._namespaces[digest] = self._index.namespace(namespace)
        return self._namespaces[digest]

    def _age(self) -> float:
        return self._retirement.age()

    @staticmethod
    def _facts_of(header: Header, now: float) -> ChunkFacts:
        return ChunkFacts(header.position, 0.0, header.turn, header.cost, now, now)
