# SPDX-License-Identifier: Apache-2.0
"""Key shadows that do not fit in DRAM, on the drive."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hillinfer.storage.aligned_buffer import PAGE_BYTES, aligned_buffer, round_up
from hillinfer.storage.cold_file import ColdFile, IOMode
from hillinfer.storage.drive_calls import DriveCalls
from hillinfer.storage.group_table import GroupTable
from hillinfer.storage.read_engine import ReadEngine
from hillinfer.storage.read_plan import MAX_READ_BYTES
from hillinfer.storage.reads import Reads
from hillinfer.storage.row_sums import sums_of
from hillinfer.storage.stored_base import BaseMap, ReadFile, ShadowBase
from hillinfer.timeline.lane import Lane
from hillinfer.timeline.recorder import Recorder
from hillinfer.timeline.silent import SILENT
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec

# Shadows that are read ahead of scoring.
STREAM_BUFFERS = 4
_UNKNOWN = -1


class ShadowStore:
    """Slots of one shadow each, of one segment in one layer, in a file that is made when needed.

    Runs of slots may lie in bases, files that are read and never written; the store's own file has
    every slot at the place of its number.

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
        self._slots = GroupTable()
        self._bases: BaseMap[ShadowBase] = BaseMap()
        # Checksums by slot, counted with the statistics of what the slot holds; below 0 where a
        # slot's is not known.
        self._sums = array("q")

    @property
    def slots_in_use(self) -> int:
        """Slots that somebody owns, those of bases too."""
        return self._slots.groups_in_use

    def add_base(self, base: ShadowBase) -> int | None:
        """Take a base in, and return its first slot, held until `let_base_go`.

        The store closes it; at once where the same files are a base already. None, where it holds
        nothing or its slots are laid out otherwise.
        """
        if base.slot_bytes != self.slot_bytes or not base.count:
            base.close()
            return None
        first = self._bases.like(base)
        if first is not None:
            base.close()
            self._slots.hold(first)
            return first
        first = self._slots.open_region(base.count)
        self._sums.extend([_UNKNOWN] * (self._slots.groups - len(self._sums)))
        for slot in range(base.count):
            self._sums[first + slot] = _UNKNOWN if base.sums is None else int(base.sums[slot])
        self._bases = self._bases.having(first, replace(base, sums=None))
        return first

    def let_base_go(self, first: int) -> None:
        """Close a base that `add_base` returned, once nobody has a slot of it."""
        self._slots.let_go(first)
        self._drop_bases()

    def buffer(self) -> NDArray[np.uint8]:
        """Return page-aligned zeros that a shadow fits in, uint8 (segment_beats, 64)."""
        return self.view(aligned_buffer(self.slot_bytes))

    def view(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return a slot's bytes of memory as a shadow, uint8 (segment_beats, 64)."""
        return memory[: self._shape[0] * self._shape[1]].reshape(self._shape)

    def take(self) -> int:
        """Return a slot that nobody owns, to be written."""
        slot = self._slots.take()
        self._sums.extend([_UNKNOWN] * (self._slots.groups - len(self._sums)))
        return slot

    def share(self, slot: int) -> None:
        """Own a slot of a base, as others may."""
        self._slots.share(slot)

    def give(self, slot: int) -> None:
        """Own a slot no more: it is used for another shadow, or goes with its base."""
        self._slots.give(slot)
        self._drop_bases()

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
        for part in self._bases.parts(numbers):
            offsets = (numbers[part.chosen] - part.first) * self.slot_bytes
            file = self._opened() if part.base is None else part.base.file
            parts.append((file, self._reads(offsets, places[part.chosen])))
        return self._readers.submit(self._noted_reads, parts, into, slots)

    def place(self, slot: int) -> tuple[int, int]:
        """Return descriptor and offset of a shadow that was written or lies in the base."""
        first, base = self._bases.of(slot)
        file = self._opened() if base is None else base.file
        return file.descriptor, (slot - first) * self.slot_bytes

    def close(self) -> None:
        """Stop the threads and give the drive's space back; harmless when done twice."""
        self._writer.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)
        if self._file is not None:
            self._file.close()
            self._file = None
        for base in self._bases.bases:
            base.close()

    def _drop_bases(self) -> None:
        for first in self._slots.close_idle_regions():
            base, self._bases = self._bases.without(first)
            assert base is not None
            base.close()

    def _noted_write(self, file: ColdFile, memory: memoryview, slot: int) -> None:
        self._sums[slot] = int(self._sums_of(np.frombuffer(memory, np.uint8), 1)[0])
        with self._recorder.span(Lane.WRITES, "shadow", bytes=len(memory)):
            file.write(memory, slot * self.slot_bytes)

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
                first, base = self._bases.of(slot)
                file = self._opened() if base is None else base.file
                raise file.changed(self.slot_bytes, (slot - first) * self.slot_bytes)

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
