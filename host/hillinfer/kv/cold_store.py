# SPDX-License-Identifier: Apache-2.0
"""The cold pool: every full group of every layer, on the drive."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.checksums import RowStream, RowSums
from hillinfer.drive.files import PAGE_BYTES, ColdFile, IOMode, aligned_buffer, probe_io_mode
from hillinfer.drive.landing import FileRows, Landed, WantedRows
from hillinfer.drive.read_engines import LandingAhead, ReadEngine, RowLander, lander_of
from hillinfer.drive.read_turns import QUANTUM_BYTES, ReadTurns
from hillinfer.drive.regions import OWN_FILE, OtherFiles, PlacedGroups, WriteElsewhere
from hillinfer.drive.shared_files import ReadFile, RowBase
from hillinfer.errors import ColdPoolError, HillInferError
from hillinfer.model_shape import ModelShape
from hillinfer.secrecy.cold_pages import PlainRowPages, RowPages
from hillinfer.statistics import Counters
from hillinfer.trace.recorder import SILENT, Lane, ReadCost, Recorder
from hillinfer_model.kernel_spec import GROUP_TOKENS

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

    Row r of a layer is row r % 64 of group r // 64. Groups may lie in other files: in those of a
    base, which are read and never written, or in files that several stores share. The store's own
    files have every group at the place of its number, with holes, which take no room on the drive,
    where others lie elsewhere.

    Parameters
    ----------
    read_buffer_bytes
        Size of what reads go through; half of it is for rows that land beside their caller.
    engine
        Reads rows; the caller closes it after the store.
    calls
        How the drive is reached; the operating system itself where None.
    sums
        Checksums of all rows, by which each one is known that does not come back as it was written;
        None where nobody looks.
    ahead_bytes
        Most bytes that are read ahead in a turn, which reads on demand wait for.
    pages
        How the own files are kept; plainly where None.

    Attributes
    ----------
    engine, others
        As given; and files that groups lie in beside the own ones.
    pages
        How the own ones are kept.
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
        pages: RowPages | None = None,
    ) -> None:
        self._sums = sums
        self.pages = pages or PlainRowPages()
        self._ahead_bytes = ahead_bytes
        self._recorder = recorder
        self._directory = directory
        self._layers = shape.layers
        self._calls = calls
        self.own_io_mode: IOMode = probe_io_mode(directory, calls)
        self._files: list[ColdFile] = self.fresh_files()
        self._row_bytes = shape.row_bytes
        self._group_bytes = GROUP_TOKENS * shape.row_bytes
        self.others = OtherFiles(shape.layers, self._group_bytes)
        self._placement = self.others.placement
        buffer = aligned_buffer(max(read_buffer_bytes, shape.row_bytes + 2 * PAGE_BYTES))
        # What lands beside its caller has half of it, where that holds a row.
        half = len(buffer) // 2 // PAGE_BYTES * PAGE_BYTES
        half = half if half >= shape.row_bytes + 2 * PAGE_BYTES else 0
        self._ahead_buffer, self._buffer = buffer[:half], buffer[half:]
        self.engine = engine
        # Reads ahead that take turns share the buffer with reads on demand, and the drive.
        self.turns = ReadTurns()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="hillinfer-write")
        self._pending: list[list[_PendingWrite]] = [[] for _ in range(shape.layers)]
        self._failure: Exception | None = None
        self._counters = counters

    @property
    def io_mode(self) -> IOMode:
        """Buffered where any of the files is read or written so."""
        modes = {self.own_io_mode, *self.others.io_modes}
        return IOMode.BUFFERED if IOMode.BUFFERED in modes else IOMode.DIRECT

    @property
    def files(self) -> tuple[ColdFile, ...]:
        """The store's own files, one per layer; those of bases are none of them."""
        return tuple(self._files)

    def add_base(self, first: int, base: RowBase) -> None:
        """Let groups from `first` on lie in a base of the other files.

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
                start = first * GROUP_TOKENS
                self._sums.take(layer, slice(start, start + len(sums)), sums)
        self.others.add_base(first, base)

    # --- groups in files of others ---------------------------------------------------------

    def adopt_sums(self, layer: int, groups: NDArray[np.int64], sums: NDArray[np.uint32]) -> None:
        """Take the checksums of the rows of groups that lie elsewhere, uint32 (64 · groups,)."""
        if self._sums is not None:
            self._sums.take(layer, _rows_of(groups), sums)

    def sums_of(self, layer: int, groups: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return the checksums of the rows of groups that are written, uint32 (64 · groups,)."""
        assert self._sums is not None, "an engine has them"
        return self._sums.noted(layer, _rows_of(groups))

    def behind_writes(self, work: Callable[[], None]) -> Future[None]:
        """Do something in the writing thread, behind everything that is queued."""
        return self._writer.submit(work)

    def cover(self, groups: int) -> None:
        """Make room for checksums and tags of the groups below `groups`.

        Raises
        ------
        BudgetError
            Where there is no room.
        """
        if self._sums is not None:
            self._sums.cover(groups * GROUP_TOKENS)
        self.pages.cover(groups)

    def fresh_files(self) -> list[ColdFile]:
        """Return an empty file for each layer, for this store or to `freeze` it with."""
        with ExitStack() as opened:
            files = []
            for layer in range(self._layers):
                files.append(self.fresh_file(f"rows of layer {layer}"))
                opened.callback(files[-1].close)
            opened.pop_all()
        return files

    def fresh_file(self, label: str) -> ColdFile:
        """Return an empty file on the same drive; the label says what it will hold."""
        return ColdFile(self._directory, self.own_io_mode, label, self._calls)

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
        if self.others.are_used:
            raise ValueError("this cold pool has a base already")
        self.others.add_base(0, RowBase(self._files, groups, self.own_io_mode))
        self._files = fresh

    def write_groups(
        self,
        layer: int,
        groups: NDArray[np.int64],
        rows: NDArray[np.uint8],
        done: Callable[[], None],
        elsewhere: WriteElsewhere | None = None,
    ) -> None:
        """Queue full groups to be written; the caller computes on while they are.

        Parameters
        ----------
        groups
            int64 group numbers, one per 64 rows.
        rows
            Page-aligned uint8 of shape (64 · groups, row_bytes), left alone until `done`.
        done
            Called from the writing thread when `rows` may be used again.
        elsewhere
            Writes what it can to another file; None for the own one alone.
        """
        if self.others.in_base(groups):
            raise ValueError("groups of a base of this cold pool are never written")
        file = self._files[layer]
        data = rows.reshape(-1).data
        self._counters.cold_write_bytes += len(data)

        def write() -> None:
            try:
                if self._sums is not None:
                    self._sums.note(layer, _rows_of(groups), rows)
                left = np.ones(len(groups), np.bool_)
                for run in [] if elsewhere is None else elsewhere(rows):
                    self.others.place(layer, groups[run.first : run.stop], run.file, run.start)
                    left[run.first : run.stop] = False
                breaks = np.flatnonzero((np.diff(groups) != 1) | (np.diff(left) != 0)) + 1
                for begin, end in pairwise([0, *breaks.tolist(), len(groups)]):
                    if not left[begin]:
                        continue
                    self._placement.forget(slice(layer, layer + 1), groups[begin:end])
                    piece = data[begin * self._group_bytes : end * self._group_bytes]
                    start = int(groups[begin]) * self._group_bytes
                    for offset, part in self.pages.as_written(layer, piece, start):
                        self._write(file, layer, part, offset)
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
            if pending:
                self._pending[layer] = [one for one in pending if not one.written.done()]
        self._raise_failure()

    def read_rows(self, wanted: WantedRows) -> ReadCost:
        """Read rows in one batch, before any that are read ahead; any thread may."""
        if not len(wanted.rows):
            return ReadCost()
        self.settle(wanted.layer, wanted.groups)
        return self.turns.on_demand(partial(self._read_now, wanted))

    def read_rows_ahead(self, wanted: WantedRows) -> Iterator[tuple[int, ReadCost]]:
        """Read rows piece by piece, giving way to reads on demand in between.

        Yields how many rows have come with each piece, in their order, and what it took.
        """
        self.settle(wanted.layer, wanted.groups)
        for piece in wanted.pieces(max(1, self._ahead_bytes // self._row_bytes)):
            with self.turns.ahead():
                cost = self._read_now(piece)
            yield len(piece.rows), cost

    def lander(self) -> RowLander | None:
        """Return a thread that lands rows beside its caller, to be closed before this; or None."""
        lander = lander_of(self.engine)
        if lander is not None:
            self.turns.without_turns.append(lander)
        return lander

    def ahead(self, lander: RowLander, wanted: WantedRows) -> LandingAhead | None:
        """Return rows that a thread is to land, which nobody has begun; `landed_ahead` follows.

        None where `read_rows_ahead` is to read them: some of them are not on the drive yet, or lie
        in files of others, or the buffer is too small for two.
        """
        layer, groups = wanted.layer, wanted.groups
        writing = [one.groups for one in self._pending[layer] if not one.written.done()]
        if self._failure is not None or any(np.isin(groups, one).any() for one in writing):
            return None
        own = self.own_rows(wanted, self._ahead_buffer) if len(self._ahead_buffer) else None
        return None if own is None else lander.ahead(self._files[layer], own)

    def own_rows(
        self, wanted: WantedRows, buffer: NDArray[np.uint8] | None = None
    ) -> FileRows | None:
        """Return rows and what they go through; None where some lie in files of others."""
        part, *others = self._placement.parts(wanted.layer, wanted.groups)
        if others or part.file != OWN_FILE:
            return None
        return self._file_rows(wanted, part, self._buffer if buffer is None else buffer)

    def landed_ahead(self, wanted: WantedRows, ahead: LandingAhead) -> ReadCost:
        """Return what it took, once rows that `ahead` returned are there; raises as `read_rows`."""
        return self.landed_by(wanted, ahead.result(), ahead.times, ahead.thread)

    def landed_by(
        self,
        wanted: WantedRows,
        landed: Landed,
        times: tuple[int, int],
        thread: int | None = None,
    ) -> ReadCost:
        """Return what rows took that a thread has landed between two times; as above.

        The calling one where it is None.
        """
        self._tell(wanted.layer, landed.cost, *times, thread)
        wrong = len(wanted.rows) if landed.wrong is None else landed.wrong
        return self.counted(wanted, landed.cost, wrong)

    def groups_in_order(self, layer: int, groups: list[int]) -> Iterator[memoryview]:
        """Yield the bytes of whole groups, one behind the other, in pieces valid until the next.

        They go through the buffer that reads go through.

        Parameters
        ----------
        groups
            Group numbers, in the order wanted.
        """
        numbers = np.asarray(groups, np.int64)
        self.settle(layer, numbers)
        most = len(self._buffer) // PAGE_BYTES * PAGE_BYTES
        files = self._placement.of(layer, numbers)
        starts = self._placement.starts(layer, numbers, self._group_bytes)
        breaks = (np.diff(starts) != self._group_bytes) | (np.diff(files) != 0)
        breaks |= np.diff(numbers) != 1
        for begin, end in pairwise([0, *(np.flatnonzero(breaks) + 1).tolist(), len(numbers)]):
            if begin == end:
                continue
            file = self._file(layer, int(files[begin]))
            offset = int(starts[begin])
            last = offset + (end - begin) * self._group_bytes
            stream = None
            if self._sums is not None:
                first_row = int(numbers[begin]) * GROUP_TOKENS
                stream = RowStream(self._sums, layer, first_row, self._row_bytes)
            while offset < last:
                piece = self._buffer.data[: min(most, last - offset)]
                file.read(piece, offset)
                if files[begin] == OWN_FILE:
                    self.pages.open(file, layer, piece, offset)
                else:
                    place = int(files[begin]), int(numbers[begin]), int(starts[begin])
                    self.others.open(layer, *place, piece, offset)
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
        self.others.close()

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
            # As it is raised it comes to know who met it: caches would stay with it.
            raise copy.copy(self._failure) from self._failure

    def _read_now(self, wanted: WantedRows) -> ReadCost:
        """Read rows that are settled, while it is the caller's turn."""
        cost, wrong = ReadCost(), len(wanted.rows)
        for part in self._placement.parts(wanted.layer, wanted.groups):
            own = wanted if part.chosen is None else wanted.only(part.chosen)
            landed = self._land(own, part)
            cost += landed.cost
            if landed.wrong is not None:
                at = landed.wrong
                if part.chosen is not None:
                    at = int(np.flatnonzero(part.chosen)[at])
                wrong = min(wrong, at)
        return self.counted(wanted, cost, wrong)

    def counted(self, wanted: WantedRows, cost: ReadCost, wrong: int) -> ReadCost:
        """Count rows that came, or raise where one of them is not what was written."""
        if wrong < len(wanted.rows):
            raise self._changed(wanted.layer, int(wanted.rows[wrong]))
        self._counters.cold_useful_bytes += len(wanted.rows) * self._row_bytes
        self._counters.cold_reads += cost.reads
        self._counters.cold_read_bytes += cost.byte_count
        return cost

    def _land(self, wanted: WantedRows, part: PlacedGroups) -> Landed:
        """Bring rows of one file."""
        file, started = self._file(wanted.layer, part.file), time.perf_counter_ns()
        landed = self.engine.land(file, self._file_rows(wanted, part, self._buffer))
        self._tell(wanted.layer, landed.cost, started, time.perf_counter_ns())
        return landed

    def _file_rows(
        self, wanted: WantedRows, part: PlacedGroups, buffer: NDArray[np.uint8]
    ) -> FileRows:
        """Return rows of one file, and what they go through."""
        layer, is_own = wanted.layer, part.file == OWN_FILE
        return FileRows(
            wanted.rows,
            wanted.out,
            wanted.places,
            buffer,
            None if self._sums is None else self._sums.expected(layer),
            wanted.coming,
            part.starts,
            self.pages.seals(layer) if is_own else self.others.seals(part.file),
            self._file(layer, part.file).read_unit,
        )

    def _tell(
        self, layer: int, cost: ReadCost, started: int, stop: int, thread: int | None = None
    ) -> None:
        if self._recorder is not SILENT:
            own = {"layer": layer, "reads": cost.reads, "bytes": cost.byte_count}
            self._recorder.note(Lane.READS, "rows", started, stop, thread=thread, **own)

    def _changed(self, layer: int, row: int) -> HillInferError:
        """Return the error that says that a row is not as it was written."""
        group = np.array([row // GROUP_TOKENS])
        start = int(self._placement.starts(layer, group, self._group_bytes)[0])
        file = self._file(layer, int(self._placement.of(layer, group)[0]))
        return file.changed(self._row_bytes, start + row % GROUP_TOKENS * self._row_bytes)

    def _file(self, layer: int, number: int) -> ReadFile:
        if number == OWN_FILE:
            return self._files[layer]
        return self.others.file(layer, number)


def _rows_of(groups: NDArray[np.int64]) -> NDArray[np.int64]:
    rows: NDArray[np.int64] = groups[:, None] * GROUP_TOKENS + np.arange(GROUP_TOKENS)
    return rows.reshape(-1)
