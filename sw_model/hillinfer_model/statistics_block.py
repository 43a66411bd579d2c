# SPDX-License-Identifier: Apache-2.0
"""Packs channel statistics into the block that a kernel reads."""

from __future__ import annotations

import numpy as np

from hillinfer_model.beats import Beats, from_beats, to_beats
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.launch_error import ErrorCode, LaunchError


def pack_statistics(statistics: ChannelStatistics, spec: KernelSpec) -> Beats:
    """Pack statistics: per KV head and padded channel c in bits 31:24, M in 23:0 (section 10).

    Parameters
    ----------
    statistics
        Of shape (kv_heads, head_dim).
    spec
        Shape.

    Returns
    -------
    uint8 of shape (beats, 64).

    Raises
    ------
    ValueError
        Where the shape does not fit the spec or a mean does not fit 24 bits.
    """
    if statistics.means.shape != (spec.kv_heads, spec.head_dim):
        raise ValueError(f"statistics of shape {statistics.means.shape} do not fit the spec")
    if np.any(np.abs(statistics.means.astype(np.int64)) >= 2**23):
        raise ValueError("a channel mean does not fit signed 24 bits")
    words = np.zeros((spec.kv_heads, spec.padded_head_dim), dtype="<i4")
    exponents = statistics.exponents.astype(np.int32) << 24
    words[:, : spec.head_dim] = exponents | (statistics.means & 0xFF_FFFF)
    return to_beats(words.tobytes())


def unpack_statistics(block: Beats, spec: KernelSpec) -> ChannelStatistics:
    """Undo `pack_statistics`.

    Raises
    ------
    LaunchError
        Where a padding channel is not zero (`ErrorCode.RESERVED_NOT_ZERO`).
    ValueError
        Where the block has another size.
    """
    shape = (spec.kv_heads, spec.padded_head_dim)
    content = from_beats(block, 4 * shape[0] * shape[1], "statistics block")
    words = np.frombuffer(content, dtype="<i4").astype(np.int32).reshape(shape)
    if np.any(words[:, spec.head_dim :]):
        raise LaunchError(ErrorCode.RESERVED_NOT_ZERO, "statistics of a padding channel, not 0")
    own = words[:, : spec.head_dim]
    return ChannelStatistics((own >> 24).astype(np.int8), (own << 8) >> 8)
