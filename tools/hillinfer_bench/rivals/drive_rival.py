# SPDX-License-Identifier: Apache-2.0
"""What rivals on a drive share: an engine, rows on the drive and the newest rows in DRAM."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.storage.aligned_buffer import PAGE_BYTES, round_up
from hillinfer.storage.drive_calls import DriveCalls
from hillinfer.storage.read_engines import open_engine
from hillinfer_bench.rivals.block_attention import BlockAttention
from hillinfer_bench.rivals.drive_rows import DriveRows
from hillinfer_bench.rivals.rival import Rival
from hillinfer_bench.rivals.setup import RivalSetup
from hillinfer_model.kernel_spec import GROUP_TOKENS


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
        self.engine = open_engine(setup.io, setup.threads, DriveCalls())
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
