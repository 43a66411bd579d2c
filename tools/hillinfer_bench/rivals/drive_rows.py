# SPDX-License-Identifier: Apache-2.0
"""Rows of every layer and sequence on the drive, read in whole stretches or scattered."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from hillinfer.storage.aligned_buffer import PAGE_BYTES, round_up
from hillinfer.storage.cold_file import ColdFile, probe_io_mode
from hillinfer.storage.read_engine import ReadEngine
from hillinfer.storage.read_plan import JOIN_GAP_BYTES, plan_reads
from hillinfer.storage.reads import Reads
from hillinfer_bench.rivals.meter import Meter
from hillinfer_bench.rivals.setup import RivalSetup
from hillinfer_model.kernel_spec import GROUP_TOKENS

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
        Of one token, a multiple of 64, so that a group of 64 rows fills whole pages.
    label
        What the rows are, for errors.
    engine
        Reads; the caller closes it afterwards.
    meter
        Counts bytes.
    """

    def __init__(
        self, setup: RivalSetup, row_bytes: int, label: str, engine: ReadEngine, meter: Meter
    ) -> None:
        self.row_bytes = row_bytes
        self.region_rows = round_up(setup.context, GROUP_TOKENS)
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
        """Write whole groups of rows, page-aligned uint8 (64 · groups, row_bytes), at a token."""
        data = rows.reshape(-1).data
        self.files[layer].write(data, (row * self.region_rows + first) * self.row_bytes)
        self._meter.count_write(len(data))

    def read_span(
        self, layer: int, row: int, first: int, last: int, into: NDArray[np.uint8]
    ) -> None:
        """Read tokens `first` up to `last`, whole groups, one behind the other into a buffer."""
        count = (last - first) * self.row_bytes
        begin = (row * self.region_rows + first) * self.row_bytes
        self._meter.count_read(count)
        self._engine.read(self.files[layer], into, Reads.in_pieces(begin, count, PIECE_BYTES))

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
        lands = _lands_alone(unit_bytes)
        into = out.reshape(-1) if lands else buffer
        for batch in plan_reads(row * per_region + units, unit_bytes, len(into)):
            self._meter.count_read(int(batch.byte_counts.sum()))
            self._engine.read(self.files[layer], into, batch)
            if lands:
                continue
            # Units start at multiples of 64 bytes, so a view of all such places has them.
            at_64 = np.lib.stride_tricks.as_strided(
                buffer,
                shape=((len(buffer) - unit_bytes) // 64 + 1, unit_bytes),
                strides=(64, 1),
                writeable=False,
            )
            out[batch.wanted] = at_64[batch.row_offsets // 64]

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
