# SPDX-License-Identifier: Apache-2.0
"""Scores of tokens: aligned products, weights, sums and the monotone 16-bit score code."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.integers import Integers, bit_length, clamp, shift_half_up
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.key_codes import KeyCodes
from hillinfer_model.query_codes import QueryCodes

PRODUCT_LIMIT = 2**23 - 1
WEIGHT_LIMIT = 2**48 - 1
ONE_BITS = 24


def aligned_products(query: QueryCodes, keys: KeyCodes, spec: KernelSpec) -> Integers:
    """Return L', inner products in log2 units, comparable across segments (contract, section 5).

    Parameters
    ----------
    query, keys
        Codes made with the same segment's statistics.
    spec
        Shape, rule and key mode.

    Returns
    -------
    int64 of shape (H', tokens), 8 fraction bits, |L'| < 2^24. An invalid key's values follow the
    same formulas and mean nothing.
    """
    _check_shapes(query, keys, spec)
    heads_per_kv = spec.scored_heads // spec.kv_heads
    tokens = keys.codes.shape[0]
    # Every partial sum is an integer of at most 128 · 128 · 256 = 2^22, so float32 is exact in
    # any order of summation and BLAS may serve.
    left = query.codes.astype(np.float32).reshape(spec.kv_heads, heads_per_kv, spec.head_dim)
    right = keys.codes.transpose(1, 2, 0).astype(np.float32)
    products = np.matmul(left, right).astype(np.int64).reshape(spec.scored_heads, tokens)
    if spec.key_mode is KeyMode.INT2:
        products = 2 * products + query.codes.sum(axis=1, dtype=np.int64)[:, np.newaxis]

    token_exponents = keys.exponents.T.astype(np.int64).repeat(heads_per_kv, axis=0)
    shift = np.clip(query.exponents.astype(np.int64)[:, np.newaxis] + token_exponents - 6, -24, 24)
    aligned = clamp(shift_half_up(products, shift), PRODUCT_LIMIT)
    return aligned + query.corrections.astype(np.int64)[:, np.newaxis]


def weight(log_weights: Integers) -> Integers:
    """Return 2^(Z / 256) with 24 fraction bits by Mitchell's approximation (contract, section 7).

    Parameters
    ----------
    log_weights
        Z, int64 of any shape.

    Returns
    -------
    int64, 0..2^48-1; 1.0 is 2^24.
    """
    integer = log_weights >> 8
    mantissa = 256 + (log_weights & 255)
    left = mantissa << np.clip(integer + 16, 0, 39)
    right = mantissa >> np.clip(-integer - 16, 0, 63)
    finite = np.where(integer >= -16, left, right)
    return np.asarray(np.where(integer >= ONE_BITS, WEIGHT_LIMIT, finite))


def mag(values: Integers) -> Integers:
    """Return the monotone, truncating 16-bit magnitude of non-negative values (section 7).

    Parameters
    ----------
    values
        int64 of any shape, 0..2^48-1.
    """
    bits = bit_length(values)
    mantissa = (values >> np.maximum(bits - 11, 0)) & 1023
    return np.asarray(np.where(values < 1024, values, ((bits - 10) << 10) | mantissa))


def score_codes(
    aligned: Integers,
    offsets: Integers,
    invalid: NDArray[np.bool_],
    spec: KernelSpec,
    scope: Scope,
) -> NDArray[np.uint16]:
    """Return the score code of every token (contract, section 7).

    Parameters
    ----------
    aligned
        L', int64 of shape (H', tokens).
    offsets
        int64: B of shape (H',) for `weight_sum`; A of shape (1,) or (kv_heads,) for `raw_sum`.
    invalid
        bool of shape (tokens, kv_heads).
    spec, scope
        Shape and rule; what shares one selected set.

    Returns
    -------
    uint16 of shape (1, tokens) for scope `layer`, (kv_heads, tokens) for `kv_head`; 0 is invalid.

    Raises
    ------
    ValueError
        Where a shape does not fit the spec.
    """
    check_aligned(aligned, invalid, spec)
    if offsets.shape != (offset_count(spec, scope),):
        raise ValueError(
            f"offsets of shape {offsets.shape}: {spec.rule} in scope {scope} needs "
            f"({offset_count(spec, scope)},)"
        )
    if spec.rule is Rule.WEIGHT_SUM:
        weights = weight(aligned - offsets[:, np.newaxis])
        codes = 1 + mag(np.minimum(scope_sums(weights, spec, scope), WEIGHT_LIMIT))
    else:
        sums = scope_sums(aligned, spec, scope) - offsets[:, np.newaxis]
        # The other branch of the `where` sees values it must not be asked for; 0 stands in.
        above = 32768 + mag(np.maximum(sums, 0))
        below = 32767 - mag(np.maximum(-sums - 1, 0))
        codes = np.where(sums >= 0, above, below)
    return np.where(scope_invalid(invalid, scope), 0, codes).astype(np.uint16)


def offset_count(spec: KernelSpec, scope: Scope) -> int:
    """Return how many offsets a rule takes: one per scored head, or one per selected set."""
    if spec.rule is Rule.WEIGHT_SUM:
        return spec.scored_heads
    return 1 if scope is Scope.LAYER else spec.kv_heads


def scope_sums(values: Integers, spec: KernelSpec, scope: Scope) -> Integers:
    """Sum int64 (H', tokens) over the heads that share one selected set: (sets, tokens)."""
    sets = 1 if scope is Scope.LAYER else spec.kv_heads
    grouped = values.reshape(sets, spec.scored_heads // sets, values.shape[1])
    return np.asarray(grouped.sum(axis=1))


def scope_invalid(invalid: NDArray[np.bool_], scope: Scope) -> NDArray[np.bool_]:
    """Return which tokens a selected set cannot rank, from bool (tokens, kv_heads)."""
    if scope is Scope.LAYER:
        return np.asarray(invalid.any(axis=1))[np.newaxis, :]
    return invalid.T


def check_aligned(aligned: Integers, invalid: NDArray[np.bool_], spec: KernelSpec) -> None:
    """Raise ValueError where L' or the invalid marks do not have the shape the spec asks for."""
    if aligned.ndim != 2 or aligned.shape[0] != spec.scored_heads:
        raise ValueError(f"aligned products of shape {aligned.shape}, not (H', tokens)")
    if invalid.shape != (aligned.shape[1], spec.kv_heads):
        raise ValueError(
            f"invalid marks of shape {invalid.shape}, not ({aligned.shape[1]}, {spec.kv_heads})"
        )


def _check_shapes(query: QueryCodes, keys: KeyCodes, spec: KernelSpec) -> None:
    if query.codes.shape != (spec.scored_heads, spec.head_dim):
        raise ValueError(f"query codes of shape {query.codes.shape} do not fit the spec")
    if keys.codes.shape[1:] != (spec.kv_heads, spec.head_dim):
        raise ValueError(f"key codes of shape {keys.codes.shape} do not fit the spec")
