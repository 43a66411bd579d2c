# SPDX-License-Identifier: Apache-2.0
"""Large sequential reads that run ahead of the computation."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hillinfer_bench.rivals.drive_rows import DriveRows
from hillinfer_bench.rivals.meter import Meter
from hillinfer_bench.rivals.setup import RivalSetup
from hillinfer_model.kernel_spec import GROUP_TOKENS

BLOCK_BYTES = 4 * 1024 * 1024


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
    """

    def __init__(
        self, setup: RivalSetup, rows: DriveRows, spilled: list[list[int]], meter: Meter
    ) -> None:
        self._setup = setup
        self._rows = rows
        self._spilled = spilled
        self.first_token = 0
        wanted = min(BLOCK_BYTES, setup.budget_bytes // 16) // (GROUP_TOKENS * rows.row_bytes)
        most = rows.region_rows // GROUP_TOKENS
        self.block_tokens = max(1, min(wanted, most)) * GROUP_TOKENS
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
