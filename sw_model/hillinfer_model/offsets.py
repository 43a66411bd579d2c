# SPDX-License-Identifier: Apache-2.0
"""Computes the offsets of scores from reference tokens that are chosen by position."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer_model.choices import Rule, Scope
from hillinfer_model.integers import Integers, bit_length
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.scores import check_aligned, scope_invalid, scope_sums, weight
from hillinfer_model.statistics import SINK_TOKENS

RECENT_TOKENS = 256
PROBE_STRIDE = 16
# Below every L', whose magnitude is less than 2^24.
_BELOW_ALL = -(2**24)


def reference_positions(length: int, coming: int = 0) -> tuple[Integers, Integers]:
    """Return the tokens that offsets are taken from (contract, section 6).

    Parameters
    ----------
    length
        The tokens that are scored.
    coming
        Tokens that N counts beside them and that have no key yet: 1 where the query is predicted.

    Returns
    -------
    recent
        R, int64 ascending: the first 4 and the most recent 256 positions, each once.
    probes
        Φ, int64 ascending: the positions that are multiples of 16 and not in R.
    """
    if length < 0:
        raise ValueError(f"length={length} is negative")
    if coming not in (0, 1):
        raise ValueError(f"coming={coming}: one token comes at a time, or none")
    first_recent = max(length + coming - RECENT_TOKENS, min(SINK_TOKENS, length))
    recent = np.concatenate(
        (
            np.arange(min(SINK_TOKENS, length), dtype=np.int64),
            np.arange(first_recent, length, dtype=np.int64),
        )
    )
    # Position 0 is a sink, so the first probe is 16.
    probes = np.arange(PROBE_STRIDE, first_recent, PROBE_STRIDE, dtype=np.int64)
    return recent, probes


def offsets(
    aligned: Integers,
    invalid: NDArray[np.bool_],
    spec: KernelSpec,
    scope: Scope,
    coming: int = 0,
) -> Integers:
    """Return the offsets of a sequence from all its aligned products (contract, section 6).

    Parameters
    ----------
    aligned
        L', int64 of shape (H', N), positions ascending from 0.
    invalid
        bool of shape (N, kv_heads).
    spec, scope
        Shape and rule; what shares one selected set.
    coming
        As for `reference_positions`.

    Returns
    -------
    int64: B of shape (H',) for `weight_sum`; A of shape (1,) or (kv_heads,) for `raw_sum`.
    """
    check_aligned(aligned, invalid, spec)
    recent, probes = reference_positions(aligned.shape[1], coming)
    return offsets_from_references(
        aligned[:, recent], invalid[recent], aligned[:, probes], invalid[probes], spec, scope
    )


def offsets_from_references(
    aligned_recent: Integers,
    invalid_recent: NDArray[np.bool_],
    aligned_probes: Integers,
    invalid_probes: NDArray[np.bool_],
    spec: KernelSpec,
    scope: Scope,
) -> Integers:
    """Return the offsets from the reference tokens alone (contract, section 6).

    Parameters
    ----------
    aligned_recent, aligned_probes
        L' of R and of Φ, int64 of shape (H', tokens).
    invalid_recent, invalid_probes
        bool of shape (tokens, kv_heads).
    spec, scope
        As for `offsets`, which says what is returned.
    """
    check_aligned(aligned_recent, invalid_recent, spec)
    check_aligned(aligned_probes, invalid_probes, spec)
    aligned = np.concatenate((aligned_recent, aligned_probes), axis=1)
    invalid = np.concatenate((invalid_recent, invalid_probes), axis=0)
    if spec.rule is Rule.RAW_SUM:
        return _means(scope_sums(aligned, spec, scope), ~scope_invalid(invalid, scope))
    multiplicity = np.ones(aligned.shape[1], dtype=np.int64)
    # A probe token stands for the 16 tokens it is one of.
    multiplicity[aligned_recent.shape[1] :] = PROBE_STRIDE
    counted = ~invalid.T.repeat(spec.group_size, axis=0)
    return _log_sums(aligned, multiplicity, counted)


def _means(sums: Integers, counted: NDArray[np.bool_]) -> Integers:
    """Return the floor of the mean of each row over its counted tokens, 0 where none is."""
    total = np.where(counted, sums, 0).sum(axis=1)
    return np.asarray(total // np.maximum(counted.sum(axis=1), 1))


def _log_sums(aligned: Integers, multiplicity: Integers, counted: NDArray[np.bool_]) -> Integers:
    """Return log2 of each row's sum of weights over its counted tokens, 0 where none is."""
    top = np.where(counted, aligned, _BELOW_ALL).max(axis=1, initial=_BELOW_ALL)
    weights = np.where(counted, weight(aligned - top[:, np.newaxis]), 0)
    total = (weights * multiplicity).sum(axis=1)
    bits = bit_length(total)
    fraction = (total >> np.maximum(bits - 9, 0)) & 255
    return np.asarray(np.where(total > 0, top + ((bits - 25) << 8) + fraction, 0))
