# SPDX-License-Identifier: Apache-2.0
"""Key shadows that do not fit in DRAM, on the drive."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hillinfer.storage.aligned_buffer import PAGE_BYTES, aligned_buffer, round_up
from hillinfer.storage.cold_file import ColdFile, IOMode
from hillinfer.storage.drive_calls import DriveCalls
from hillinfer.storage.read_engine import ReadEngine
from hillinfer.storage.read_plan import MAX_READ_BYTES
from hillinfer.storage.reads import Reads
from hillinfer.storage.row_sums import sums_of
from hillinfer.storage.stored_base import ReadFile, ShadowBase
from hillinfer.timeline.lane import Lane
from hillinfer.timeline.recorder import Recorder
from hillinfer.timeline.silent import SILENT
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec

# Shadows that are read ahead of scoring.
STREAM_BUFFERS = 4
_UNKNOWN = -1


class ShadowStore:
    """Slots of one shadow each, of one segment in one layer, in a file that is made when needed.

    Parameters
    ----------
    directory
        Where the file lies.
    mode
        Direct or buffered I/O.
    spec
        Fixes the size of a shadow.
    engine
        Reads shadows; the caller closes it after the store.
    calls
        How the drive is reached.
    base
        Holds the first slots, which are read and never written; the store closes it.
    recorder
        Notes how long reads and writes take.
    """

    def __init__(
        self,
        directory: Path,
        mode: IOMode,
        spec: KernelSpec,
        engine: ReadEngine,
        calls: DriveCalls | None = None,
        base: ShadowBase | None = None,
        recorder: Recorder = SILENT,
    ) -> None:
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
        self._free: list[int] = []
        self._base = base
        self._base_slots = base.slots if base else 0
        self._slots = self._base_slots
        # Checksums by slot, counted with the statistics of what the slot holds; below 0 where a
        # slot's is not known.
        known = None if base is None or base.sums is None else base.sums.tolist()
        self._sums = array("q", [_UNKNOWN] * self._base_slots if known is None else known)

    @property
    def has_base(self) -> bool:
        """Whether there is a base whose slots are laid out as this store's."""
        return self._base is not None and self._base.slot_bytes == self.slot_bytes

    def buffer(self) -> NDArray[np.uint8]:
        """Return page-aligned zeros that a shadow fits in, uint8 (segment_beats, 64)."""
        return self.view(aligned_buffer(self.slot_bytes))

    def view(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return a slot's bytes of memory as a shadow, uint8 (segment_beats, 64)."""
        return memory[: self._shape[0] * self._shape[1]].reshape(self._shape)

    def take(self) -> int:
        """Return a slot that nobody owns."""
        if self._free:
            return heapq.heappop(self._free)
        self._slots += 1
        self._sums.append(_UNKNOWN)
        return self._slots - 1

    def give(self, slot: int) -> None:
        """Let a slot be used for another shadow; one of the base stays as it is."""
        if slot >= self._base_slots:
            heapq.heappush(self._free, slot)

    def write(self, slot: int, shadow: NDArray[np.uint8]) -> Future[None]:
        """Write a shadow that `buffer` made, in the background; leave it alone until it is done."""
        file = self._opened()
        memory = _whole(shadow, self.slot_bytes)
        return self._writer.submit(self._noted_write, file, memory, slot)

    def read(self, slot: int, into: NDArray[np.uint8]) -> Future[None]:
        """Read a shadow into what `buffer` made, in the background."""
        return self.read_together([slot], _memory(into))

    def buffers(self, count: int) -> tuple[NDArray[np.uint8], list[NDArray[np.uint8]]]:
        """Return page-aligned memory of so many shadows, and each of them as `buffer` has it."""
        memory = aligned_buffer(count * self.slot_bytes)[: count * self.slot_bytes]
        starts = range(0, len(memory), self.slot_bytes)
        return memory, [self.view(memory[start : start + self.slot_bytes]) for start in starts]

    def read_together(self, slots: Sequence[int], into: NDArray[np.uint8]) -> Future[None]:
        """Read shadows in the background, one behind the other.

        Parameters
        ----------
        slots
            Whose.
        into
            Memory for as many, uint8, from a page on.
        """
        numbers = np.asarray(slots, np.int64)
        places = np.arange(len(numbers)) * self.slot_bytes
        parts: list[tuple[ReadFile, Reads]] = []
        in_base = numbers < self._base_slots
        if self._base is not None and in_base.any():
            offsets = numbers[in_base] * self.slot_bytes
            parts.append((self._base.file, self._reads(offsets, places[in_base])))
        if not in_base.all():
            offsets = (numbers[~in_base] - self._base_slots) * self.slot_bytes
            parts.append((self._opened(), self._reads(offsets, places[~in_base])))
        return self._readers.submit(self._noted_reads, parts, into, slots)

    def place(self, slot: int) -> tuple[int, int]:
        """Return descriptor and offset of a shadow that was written or lies in the base."""
        if self._base is not None and slot < self._base_slots:
            return self._base.file.descriptor, slot * self.slot_bytes
        return self._opened().descriptor, self._offset(slot)

    def close(self) -> None:
        """Stop the threads and give the drive's space back; harmless when done twice."""
        self._writer.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._base is not None:
            self._base.file.close()

    def _noted_write(self, file: ColdFile, memory: memoryview, slot: int) -> None:
        self._sums[slot] = int(self._sums_of(np.frombuffer(memory, np.uint8), 1)[0])
        with self._recorder.span(Lane.WRITES, "shadow", bytes=len(memory)):
            file.write(memory, self._offset(slot))

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
        for slot, found in zip(slots, self._sums_of(memory, len(slots)).tolist(), strict=True):
            if self._sums[slot] not in (_UNKNOWN, found):
                in_base = self._base is not None and slot < self._base_slots
                place = slot * self.slot_bytes if in_base else self._offset(slot)
                file = self._base.file if self._base is not None and in_base else self._opened()
                raise file.changed(self.slot_bytes, place)

    def _sums_of(self, memory: NDArray[np.uint8], count: int) -> NDArray[np.uint32]:
        shadows = memory[: count * self.slot_bytes].reshape(count, self.slot_bytes)
        return sums_of(shadows, np.arange(count))

    def _reads(self, offsets: NDArray[np.int64], places: NDArray[np.int64]) -> Reads:
        pieces = np.arange(0, self.slot_bytes, MAX_READ_BYTES)
        return Reads(
            (offsets[:, None] + pieces).reshape(-1),
            (places[:, None] + pieces).reshape(-1),
            np.tile(np.minimum(self.slot_bytes - pieces, MAX_READ_BYTES), len(offsets)),
        )

    def _opened(self) -> ColdFile:
        if self._file is None:
            self._file = ColdFile(self._directory, self._mode, "key shadow", self._calls)
        return self._file

    def _offset(self, slot: int) -> int:
        return (slot - self._base_slots) * self.slot_bytes


def shadow_bytes(spec: KernelSpec) -> int:
    """Return the bytes that the shadow of one segment in one layer takes, whole pages."""
    return round_up(spec.segment_bytes, PAGE_BYTES)


def _whole(shadow: NDArray[np.uint8], byte_count: int) -> memoryview:
    """Return a shadow's memory with the rest of its last page."""
    return _memory(shadow).data[:byte_count]


def _memory(shadow: NDArray[np.uint8]) -> NDArray[np.uint8]:
    memory = shadow
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    return memory
