# SPDX-License-Identifier: Apache-2.0
"""The cold pool: every full group of every layer, on the drive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hillinfer.counters import Counters
from hillinfer.errors import ColdPoolError, HillInferError
from hillinfer.model_shape import ModelShape
from hillinfer.storage.aligned_buffer import PAGE_BYTES, aligned_buffer
from hillinfer.storage.cold_file import ColdFile, IOMode, probe_io_mode
from hillinfer.storage.drive_calls import DriveCalls
from hillinfer.storage.read_cost import ReadCost
from hillinfer.storage.read_engine import ReadEngine
from hillinfer.storage.read_plan import lie_in_pages, plan_in_place, plan_reads
from hillinfer.storage.read_turns import ReadTurns
from hillinfer.storage.reads import Reads
from hillinfer.storage.row_sums import RowStream, RowSums
from hillinfer.storage.stored_base import ReadFile, RowBase
from hillinfer.storage.wanted_rows import WantedRows
from hillinfer.timeline.lane import Lane
from hillinfer.timeline.recorder import Recorder
from hillinfer.timeline.silent import SILENT
from hillinfer_model.kernel_spec import GROUP_TOKENS

# As long as reads on demand wait for one ahead: ten milliseconds of a slow drive, and large enough
# for hundreds of reads in flight.
_AHEAD_BYTES = 4 << 20


@dataclass(frozen=True)
class _PendingWrite:
    groups: NDArray[np.int64]
    written: Future[None]


class ColdStore:
    """Writes groups of rows once and reads rows in batches, one file per layer.

    Row r of a layer is row r % 64 of group r // 64. The first groups may lie in a base, files that
    are read and never written; the store's own files then start with the group after them.

    Parameters
    ----------
    directory
        Where the files lie.
    shape
        The model's.
    read_buffer_bytes
        Size of the one buffer that reads go through.
    engine
        Reads rows; the caller closes it after the store.
    counters
        Where bytes and waits are counted.
    calls
        How the drive is reached; the operating system itself where None.
    base
        Where the first groups lie already; the store closes it.
    recorder
        Notes how long reads and writes take.
    sums
        Checksums of all rows, by which each one is known that does not come back as it was written;
        None where nobody looks.
    """

    def __init__(
        self,
        directory: Path,
        shape: ModelShape,
        read_buffer_bytes: int,
        engine: ReadEngine,
        counters: Counters,
        calls: DriveCalls | None = None,
        base: RowBase | None = None,
        recorder: Recorder = SILENT,
        sums: RowSums | None = None,
    ) -> None:
        self._sums = sums
        self._recorder = recorder
        self._directory = directory
        self._layers = shape.layers
        self._calls = calls
        self.own_io_mode: IOMode = probe_io_mode(directory, calls)
        self._files: list[ColdFile] = self.fresh_files()
        self._base = base
        self._row_bytes = shape.row_bytes
        self._group_bytes = GROUP_TOKENS * shape.row_bytes
        self._buffer = aligned_buffer(max(read_buffer_bytes, shape.row_bytes + 2 * PAGE_BYTES))
        self._engine = engine
        # Reads ahead and reads on demand share the buffer, and the drive.
        self._turns = ReadTurns()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="hillinfer-write")
        self._pending: list[list[_PendingWrite]] = [[] for _ in range(shape.layers)]
        self._failure: Exception | None = None
        self._counters = counters

    @property
    def io_mode(self) -> IOMode:
        """Buffered where any of the files is read or written so."""
        modes = {self.own_io_mode, self._base.io_mode if self._base else self.own_io_mode}
        return IOMode.BUFFERED if IOMode.BUFFERED in modes else IOMode.DIRECT

    @property
    def base_groups(self) -> int:
        """Groups that are never written: they lie in the base."""
        return self._base.groups if self._base else 0

    def cover(self, groups: int) -> None:
        """Make room for the checksums of the groups below `groups`; those of the base come in.

        Raises
        ------
        BudgetError
            Where there is no room.
        """
        if self._sums is None:
            return
        self._sums.cover(groups * GROUP_TOKENS)
        if self._base is not None and self._base.sums is not None:
            for layer, sums in enumerate(self._base.sums):
                self._sums.adopt(layer, sums[: self._base.groups * GROUP_TOKENS])
            self._base = replace(self._base, sums=None)

    def fresh_files(self) -> list[ColdFile]:
        """Return an empty file for each layer, for this store or to `freeze` it with."""
        with ExitStack() as opened:
            files = []
            for layer in range(self._layers):
                label = f"rows of layer {layer}"
                files.append(ColdFile(self._directory, self.own_io_mode, label, self._calls))
                opened.callback(files[-1].close)
            opened.pop_all()
        return files

    def publish(self, layer: int, path: Path) -> None:
        """Give a layer's own file a name; the store goes on with it.

        Raises
        ------
        OSError
            Where the name lies on another file system, or the file cannot have one.
        """
        self._files[layer].publish(path)

    def freeze(self, groups: int, fresh: list[ColdFile]) -> None:
        """Make the files written so far the base and go on with fresh ones.

        Parameters
        ----------
        groups
            What the files hold, settled: groups 0 up to this number.
        fresh
            From `fresh_files`.
        """
        if self._base is not None:
            raise ValueError("this cold pool has a base already")
        self._base = RowBase(self._files, groups, self.own_io_mode)
        self._files = fresh

    def write_groups(
        self,
        layer: int,
        groups: NDArray[np.int64],
        rows: NDArray[np.uint8],
        done: Callable[[], None],
    ) -> None:
        """Queue full groups to be written; the caller computes on while they are.

        Parameters
        ----------
        layer
            Which file.
        groups
            int64 group numbers, one per 64 rows.
        rows
            Page-aligned uint8 of shape (64 · groups, row_bytes), left alone until `done`.
        done
            Called from the writing thread when `rows` may be used again.
        """
        first_group = self.base_groups
        if len(groups) and int(groups.min()) < first_group:
            raise ValueError(f"groups below {first_group} of this cold pool are never written")
        file = self._files[layer]
        data = rows.reshape(-1).data
        self._counters.cold_write_bytes += len(data)

        def write() -> None:
            try:
                if self._sums is not None:
                    self._sums.note(layer, _rows_of(groups), rows)
                breaks = np.flatnonzero(np.diff(groups) != 1) + 1
                for begin, end in pairwise([0, *breaks.tolist(), len(groups)]):
                    piece = data[begin * self._group_bytes : end * self._group_bytes]
                    at = (int(groups[begin]) - first_group) * self._group_bytes
                    with self._recorder.span(Lane.WRITES, "rows", layer=layer, bytes=len(piece)):
                        file.write(piece, at)
            except Exception as error:
                self._failure = error
            finally:
                done()

        self._pending[layer].append(_PendingWrite(groups, self._writer.submit(write)))

    def settle(self, layer: int, groups: NDArray[np.int64]) -> None:
        """Wait until what is queued of some groups is on the drive; raise what went wrong.

        Writes of other groups go on, so that spilling a chunk overlaps attending to those before.
        """
        for pending in self._pending[layer]:
            if not pending.written.done() and np.isin(groups, pending.groups).any():
                pending.written.result()
        self._raise_failure()

    def settle_all(self, layer: int) -> None:
        """Wait until everything queued of a layer is on the drive; raise what went wrong."""
        for pending in self._pending[layer]:
            pending.written.result()
        self._raise_failure()

    def check(self) -> None:
        """Raise what went wrong with any write that has ended, ever since.

        Rows that a failed write lost would read as zeros once a later write had made the file
        longer, so a store that failed once stays failed.
        """
        for layer, pending in enumerate(self._pending):
            self._pending[layer] = [one for one in pending if not one.written.done()]
        self._raise_failure()

    def read_rows(self, wanted: WantedRows) -> ReadCost:
        """Read rows in one batch, before any that are read ahead; any thread may."""
        if not len(wanted.rows):
            return ReadCost()
        self.settle(wanted.layer, wanted.groups)
        return self._turns.on_demand(partial(self._read_now, wanted))

    def demand(self) -> None:
        """Hold reads ahead back until `satisfy`, between several reads on demand."""
        self._turns.demand()

    def satisfy(self) -> None:
        """Let reads ahead go on."""
        self._turns.satisfy()

    def read_rows_ahead(self, wanted: WantedRows) -> ReadCost:
        """Read rows piece by piece, giving way to reads on demand in between."""
        cost = ReadCost()
        self.settle(wanted.layer, wanted.groups)
        for piece in wanted.pieces(max(1, _AHEAD_BYTES // self._row_bytes)):
            with self._turns.ahead():
                cost += self._read_now(piece)
        return cost

    def groups_in_order(self, layer: int, groups: list[int]) -> Iterator[memoryview]:
        """Yield the bytes of whole groups, one behind the other, in pieces valid until the next.

        They go through the buffer that reads go through.

        Parameters
        ----------
        layer
            Which file.
        groups
            Group numbers, in the order wanted.
        """
        numbers = np.asarray(groups, np.int64)
        self.settle(layer, numbers)
        most = len(self._buffer) // PAGE_BYTES * PAGE_BYTES
        first = self.base_groups
        in_base = numbers < first
        breaks = np.flatnonzero((np.diff(numbers) != 1) | np.diff(in_base)) + 1
        for begin, end in pairwise([0, *breaks.tolist(), len(numbers)]):
            if begin == end:
                continue
            file: ReadFile = self._files[layer]
            at = int(numbers[begin]) - first
            if self._base is not None and in_base[begin]:
                file, at = self._base.files[layer], int(numbers[begin])
            offset, last = at * self._group_bytes, (at + end - begin) * self._group_bytes
            stream = None
            if self._sums is not None:
                first_row = int(numbers[begin]) * GROUP_TOKENS
                stream = RowStream(self._sums, layer, first_row, self._row_bytes)
            while offset < last:
                piece = self._buffer.data[: min(most, last - offset)]
                file.read(piece, offset)
                wrong = None if stream is None else stream.wrong_row(piece)
                if wrong is not None:
                    raise self._changed(layer, wrong)
                yield piece
                offset += len(piece)

    def close(self) -> None:
        """Stop the threads and give the drive's space back."""
        self._writer.shutdown(cancel_futures=True)
        for file in [*self._files, *(self._base.files if self._base else ())]:
            file.close()

    def _raise_failure(self) -> None:
        if isinstance(self._failure, ColdPoolError):
            raise ColdPoolError(str(self._failure)) from self._failure
        if self._failure is not None:
            raise self._failure

    def _read_now(self, wanted: WantedRows) -> ReadCost:
        """Read rows that are settled, while it is the caller's turn."""
        if self._base is None:
            cost = self._read_rows(self._files[wanted.layer], wanted)
        else:
            cost = self._read_both(self._base, wanted)
        if self._sums is not None:
            wrong = self._sums.wrong_row(wanted.layer, wanted.rows, wanted.out, wanted.places)
            if wrong is not None:
                raise self._changed(wanted.layer, wrong)
        self._counters.cold_useful_bytes += len(wanted.rows) * self._row_bytes
        self._counters.cold_reads += cost.reads
        self._counters.cold_read_bytes += cost.byte_count
        return cost

    def _changed(self, layer: int, row: int) -> HillInferError:
        """Return the error that says that a row is not as it was written."""
        file, own = self._files[layer], row - self.base_groups * GROUP_TOKENS
        if self._base is not None and own < 0:
            return self._base.files[layer].changed(self._row_bytes, row * self._row_bytes)
        return file.changed(self._row_bytes, own * self._row_bytes)

    def _read_both(self, base: RowBase, wanted: WantedRows) -> ReadCost:
        """Read rows that may lie in the base and in the store's own files."""
        first_row = base.groups * GROUP_TOKENS
        based = wanted.rows < first_row
        base_file, own_file = base.files[wanted.layer], self._files[wanted.layer]
        if based.all():
            return self._read_rows(base_file, wanted)
        own = wanted.only(~based, first_row)
        if not based.any():
            return self._read_rows(own_file, own)
        return self._read_rows(base_file, wanted.only(based)) + self._read_rows(own_file, own)

    def _read_rows(self, file: ReadFile, wanted: WantedRows) -> ReadCost:
        layer, rows, out, places = wanted.layer, wanted.rows, wanted.out, wanted.places
        if lie_in_pages(out):
            in_place = plan_in_place(rows, places, self._row_bytes)
            return self._read(layer, file, out.reshape(-1), in_place)
        cost = ReadCost()
        for batch in plan_reads(rows, self._row_bytes, len(self._buffer)):
            cost += self._read(layer, file, self._buffer, batch)
            # Rows start at multiples of 64 bytes, so a view of all such places has them as rows.
            at_64 = np.lib.stride_tricks.as_strided(
                self._buffer,
                shape=((len(self._buffer) - self._row_bytes) // 64 + 1, self._row_bytes),
                strides=(64, 1),
                writeable=False,
            )
            out[places[batch.wanted]] = at_64[batch.row_offsets // 64]
        return cost

    def _read(
        self, layer: int, file: ReadFile, buffer: NDArray[np.uint8], reads: Reads
    ) -> ReadCost:
        cost = ReadCost(len(reads), int(reads.byte_counts.sum()))
        with self._recorder.span(
            Lane.READS, "rows", layer=layer, reads=cost.reads, bytes=cost.byte_count
        ):
            self._engine.read(file, buffer, reads)
        return cost


def _rows_of(groups: NDArray[np.int64]) -> NDArray[np.int64]:
    rows: NDArray[np.int64] = groups[:, None] * GROUP_TOKENS + np.arange(GROUP_TOKENS)
    return rows.reshape(-1)
