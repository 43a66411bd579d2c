# SPDX-License-Identifier: Apache-2.0
"""The whole KV cache, what M0 cannot hold of it read from the drive at every step."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.rivals.block_attention import attend_blocks, cut
from hillinfer.rivals.drive_rival import DriveRival
from hillinfer.rivals.traffic import Traffic
from hillinfer_model.kernel_spec import GROUP_TOKENS

_BLOCK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class _Ahead:
    """A block of tokens of one layer and sequence that is being read into a buffer."""

    layer: int
    row: int
    first: int
    last: int
    buffer: int
    done: Future[None]


class FullDrive(DriveRival):
    """A fixed share of each layer's KV in DRAM, the rest streamed (after FlexGen).

    The first tokens are the share. The rest is read in large blocks into two buffers: while
    attention works on one, the next block, of this layer or of the one after it, comes.

    Parameters
    ----------
    setup
        See `Rival`.
    """

    def prepare(self) -> None:
        """Take two buffers, and the share with what is left; see `DriveRival`."""
        setup = self.setup
        self.rows = self.open_rows(self.row_bytes, "rows")
        group_bytes = GROUP_TOKENS * self.row_bytes
        most = self.rows.region_rows // GROUP_TOKENS
        wanted = min(_BLOCK_BYTES, setup.budget_bytes // 16) // group_bytes
        self.block_tokens = max(1, min(wanted, most)) * GROUP_TOKENS
        size = self.block_tokens * self.row_bytes
        self._buffers = [self.meter.buffer(size) for _ in range(2)]
        held = min(most, self.meter.free_bytes // (setup.units * group_bytes))
        self.held_tokens = held * GROUP_TOKENS
        size = setup.units * self.held_tokens * self.row_bytes
        self._held = self.meter.buffer(size).reshape(
            setup.shape.layers, setup.batch, self.held_tokens, self.row_bytes
        )
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="hillinfer-rival")
        self._ahead: _Ahead | None = None

    def describe(self) -> str:
        """Return the share in DRAM and the size of a block."""
        return f"{self.held_tokens} tokens in DRAM, blocks of {self.block_tokens}"

    def spill(self, layer: int, row: int, first: int, rows: NDArray[np.uint8]) -> None:
        """Keep a group of the share, write any other; see `DriveRival`."""
        if first < self.held_tokens:
            self._held[layer, row, first : first + len(rows)] = rows
        else:
            self.rows.write(layer, row, first, rows)

    def attend(self, layer: int, row: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend to everything; see `Rival`."""
        return attend_blocks(query, self._blocks(layer, row), scaling)

    def traffic(self) -> Traffic:
        """Return the totals, a block being read ahead included; see `Rival`."""
        if self._ahead is not None:
            self._ahead.done.result()
        return super().traffic()

    def close(self) -> None:
        """Wait for what is being read and give everything back; see `Rival`."""
        self._reader.shutdown()
        self._ahead = None
        super().close()
        self._held = np.empty((0, 0, 0, 0), np.uint8)
        self._buffers = []

    def _blocks(self, layer: int, row: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        spilled = self.spilled[layer][row]
        held = min(spilled, self.held_tokens)
        yield from self._cut(self._held[layer, row, :held])
        at = held
        while at < spilled:
            block = self._take(layer, row, at)
            at = block.last
            self._read_ahead(layer, row, at, 1 - block.buffer)
            size = (block.last - block.first) * self.row_bytes
            yield from self._cut(self._buffers[block.buffer][:size].reshape(-1, self.row_bytes))
        yield from self._cut(self.tail(layer, row))

    def _cut(self, rows: NDArray[np.uint8]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return cut(*self.states(rows), self.setup.block_rows)

    def _take(self, layer: int, row: int, first: int) -> _Ahead:
        """Return the block that begins at a token, read by now."""
        ahead = self._ahead
        if ahead is None or (ahead.layer, ahead.row, ahead.first) != (layer, row, first):
            if ahead is not None:
                ahead.done.result()
            ahead = self._start(layer, row, first, 0)
        self._ahead = None
        ahead.done.result()
        return ahead

    def _read_ahead(self, layer: int, row: int, at: int, buffer: int) -> None:
        """Begin to read what comes after a token: in this layer and sequence or the next ones."""
        units = self.setup.units
        here = layer * self.setup.batch + row
        for number in range(here, here + units + 1):
            layer, row = divmod(number % units, self.setup.batch)
            if at < self.spilled[layer][row]:
                self._ahead = self._start(layer, row, at, buffer)
                return
            at = self.held_tokens

    def _start(self, layer: int, row: int, first: int, buffer: int) -> _Ahead:
        last = min(first + self.block_tokens, self.spilled[layer][row])
        into = self._buffers[buffer]
        done = self._reader.submit(self.rows.read_span, layer, row, first, last, into)
        return _Ahead(layer, row, first, last, buffer, done)
