# SPDX-License-Identifier: Apache-2.0
"""The whole KV cache, what M0 cannot hold of it read from the drive at every step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer_bench.rivals.block_attention import Part, whole
from hillinfer_bench.rivals.block_stream import BlockStream
from hillinfer_bench.rivals.drive_rival import DriveRival
from hillinfer_bench.rivals.traffic import Traffic
from hillinfer_model.kernel_spec import GROUP_TOKENS


class FullDrive(DriveRival):
    """A fixed share of each layer's KV in DRAM, the rest streamed (after FlexGen).

    The first tokens are the share. The rest is read in large blocks ahead of attention.

    Parameters
    ----------
    setup
        See `Rival`.
    """

    def prepare(self) -> None:
        """Take the stream's buffers, and the share with what is left; see `DriveRival`."""
        setup = self.setup
        self.rows = self.open_rows(self.row_bytes, "rows")
        self.stream = BlockStream(setup, self.rows, self.spilled, self.meter)
        most = self.rows.region_rows // GROUP_TOKENS
        group_bytes = GROUP_TOKENS * self.row_bytes
        held = min(most, self.meter.free_bytes // (setup.units * group_bytes))
        self.stream.first_token = self.held_tokens = held * GROUP_TOKENS
        size = setup.units * self.held_tokens * self.row_bytes
        self._held = self.meter.buffer(size).reshape(
            setup.shape.layers, setup.batch, self.held_tokens, self.row_bytes
        )

    def attended_token_bytes(self) -> float:
        """Return those of whole rows; see `Rival`."""
        return float(self.setup.shape.token_bytes)

    def describe(self) -> str:
        """Return the share in DRAM and the size of a block."""
        return f"{self.held_tokens} tokens in DRAM, blocks of {self.stream.block_tokens}"

    def spill(self, layer: int, row: int, first: int, rows: NDArray[np.uint8]) -> None:
        """Keep a group of the share, write any other; see `DriveRival`."""
        if first < self.held_tokens:
            self._held[layer, row, first : first + len(rows)] = rows
        else:
            self.rows.write(layer, row, first, rows)

    def attend(self, layer: int, row: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend to everything; see `Rival`."""
        return self.attention.attend(query, self._batches(layer, row), scaling)

    def traffic(self) -> Traffic:
        """Return the totals, a block being read ahead included; see `Rival`."""
        self.stream.wait()
        return super().traffic()

    def close(self) -> None:
        """Wait for what is being read and give everything back; see `Rival`."""
        self.stream.close()
        super().close()
        self._held = np.empty((0, 0, 0, 0), np.uint8)

    def _batches(self, layer: int, row: int) -> Iterator[list[Part]]:
        held = min(self.spilled[layer][row], self.held_tokens)
        yield [whole(self._held[layer, row, :held])]
        for rows in self.stream.blocks(layer, row):
            yield [whole(rows)]
        yield [whole(self.tail(layer, row))]
