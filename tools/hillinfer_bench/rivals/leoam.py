# SPDX-License-Identifier: Apache-2.0
"""Chunks ranked by their KV abstracts, the important ones split and ranked again (LeoAM)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer_bench.rivals.paged_rival import PAGE_TOKENS, PagedRival, top

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
