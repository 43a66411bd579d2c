# SPDX-License-Identifier: Apache-2.0
"""Which tokens a rival selects, once it has scores."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer_bench.rivals.setup import RivalSetup
from hillinfer_model.selection import selected_count


def count(setup: RivalSetup, length: int) -> int:
    """Return k: α of the length, between the kept tokens and all, as for every system."""
    return selected_count(length, setup.alpha, setup.kept_tokens, None)


def best_tokens(setup: RivalSetup, scores: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the kept tokens and the best of the others, k of them, int64 ascending.

    Parameters
    ----------
    setup
        α and the kept tokens.
    scores
        float32, one for each token, higher is better.
    """
    length = len(scores)
    chosen = count(setup, length)
    if chosen == length:
        return np.arange(length)
    middle = scores[setup.kept_sinks : length - setup.kept_recent]
    wanted = chosen - setup.kept_tokens
    best = np.argpartition(middle, len(middle) - wanted)[len(middle) - wanted :]
    return np.concatenate(
        [
            np.arange(setup.kept_sinks),
            np.sort(best) + setup.kept_sinks,
            np.arange(length - setup.kept_recent, length),
        ]
    )


def head_logits(query: torch.Tensor, keys: torch.Tensor, scaling: float, out: torch.Tensor) -> None:
    """Compute scaled inner products in float32, keys read once for all heads that share them.

    Parameters
    ----------
    query
        (query_heads, 1, d).
    keys
        (kv_heads, tokens, d).
    scaling
        Factor on inner products.
    out
        float32 (query_heads, tokens), may be a view.
    """
    packed = query.float().reshape(keys.shape[0], -1, query.shape[-1]) * scaling
    scores = torch.matmul(packed, keys.float().transpose(1, 2))
    out.copy_(scores.reshape(out.shape))


def summed_weights(logits: torch.Tensor) -> NDArray[np.float32]:
    """Return the attention weights of each token, summed over heads; logits (heads, tokens)."""
    weights: NDArray[np.float32] = torch.softmax(logits, -1).sum(0).numpy()
    return weights


def replayed(
    setup: RivalSetup, layer: int, row: int, length: int, positions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return what a benchmark has this layer select in place of `positions`, or these."""
    return positions if setup.selections is None else setup.selections(layer, row, length)


def replayed_pages(
    setup: RivalSetup,
    layer: int,
    row: int,
    length: int,
    page_tokens: int,
    there: int,
    pages: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return in place of `pages` as many that hold the most tokens of a benchmark's selection.

    Parameters
    ----------
    setup, layer, row, length
        As for `replayed`.
    page_tokens, there
        Tokens of a page, and pages to choose from; the first is always chosen.
    pages
        Numbers of pages that the rival selected, int64 ascending.
    """
    if setup.selections is None:
        return pages
    positions = setup.selections(layer, row, length)
    held = np.bincount(positions // page_tokens, minlength=there)[:there]
    held[0] = page_tokens + 1
    # Among equals the newer page.
    order = np.lexsort((-np.arange(there), -held))
    return np.sort(order[: len(pages)])
