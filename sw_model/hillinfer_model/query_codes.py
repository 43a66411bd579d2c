# SPDX-License-Identifier: Apache-2.0
"""Query codes: a query scaled into log2 units and quantised for one segment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import Rule
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.integers import clamp, shift_half_up
from hillinfer_model.kernel_spec import KernelSpec

LOG2_E = 1.4426950408889634
CODE_LIMIT = 127
CORRECTION_LIMIT = 2**23 - 1


@dataclass(frozen=True)
class QueryCodes:
    """A layer's query heads, quantised relative to one segment (contract, section 4).

    H' below is `KernelSpec.scored_heads`: every query head, or for `raw_sum` one per KV head.

    Parameters
    ----------
    codes
        int8 of shape (H', head_dim), -127..127.
    exponents
        int8 of shape (H',): s, so that a code's unit is 2^s.
    corrections
        int32 of shape (H',): o, the mean correction in log2 units with 8 fraction bits.
    """

    codes: NDArray[np.int8]
    exponents: NDArray[np.int8]
    corrections: NDArray[np.int32]

    def __post_init__(self) -> None:
        """Refuse other types, shapes that do not belong together, and the code -128."""
        types = [array.dtype.name for array in (self.codes, self.exponents, self.corrections)]
        if types != ["int8", "int8", "int32"]:
            raise ValueError(f"query codes need int8, int8 and int32, not {', '.join(types)}")
        heads = self.codes.shape[:1]
        if self.codes.ndim != 2 or not heads == self.exponents.shape == self.corrections.shape:
            raise ValueError(
                f"query codes need shapes (heads, head_dim), (heads,) and (heads,), not "
                f"{self.codes.shape}, {self.exponents.shape} and {self.corrections.shape}"
            )
        # Two INT8 products share one multiplier in hardware only while |code| <= 127.
        if np.any(self.codes < -CODE_LIMIT):
            raise ValueError("a query code is -128, which the contract excludes")


def encode_query(
    query: NDArray[np.float32], statistics: ChannelStatistics, scaling: float, spec: KernelSpec
) -> QueryCodes:
    """Quantise a layer's query for one segment (contract, section 4).

    Parameters
    ----------
    query
        float32 of shape (query_heads, head_dim), after rotary embedding.
    statistics
        The segment's.
    scaling
        What the attention function multiplies inner products with.
    spec
        Shape and rule.

    Raises
    ------
    NonFiniteQueryError
        Where the query holds an infinity or a NaN, or becomes one when summed or scaled.
    ValueError
        Where a shape does not fit the spec.
    """
    return encode_scaled_query(scale_query(query, scaling, spec), statistics, spec)


def scale_query(
    query: NDArray[np.float32], scaling: float, spec: KernelSpec
) -> NDArray[np.float32]:
    """Return q', the query in log2 units, the same for every segment (contract, section 4).

    Parameters
    ----------
    query, scaling, spec
        As for `encode_query`, whose errors it raises.

    Returns
    -------
    float32 of shape (H', head_dim); for `raw_sum` one sum of queries per KV head.
    """
    heads = np.asarray(query, dtype=np.float32)
    if heads.shape != (spec.query_heads, spec.head_dim):
        raise ValueError(
            f"a query of shape {heads.shape} does not fit the spec's "
            f"({spec.query_heads}, {spec.head_dim})"
        )
    _require_finite(heads, "the query holds")
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if spec.rule is Rule.RAW_SUM:
            heads = _group_sums(heads, spec)
        scaled = heads * np.float32(scaling * LOG2_E)
    _require_finite(scaled, f"the query scaled by {scaling} holds")
    return scaled


def encode_scaled_query(
    scaled: NDArray[np.float32], statistics: ChannelStatistics, spec: KernelSpec
) -> QueryCodes:
    """Quantise what `scale_query` returned for one segment (contract, section 4).

    Parameters
    ----------
    scaled
        float32 of shape (H', head_dim), finite.
    statistics, spec
        As for `encode_query`.
    """
    if statistics.means.shape != (spec.kv_heads, spec.head_dim):
        raise ValueError(
            f"statistics of shape {statistics.means.shape} do not fit the spec's "
            f"({spec.kv_heads}, {spec.head_dim})"
        )
    heads_per_kv = spec.scored_heads // spec.kv_heads
    channel_exponents = statistics.exponents.astype(np.int32).repeat(heads_per_kv, axis=0)
    means = statistics.means.astype(np.int64).repeat(heads_per_kv, axis=0)

    # float64 from here: every power-of-two scaling of a float32 is exact in it.
    weighted = np.ldexp(scaled.astype(np.float64), channel_exponents)
    peak_exponents = np.frexp(np.abs(weighted).max(axis=1))[1]
    exponents = np.clip(peak_exponents - 7, -128, 127)
    codes = np.clip(np.rint(np.ldexp(weighted, -exponents[:, np.newaxis])), -CODE_LIMIT, CODE_LIMIT)

    sums = (codes.astype(np.int64) * means).sum(axis=1)
    shift = np.clip(exponents.astype(np.int64) - 6, -40, 24)
    corrections = clamp(shift_half_up(sums, shift), CORRECTION_LIMIT)
    return QueryCodes(
        codes.astype(np.int8), exponents.astype(np.int8), corrections.astype(np.int32)
    )


def _group_sums(heads: NDArray[np.float32], spec: KernelSpec) -> NDArray[np.float32]:
    """Return the sum of every KV head's queries, heads ascending, rounded once to float32."""
    groups = heads.astype(np.float64).reshape(spec.kv_heads, spec.group_size, spec.head_dim)
    total = groups[:, 0]
    # A written-out order: a pairwise sum would round differently in float64.
    for member in range(1, spec.group_size):
        total = total + groups[:, member]
    return total.astype(np.float32)


def _require_finite(values: NDArray[np.float32], where: str) -> None:
    if not np.isfinite(values).all():
        raise NonFiniteQueryError(f"{where} an infinity or a NaN; check the model's activations")
