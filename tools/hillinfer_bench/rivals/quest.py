# SPDX-License-Identifier: Apache-2.0
"""Pages of 16 tokens, the best by the bounds of their keys (Quest)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer_bench.rivals.paged_rival import PAGE_TOKENS, PagedRival, top


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
