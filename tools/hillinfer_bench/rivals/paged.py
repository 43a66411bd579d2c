# SPDX-License-Identifier: Apache-2.0
"""Rivals that rank pages by bounds of their keys: Quest and LeoAM."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.files import round_up
from hillinfer_bench.rivals.block_attention import Part, RowProducts, count, replayed_pages, whole
from hillinfer_bench.rivals.drive_rows import DriveRival, Landing
from hillinfer_bench.rivals.pooled_rows import Fetch, Fetched, FetchThread, PooledRows
from hillinfer_bench.rivals.rival import Meter, RivalSetup, Traffic
from hillinfer_model.kernel_spec import GROUP_TOKENS


class KeyBounds:
    """Per page and KV head the largest and the least key of each channel, in the stored type.

    The larger of query times either, summed over channels, is what no inner product of the page
    exceeds (Quest's criterion; LeoAM's KV abstract holds the same two vectors).

    Parameters
    ----------
    setup
        Says how many layers, sequences and tokens.
    page_tokens
        Tokens of a page, a power of two up to 64.
    dtype
        The stored type.
    meter
        Counts the bounds.
    """

    def __init__(
        self, setup: RivalSetup, page_tokens: int, dtype: torch.dtype, meter: Meter
    ) -> None:
        shape = setup.shape
        self.page_tokens = page_tokens
        self.pages = round_up(setup.context, GROUP_TOKENS) // page_tokens
        self._products = RowProducts(shape, setup.block_rows)
        size = (shape.layers, setup.batch, 2, self.pages, shape.kv_heads, shape.head_dim)
        self._bounds = meter.tensor(size, dtype)

    def add(self, layer: int, row: int, first: int, keys: torch.Tensor) -> None:
        """Take a group's keys, (kv_heads, 64, head_dim), of tokens from `first` on."""
        heads, _, head_dim = keys.shape
        paged = keys.transpose(0, 1).reshape(-1, self.page_tokens, heads, head_dim)
        at = first // self.page_tokens
        pages = slice(at, at + len(paged))
        self._bounds[layer, row, 0, pages] = paged.amax(1)
        self._bounds[layer, row, 1, pages] = paged.amin(1)

    def scores(
        self, layer: int, row: int, query: torch.Tensor, scaling: float, pages: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Score pages by the softmax of their bounds, summed over query heads.

        Parameters
        ----------
        layer, row
            Which layer of which sequence.
        query
            (query_heads, 1, head_dim).
        scaling
            Factor on inner products.
        pages
            int64 numbers, ascending.
        """
        if not len(pages):
            return np.zeros(0, np.float32)
        # A bound is linear in the positive and in the negative part of a query.
        rising, falling = query.float().clamp(min=0), query.float().clamp(max=0)
        logits, others = torch.empty(2, len(query), len(pages))
        for part, sign, out in ((0, rising, logits), (1, falling, others)):
            rows = self._bounds[layer, row, part].view(torch.uint8).view(self.pages, -1).numpy()
            self._products.logits(sign, scaling, rows, pages, out)
        scores: NDArray[np.float32] = torch.softmax(logits.add_(others), -1).sum(0).numpy()
        return scores

    def close(self) -> None:
        """Give the memory back; the meter's owner counts it."""
        self._bounds = torch.empty(0)


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
        # With predictions one layer's pages are attended to while the next one's come.
        fetches = 2 * setup.batch if self.wants_prediction else 0
        self._landing = Landing(
            self.meter,
            setup.ahead_rows,
            fetches,
            most,
            PAGE_TOKENS,
            self.row_bytes,
            setup.landing_bytes,
        )
        self.pool = PooledRows(setup, self.rows, PAGE_TOKENS, self.meter)
        self.pool.take_pool(self.meter.free_bytes)
        self._thread = FetchThread(self._landing)
        self._ahead: dict[tuple[int, int], Fetch] = {}

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
        # Nothing is predicted for a layer that a group is about to leave.
        self.pool.put(layer, row, first, rows)

    def begin_step(self) -> None:
        """Forget predictions of a step that broke off; see `Rival`."""
        super().begin_step()
        self._drop_ahead()

    def predict(self, layer: int, query: torch.Tensor, scaling: float) -> None:
        """Begin to rank and read for a layer, where predictions are wanted; see `Rival`."""
        if not self.wants_prediction:
            return
        for row in range(self.setup.batch):
            if (layer, row) in self._ahead:
                continue
            # The step's own token stays in the tail, but may make a group leave it: then pages
            # are ranked when they are known.
            if self.lengths[layer][row] - self.spilled[layer][row] < self.tail_rows:
                length = self.lengths[layer][row] + 1
                self._ahead[layer, row] = self._start(layer, row, query[row], scaling, length)

    def attend(self, layer: int, row: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend to the best pages as they come, then to the tail; see `Rival`."""
        fetch = self._ahead.pop((layer, row), None)
        if fetch is None:
            fetch = self._start(layer, row, query, scaling, self.lengths[layer][row])
        return self.attention.attend(query, self._batches(layer, row, fetch), scaling)

    def traffic(self) -> Traffic:
        """Return the totals, what is being read ahead included; see `Rival`."""
        self._thread.wait()
        return super().traffic()

    def close(self) -> None:
        """Wait for what is being read and give everything back; see `Rival`."""
        self._drop_ahead()
        self._thread.close()
        super().close()
        self.pool.close()
        for level in self.bounds:
            level.close()
        self._landing.close()

    def _drop_ahead(self) -> None:
        for fetch in self._ahead.values():
            self._thread.drop(fetch)
        self._ahead = {}

    def _start(
        self, layer: int, row: int, query: torch.Tensor, scaling: float, length: int
    ) -> Fetch:
        def fetched(memory: Iterator[NDArray[np.uint8]]) -> Iterator[Fetched]:
            pages = self._pages(layer, row, query, scaling, length)
            yield from self.pool.fetch(layer, row, pages, memory)

        return self._thread.start(fetched)

    def _batches(self, layer: int, row: int, fetch: Fetch) -> Iterator[list[Part]]:
        for fetched in self._thread.pieces(fetch):
            tail = [whole(self.tail(layer, row))] if fetched.is_last else []
            yield fetched.parts + tail

    def _pages(
        self, layer: int, row: int, query: torch.Tensor, scaling: float, length: int
    ) -> NDArray[np.int64]:
        spilled = self.spilled[layer][row]
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


CHUNK_TOKENS = 64
_SPLIT = CHUNK_TOKENS // PAGE_TOKENS
# Chunks that are split have this many times the tokens wanted.
_CANDIDATES = 2


class LeoAM(PagedRival):
    """Scores chunks of 64 tokens, splits the important ones into 16s and fetches the best of those.

    Chunks of little weight are looked at once, as a whole; only where attention gathers does it
    cost more. Both levels' abstracts (largest and least key per channel) stay in DRAM. Given a
    layer's approximate query while the layer before computes, a thread ranks and reads during that
    time, for its pipeline.

    Parameters
    ----------
    setup
        See `Rival`.
    """

    wants_prediction: ClassVar[bool] = True
    bound_tokens = (CHUNK_TOKENS, PAGE_TOKENS)

    def scored_token_bytes(self) -> float:
        """Return those of all chunks and of the parts of split ones; see `Rival`."""
        split = min(1.0, _CANDIDATES * self.setup.alpha)
        return self.bound_bytes(CHUNK_TOKENS) + split * self.bound_bytes(PAGE_TOKENS)

    def best_pages(
        self, layer: int, row: int, query: torch.Tensor, scaling: float, wanted: int
    ) -> NDArray[np.int64]:
        """Rank chunks, then the parts of the best; see `PagedRival`."""
        coarse, fine = self.bounds
        chunks = np.arange(self.spilled[layer][row] // CHUNK_TOKENS)
        split = -(-_CANDIDATES * wanted // _SPLIT)
        if split < len(chunks):
            chunks = top(coarse.scores(layer, row, query, scaling, chunks), split)
        parts = (chunks[:, None] * _SPLIT + np.arange(_SPLIT)).reshape(-1)
        chosen: NDArray[np.int64] = parts[
            top(fine.scores(layer, row, query, scaling, parts), wanted)
        ]
        return chosen


class Quest(PagedRival):
    """Scores every page at every step and fetches the best ones whole.

    Parameters
    ----------
    setup
        See `Rival`.
    """

    def best_pages(
        self, layer: int, row: int, query: torch.Tensor, scaling: float, wanted: int
    ) -> NDArray[np.int64]:
        """Rank all pages; see `PagedRival`."""
        pages = np.arange(self.spilled[layer][row] // PAGE_TOKENS)
        return top(self.bounds[0].scores(layer, row, query, scaling, pages), wanted)
