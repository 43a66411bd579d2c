# SPDX-License-Identifier: Apache-2.0
"""What rivals that fetch whole pages share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.rivals.block_attention import Part, whole
from hillinfer.rivals.drive_rival import DriveRival
from hillinfer.rivals.key_bounds import KeyBounds
from hillinfer.rivals.pooled_rows import PooledRows, landing_units
from hillinfer.rivals.selection import count, replayed_pages

PAGE_TOKENS = 16


class PagedRival(DriveRival):
    """Whole pages of 16 tokens, ranked by bounds on their keys that stay in DRAM.

    The tail is attended to whole, since it is in DRAM; of the pages before it as many are selected
    as it takes to reach k tokens. What bounds leave of M0 is a pool of the pages used last.

    Parameters
    ----------
    setup
        See `Rival`.
    """

    bound_tokens: tuple[int, ...] = (PAGE_TOKENS,)
    """Tokens of the pages that have bounds, a level each."""

    def prepare(self) -> None:
        """Take bounds and buffers, and a pool with what is left; see `DriveRival`."""
        setup, kind = self.setup, self.layout.stored_type
        self.rows = self.open_rows(self.row_bytes, "rows")
        self.bounds = [KeyBounds(setup, size, kind, self.meter) for size in self.bound_tokens]
        region = self.rows.region_rows // PAGE_TOKENS
        most = min(region, -(-count(setup, setup.context) // PAGE_TOKENS))
        landing = landing_units(most, PAGE_TOKENS, self.row_bytes)
        size = landing * PAGE_TOKENS * self.row_bytes
        self._selected = self.meter.buffer(size).reshape(landing, -1)
        self.pool = PooledRows(setup, self.rows, PAGE_TOKENS, self.meter)
        self.pool.take_pool(self.meter.free_bytes)

    @abstractmethod
    def best_pages(
        self, layer: int, row: int, query: torch.Tensor, scaling: float, wanted: int
    ) -> NDArray[np.int64]:
        """Return the pages of 16 tokens to fetch, ascending.

        Parameters
        ----------
        layer, row, query, scaling
            As in `Rival.attend`.
        wanted
            How many, at least 1 and fewer than there are.
        """

    def bound_bytes(self, page_tokens: int) -> float:
        """Return the bytes per token, all layers, of the bounds of pages of a size."""
        shape = self.setup.shape
        return 4.0 * shape.layers * shape.kv_heads * shape.head_dim / page_tokens

    def scored_token_bytes(self) -> float:
        """Return those of the finest bounds; see `Rival`."""
        return self.bound_bytes(PAGE_TOKENS)

    def describe(self) -> str:
        """Return what the pool holds."""
        return f"{self.pool.slots} pages of {PAGE_TOKENS} pooled"

    def spill(self, layer: int, row: int, first: int, rows: NDArray[np.uint8]) -> None:
        """Keep the group's bounds and write it; see `DriveRival`."""
        for level in self.bounds:
            level.add(layer, row, first, self.states(rows)[0])
        self.rows.write(layer, row, first, rows)

    def attend(self, layer: int, row: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Fetch the best pages and attend to them and the tail; see `Rival`."""
        pages = self._pages(layer, row, query, scaling)
        return self.attention.attend(query, self._batches(layer, row, pages), scaling)

    def _batches(self, layer: int, row: int, pages: NDArray[np.int64]) -> Iterator[list[Part]]:
        for fetched in self.pool.fetch(layer, row, pages, self._selected):
            tail = [whole(self.tail(layer, row))] if fetched.is_last else []
            yield fetched.parts + tail

    def close(self) -> None:
        """Give everything back; see `Rival`."""
        super().close()
        self.pool.close()
        for level in self.bounds:
            level.close()
        self._selected = np.empty((0, 0), np.uint8)

    def _pages(
        self, layer: int, row: int, query: torch.Tensor, scaling: float
    ) -> NDArray[np.int64]:
        length, spilled = self.lengths[layer][row], self.spilled[layer][row]
        there = spilled // PAGE_TOKENS
        # The first page has the sinks: one page at least.
        wanted = max(1, -(-(count(self.setup, length) - (length - spilled)) // PAGE_TOKENS))
        if wanted >= there:
            return np.arange(there)
        best = self.best_pages(layer, row, query, scaling, wanted)
        return replayed_pages(self.setup, layer, row, length, PAGE_TOKENS, there, best)


def top(scores: NDArray[np.float32], wanted: int) -> NDArray[np.int64]:
    """Return the numbers of the best scores, the first among them whatever it is, ascending."""
    scores[0] = np.inf
    best = np.argpartition(scores, len(scores) - wanted)[len(scores) - wanted :]
    return np.sort(best)
