# SPDX-License-Identifier: Apache-2.0
"""Rows in files on the drive, and how rivals read them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.calls import Reads
from hillinfer.drive.engine_table import open_engine
from hillinfer.drive.files import PAGE_BYTES, ColdFile, probe_io_mode, round_up
from hillinfer.drive.landing import JOIN_GAP_BYTES, FileRows
from hillinfer.drive.read_engines import ReadEngine
from hillinfer_bench.rivals.block_attention import BlockAttention
from hillinfer_bench.rivals.rival import Meter, Rival, RivalSetup
from hillinfer_model.kernel_spec import GROUP_TOKENS

# One piece is attended to while the next one comes.
_ATTENDED = 2


def piece_units(most: int, unit_rows: int, row_bytes: int, piece_bytes: int) -> int:
    """Return how many units a piece takes: its bytes or `most`, in multiples of 64 rows."""
    rows = min(piece_bytes // row_bytes, round_up(most * unit_rows, GROUP_TOKENS))
    return max(GROUP_TOKENS, rows // GROUP_TOKENS * GROUP_TOKENS) // unit_rows


def piece_counts(
    ahead_rows: int, fetches: int, most: int, unit_rows: int, row_bytes: int, piece_bytes: int
) -> tuple[int, int]:
    """Return how many pieces only a layer that attends may take, and how many any may.

    Parameters
    ----------
    ahead_rows
        Rows that may be read ahead, rounded up to pieces.
    fetches
        How many may be under way before their layer attends.
    most
        The most units of one fetch.
    unit_rows, row_bytes
        Rows of a unit, and bytes of a row.
    piece_bytes
        As in `RivalSetup`.
    """
    units = piece_units(most, unit_rows, row_bytes, piece_bytes)
    needed = -(-most // units)
    ahead = min(fetches * needed, -(-ahead_rows // (units * unit_rows)))
    return min(_ATTENDED, needed), ahead


class Landing:
    """Pieces for all fetches of a rival; one thread at a time may use it.

    Parameters
    ----------
    meter
        Counts them.
    ahead_rows, fetches, most, unit_rows, row_bytes, piece_bytes
        As in `piece_counts`.
    """

    def __init__(
        self,
        meter: Meter,
        ahead_rows: int,
        fetches: int,
        most: int,
        unit_rows: int,
        row_bytes: int,
        piece_bytes: int,
    ) -> None:
        sizes = (most, unit_rows, row_bytes, piece_bytes)
        self._kept, ahead = piece_counts(ahead_rows, fetches, *sizes)
        units = piece_units(*sizes)
        size = self._kept + ahead, units, unit_rows * row_bytes
        self._memory = meter.buffer(int(np.prod(size))).reshape(size)
        self._free = list(range(len(self._memory)))

    def take_attending(self) -> int | None:
        """Take a piece for the layer that attends; None where none is free."""
        return self._free.pop() if self._free else None

    def take_ahead(self) -> int | None:
        """Take a piece for a later layer; None where only those for the one that attends are."""
        return self._free.pop() if len(self._free) > self._kept else None

    def give(self, piece: int) -> None:
        """Give a piece back."""
        self._free.append(piece)

    def of(self, piece: int) -> NDArray[np.uint8]:
        """Return a piece's memory, page-aligned uint8 (units, unit_bytes)."""
        own: NDArray[np.uint8] = self._memory[piece]
        return own

    def close(self) -> None:
        """Give the memory back; the meter's owner counts it."""
        self._memory = np.empty((0, 0, 0), np.uint8)
        self._free = []


# What one read of a stretch takes; several are in flight.
PIECE_BYTES = 256 * 1024
SCATTER_BYTES = 2 * 1024 * 1024


