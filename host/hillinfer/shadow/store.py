# SPDX-License-Identifier: Apache-2.0
"""Key shadows that do not fit in DRAM: written to the drive, read back just ahead of scoring."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import DriveCalls, Reads
from hillinfer.drive.checksums import sums_of
from hillinfer.drive.files import PAGE_BYTES, ColdFile, IOMode, aligned_buffer, round_up
from hillinfer.drive.landing import MAX_READ_BYTES
from hillinfer.drive.read_engines import ReadEngine
from hillinfer.drive.regions import GroupTable
from hillinfer.drive.shared_files import ReadFile, ShadowBase, begins_like
from hillinfer.errors import ColdPoolError
from hillinfer.native.structures import address_of
from hillinfer.scoring.layout import probe_bytes
from hillinfer.secrecy.cold_pages import ColdPages, table_bytes
from hillinfer.secrecy.library import WrongTagError
from hillinfer.shadow.segments import SegmentLayer
from hillinfer.statistics import Counters
from hillinfer.trace.recorder import SILENT, Lane, Recorder
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec

# --- Shadows on the drive ---

# Shadows that are read ahead of scoring.
STREAM_BUFFERS = 4
_UNKNOWN = -1


class ShadowStore:
    """Slots of one shadow each, of one segment in one layer, in a file that is made when needed.

    Runs of slots may lie in bases, files that are read and never written; the store's own file has
    every slot at the place of its number.

    Parameters
    ----------
    engine
        Reads shadows; the caller closes it after the store.
    pages
        What seals the pages of the store's own file; None where they are plain.
    """

    def __init__(
        self,
        directory: Path,
        mode: IOMode,
        spec: KernelSpec,
        engine: ReadEngine,
        calls: DriveCalls | None = None,
        recorder: Recorder = SILENT,
        pages: ColdPages | None = None,
    ) -> None:
        self._pages = pages
        # Of the thread that writes.
        self._sealed: NDArray[np.uint8] | None = None
        self._recorder = recorder
        self._directory = directory
        self._mode = mode
        self._calls = calls
        self._shape = (spec.segment_beats, BEAT_BYTES)
        self.slot_bytes = shadow_bytes(spec)
        self._file: ColdFile | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="hillinfer-shadow-write")
        self._engine = engine
        self._readers = ThreadPoolExecutor(
            STREAM_BUFFERS, thread_name_prefix="hillinfer-shadow-read"
        )
        self._slots = GroupTable()
        # By their first slot; replaced and never changed, so that any thread may look.
        self._bases: dict[int, ShadowBase] = {}
        # Checksums by slot, counted with the statistics of what the slot holds; below 0 where a
        # slot's is not known.
        self._sums = array("q")

    @property
    def streaming_bytes(self) -> int:
        """Bytes of the buffers that shadows go through."""
        sealing = 0 if self._pages is None else 1
        return (STREAM_BUFFERS + sealing) * self.slot_bytes

    def add_base(self, base: ShadowBase) -> int | None:
        """Take a base in, and return its first slot, held until `let_base_go`.

        The store closes it; at once where the same files are a base already. None, where it holds
        nothing or its slots are laid out otherwise.
        """
        if base.slot_bytes != self.slot_bytes or not base.count:
            base.close()
            return None
        first = begins_like(base, self._bases)
        if first is not None:
            base.close()
            self._slots.hold(first)
            return first
        first = self._slots.open_region(base.count)
        self._sums.extend([_UNKNOWN] * (self._slots.groups - len(self._sums)))
        for slot in range(base.count):
            self._sums[first + slot] = _UNKNOWN if base.sums is None else int(base.sums[slot])
        self._bases = self._bases | {first: replace(base, sums=None)}
        return first

    def let_base_go(self, first: int) -> None:
        """Close a base that `add_base` returned, once nobody has a slot of it."""
        self._slots.let_go(first)
        self._slots.close_idle_regions(self._drop_base)

    def buffer(self) -> NDArray[np.uint8]:
        """Return page-aligned zeros that a shadow fits in, uint8 (segment_beats, 64)."""
        return self.view(aligned_buffer(self.slot_bytes))

    def view(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return a slot's bytes of memory as a shadow, uint8 (segment_beats, 64)."""
        return memory[: self._shape[0] * self._shape[1]].reshape(self._shape)

    def take(self) -> int:
        """Return a slot that nobody owns, to be written.

        Raises
        ------
        BudgetError
            Where there is no room for its tags.
        """
        slot = self._slots.take()
        if self._pages is not None:
            try:
                self._pages.cover((slot + 1) * self.slot_bytes)
            except BaseException:
                self._slots.give(slot)
                raise
        self._sums.extend([_UNKNOWN] * (self._slots.groups - len(self._sums)))
        return slot

    def share(self, slot: int) -> None:
        """Own a slot of a base, as others may."""
        self._slots.share(slot)

    def give(self, slot: int) -> None:
        """Own a slot no more: it is used for another shadow, or goes with its base."""
        self._slots.give(slot)
        self._slots.close_idle_regions(self._drop_base)

    def write(self, slot: int, shadow: NDArray[np.uint8]) -> Future[None]:
        """Write a shadow that `buffer` made, in the background; leave it alone until it is done."""
        memory = self._whole(shadow).data
        return self._writer.submit(self._noted_write, self._opened(), memory, slot)

    def read(self, slot: int, into: NDArray[np.uint8]) -> Future[None]:
        """Read a shadow into what `buffer` made, in the background."""
        return self.read_together([slot], self._whole(into))

    def buffers(self, count: int) -> tuple[NDArray[np.uint8], list[NDArray[np.uint8]]]:
        """Return page-aligned memory of so many shadows, and each of them as `buffer` has it."""
        memory = aligned_buffer(count * self.slot_bytes)[: count * self.slot_bytes]
        starts = range(0, len(memory), self.slot_bytes)
        return memory, [self.view(memory[start : start + self.slot_bytes]) for start in starts]

    def read_together(self, slots: Sequence[int], into: NDArray[np.uint8]) -> Future[None]:
        """Read shadows in the background, one behind the other.

        Parameters
        ----------
        into
            Memory for as many, uint8, from a page on.
        """
        wanted: dict[ReadFile, list[tuple[int, int]]] = {}
        for number, slot in enumerate(slots):
            file, offset = self._lies(slot)
            wanted.setdefault(file, []).append((offset, number * self.slot_bytes))
        parts = [(file, self._reads(np.array(own, np.int64))) for file, own in wanted.items()]
        return self._readers.submit(self._noted_reads, parts, into, slots)

    def place(self, slot: int) -> tuple[int, int] | None:
        """Return descriptor and offset of a shadow that was written or lies in the base.

        None where nobody can read it there, because it is sealed.
        """
        if self._pages is not None and self._base_of(slot) is None:
            return None
        file, offset = self._lies(slot)
        return file.descriptor, offset

    def close(self) -> None:
        """Stop the threads and give the drive's space back; harmless when done twice."""
        self._writer.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)
        if self._file is not None:
            self._file.close()
            self._file = None
        for base in self._bases.values():
            base.close()

    def _drop_base(self, first: int) -> None:
        if first in self._bases:
            self._bases[first].close()
            self._bases = {own: base for own, base in self._bases.items() if own != first}

    def _base_of(self, slot: int) -> int | None:
        """Return the first slot of the base that a slot lies in; None for the own file."""
        for first, base in self._bases.items():
            if first <= slot < first + base.count:
                return first
        return None

    def _lies(self, slot: int) -> tuple[ReadFile, int]:
        """Return the file that a slot lies in, and at which of its bytes."""
        first = self._base_of(slot)
        if first is None:
            return self._opened(), slot * self.slot_bytes
        return self._bases[first].file, (slot - first) * self.slot_bytes

    def _whole(self, shadow: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return a shadow with the rest of its last page, wherever its slot lies in memory."""
        memory = shadow
        while isinstance(memory.base, np.ndarray):
            memory = memory.base
        start = address_of(shadow) - address_of(memory)
        return memory[start : start + self.slot_bytes]

    def _noted_write(self, file: ColdFile, memory: memoryview, slot: int) -> None:
        self._sums[slot] = int(self._sums_of(np.frombuffer(memory, np.uint8), 1)[0])
        with self._recorder.span(Lane.WRITES, "shadow", bytes=len(memory)):
            file.write(self._as_written(memory, slot), slot * self.slot_bytes)

    def _noted_reads(
        self,
        parts: list[tuple[ReadFile, Reads]],
        memory: NDArray[np.uint8],
        slots: Sequence[int],
    ) -> None:
        for file, reads in parts:
            size = int(reads.byte_counts.sum())
            with self._recorder.span(Lane.READS, "shadow", reads=len(reads), bytes=size):
                self._engine.read(file, memory, reads)
        self._open(memory, slots)
        for slot, found in zip(slots, self._sums_of(memory, len(slots)).tolist(), strict=True):
            if self._sums[slot] not in (_UNKNOWN, found):
                file, offset = self._lies(slot)
                raise file.changed(self.slot_bytes, offset)

    def _as_written(self, memory: memoryview, slot: int) -> memoryview:
        """Return a shadow as it goes to the drive."""
        if self._pages is None:
            return memory
        if self._sealed is None:
            self._sealed = aligned_buffer(self.slot_bytes)[: self.slot_bytes]
        # It is scored with until the drive has it, so it stays as it is.
        self._sealed[:] = np.frombuffer(memory, np.uint8)
        self._pages.seal(slot * self.slot_bytes, self._sealed)
        return self._sealed.data

    def _open(self, memory: NDArray[np.uint8], slots: Sequence[int]) -> None:
        """Open those shadows that were sealed, where they were read to."""
        if self._pages is None:
            return
        for at, slot in enumerate(slots):
            if self._base_of(slot) is not None:
                continue
            own = memory[at * self.slot_bytes : (at + 1) * self.slot_bytes]
            try:
                self._pages.open(slot * self.slot_bytes, own)
            except WrongTagError as error:
                changed = self._opened().changed(self.slot_bytes, slot * self.slot_bytes)
                raise changed from error

    def _sums_of(self, memory: NDArray[np.uint8], count: int) -> NDArray[np.uint32]:
        shadows = memory[: count * self.slot_bytes].reshape(count, self.slot_bytes)
        return sums_of(shadows, np.arange(count))

    def _reads(self, wanted: NDArray[np.int64]) -> Reads:
        """Return the reads of shadows, of each the byte of the file and that of the memory."""
        pieces = np.arange(0, self.slot_bytes, MAX_READ_BYTES)
        starts = (wanted[:, :, None] + pieces).transpose(1, 0, 2).reshape(2, -1)
        sizes = np.minimum(self.slot_bytes - pieces, MAX_READ_BYTES)
        return Reads(starts[0], starts[1], np.tile(sizes, len(wanted)))

    def _opened(self) -> ColdFile:
        if self._file is None:
            self._file = ColdFile(self._directory, self._mode, "key shadow", self._calls)
        return self._file


def shadow_bytes(spec: KernelSpec) -> int:
    """Return the bytes that the shadow of one segment in one layer takes, whole pages."""
    return round_up(spec.segment_bytes, PAGE_BYTES)


def sealed_bytes(spec: KernelSpec, count: int) -> tuple[int, int]:
    """Return what sealing so many shadows on the drive takes in memory: a buffer, and tables."""
    size = shadow_bytes(spec)
    # The table of tags grows by an eighth, and while it does the old one is there as well.
    return size, 2 * table_bytes(count * size + count * size // 4)


# --- Bytes that a segment takes in DRAM ---

# A shadow in DRAM has the sinks beside it, so its copy is that of a segment without.
NO_SINKS = 1
_STATISTICS_ITEM_BYTES = 5
_SUM_BYTES = 8


def held_bytes(spec: KernelSpec) -> int:
    """Return the most bytes of one segment's shadow in DRAM, with the copy of its probe tokens."""
    return shadow_bytes(spec) + probe_bytes(spec, NO_SINKS)


def statistics_bytes(spec: KernelSpec) -> int:
    """Return the bytes of one segment's channel statistics and checksum in one layer."""
    return spec.kv_heads * spec.head_dim * _STATISTICS_ITEM_BYTES + _SUM_BYTES


# --- Shadows that are read back ---


@dataclass(frozen=True)
class _Buffers:
    """Memory that shadows are read to at once, and each of them in it."""

    memory: NDArray[np.uint8]
    shadows: list[NDArray[np.uint8]]


@dataclass(frozen=True)
class _Batch:
    """Slots that are read, or were, to the first of some buffers."""

    slots: Sequence[int]
    buffers: _Buffers
    reading: Future[None]


class ShadowStream:
    """Hands out the shadows of one layer in order, each valid until the next is asked for.

    Small shadows are read several at once: to hand a read to another thread and to wait for it
    takes longer than to score one of them.
    """

    def __init__(self, store: ShadowStore, counters: Counters) -> None:
        self._store = store
        self._counters = counters
        together = together_of(store.slot_bytes)
        self._all = [_Buffers(*store.buffers(together)) for _ in range(STREAM_BUFFERS // together)]
        self._free = list(self._all)
        self._slots: Sequence[int] = ()
        self._next = 0
        self._current: _Batch | None = None
        self._ahead: deque[_Batch] = deque()
        # Every read that may not be done, whatever came between its start and its place in line.
        self._readings: list[Future[None]] = []

    def begin(self, slots: Sequence[int]) -> None:
        """Start to read these slots, which will be asked for in this order."""
        wait(self._readings)
        # An error or Ctrl-C may have left buffers in no place, or in two.
        self._ahead.clear()
        self._current = None
        self._free = list(self._all)
        self._readings.clear()
        self._slots, self._next = slots, 0
        self._read_ahead()

    def shadow(self, slot: int) -> NDArray[np.uint8]:
        """Return the shadow in a slot, uint8 (segment_beats, 64).

        The last one may be asked for again; any other only in the order that was announced.
        """
        if self._current is None or slot not in self._current.slots:
            if self._current is not None:
                self._free.append(self._current.buffers)
                self._current = None
            self._read_ahead()
            if not self._ahead or self._ahead[0].slots[0] != slot:
                # Whoever scores again, or in another order, starts over from here.
                rest = list(self._slots)
                self.begin(rest[rest.index(slot) :])
            started = time.perf_counter()
            # Until then it stays in line, where `begin` waits for it whatever comes in between.
            self._ahead[0].reading.result()
            self._current = self._ahead.popleft()
            self._counters.drive_wait_seconds += time.perf_counter() - started
        return self._current.buffers.shadows[self._current.slots.index(slot)]

    def _read_ahead(self) -> None:
        while self._free and self._next < len(self._slots):
            buffers = self._free.pop()
            slots = self._slots[self._next : self._next + len(buffers.shadows)]
            self._next += len(slots)
            self._counters.shadow_read_bytes += len(slots) * self._store.slot_bytes
            self._readings = [one for one in self._readings if not one.done()]
            self._readings.append(self._store.read_together(slots, buffers.memory))
            self._ahead.append(_Batch(slots, buffers, self._readings[-1]))


def together_of(slot_bytes: int) -> int:
    """Return how many shadows of a size are read at once, a divisor of all buffers."""
    together = STREAM_BUFFERS
    while together > 1 and together * slot_bytes > MAX_READ_BYTES:
        together //= 2
    return together


# --- Shadows that are being written to the drive ---

# DRAM still holds them.
LEAVING_SHADOWS = 4


class LeavingShadows:
    """Writes full shadows, a few at a time, and tells when DRAM may forget one.

    Parameters
    ----------
    written
        Called with each that the drive has.
    stays
        Called with each that the drive did not take, and that has no slot any more.
    """

    def __init__(
        self,
        store: ShadowStore,
        counters: Counters,
        written: Callable[[SegmentLayer], None],
        stays: Callable[[SegmentLayer], None],
    ) -> None:
        self._store = store
        self._counters = counters
        self._written = written
        self._stays = stays
        self._leaving: deque[tuple[SegmentLayer, Future[None]]] = deque()

    def make_room(self) -> None:
        """Wait until another may leave.

        Raises
        ------
        ColdPoolError
            Where one that left before could not be written.
        """
        while len(self._leaving) >= LEAVING_SHADOWS:
            self._end_first()

    def send(self, own: SegmentLayer) -> None:
        """Begin to write a full shadow, for which there is room; it has a slot from here on."""
        assert own.shadow is not None
        slot = self._store.take()
        try:
            writing = self._store.write(slot, own.shadow)
        except BaseException:
            # A slot that nothing is written to must never be read.
            self._store.give(slot)
            raise
        own.slot = slot
        self._leaving.append((own, writing))
        self._counters.shadow_write_bytes += self._store.slot_bytes

    def end_done(self) -> None:
        """Tell of those that are written by now."""
        while self._leaving and self._leaving[0][1].done():
            self._end_first()

    def settle(self) -> None:
        """Wait for all; raises as `make_room`."""
        while self._leaving:
            self._end_first()

    def settle_quietly(self) -> None:
        """Wait for all; what was not written is told by whoever still needs it."""
        while self._leaving:
            with suppress(ColdPoolError):
                self._end_first()

    def _end_first(self) -> None:
        own, writing = self._leaving.popleft()
        try:
            writing.result()
        except BaseException:
            # Its codes stay in DRAM, so nothing is lost but the room that was hoped for.
            assert own.slot is not None
            self._store.give(own.slot)
            own.slot = None
            self._stays(own)
            raise
        self._written(own)
