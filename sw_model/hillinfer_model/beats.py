# SPDX-License-Identifier: Apache-2.0
"""Blocks of whole 512-bit beats, the unit every launch buffer is made of."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer_model.kernel_spec import BEAT_BYTES
from hillinfer_model.launch_error import ErrorCode, LaunchError

Beats = NDArray[np.uint8]


def beat_count(nbytes: int) -> int:
    """Return the beats that hold a number of bytes."""
    return -(-nbytes // BEAT_BYTES)


def check_beats(block: Beats, name: str) -> None:
    """Raise ValueError where a buffer is not uint8 of shape (beats, 64)."""
    if block.dtype != np.uint8 or block.ndim != 2 or block.shape[1] != BEAT_BYTES:
        raise ValueError(f"{name} of {block.dtype} {block.shape}, not uint8 (beats, 64)")


def to_beats(content: bytes) -> Beats:
    """Return bytes padded with zeros to whole beats, uint8 of shape (beats, 64)."""
    block = np.zeros((beat_count(len(content)), BEAT_BYTES), dtype=np.uint8)
    block.reshape(-1)[: len(content)] = np.frombuffer(content, dtype=np.uint8)
    return block


def from_beats(block: Beats, nbytes: int, name: str) -> bytes:
    """Return the content of a block of beats, without its padding.

    Parameters
    ----------
    block
        uint8 of shape (beats, 64).
    nbytes
        Bytes of content.
    name
        What the block is, for the message.

    Raises
    ------
    ValueError
        Where the block is not exactly the beats the content needs.
    LaunchError
        Where a spare byte is not zero (`ErrorCode.RESERVED_NOT_ZERO`).
    """
    if block.dtype != np.uint8 or block.shape != (beat_count(nbytes), BEAT_BYTES):
        raise ValueError(
            f"a {name} of {block.dtype} {block.shape}, not uint8 ({beat_count(nbytes)}, 64)"
        )
    content = block.tobytes()
    if any(content[nbytes:]):
        raise LaunchError(ErrorCode.RESERVED_NOT_ZERO, f"a spare byte of a {name} is not zero")
    return content[:nbytes]
