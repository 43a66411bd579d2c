# SPDX-License-Identifier: Apache-2.0
"""The cold pool: every full group of every layer, on the drive."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.checksums import RowStream, RowSums
from hillinfer.drive.files import PAGE_BYTES, ColdFile, IOMode, aligned_buffer, probe_io_mode
from hillinfer.drive.landing import FileRows, Landed
from hillinfer.drive.read_engines import ReadEngine
from hillinfer.drive.read_turns import QUANTUM_BYTES, ReadTurns
from hillinfer.drive.shared_files import BaseMap, ReadFile, RowBase
from hillinfer.errors import ColdPoolError, HillInferError
from hillinfer.model_shape import ModelShape
from hillinfer.native.coming import Coming
from hillinfer.statistics import Counters
from hillinfer.trace.recorder import SILENT, Lane, ReadCost, Recorder
from hillinfer_model.kernel_spec import GROUP_TOKENS

# --- Rows of a layer that are to be read ---


@dataclass(frozen=True)
class WantedRows:
    """Rows of a layer, and where each of them goes.

    Parameters
    ----------
    layer
        Whose.
    rows
        int64 row numbers, each once.
    out
        uint8 of shape (any, row_bytes).
    places
        int64, where in `out` each row goes.
    coming
        Who attends to them as they come; None where nobody does.
    """

    layer: int
    rows: NDArray[np.int64]
    out: NDArray[np.uint8]
    places: NDArray[np.int64]
    coming: Coming | None = None

    @property
    def groups(self) -> NDArray[np.int64]:
        """The group of each row, int64."""
        return self.rows // GROUP_TOKENS

    def only(self, chosen: NDArray[np.bool_], first_row: int = 0) -> WantedRows:
        """Return some of them, numbered from `first_row` on, by one flag for each row."""
        rows = self.rows[chosen]
        coming = None if self.coming is None else self.coming.only(chosen)
        return WantedRows(self.layer, rows - first_row, self.out, self.places[chosen], coming)

    def pieces(self, most: int) -> Iterator[WantedRows]:
        """Yield all of them, at most so many at a time."""
        for begin in range(0, len(self.rows), most):
            part = slice(begin, begin + most)
            yield WantedRows(self.layer, self.rows[part], self.out, self.places[part])


# --- The cold pool: every full group of every layer, on the drive ---

# As long as reads on demand wait for one ahead: ten milliseconds of a slow drive, and large enough
# for hundreds of reads in flight.
AHEAD_BYTES = 4 << 20
# Less than this is no waiting but taking a turn.
_UNTOLD_NS = 50_000


@dataclass(frozen=True)
class _PendingWrite:
    groups: NDArray[np.int64]
    written: Future[None]


class ColdStore:
    """Writes groups of rows once and reads rows in batches, one file per layer.

    Row r of a layer is row r % 64 of group r // 64. Runs of groups may lie in bases, files that are
    read and never written. The store's own files have every group at the place of its number, with
    holes, which take no room on the drive, where others lie in a base.

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
    recorder
        Notes how long reads and writes take.
    sums
        Checksums of all rows, by which each one is known that does not come back as it was written;
        None where nobody looks.
    ahead_bytes
        Most bytes that are read ahead at a time, which reads on demand wait for.

    Attributes
    ----------
    turns
        Who has the drive: reads on demand, spills, reads ahead, and write-back in slack.
    """

    def __init__(
        self,
        directory: Path,
        shape: ModelShape,
        read_buffer_bytes: int,
        engine: ReadEngine,
        counters: Counters,
        calls: DriveCalls | None = None,
        recorder: Recorder = SILENT,
        sums: RowSums | None = None,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        self._sums = sums
        self._ahead_bytes = ahead_bytes
        self._recorder = recorder
        self._directory = directory
        self._layers = shape.layers
        self._calls = calls
        self.own_io_mode: IOMode = probe_io_mode(directory, calls)
        self._files: list[ColdFile] = self.fresh_files()
        self._bases: BaseMap[RowBase] = BaseMap()
        self._row_bytes = shape.row_bytes
        self._group_bytes = GROUP_TOKENS * shape.row_bytes
        self._buffer = aligned_buffer(max(read_buffer_bytes, shape.row_bytes + 2 * PAGE_BYTES))
        self._engine = engine
        # Reads ahead and reads on demand share the buffer, and the drive.
        self.turns = ReadTurns()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="hillinfer-write")
        self._pending: list[list[_PendingWrite]] = [[] for _ in range(shape.layers)]
        self._failure: Exception | None = None
        self._counters = counters

    @property
    def io_mode(self) -> IOMode:
        """Buffered where any of the files is read or written so."""
        modes = {self.own_io_mode, *(base.io_mode for base in self._bases.bases)}
        return IOMode.BUFFERED if IOMode.BUFFERED in modes else IOMode.DIRECT

    @property
    def files(self) -> tuple[ColdFile, ...]:
        """The store's own files, one per layer; those of bases are none of them."""
        return tuple(self._files)

    @property
    def has_bases(self) -> bool:
        """Whether any groups lie in a base."""
        return bool(self._bases)

    def base_like(self, base: RowBase) -> int | None:
        """Return where a base of the same files begins that has as many groups, or None."""
        return self._bases.like(base)

    def add_base(self, first: int, base: RowBase) -> None:
        """Let groups from `first` on lie in a base, which the store closes.

        Nobody owns these groups, and there is room for them (`cover`).

        Raises
        ------
        ColdPoolError
            Where something could not be written before.
        """
        groups = np.arange(first, first + base.count)
        for layer in range(self._layers):
            # Checksums of what was written to groups of these numbers come no later than now.
            self.settle(layer, groups)
            if self._sums is not None and base.sums is not None:
                sums = base.sums[layer][: base.count * GROUP_TOKENS]
                self._sums.adopt(layer, first * GROUP_TOKENS, sums)
        self._bases = self._bases.having(first, replace(base, sums=None))

    def drop_base(self, first: int) -> None:
        """Close the base whose groups begin with `first`, if there is one."""
        base, self._bases = self._bases.without(first)
        if base is not None:
            base.close()

    def cover(self, groups: int) -> None:
        """Make room for the checksums of the groups below `groups`.

        Raises
        ------
        BudgetError
            Where there is no room.
        """
        if self._sums is not None:
            self._sums.cover(groups * GROUP_TOKENS)

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
        """Make the files written so far a base and go on with fresh ones.

        Parameters
        ----------
        groups
            What the files hold, settled: groups 0 up to this number.
        fresh
            From `fresh_files`.
        """
        if self._bases:
            raise ValueError("this cold pool has a base already")
        self._bases = self._bases.having(0, RowBase(self._files, groups, self.own_io_mode))
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
        if (self._bases.which(groups) >= 0).any():
            raise ValueError("groups of a base of this cold pool are never written")
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
                    self._write(file, layer, piece, int(groups[begin]) * self._group_bytes)
            except Exception as error:
                self._failure = error
            finally:
                done()

        self._pending[layer].append(_PendingWrite(groups, self._writer.submit(write)))

    def settle(self, layer: int, groups: NDArray[np.int64]) -> None:
        """Wait until what is queued of some groups is on the drive; raise what went wrong.

        Writes of other groups go on: a chunk is written back while those before are attended to.
        """
        for pending in self._pending[layer]:
            if not pending.written.done() and np.isin(groups, pending.groups).any():
                self.turns.hurry(pending.written.result)
        self._raise_failure()

    def settle_all(self, layer: int) -> None:
        """Wait until everything queued of a layer is on the drive; raise what went wrong."""
        for pending in self._pending[layer]:
            self.turns.hurry(pending.written.result)
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
        return self.turns.on_demand(partial(self._read_now, wanted))

    def demand(self) -> None:
        """Hold reads ahead back until `satisfy`, between several reads on demand."""
        self.turns.demand()

    def satisfy(self) -> None:
        """Let reads ahead go on."""
        self.turns.satisfy()

    def read_rows_ahead(self, wanted: WantedRows) -> Iterator[tuple[int, ReadCost]]:
        """Read rows piece by piece, giving way to reads on demand in between.

        Yields how many rows have come with each piece, in their order, and what it took.
        """
        self.settle(wanted.layer, wanted.groups)
        for piece in wanted.pieces(max(1, self._ahead_bytes // self._row_bytes)):
            with self.turns.ahead():
                cost = self._read_now(piece)
            yield len(piece.rows), cost

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
        bases = self._bases
        which = bases.which(numbers)
        breaks = np.flatnonzero((np.diff(numbers) != 1) | (np.diff(which) != 0)) + 1
        for begin, end in pairwise([0, *breaks.tolist(), len(numbers)]):
            if begin == end:
                continue
            first, base = bases.of(int(numbers[begin]))
            file = self._file(layer, base)
            at = int(numbers[begin]) - first
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
        self.turns.hurry(partial(self._writer.shutdown, cancel_futures=True))
        for file in self._files:
            file.close()
        for base in self._bases.bases:
            base.close()

    def _write(self, file: ColdFile, layer: int, data: memoryview, offset: int) -> None:
        """Write bytes piece by piece while nobody reads, or at once where somebody waits."""
        for begin in range(0, len(data), QUANTUM_BYTES):
            piece = data[begin : begin + QUANTUM_BYTES]
            queued = time.perf_counter_ns()
            with self.turns.writing(len(piece)):
                started = time.perf_counter_ns()
                if started - queued > _UNTOLD_NS:
                    self._recorder.note(Lane.BUBBLES, "put off", queued, started, layer=layer)
                with self._recorder.span(Lane.WRITES, "rows", layer=layer, bytes=len(piece)):
                    file.write(piece, offset + begin)

    def _raise_failure(self) -> None:
        if isinstance(self._failure, ColdPoolError):
            raise ColdPoolError(str(self._failure)) from self._failure
        if self._failure is not None:
            raise self._failure

    def _read_now(self, wanted: WantedRows) -> ReadCost:
        """Read rows that are settled, while it is the caller's turn."""
        cost, wrong = ReadCost(), len(wanted.rows)
        if self._bases:
            for part in self._bases.parts(wanted.groups):
                own = wanted.only(part.chosen, part.first * GROUP_TOKENS)
                landed = self._land(own, part.first * GROUP_TOKENS, part.base)
                cost += landed.cost
                if landed.wrong is not None:
                    wrong = min(wrong, int(np.flatnonzero(part.chosen)[landed.wrong]))
        else:
            landed = self._land(wanted, 0, None)
            cost, wrong = landed.cost, wrong if landed.wrong is None else landed.wrong
        if wrong < len(wanted.rows):
            raise self._changed(wanted.layer, int(wanted.rows[wrong]))
        self._counters.cold_useful_bytes += len(wanted.rows) * self._row_bytes
        self._counters.cold_reads += cost.reads
        self._counters.cold_read_bytes += cost.byte_count
        return cost

    def _land(self, wanted: WantedRows, first_row: int, base: RowBase | None) -> Landed:
        """Bring rows of one file by its own numbers, the first of which is `first_row` here."""
        layer = wanted.layer
        sums = None if self._sums is None else self._sums.expected(layer, first_row)
        started = time.perf_counter_ns()
        landed = self._engine.land(
            self._file(layer, base),
            FileRows(wanted.rows, wanted.out, wanted.places, self._buffer, sums, wanted.coming),
        )
        self._recorder.note(
            Lane.READS,
            "rows",
            started,
            time.perf_counter_ns(),
            layer=layer,
            reads=landed.cost.reads,
            bytes=landed.cost.byte_count,
        )
        return landed

    def _changed(self, layer: int, row: int) -> HillInferError:
        """Return the error that says that a row is not as it was written."""
        first, base = self._bases.of(row // GROUP_TOKENS)
        place = (row - first * GROUP_TOKENS) * self._row_bytes
        return self._file(layer, base).changed(self._row_bytes, place)

    def _file(self, layer: int, base: RowBase | None) -> ReadFile:
        return self._files[layer] if base is None else base.files[layer]


def _rows_of(groups: NDArray[np.int64]) -> NDArray[np.int64]:
    rows: NDArray[np.int64] = groups[:, None] * GROUP_TOKENS + np.arange(GROUP_TOKENS)
    return rows.reshape(-1)
