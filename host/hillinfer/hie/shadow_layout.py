# SPDX-License-Identifier: Apache-2.0
"""Where codes and exponents lie in a segment's shadow (scoring contract, section 5)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hillinfer_model.kernel_spec import BEAT_BYTES, GROUP_TOKENS, SLICE_CHANNELS, KernelSpec

# One token's 16 codes of one slice are 16, 8 or 4 bytes and move as one element.
_SLICE_TYPES: dict[int, type[np.generic]] = {8: np.complex128, 4: np.int64, 2: np.int32}


class ShadowLayout:
    """Views of a segment's shadow by group, tile, KV head, slice and token (contract, section 5).

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
