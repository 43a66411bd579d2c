# SPDX-License-Identifier: Apache-2.0
"""What a store holds of a chunk in one layer beside its rows: codes, statistics, checksums."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import PAGE_BYTES, round_up
from hillinfer.shadow.store import shadow_bytes
from hillinfer.store.keys import CHUNK_TOKENS
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import KernelSpec


@dataclass(frozen=True)
class StoredShadow:
    """The shadow of a chunk in one layer.

    Parameters
    ----------
    codes
        uint8 (segment_beats, 64).
    statistics
        By which they were made.
    sums
        uint32 (1024,), a checksum of every row: rows that are read singly are known by it.
    """

    codes: NDArray[np.uint8]
    statistics: ChannelStatistics
    sums: NDArray[np.uint32]


class ShadowSlot:
    """Where codes, statistics and checksums of rows lie in the shadow that a store has of a layer.

    Parameters
    ----------
    spec
        Fixes sizes; its segments are chunks.
    """

    def __init__(self, spec: KernelSpec) -> None:
        if spec.segment_tokens != CHUNK_TOKENS:
            raise ValueError(f"segments of {spec.segment_tokens} tokens are no chunks of a store")
        self._heads = spec.kv_heads, spec.head_dim
        self._codes = spec.segment_bytes
        channels = spec.kv_heads * spec.head_dim
        self._exponents = shadow_bytes(spec)
        self._means = self._exponents + round_up(channels, 4)
        self._sums = self._means + 4 * channels
        self.byte_count = round_up(self._sums + 4 * CHUNK_TOKENS, PAGE_BYTES)

    def pack(self, shadow: StoredShadow, out: NDArray[np.uint8]) -> None:
        """Fill uint8 (byte_count,)."""
        out[:] = 0
        out[: self._codes] = shadow.codes.reshape(-1)[: self._codes]
        for at, part in (
            (self._exponents, shadow.statistics.exponents),
            (self._means, shadow.statistics.means.astype("<i4")),
            (self._sums, shadow.sums.astype("<u4")),
        ):
            flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            out[at : at + len(flat)] = flat

    def unpack(self, data: NDArray[np.uint8]) -> StoredShadow:
        """Return what uint8 (byte_count,) holds; codes and checksums are views."""
        channels = self._heads[0] * self._heads[1]
        exponents = data[self._exponents : self._exponents + channels].view(np.int8)
        means = data[self._means : self._sums].view("<i4").astype(np.int32)
        sums = data[self._sums : self._sums + 4 * CHUNK_TOKENS].view("<u4")
        statistics = ChannelStatistics(
            exponents.reshape(self._heads).copy(), means.reshape(self._heads)
        )
        return StoredShadow(data[: self._codes], statistics, sums)
