# SPDX-License-Identifier: Apache-2.0
"""Packs, ranks and splits the tuples of token position and score code."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hillinfer_model.beats import Beats, from_beats, to_beats
from hillinfer_model.score_block import ScoreBlock

WINDOW_TOKENS = 65_536
Tuples = NDArray[np.uint32]


def make_tuples(codes: NDArray[np.uint16], first_position: int) -> Tuples:
    """Join the score codes of consecutive tokens with their positions (contract, section 11).

    Parameters
    ----------
    codes
        uint16, tokens along the last axis.
    first_position
        Position of the first token.

    Returns
    -------
    uint32 of the same shape: code << 16 | low 16 bits of the position.
    """
    positions = np.arange(first_position, first_position + codes.shape[-1], dtype=np.int64)
    low_bits = (positions % WINDOW_TOKENS).astype(np.uint32)
    return (codes.astype(np.uint32) << np.uint32(16)) | low_bits


def ranking_keys(tuples: Tuples) -> Tuples:
    """Return uint32 keys that rank tuples of one window when sorted descending (section 11)."""
    return tuples ^ np.uint32(0xFFFF)


def pack_score_array(tuples: Tuples) -> Beats:
    """Return the score array of one segment (and KV head): uint8 (beats, 64), spare tuples 0."""
    return to_beats(tuples.astype("<u4").tobytes())


def unpack_score_array(block: Beats, tokens: int) -> Tuples:
    """Read a score array, uint8 (beats, 64), of a number of tokens.

    Raises
    ------
    LaunchError
        Where a spare tuple is not zero (`ErrorCode.RESERVED_NOT_ZERO`).
    ValueError
        Where the block has another size.
    """
    content = from_beats(block, 4 * tokens, "score array")
    return np.frombuffer(content, dtype="<u4").astype(np.uint32)


def cut_blocks(codes: NDArray[np.uint16], block_tokens: int) -> Iterator[ScoreBlock]:
    """Cut the score codes of a sequence into score blocks (contract, section 11).

    A block never crosses a window of 65,536 positions; the last of a window and of the sequence
    may be short. For each run of positions the KV heads' blocks follow each other.

    Parameters
    ----------
    codes
        uint16 of shape (1, N) for scope `layer`, (kv_heads, N) for `kv_head`, from position 0.
    block_tokens
        Tuples of a full block.
    """
    length = codes.shape[1]
    for window in range(0, length, WINDOW_TOKENS):
        window_end = min(window + WINDOW_TOKENS, length)
        for start in range(window, window_end, block_tokens):
            end = min(start + block_tokens, window_end)
            for kv_head, tuples in enumerate(make_tuples(codes[:, start:end], start)):
                yield ScoreBlock(kv_head, window, tuples)