class DriveRows:
    """One nameless file per layer; in it a region for each sequence, in it rows by position.

    Parameters
    ----------
    setup
        Says how many layers, sequences and tokens.
    row_bytes
        Of one token; a group of rows fills whole pages, so that of 64 rows this is a multiple of
        64.
    label
        What the rows are, for errors.
    engine
        Reads; the caller closes it afterwards.
    meter
        Counts bytes.
    group_rows
        Rows of a group, which is written and streamed as a whole.
    """

    def __init__(
        self,
        setup: RivalSetup,
        row_bytes: int,
        label: str,
        engine: ReadEngine,
        meter: Meter,
        group_rows: int = GROUP_TOKENS,
    ) -> None:
        self.row_bytes = row_bytes
        self.region_rows = round_up(setup.context, group_rows)
        self._engine = engine
        self._meter = meter
        mode = probe_io_mode(setup.cold_dir)
        with ExitStack() as opened:
            self.files: list[ColdFile] = []
            for layer in range(setup.shape.layers):
                file = ColdFile(setup.cold_dir, mode, f"{label} of layer {layer}")
                opened.callback(file.close)
                self.files.append(file)
            opened.pop_all()

    def write(self, layer: int, row: int, first: int, rows: NDArray[np.uint8]) -> None:
        """Write whole groups of rows, page-aligned uint8 as they lie one behind the other."""
        data = rows.reshape(-1).data
        self.files[layer].write(data, (row * self.region_rows + first) * self.row_bytes)
        self._meter.count_write(len(data))

    def read_span(
        self, layer: int, row: int, first: int, last: int, into: NDArray[np.uint8]
    ) -> None:
        """Read tokens `first` up to `last`, whole groups, one behind the other into a buffer."""
        count = (last - first) * self.row_bytes
        begin = (row * self.region_rows + first) * self.row_bytes
        reads = Reads.in_pieces(begin, count, PIECE_BYTES)
        self._meter.count_reads(len(reads.byte_counts), count)
        self._engine.read(self.files[layer], into, reads)

    def read_units(
        self,
        layer: int,
        row: int,
        units: NDArray[np.int64],
        out: NDArray[np.uint8],
        buffer: NDArray[np.uint8],
    ) -> None:
        """Read scattered units of one or more rows, joined.

        Parameters
        ----------
        layer, row
            Which layer of which sequence.
        units
            int64 numbers of units, ascending; how many rows one has follows from `out`.
        out
            Page-aligned uint8 (len(units), unit_bytes).
        buffer
            Page-aligned, what reads go through; as `scatter_buffer_bytes` says.
        """
        unit_bytes = out.shape[1]
        per_region = self.region_rows * self.row_bytes // unit_bytes
        file, rows = self.files[layer], row * per_region + units
        wanted = FileRows(rows, out, np.arange(len(units)), buffer, unit_bytes=file.read_unit)
        landed = self._engine.land(file, wanted)
        self._meter.count_reads(landed.cost.reads, landed.cost.byte_count)

    def scatter_buffer_bytes(self, unit_rows: int) -> int:
        """Return the size of a buffer for `read_units`: 2 MiB, or what a sequence can need.

        None is needed where units are read to where they are wanted.
        """
        unit = unit_rows * self.row_bytes
        if _lands_alone(unit):
            return 0
        everything = self.region_rows * self.row_bytes
        return max(min(SCATTER_BYTES, everything), round_up(unit, PAGE_BYTES)) + 2 * PAGE_BYTES

    def close(self) -> None:
        """Give the drive's space back."""
        for file in self.files:
            file.close()


def _lands_alone(unit_bytes: int) -> bool:
    """Whether nothing but units is read: they fill pages, and no gap is too small to leave out."""
    return unit_bytes % PAGE_BYTES == 0 and unit_bytes > JOIN_GAP_BYTES


@dataclass(frozen=True)
class _Ahead:
    """A block of tokens of one layer and sequence that is being read into a buffer."""

    layer: int
    row: int
    first: int
    last: int
    buffer: int
    done: Future[None]


