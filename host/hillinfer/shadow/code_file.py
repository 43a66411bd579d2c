# SPDX-License-Identifier: Apache-2.0
"""Value codes on the drive, densely packed: what cold coded tokens are read from."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.checksums import ROW_SUM_BYTES, RowSums, sums_of
from hillinfer.drive.files import PAGE_BYTES, ColdFile, IOMode, aligned_buffer, round_up
from hillinfer.drive.landing import FileRows, Landed
from hillinfer.drive.read_engines import LandingAhead, LandingInPython, ReadEngine, lander_of
from hillinfer.errors import ColdPoolError, HillInferWarning
from hillinfer.memory_budget import TABLE_GROWTH_ROWS, Accountant, Part
from hillinfer.native.structures import row_addresses
from hillinfer.shadow.coming_codes import (
    ComingCodes,
    Flags,
    Numbers,
    buffer_bytes,
    landing_bytes,
    record_bytes,
)
from hillinfer.statistics import Counters
from hillinfer.trace.recorder import SILENT, Lane, Recorder
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec
from hillinfer_model.value_layout import code_row_bytes

_NUMBER_BYTES, _START_BYTES = 4, 8
# Of a layer, records of so many rows lie together.
_SPAN_ROWS = 4096
_NOTHING = -1
# No codes have it; the native library says so, too (kNoNumber).
NO_NUMBER = -2


def table_bytes(layers: int, rows: int) -> int:
    """Return what checksums, numbers and starts of so many rows take in memory."""
    groups = rows // GROUP_TOKENS
    return layers * (rows * ROW_SUM_BYTES + groups * _NUMBER_BYTES) + groups * _START_BYTES


class CodeFile:
    """Keeps codes of full groups in one file, written once, and reads those of single tokens.

    Codes of a group are known under the number of its segment's values, as in `CodePool`. A layer's
    records of 4,096 rows lie together, so that one file serves all layers. What cannot be written
    is read as rows. These have all that codes have, so after codes that cannot be read all is.

    Parameters
    ----------
    directory, mode
        Where the file lies, and how it is reached.
    spec, layers
        Of the model.
    engine
        Reads; the caller closes it after this.
    accountant
        Counts tables and buffers.
    counters
        Where bytes are counted.
    calls
        How the drive is reached; the operating system itself where None.
    recorder
        Notes how long reads and writes take.
    """

    def __init__(
        self,
        directory: Path,
        mode: IOMode,
        spec: KernelSpec,
        layers: int,
        engine: ReadEngine,
        accountant: Accountant,
        counters: Counters,
        calls: DriveCalls | None = None,
        recorder: Recorder = SILENT,
    ) -> None:
        self._spec = spec
        self._layers = layers
        self._engine = engine
        self._accountant = accountant
        self._counters = counters
        self._recorder = recorder
        self._row_bytes = code_row_bytes(spec) + spec.kv_heads
        self._size = record_bytes(spec)
        self._file = ColdFile(directory, mode, "codes of values", calls)
        self._rows = 0
        self._sums = RowSums(layers, accountant)
        # Of each group, and behind the last one, so that no other is taken for it.
        self._numbers = np.full((layers, 1), _NOTHING, np.int32)
        # The byte that each group's records start at, of the first layer.
        self._first_starts = np.zeros(0, np.int64)
        self._is_written = self._is_read = True
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="hillinfer-codes")
        self._lander = lander_of(engine)
        accountant.take(Part.STAGING, buffer_bytes(spec, 0))
        size = round_up(spec.segment_tokens * self._size, PAGE_BYTES)
        self._written = aligned_buffer(size)[:size]
        self._landing = aligned_buffer(landing_bytes(spec, 0))
        # What codes are read to, and for how many: one thread begins what another one takes.
        self._lending, self._writing = threading.Lock(), threading.Lock()
        self._buffers: list[NDArray[np.uint8]] = []
        self._tokens = 0
        self._coming: dict[tuple[int, Hashable], ComingCodes] = {}
        # What somebody looks at.
        self._held: dict[tuple[int, Hashable], list[ComingCodes]] = {}

    def cover(self, rows: int) -> None:
        """Have tables for row numbers below that.

        Raises
        ------
        BudgetError
            Where they do not fit.
        """
        grown = round_up(rows, TABLE_GROWTH_ROWS)
        if grown <= self._rows:
            return
        self._sums.cover(grown)
        groups = grown // GROUP_TOKENS
        numbers = np.full((self._layers, groups + 1), _NOTHING, np.int32)
        starts = self._starts(0, np.arange(groups))
        added = numbers.nbytes + starts.nbytes - self._numbers.nbytes - self._first_starts.nbytes
        self._accountant.take(Part.OTHER, added)
        numbers[:, : self._numbers.shape[1]] = self._numbers
        self._first_starts = starts
        self._numbers, self._rows = numbers, grown

    def expect(self, tokens: int) -> None:
        """Have buffers for so many tokens of a layer; nothing else than this takes memory later."""
        if tokens <= self._tokens:
            return
        spec = self._spec
        added = buffer_bytes(spec, tokens) - buffer_bytes(spec, self._tokens)
        self._accountant.take(Part.STAGING, added)
        self.drop()
        with self._lending:
            self._tokens, self._buffers, self._landing = 0, [], self._landing[:0].copy()
        larger = [np.zeros((tokens, self._size), np.uint8) for _ in range(2)]
        landing = aligned_buffer(landing_bytes(spec, tokens))
        with self._lending:
            self._tokens, self._buffers, self._landing = tokens, larger, landing

    # --- writing ---------------------------------------------------------------------------

    def write(self, layer: int, rows: Numbers, number: int, codes: NDArray[np.uint8]) -> None:
        """Write codes of those groups that are there as a whole.

        Parameters
        ----------
        layer
            Whose.
        rows
            int64 row numbers, in the order of positions, at most a segment's.
        number
            Of their segment's values.
        codes
            uint8 of shape (rows, row_bytes).
        """
        if not self._is_written:
            return
        first = np.flatnonzero(rows % GROUP_TOKENS == 0)
        first = first[first + GROUP_TOKENS <= len(rows)]
        if not len(first):
            return
        self.cover(int(rows.max()) + 1)
        with self._writing:
            self._write(layer, rows, first, number, codes)

    def _write(
        self,
        layer: int,
        rows: Numbers,
        first: Numbers,
        number: int,
        codes: NDArray[np.uint8],
    ) -> None:
        """Write groups whose first rows stand at `first`; one thread at a time has the buffer."""
        groups = rows[first] // GROUP_TOKENS
        count = len(first) * GROUP_TOKENS
        records = self._written[: count * self._size].reshape(count, self._size)
        own = (first[:, None] + np.arange(GROUP_TOKENS)).reshape(-1)
        records[:, : self._row_bytes] = codes[own]
        records[:, self._row_bytes :] = 0
        starts = self._starts(layer, groups)
        self._numbers[layer, groups] = _NOTHING
        self._sums.note(layer, rows[own], records)
        try:
            for piece, start in self._runs(records, starts):
                with self._recorder.span(Lane.WRITES, "codes", layer=layer, bytes=len(piece)):
                    self._file.write(piece, start)
                self._counters.cold_write_bytes += len(piece)
                self._counters.code_write_bytes += len(piece)
        except ColdPoolError:
            # Rows say it where they cannot be written either; these are read as rows.
            self._is_written = False
            return
        self._numbers[layer, groups] = number

    def written(self, layer: int, rows: Numbers, number: int) -> NDArray[np.uint8] | None:
        """Return codes of whole groups as they were written, uint8 (rows, row_bytes).

        None where they are not all here, or do not come as they were. Parameters as of `write`;
        any thread may ask.
        """
        with self._writing:
            if not self.covers(layer, rows, np.full(len(rows), number)).all():
                return None
            records = self._written[: len(rows) * self._size].reshape(-1, self._size)
            starts = self._starts(layer, rows[::GROUP_TOKENS] // GROUP_TOKENS)
            try:
                for piece, start in self._runs(records, starts):
                    self._file.read(piece, start)
            except ColdPoolError:
                return None
            sums = sums_of(records, np.arange(len(records)))
            if (sums != self._sums.noted(layer, rows)).any():
                return None
            return records[:, : self._row_bytes].copy()

    def _runs(
        self, records: NDArray[np.uint8], starts: Numbers
    ) -> Iterator[tuple[memoryview, int]]:
        """Yield records of groups that lie one behind the other in the file, and where."""
        whole, data = GROUP_TOKENS * self._size, records.reshape(-1).data
        breaks = np.flatnonzero(np.diff(starts) != whole) + 1
        for first, stop in pairwise([0, *breaks.tolist(), len(starts)]):
            yield data[first * whole : stop * whole], int(starts[first])

    def forget_groups(self, groups: list[int]) -> None:
        """Have no codes of groups that were given back."""
        own = np.asarray(groups, np.int64)
        self._numbers[:, own[own < self._numbers.shape[1]]] = _NOTHING

    # --- reading ---------------------------------------------------------------------------

    def covers(self, layer: int, rows: Numbers, numbers: Numbers) -> Flags:
        """Say which rows have codes here, under those numbers; any thread may ask."""
        if not self._is_read:
            return np.zeros(len(rows), np.bool_)
        own = self._numbers[layer]
        return np.asarray(own.take(rows // GROUP_TOKENS, mode="clip") == numbers)

    def begin(self, layer: int, key: Hashable, rows: Numbers, numbers: Numbers) -> Flags:
        """Begin to read codes for whoever fills in by that key, and say of which rows.

        Takes no memory, and any thread may ask: none is read where buffers are in use.

        Parameters
        ----------
        layer, key
            Whose.
        rows, numbers
            int64, as in `covers`; each row once.
        """
        return self._begin_chosen(layer, key, rows, numbers, LandingAhead.begin)

    def begin_first(self, layer: int, key: Hashable, rows: Numbers, numbers: Numbers) -> Flags:
        """Begin as `begin` does, before what is read for other layers: these are waited for.

        A thread of Python's, where that reads, has one line for all.
        """
        return self._begin_chosen(layer, key, rows, numbers, LandingAhead.begin_first)

    def _begin_chosen(
        self,
        layer: int,
        key: Hashable,
        rows: Numbers,
        numbers: Numbers,
        begin: Callable[[LandingAhead], None],
    ) -> Flags:
        chosen = self.covers(layer, rows, numbers)
        self._forget(layer, key)
        own = rows[chosen]
        with self._lending:
            buffer = self._unused()
            if not len(own) or len(own) > self._tokens or buffer is None:
                return np.zeros(len(rows), np.bool_)
            self._begin(layer, key, own, numbers[chosen], buffer, begin)
        return chosen

    def _unused(self) -> NDArray[np.uint8] | None:
        """Return a buffer that nothing is read to and that nobody looks at, if there is one.

        What is noted says so and nothing else: wherever an interrupt comes, none is given twice.
        """
        noted = [*self._coming.copy().values(), *chain.from_iterable(self._held.copy().values())]
        used = {id(one.memory) for one in noted}
        unused = [one for one in self._buffers if id(one) not in used]
        return unused[-1] if unused else None

    def _forget(self, layer: int, key: Hashable) -> None:
        """Forget what is on its way, once nothing is read to its buffer any more."""
        coming = self._coming.get((layer, key))
        if coming is not None:
            coming.landed.settle()
            # Another thread may have taken it meanwhile.
            self._coming.pop((layer, key), None)

    def has_begun(self, layer: int, key: Hashable) -> bool:
        """Say whether codes of a layer are on their way to whoever fills in by that key."""
        return (layer, key) in self._coming

    def has_begun_all(self, layer: int, key: Hashable, rows: Numbers, numbers: Numbers) -> bool:
        """Say whether codes of these very tokens are; parameters as for `fill`."""
        coming = self._coming.get((layer, key))
        return self._is_read and coming is not None and coming.is_of(rows, numbers)

    def on_way(self, layer: int, key: Hashable) -> ComingCodes | None:
        """Return codes of a layer that are on their way to whoever fills in by that key."""
        return self._coming.get((layer, key)) if self._is_read else None

    def took(self, layer: int, key: Hashable, own: Counters) -> None:
        """Count codes on their way that a call of the library found, all of what it wanted.

        Nobody looks at them any more. Parameters as for `fill`.
        """
        coming = self._coming[layer, key]
        try:
            self._count(self._landed(coming), coming.taken, own)
        finally:
            self._forget(layer, key)

    def fill(
        self,
        layer: int,
        key: Hashable,
        rows: Numbers,
        numbers: Numbers,
        addresses: NDArray[np.uint64],
        own: Counters,
    ) -> Flags:
        """Bring codes of those rows that have any here, and say of which; `let_go` must follow.

        Where they cannot be read, or are not what was written, the user is warned, and none is
        brought from here on.

        Parameters
        ----------
        layer, key, rows, numbers
            As for `begin`; what was begun by the key is waited for, and the rest is read.
        addresses
            uint64: gets where codes lie until they are let go; those of other rows stay.
        own
            Counts what was read, too: for the sequence.
        """
        filled = np.zeros(len(rows), np.bool_)
        try:
            self._take(layer, key, rows, numbers, addresses, filled, own)
            (rest,) = np.nonzero(~filled)
            if len(rest) and self._begin_rest(layer, key, rows[rest], numbers[rest]):
                self._take(layer, key, rows, numbers, addresses, filled, own)
        except ColdPoolError as error:
            self._is_written = self._is_read = False
            warnings.warn(
                f"{error}; coded tokens are read as rows from here on: same tokens, slower",
                HillInferWarning,
                stacklevel=2,
            )
        return filled

    def let_go(self, layer: int, key: Hashable) -> None:
        """Let buffers be used again that codes of a layer lie in; harmless when done twice."""
        for one in list(self._held.get((layer, key), ())):
            one.landed.settle()
        self._held.pop((layer, key), None)

    def drop(self) -> None:
        """Forget what was begun and what came, and wait until nothing is read."""
        for held in list(self._held):
            self.let_go(*held)
        for coming in list(self._coming):
            self._forget(*coming)

    def close(self) -> None:
        """Stop reading and give the drive's space back; harmless when done twice."""
        self.drop()
        self._reader.shutdown(cancel_futures=True)
        if self._lander is not None:
            self._lander.close()
        self._file.close()

    # --- inside ----------------------------------------------------------------------------

    def _take(
        self,
        layer: int,
        key: Hashable,
        rows: Numbers,
        numbers: Numbers,
        addresses: NDArray[np.uint64],
        filled: Flags,
        own: Counters,
    ) -> None:
        """Wait for what was begun, and take what is wanted of it; parameters as for `fill`."""
        coming = self._coming.get((layer, key))
        if coming is None:
            return
        # Whatever becomes of it here, its buffer is free once it is let go.
        self._held.setdefault((layer, key), []).append(coming)
        self._coming.pop((layer, key), None)
        landed = self._landed(coming)
        if landed.wrong is not None:
            row = int(coming.rows[landed.wrong])
            start = int(self._starts(layer, np.array([row // GROUP_TOKENS]))[0])
            raise self._file.changed(self._size, start + row % GROUP_TOKENS * self._size)
        at, came = coming.found(rows, numbers, filled)
        addresses[came] = row_addresses(coming.buffer, at)
        filled[came] = True
        self._count(landed, len(came), own)

    def _landed(self, coming: ComingCodes) -> Landed:
        """Wait for what was begun, and note how long it was read."""
        landed = coming.landed.result()
        if isinstance(coming.landed, LandingAhead):
            ahead = coming.landed
            self._tell(coming.layer, landed, *ahead.times, ahead.thread)
        return landed

    def _count(self, landed: Landed, came: int, own: Counters) -> None:
        """Count reads that brought so many codes that were wanted."""
        for counters in (self._counters, own):
            counters.cold_reads += landed.cost.reads
            counters.cold_read_bytes += landed.cost.byte_count
            counters.cold_useful_bytes += came * self._size
            counters.coded_reads += came

    def _begin_rest(self, layer: int, key: Hashable, rows: Numbers, numbers: Numbers) -> bool:
        """Begin to read what was not begun, behind what came; False where nothing is read."""
        if not (held := self._held.get((layer, key))):
            return bool(self.begin_first(layer, key, rows, numbers).any())
        chosen = self.covers(layer, rows, numbers)
        # Both buffers may be in use, now that the next layer's codes are on their way.
        buffer = held[-1].buffer[len(held[-1].rows) :]
        if not chosen.any() or np.count_nonzero(chosen) > len(buffer):
            return False
        own = rows[chosen], numbers[chosen]
        self._begin(layer, key, *own, buffer, LandingAhead.begin_first)
        return True

    def _starts(self, layer: int, groups: Numbers) -> Numbers:
        """Return the byte of the file at which each group's records start."""
        span, inside = np.divmod(groups * GROUP_TOKENS, _SPAN_ROWS)
        return np.asarray(((span * self._layers + layer) * _SPAN_ROWS + inside) * self._size)

    def _begin(
        self,
        layer: int,
        key: Hashable,
        rows: Numbers,
        numbers: Numbers,
        buffer: NDArray[np.uint8],
        begin: Callable[[LandingAhead], None],
    ) -> None:
        """Begin to read records of rows to a buffer."""
        groups = int(rows.max()) // GROUP_TOKENS + 1
        # A layer's records of so many rows lie behind those of the layer before.
        starts = self._first_starts[:groups] + layer * _SPAN_ROWS * self._size
        sums = self._sums.expected(layer)
        places = np.arange(len(rows))
        unit = self._file.read_unit
        wanted = FileRows(rows, buffer, places, self._landing, sums, starts=starts, unit_bytes=unit)
        if self._lander is None:
            landed = LandingInPython(self._reader.submit(self._land, layer, wanted))
            self._coming[layer, key] = ComingCodes(layer, rows, numbers, buffer, landed)
            return
        ahead = self._lander.ahead(self._file, wanted)
        # Noted first: an interrupt must not leave what is under way to nobody.
        self._coming[layer, key] = ComingCodes(layer, rows, numbers, buffer, ahead)
        begin(ahead)

    def _land(self, layer: int, wanted: FileRows) -> Landed:
        started = time.perf_counter_ns()
        landed = self._engine.land(self._file, wanted)
        self._tell(layer, landed, started, time.perf_counter_ns())
        return landed

    def _tell(
        self, layer: int, landed: Landed, started: int, stop: int, thread: int | None = None
    ) -> None:
        if self._recorder is not SILENT:
            own = {"layer": layer, "reads": landed.cost.reads, "bytes": landed.cost.byte_count}
            self._recorder.note(Lane.READS, "codes", started, stop, thread=thread, **own)
