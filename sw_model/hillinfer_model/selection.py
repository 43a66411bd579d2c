# SPDX-License-Identifier: Apache-2.0
"""Selects tokens by their score codes (HillInfer section 4.2)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def selected_count(length: int, alpha: float, kept: int, max_selected: int | None) -> int:
    """Return how many tokens are selected: α of the length, between the kept ones and all.

    Parameters
    ----------
    length
        N, tokens to select from.
    alpha
        Importance rate, in (0, 1].
    kept
        Number of kept tokens; one more than these is always selected.
    max_selected
        Upper bound that α gives way to, or None.

    Raises
    ------
    ValueError
        Where a value is outside its range; the message names it.
    """
    _require_at_least("length", length, 0)
    _require_at_least("kept", kept, 0)
    if not 0.0 < alpha <= 1.0:
        raise ValueError(f"alpha={alpha} is outside (0, 1]; 0.1 selects a tenth of the tokens")
    wanted = math.floor(float(alpha) * float(length) + 0.5)
    if max_selected is not None:
        _require_at_least("max_selected", max_selected, 1)
        wanted = min(max_selected, wanted)
    return min(length, max(kept + 1, wanted))


def exact_count(length: int, share: float, floor: int, kept: int, selected: int) -> int:
    """Return how many of the selected tokens are exact (contract, section 15).

    Parameters
    ----------
    length
        N, tokens that the set was selected from.
    share
        Exact share of them, in 0..1.
    floor
        Tokens that are exact at least.
    kept
        Number of kept tokens among them, which are always exact.
    selected
        k, tokens of the set.

    Raises
    ------
    ValueError
        Where a value is outside its range; the message names it.
    """
    _require_at_least("length", length, 0)
    _require_at_least("floor", floor, 0)
    _require_at_least("kept", kept, 0)
    _require_at_least("selected", selected, 0)
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share={share} is outside 0..1; 0.02 reads a fiftieth as rows")
    wanted = int(float(share) * float(length) + 0.5)
    return min(selected, max(kept, floor, wanted))


def kept_positions(length: int, sinks: int, recent: int) -> NDArray[np.int64]:
    """Return the positions that are always selected, int64 ascending.

    Parameters
    ----------
    length
        N, tokens to select from.
    sinks, recent
        How many of the first and of the most recent tokens are kept.

    Raises
    ------
    ValueError
        Where a value is negative.
    """
    _require_at_least("length", length, 0)
    _require_at_least("sinks", sinks, 0)
    _require_at_least("recent", recent, 0)
    head = min(sinks, length)
    tail = max(length - recent, head)
    return np.concatenate(
        (np.arange(head, dtype=np.int64), np.arange(tail, length, dtype=np.int64))
    )


def select_positions(
    codes: NDArray[np.uint16], count: int, kept: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the selected positions, int64 of shape (count,), ascending.

    The kept tokens are inside; the others are the best by score code descending, position
    ascending (contract, section 8).

    Parameters
    ----------
    codes
        uint16 of shape (N,): score codes by position; 0 (invalid) ranks last.
    count
        Tokens to select, kept ones included.
    kept
        int64, distinct positions.

    Raises
    ------
    ValueError
        Where `count` is smaller than the kept tokens or larger than N, or where a kept position
        is not one of the N or comes twice.
    """
    if codes.ndim != 1 or codes.dtype != np.uint16:
        raise ValueError(f"codes are {codes.dtype} of shape {codes.shape}, not uint16 of (N,)")
    length = codes.shape[0]
    if kept.size and (kept.min() < 0 or kept.max() >= length):
        raise ValueError(f"a kept position lies outside 0..{length - 1}; give every token a code")
    selected = np.zeros(length, dtype=np.bool_)
    selected[kept] = True
    free = np.flatnonzero(~selected)
    if length - free.size != kept.size:
        raise ValueError("a kept position comes twice; pass each once")
    if not kept.size <= count <= length:
        raise ValueError(f"count={count} is outside {kept.size} (kept tokens)..{length} (tokens)")
    # Stable, over ascending positions: ties fall to the lower position.
    order = np.argsort(np.uint16(65535) - codes[free], kind="stable")
    selected[free[order[: count - kept.size]]] = True
    return np.flatnonzero(selected).astype(np.int64)


def _require_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}={value} is below {least}; pass {least} or more")