class BlockStream:
    """Streams the rows of one layer and sequence after the other through two buffers.

    While the caller works on one block, the next comes: of this layer, or of the one after it, or,
    at the end of a step, of the first layer of the next. A block is 4 MiB, or a sixteenth of M0
    where that is less, and one group at least.

    Parameters
    ----------
    setup
        Says how many layers and sequences.
    rows
        What is read.
    spilled
        Tokens on the drive, by layer and sequence; the caller keeps it up to date.
    meter
        Counts the buffers.
    group_rows
        Rows of a group, of which a block has whole ones.
    """

    def __init__(
        self,
        setup: RivalSetup,
        rows: DriveRows,
        spilled: list[list[int]],
        meter: Meter,
        group_rows: int = GROUP_TOKENS,
    ) -> None:
        self._setup = setup
        self._rows = rows
        self._spilled = spilled
        self.first_token = 0
        wanted = min(setup.block_bytes, setup.budget_bytes // 16) // (group_rows * rows.row_bytes)
        most = rows.region_rows // group_rows
        self.block_tokens = max(1, min(wanted, most)) * group_rows
        size = self.block_tokens * rows.row_bytes
        self._buffers = [meter.buffer(size) for _ in range(2)]
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="hillinfer-rival")
        self._ahead: _Ahead | None = None

    def blocks(self, layer: int, row: int) -> Iterator[NDArray[np.uint8]]:
        """Yield all rows from `first_token` on, uint8 (tokens, row_bytes), valid until the next."""
        at = self.first_token
        while at < self._spilled[layer][row]:
            block = self._take(layer, row, at)
            at = block.last
            self._read_ahead(layer, row, at, 1 - block.buffer)
            size = (block.last - block.first) * self._rows.row_bytes
            yield self._buffers[block.buffer][:size].reshape(-1, self._rows.row_bytes)

    def wait(self) -> None:
        """Wait for the block that is being read."""
        if self._ahead is not None:
            self._ahead.done.result()

    def close(self) -> None:
        """Wait for what is being read and give the buffers back; harmless when done twice."""
        self._reader.shutdown()
        self._ahead = None
        self._buffers = []

    def _take(self, layer: int, row: int, first: int) -> _Ahead:
        """Return the block that begins at a token, read by now."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or (ahead.layer, ahead.row, ahead.first) != (layer, row, first):
            if ahead is not None:
                ahead.done.result()
            ahead = self._start(layer, row, first, 0)
        ahead.done.result()
        return ahead

    def _read_ahead(self, layer: int, row: int, at: int, buffer: int) -> None:
        """Begin to read what comes after a token: in this layer and sequence or the next ones."""
        units = self._setup.units
        here = layer * self._setup.batch + row
        for number in range(here, here + units + 1):
            layer, row = divmod(number % units, self._setup.batch)
            if at < self._spilled[layer][row]:
                self._ahead = self._start(layer, row, at, buffer)
                return
            at = self.first_token

    def _start(self, layer: int, row: int, first: int, buffer: int) -> _Ahead:
        last = min(first + self.block_tokens, self._spilled[layer][row])
        into = self._buffers[buffer]
        done = self._reader.submit(self._rows.read_span, layer, row, first, last, into)
        return _Ahead(layer, row, first, last, buffer, done)


class DriveRival(Rival):
    """A rival whose rows leave DRAM in groups of 64, the oldest first.

    The newest rows of each layer and sequence stay in its tail until 64 of them lie before the
    kept recent ones; so the recent tokens never have to be read, and a group is written once.

    Parameters
    ----------
    setup
        See `Rival`.
    """

    def __init__(self, setup: RivalSetup) -> None:
        super().__init__(setup)
        self.row_bytes = setup.shape.row_bytes
        self.tail_rows = GROUP_TOKENS + setup.kept_recent
        stride = round_up(self.tail_rows * self.row_bytes, PAGE_BYTES)
        size = setup.units * stride
        self._tails = self.meter.buffer(size).reshape(setup.shape.layers, setup.batch, stride)
        self.spilled = [[0] * setup.batch for _ in range(setup.shape.layers)]
        self._stores: list[DriveRows] = []
        self.attention = BlockAttention(setup.shape, self.layout, setup.block_rows)
        self.engine = open_engine(setup.io, setup.threads, setup.calls)
        try:
            self.prepare()
        except BaseException:
            self._close_drive()
            raise

    @abstractmethod
    def prepare(self) -> None:
        """Open what lies on the drive and take the memory that M0 has left."""

    @abstractmethod
    def spill(self, layer: int, row: int, first: int, rows: NDArray[np.uint8]) -> None:
        """Take a group of 64 rows out of the tail.

        Parameters
        ----------
        layer, row
            Which layer of which sequence.
        first
            Position of the first of them, a multiple of 64.
        rows
            Page-aligned uint8 (64, row_bytes), valid during the call.
        """

    def fill(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put rows into the tail and spill what is full; see `Rival`."""
        at = self.grow(layer, row, keys, values)
        end, begin = at + keys.shape[1], at
        while at < end:
            if at - self.spilled[layer][row] == self.tail_rows:
                self._spill_first_group(layer, row)
            first = self.spilled[layer][row]
            new = slice(at - begin, min(end, first + self.tail_rows) - begin)
            rows = self._tail(layer, row)[at - first : new.stop + begin - first]
            self.layout.pack(keys[:, new], values[:, new], rows)
            at = new.stop + begin

    def append(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put one row into the tail; see `Rival`."""
        self.fill(layer, row, keys, values)

    def open_rows(self, row_bytes: int, label: str) -> DriveRows:
        """Return space on the drive for rows of a size; closed with the rival."""
        rows = DriveRows(self.setup, row_bytes, label, self.engine, self.meter)
        self._stores.append(rows)
        return rows

    def tail(self, layer: int, row: int) -> NDArray[np.uint8]:
        """Return the rows of tokens `spilled` and after, uint8 (tokens, row_bytes)."""
        count = self.lengths[layer][row] - self.spilled[layer][row]
        return self._tail(layer, row)[:count]

    def states(self, rows: NDArray[np.uint8]) -> tuple[torch.Tensor, torch.Tensor]:
        """View rows as keys and values, (kv_heads, tokens, head_dim)."""
        tensor = torch.from_numpy(rows)
        return (
            self.layout.keys(tensor).transpose(0, 1),
            self.layout.values(tensor).transpose(0, 1),
        )

    def close(self) -> None:
        """Stop the engine and give memory and space back; see `Rival`."""
        self._close_drive()
        self.meter.release(self.meter.traffic().dram_bytes)
        self._tails = np.empty((0, 0, 0), np.uint8)

    def _close_drive(self) -> None:
        self.engine.close()
        for rows in self._stores:
            rows.close()

    def _tail(self, layer: int, row: int) -> NDArray[np.uint8]:
        used = self._tails[layer, row, : self.tail_rows * self.row_bytes]
        return used.reshape(self.tail_rows, self.row_bytes)

    def _spill_first_group(self, layer: int, row: int) -> None:
        rows = self._tail(layer, row)
        self.spill(layer, row, self.spilled[layer][row], rows[:GROUP_TOKENS])
        rows[: -GROUP_TOKENS or None] = rows[GROUP_TOKENS:].copy()
        self.spilled[layer][row] += GROUP_TOKENS
