# SPDX-License-Identifier: Apache-2.0
"""Packs query codes, exponents and offsets into the query block that a kernel reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hillinfer_model.beats import Beats, beat_count, from_beats, to_beats
from hillinfer_model.choices import Rule, Scope
from hillinfer_model.integers import Integers
from hillinfer_model.kernel_spec import BEAT_BYTES, SLICE_CHANNELS, KernelSpec
from hillinfer_model.launch_error import ErrorCode, LaunchError
from hillinfer_model.query_codes import QueryCodes
from hillinfer_model.scores import offset_count


@dataclass(frozen=True)
class QueryBlock:
    """What a query block tells a kernel about one segment (contract, section 10).

    Parameters
    ----------
    addends
        int32 of shape (H',): what the kernel adds to each head's L; o - B for `weight_sum`, o
        minus the A that falls to this head for `raw_sum`.
    exponents
        int8 of shape (H',): s.
    codes
        int8 of shape (H', head_dim).
    """

    addends: NDArray[np.int32]
    exponents: NDArray[np.int8]
    codes: NDArray[np.int8]

    def pack(self, spec: KernelSpec) -> Beats:
        """Return the block as uint8 of shape (beats, 64)."""
        parts = (
            self.addends.astype("<i4").tobytes(),
            self.exponents.tobytes(),
            _slice_order(self.codes, spec).tobytes(),
        )
        return np.concatenate([to_beats(part) for part in parts])

    @classmethod
    def unpack(cls, block: Beats, spec: KernelSpec) -> QueryBlock:
        """Read a block of uint8 (beats, 64).

        Raises
        ------
        LaunchError
            Where a spare byte or a padding channel is not zero (`ErrorCode.RESERVED_NOT_ZERO`).
        ValueError
            Where the block has another size.
        """
        heads = spec.scored_heads
        sizes = (4 * heads, heads, heads * spec.padded_head_dim)
        ends = np.cumsum([beat_count(size) for size in sizes])
        if block.shape != (ends[-1], BEAT_BYTES):
            raise ValueError(f"a query block of shape {block.shape}, not ({ends[-1]}, 64)")
        addends, exponents, codes = (
            from_beats(part, size, "query block")
            for part, size in zip(np.split(block, ends[:-1]), sizes, strict=True)
        )
        padded = _head_order(np.frombuffer(codes, dtype=np.int8), spec)
        if np.any(padded[:, spec.head_dim :]):
            raise LaunchError(ErrorCode.RESERVED_NOT_ZERO, "a padding channel's code is not 0")
        return cls(
            np.frombuffer(addends, dtype="<i4").astype(np.int32),
            np.frombuffer(exponents, dtype=np.int8),
            padded[:, : spec.head_dim],
        )


def make_query_block(
    query: QueryCodes, offsets: Integers, spec: KernelSpec, scope: Scope
) -> QueryBlock:
    """Join a segment's query codes with the sequence's offsets (contract, sections 6 and 10).

    Parameters
    ----------
    query
        Codes for the segment.
    offsets
        int64: B of shape (H',) for `weight_sum`; A of shape (1,) or (kv_heads,) for `raw_sum`.
    spec, scope
        Shape and rule; what shares one selected set.

    Raises
    ------
    ValueError
        Where a shape does not fit the spec, or an addend does not fit int32.
    """
    if query.codes.shape != (spec.scored_heads, spec.head_dim):
        raise ValueError(f"query codes of shape {query.codes.shape} do not fit the spec")
    if offsets.shape != (offset_count(spec, scope),):
        raise ValueError(f"offsets of shape {offsets.shape}, not ({offset_count(spec, scope)},)")
    addends = query.corrections.astype(np.int64)
    if spec.rule is Rule.RAW_SUM and scope is Scope.LAYER:
        # A is subtracted once from a sum over all heads: head 0 carries it.
        addends[0] -= offsets[0]
    else:
        addends -= offsets
    if np.any(addends != addends.astype(np.int32)):
        raise ValueError("a correction minus its offset does not fit int32")
    return QueryBlock(addends.astype(np.int32), query.exponents, query.codes)


def _slice_order(codes: NDArray[np.int8], spec: KernelSpec) -> NDArray[np.int8]:
    """Return codes as (kv_heads, slices, query heads of a KV head, 16), padding channels 0."""
    padded = np.zeros((spec.scored_heads, spec.padded_head_dim), dtype=np.int8)
    padded[:, : spec.head_dim] = codes
    return padded.reshape(spec.kv_heads, -1, _slices(spec), SLICE_CHANNELS).transpose(0, 2, 1, 3)


def _head_order(codes: NDArray[np.int8], spec: KernelSpec) -> NDArray[np.int8]:
    """Undo `_slice_order`: (H', padded_head_dim)."""
    ordered = codes.reshape(spec.kv_heads, _slices(spec), -1, SLICE_CHANNELS)
    return ordered.transpose(0, 2, 1, 3).reshape(spec.scored_heads, spec.padded_head_dim)


def _slices(spec: KernelSpec) -> int:
    return spec.padded_head_dim // SLICE_CHANNELS
