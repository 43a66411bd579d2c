# SPDX-License-Identifier: Apache-2.0
"""Chunks of stores that an engine's sequences read in place: leased once, shared by reference."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from hillinfer.drive.files import PAGE_BYTES
from hillinfer.drive.regions import GroupTable, OtherFiles
from hillinfer.drive.shared_files import Result
from hillinfer.errors import ColdPoolError, HillInferError, reason_of
from hillinfer.extents.group_seals import GroupSeals
from hillinfer.shadow.segments import Segment
from hillinfer.store.keys import CHUNK_GROUPS, CHUNK_TOKENS
from hillinfer.store.pool_files import PoolFile, Span
from hillinfer.store.prefix import StoredChunk
from hillinfer.store.store import Store
from hillinfer.store.writer import WrittenRun


class StoredRowsError(ColdPoolError):
    """Rows that lie in a store cannot be read, or are not as they were written."""


@dataclass
class _Shared:
    """A chunk that sequences of an engine read.

    Parameters
    ----------
    store, number, span
        Where it is.
    groups
        Their numbers in the cold pool, by their places in the chunk.
    segment
        The shadow of all of it, where it is in memory and as it was stored.
    is_leased
        Whether it is published and stays for this; else it is being filled.
    """

    store: Store
    number: int
    span: Span
    groups: dict[int, int] = field(default_factory=dict)
    segment: Segment | None = None
    is_leased: bool = False


class _PoolRows:
    """A file of a store, as a cold pool reads it.

    Parameters
    ----------
    file
        The file.
    chunks
        Knows who uses what of it.
    read_unit
        What reads of rows are multiples of, in bytes: a page where these are sealed.
    """

    def __init__(self, file: PoolFile, chunks: SharedChunks, read_unit: int = PAGE_BYTES) -> None:
        self._file, self._chunks = file, chunks
        self.read_unit = read_unit

    @property
    def descriptor(self) -> int:
        """Number of the open file."""
        return self._file.descriptor

    def lend(self, use: Callable[[int], Result]) -> Result:
        """Call `use` with a descriptor that stays open while the store does."""
        return use(self._file.descriptor)

    def changed(self, byte_count: int, offset: int) -> HillInferError:
        """Return the error that says so; the chunk is found by nobody any more."""
        return self._failed(
            offset,
            f"{byte_count} bytes at {offset} of the store's file {self._file.path} are not what "
            "was written there: the drive gave other bytes, or somebody changed the file",
        )

    def read(self, into: memoryview, offset: int) -> None:
        """Fill all of `into`, or raise StoredRowsError."""
        try:
            self._file.read(np.frombuffer(into, np.uint8), offset)
        except OSError as error:
            raise self._failed(
                offset,
                f"cannot read {len(into)} bytes at {offset} of the store's file "
                f"{self._file.path}: {reason_of(error)}",
            ) from error

    def close(self) -> None:
        """Leave it to its store."""

    def _failed(self, offset: int, what: str) -> StoredRowsError:
        error = StoredRowsError(f"{what}; ask again: the prompt is read anew then")
        self._chunks.blame(self._file, offset, error)
        return error


class SharedChunks:
    """Which chunks of stores the sequences of an engine read, and the groups that they are there.

    A chunk that several sequences open is there once: its rows have one number each, and so one hot
    copy, and its shadow is one segment. The writing thread and the engine's may use it at once.

    Parameters
    ----------
    others
        Files of a cold pool that groups of chunks become part of.
    groups
        Hands out their numbers.
    seals
        Knows what opens those that are sealed.
    """

    def __init__(self, others: OtherFiles, groups: GroupTable, seals: GroupSeals) -> None:
        self._others, self._groups, self._seals = others, groups, seals
        self._chunks: dict[tuple[Store, int], _Shared] = {}
        self._of_group: dict[int, tuple[_Shared, int]] = {}
        self._files: dict[PoolFile, int] = {}
        self._ends: dict[object, Callable[[], None]] = {}
        self._changing = threading.Lock()

    def file(self, store: Store, drive: int) -> int:
        """Return the number that a store's file has in the cold pool."""
        file = store.files[drive]
        with self._changing:
            if file not in self._files:
                seals = self._seals if store.places.cipher else None
                unit = file.read_unit if seals is None else PAGE_BYTES
                rows = _PoolRows(file, self, unit)
                self._files[file] = self._others.add_file(rows, file.io_mode, seals)
            return self._files[file]

    def has_groups(self, store: Store, chunk: StoredChunk, count: int) -> bool:
        """Whether the first groups of a chunk are all there already."""
        with self._changing:
            shared = self._chunks.get((store, chunk.record.number))
            return shared is not None and all(at in shared.groups for at in range(count))

    def segment(self, store: Store, chunk: StoredChunk) -> Segment | None:
        """Return the shadow of a chunk all of which is there; None where it is not."""
        with self._changing:
            shared = self._chunks.get((store, chunk.record.number))
            segment = None if shared is None else shared.segment
        if segment is None or not segment.owners:
            return None
        whole = all(own.coded_tokens == CHUNK_TOKENS for own in segment.layers)
        return segment if whole else None

    @contextmanager
    def leasing(self, store: Store, chunks: Sequence[StoredChunk]) -> Iterator[None]:
        """Lease chunks that the caller leases meanwhile, while `open` is called with them.

        Those that nobody has groups of afterwards are given back.

        Raises
        ------
        StoreError
            Where the index fails.
        """
        with self._changing:
            new = [one for one in chunks if (store, one.record.number) not in self._chunks]
        if new:
            store.lease([chunk.record.number for chunk in new])
        with self._changing:
            for chunk in new:
                record = chunk.record
                shared = _Shared(store, record.number, record.span, is_leased=True)
                self._chunks[store, record.number] = shared
        try:
            yield
        finally:
            with self._changing:
                places = [(store, chunk.record.number) for chunk in new]
                idle = [place for place in places if not self._chunks[place].groups]
                ended = [self._chunks.pop(place) for place in idle]
            _end(ended)

    def open(self, store: Store, chunk: StoredChunk, count: int) -> list[int]:
        """Return the numbers of a chunk's first groups, owned once more, placed where they lie.

        Parameters
        ----------
        store, chunk
            One that is being leased.
        count
            How many groups.

        Raises
        ------
        BudgetError
            Where there is no room for the tags of a sealed chunk.
        """
        span = chunk.record.span
        with self._changing:
            shared = self._chunks[store, chunk.record.number]
            # Its tail may be growing meanwhile.
            held = dict(shared.groups)
        if any(at not in held for at in range(count)):
            self._seals.make_room(chunk.pages)
        missing = {at: self._groups.take() for at in range(count) if at not in held}
        for at, group in held.items():
            if at < count:
                self._groups.share(group)
        if missing:
            self._seals.place(
                {group: at for at, group in missing.items()}, chunk.pages, span.offset
            )
            layers = [span.offset + chunk.shape.rows_at(at) for at in range(chunk.shape.layers)]
            places = np.array(list(missing)) * chunk.shape.group_bytes
            self._others.place_in_all(
                np.array(list(missing.values())),
                self.file(store, span.drive),
                np.array(layers)[:, None] + places,
            )
        with self._changing:
            for at, group in missing.items():
                shared.groups[at] = group
                self._of_group[group] = shared, at
            return [shared.groups[at] for at in range(count)]

    def note_written(self, store: Store, run: WrittenRun, span: Span, groups: list[int]) -> bool:
        """Learn that groups were written to a chunk that is being filled.

        False where they cannot be read there, and have to lie elsewhere, too.
        """
        if not self._seals.take_spare(run.pages):
            return False
        numbers = {group: at for at, group in enumerate(groups, run.at)}
        self._seals.place(numbers, run.pages, span.offset)
        with self._changing:
            shared = self._chunks.get((store, run.chunk))
            if shared is None:
                shared = self._chunks[store, run.chunk] = _Shared(store, run.chunk, span)
            for at, group in enumerate(groups, run.at):
                shared.groups[at] = group
                self._of_group[group] = shared, at
        return True

    def note_published(self, store: Store, chunks: Sequence[StoredChunk]) -> None:
        """Learn that chunks were published, and leased once for this."""
        extra = []
        with self._changing:
            for chunk in chunks:
                shared = self._chunks.get((store, chunk.record.number))
                if shared is None or shared.is_leased:
                    extra.append(chunk.record.number)
                else:
                    shared.is_leased = True
        if extra:
            store.release(extra)

    def note_segment(self, store: Store, number: int, segment: Segment) -> None:
        """Learn which segment is the shadow of a chunk."""
        with self._changing:
            shared = self._chunks.get((store, number))
            if shared is not None and len(shared.groups) == CHUNK_GROUPS:
                shared.segment = segment

    def is_read(self, store: Store, number: int) -> bool:
        """Whether sequences have rows of a chunk."""
        with self._changing:
            return (store, number) in self._chunks

    def forget(self, groups: Iterable[int]) -> None:
        """Learn that nobody owns some groups any more; chunks without any are given back."""
        left: list[int] = []
        ended: list[_Shared] = []
        with self._changing:
            for group in groups:
                found = self._of_group.pop(group, None)
                if found is None:
                    continue
                left.append(group)
                shared, at = found
                shared.segment = None
                del shared.groups[at]
                if not shared.groups:
                    del self._chunks[shared.store, shared.number]
                    ended.append(shared)
        if left:
            self._others.leave(left)
            self._seals.leave(left)
        _end(ended)

    def blame(self, file: PoolFile, offset: int, error: Exception) -> None:
        """Tell the store of a chunk that it cannot be read, or is not as it was written."""
        with self._changing:
            wrong = [
                shared
                for shared in self._chunks.values()
                if shared.store.files[shared.span.drive] is file
                and 0 <= offset - shared.span.offset < shared.span.byte_count
            ]
        for shared in wrong:
            shared.store.blame(shared.number, error)

    def call_at_close(self, who: object, end: Callable[[], None]) -> None:
        """Call something when all is given back, unless `spare` is called before."""
        self._ends[who] = end

    def spare(self, who: object) -> None:
        """Call nothing for somebody any more."""
        self._ends.pop(who, None)

    def close(self) -> None:
        """Give all chunks back, whatever becomes of what is called then."""
        with ExitStack() as ends:
            ends.callback(self._give_back)
            for end in reversed(list(self._ends.values())):
                ends.callback(end)

    def _give_back(self) -> None:
        with self._changing:
            groups = list(self._of_group)
            ended, self._chunks, self._of_group = list(self._chunks.values()), {}, {}
        self._seals.leave(groups)
        _end(ended)


def _end(chunks: Iterable[_Shared]) -> None:
    """End the leases of chunks, and free those that were never published."""
    by_store: dict[Store, list[_Shared]] = {}
    for shared in chunks:
        by_store.setdefault(shared.store, []).append(shared)
    # Each whatever became of another.
    with ExitStack() as ends:
        for store, own in by_store.items():
            leased = [shared.number for shared in own if shared.is_leased]
            if leased:
                ends.callback(store.release, leased)
            unpublished = [shared.number for shared in own if not shared.is_leased]
            if unpublished:
                # Whoever opens the store next collects what cannot be given back now.
                with suppress(OSError, HillInferError):
                    store.room.end_writing(unpublished)
