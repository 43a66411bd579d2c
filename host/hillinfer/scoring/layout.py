# SPDX-License-Identifier: Apache-2.0
"""Where codes and exponents lie in a segment's shadow (scoring contract, section 9)."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import BEAT_BYTES, GROUP_TOKENS, SLICE_CHANNELS, KernelSpec
from hillinfer_model.offsets import PROBE_STRIDE, RECENT_TOKENS
from hillinfer_model.statistics import SINK_TOKENS

# --- Memory that one call works in ---

# A plan must not depend on the machine that makes it.
_THREADS = 64


def scratch_bytes(spec: KernelSpec) -> int:
    """Return an upper bound of what one call takes in memory, in bytes, with up to 64 threads.

    Holds for coding and scoring, apart from what grows with the number of tokens
    (`score_bytes_per_token`).
    """
    rows = spec.scored_heads
    # Query codes, products, L' and numbers of each row; a group of probe tokens.
    thread = rows * (spec.padded_head_dim + GROUP_TOKENS * (4 + 4) + 16)
    thread += spec.group_beats * BEAT_BYTES + 5 * BEAT_BYTES
    recent = (SINK_TOKENS + RECENT_TOKENS) * _sample_bytes(spec)
    # The scaled query.
    return _THREADS * thread + recent + _query_bytes(spec) + rows * spec.padded_head_dim * 4


def score_bytes_per_token(spec: KernelSpec, scope: Scope) -> int:
    """Return an upper bound of the bytes per token that a call holds until its end.

    L' of every scored head (int32) and the exponent of every KV head, where shadows come from the
    drive; tuple (uint32) and selected position (int64) of every set; the share of the probe tokens
    that the offsets come from, and that of the segment's query codes. A last group counts as full.
    """
    sets = 1 if scope is Scope.LAYER else spec.kv_heads
    sample = -(-_sample_bytes(spec) // PROBE_STRIDE)
    queries = -(-_query_bytes(spec) // spec.segment_tokens)
    return 4 * spec.scored_heads + spec.kv_heads + (4 + 8) * sets + sample + queries


def _sample_bytes(spec: KernelSpec) -> int:
    # L' of one token, and whether it is invalid.
    return 4 * spec.scored_heads + spec.kv_heads


def _query_bytes(spec: KernelSpec) -> int:
    # Of one segment: its codes, and as kernels read them; exponents, corrections, sums, addends.
    return spec.scored_heads * (3 * spec.padded_head_dim + 32)


# --- A segment's shadow ---

# One token's 16 codes of one slice are 16, 8 or 4 bytes and move as one element.
_SLICE_TYPES: dict[int, type[np.generic]] = {8: np.complex128, 4: np.int64, 2: np.int32}


class ShadowLayout:
    """Views of a segment's shadow by group, tile, KV head, slice and token (contract, section 9).

    Parameters
    ----------
    spec
        Shape and key mode; FP16 mode has the layout of its INT8 codes.

    Attributes
    ----------
    slices
        16-channel slices of one padded head.
    """

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.slices = spec.padded_head_dim // SLICE_CHANNELS
        self._slice_type = _SLICE_TYPES[spec.key_mode.code_bits]
        self._group_shape = (-1, spec.group_beats, BEAT_BYTES)
        self._shadow_shape = (spec.segment_beats, BEAT_BYTES)
        self._tile_tokens = spec.tile_tokens
        tiles = GROUP_TOKENS // spec.tile_tokens
        self._code_shape = (-1, tiles, spec.kv_heads, self.slices, spec.tile_tokens)

    def check(self, shadow: NDArray[np.uint8]) -> None:
        """Raise ValueError where an array is no shadow of one segment."""
        if (
            shadow.dtype != np.uint8
            or shadow.shape != self._shadow_shape
            or not shadow.flags.c_contiguous
        ):
            raise ValueError(
                f"a segment's shadow is contiguous uint8 of shape {self._shadow_shape}, not "
                f"{shadow.dtype} of shape {shadow.shape}"
            )

    def exponents(self, shadow: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return a view of the exponents of whole groups, uint8 (groups, kv_heads, 64)."""
        return shadow.reshape(self._group_shape)[:, : self.spec.kv_heads]

    def slice_codes(self, shadow: NDArray[np.uint8]) -> NDArray[Any]:
        """Return a view of the codes of whole groups, one element for 16 codes of one token.

        Elements are complex128, int64 or int32 for INT8, INT4 and INT2: types of the right size,
        never read as numbers. Shape (groups, tiles, kv_heads, slices, tile_tokens).
        """
        groups = shadow.reshape(self._group_shape).view(self._slice_type)
        return groups[:, self.spec.kv_heads :].reshape(self._code_shape)

    def copy_tokens(
        self,
        source: NDArray[np.uint8],
        from_tokens: NDArray[np.int64],
        target: NDArray[np.uint8],
        to_tokens: NDArray[np.int64],
    ) -> None:
        """Copy codes and exponents of some tokens from one shadow into another.

        Parameters
        ----------
        source, target
            uint8 of shape (groups · group_beats, 64).
        from_tokens, to_tokens
            Their indices there, equally many.
        """
        group, tile, in_tile, in_group = self._places(from_tokens)
        codes = self.slice_codes(source)[group, tile, :, :, in_tile]
        exponents = self.exponents(source)[group, :, in_group]
        group, tile, in_tile, in_group = self._places(to_tokens)
        self.slice_codes(target)[group, tile, :, :, in_tile] = codes
        self.exponents(target)[group, :, in_group] = exponents

    def _places(
        self, tokens: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return group, tile in it, token in the tile and token in the group."""
        group, in_group = tokens // GROUP_TOKENS, tokens % GROUP_TOKENS
        return group, in_group // self._tile_tokens, in_group % self._tile_tokens, in_group


# --- Probe tokens ---


class ProbeShadow:
    """Codes and exponents of a segment's probe tokens, and of the sinks where it has them.

    They lie in whole groups of their own, laid out as the segment's (contract, section 9): first
    every 16th token, then sinks 1 to 3.

    Parameters
    ----------
    number
        Of the segment: number 0 has the sinks.

    Attributes
    ----------
    tokens
        Ascending indices within the segment, in the order of the groups but for the sinks.
    shadow
        uint8 of shape (groups · group_beats, 64).
    """

    def __init__(self, layout: ShadowLayout, number: int) -> None:
        self._layout = layout
        self.tokens = _kept_tokens(layout.spec, number)
        self.shadow = np.zeros((_beats(layout.spec, number), BEAT_BYTES), dtype=np.uint8)

    @classmethod
    def of(cls, layout: ShadowLayout, number: int, shadow: NDArray[np.uint8]) -> ProbeShadow:
        """Return the probe tokens of a full segment.

        Parameters
        ----------
        layout, number
            As for the class.
        shadow
            The segment's, uint8 of shape (segment_beats, 64).
        """
        made = cls(layout, number)
        made.take(shadow, 0, layout.spec.segment_tokens)
        return made

    def take(self, shadow: NDArray[np.uint8], first_token: int, stop: int) -> None:
        """Copy the tokens first_token <= index < stop that are kept out of a segment's shadow."""
        places = np.flatnonzero((self.tokens >= first_token) & (self.tokens < stop))
        self._layout.copy_tokens(shadow, self.tokens[places], self.shadow, places)

    @property
    def groups(self) -> int:
        """Groups that its tokens fill."""
        return self.shadow.shape[0] // self._layout.spec.group_beats


def probe_bytes(spec: KernelSpec, number: int) -> int:
    """Return the bytes of the probe shadow of the segment of some number."""
    return _beats(spec, number) * BEAT_BYTES


def _kept_tokens(spec: KernelSpec, number: int) -> NDArray[np.int64]:
    return _kept_places(spec.segment_tokens, min(number, 1))


@cache
def _kept_places(segment_tokens: int, number: int) -> NDArray[np.int64]:
    # A long prompt that is opened asks hundreds of times.
    sinks = range(0 if number else 1, 0 if number else SINK_TOKENS)
    tokens = np.array([*range(0, segment_tokens, PROBE_STRIDE), *sinks], np.int64)
    tokens.flags.writeable = False
    return tokens


def _beats(spec: KernelSpec, number: int) -> int:
    return -(-_kept_tokens(spec, number).size // GROUP_TOKENS) * spec.group_beats
