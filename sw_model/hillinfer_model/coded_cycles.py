# SPDX-License-Identifier: Apache-2.0
"""Cycles of a launch that attends to coded tokens on a card (a model; no such kernel exists).

A launch reads what scoring kept, L' of the coded tokens, then their exponents and code rows, in
blocks of 64 tokens of a segment. A block lies in a buffer before it is summed, one KV head after
the other: R and U are maxima over the block, and sums of one KV head then stay in registers.
Ports and memory behave as in `cycle_model`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hillinfer_model import kernel_timing as timing
from hillinfer_model.beats import beat_count
from hillinfer_model.coded_attention import BLOCK_TOKENS
from hillinfer_model.cycle_count import CycleCount
from hillinfer_model.kernel_spec import BEAT_BYTES, GROUP_TOKENS, KernelSpec
from hillinfer_model.key_stream import KeyStream
from hillinfer_model.latencies import Latencies
from hillinfer_model.launch_shape import statistics_beats
from hillinfer_model.memory_model import BURST_BEATS, MemoryModel
from hillinfer_model.value_layout import code_row_bytes

# Bytes of L', of a head's R, W and mark, and of an output channel.
PRODUCT_BYTES = 4
HEAD_BYTES = 16
OUTPUT_BYTES = 4
# Output channels that are finished, and merged, per cycle.
OUTPUT_LANES = 8
# Stages of the parts in `hw/partial_softmax`: weights twice, sums, outputs, merging.
DEPTH = 2 * 6 + 4 + 9 + 6


class Banks(StrEnum):
    """How many memory banks a card has; with two, L' lies apart from the value shadow."""

    ONE = "one"
    TWO = "two"


def product_beats(tokens: int, spec: KernelSpec) -> int:
    """Return the beats of L' of consecutive tokens, all query heads."""
    return beat_count(PRODUCT_BYTES * spec.query_heads * tokens)


def partial_beats(spec: KernelSpec) -> int:
    """Return the beats of one partial softmax of a layer: R, W, marks and O of every query head."""
    return beat_count(HEAD_BYTES * spec.query_heads) + beat_count(
        OUTPUT_BYTES * spec.query_heads * spec.head_dim
    )


def block_count(segments: Sequence[NDArray[np.int64]]) -> int:
    """Return the blocks of 64 that coded tokens of segments are cut into (contract, section 16)."""
    return sum(-(-len(tokens) // BLOCK_TOKENS) for tokens in segments)


def attend_cycles(
    spec: KernelSpec,
    segments: Sequence[NDArray[np.int64]],
    memory: MemoryModel,
    banks: Banks,
    answers: int = 1,
) -> CycleCount:
    """Return the modelled cycles and beats of attending to a layer's coded tokens.

    Parameters
    ----------
    spec
        The model's shape.
    segments
        Coded tokens' places in each segment, ascending.
    memory
        How each bank behaves.
    banks
        Of the card.
    answers
        Partial softmaxes that are written: 1, or one for each block.
    """
    latencies = Latencies(memory)
    start = float(timing.REFRESH_PHASE) if memory.refresh[0] else 0.0
    values = KeyStream(memory, latencies)
    products = values if banks is Banks.ONE else KeyStream(memory, latencies)
    listed = beat_count(-(-sum(spec.segment_tokens for _ in segments) // 8))
    command = start + timing.START + timing.READ_COMMAND + latencies.usual_read() + timing.READ_DATA
    values.steal(listed)
    loads, codes = listed, 0
    summed = finished = before = command
    for tokens in segments:
        values.steal(statistics_beats(spec) + 1)
        loads += statistics_beats(spec) + 1
        values.open_segment(command, command)
        products.open_segment(command, command)
        for first in range(0, len(tokens), BLOCK_TOKENS):
            block = tokens[first : first + BLOCK_TOKENS]
            for run in _runs(block):
                for beats in _bursts(product_beats(run, spec)):
                    products.burst(beats, 0.0)
            for _ in np.unique(block // GROUP_TOKENS):
                values.burst(spec.kv_heads, 0.0)
            for run in _runs(block):
                row_beats = beat_count(run * code_row_bytes(spec))
                codes += row_beats
                for beats in _bursts(row_beats):
                    # Two blocks have room: one is summed while the next one comes in.
                    values.burst(beats, before)
            before = summed
            there = max(values.computed, products.computed)
            summed = max(summed, there) + beat_count(len(block) * code_row_bytes(spec))
            outputs = spec.query_heads * spec.head_dim // OUTPUT_LANES
            finished = max(finished, summed) + outputs
            if answers > 1:
                values.steal(partial_beats(spec))
    written = answers * partial_beats(spec) + 1
    # Answers of all blocks but the last have gone out beside what was read.
    end = memory.beats_end(finished + DEPTH + timing.WRITE_PATH, partial_beats(spec) + 1)
    end += timing.STATUS_PATH + latencies.write()
    read = values.beats + (products.beats if products is not values else 0)
    return CycleCount(round(end - start), read, codes, loads, written)


def _runs(block: NDArray[np.int64]) -> Iterator[int]:
    """Yield the lengths of runs of neighbours within one group, whose codes lie together."""
    breaks = np.flatnonzero((np.diff(block) != 1) | (block[1:] % GROUP_TOKENS == 0)) + 1
    for begin, stop in pairwise([0, *breaks.tolist(), len(block)]):
        yield stop - begin


def _bursts(beats: int) -> Iterator[int]:
    while beats > 0:
        yield min(beats, BURST_BEATS)
        beats -= BURST_BEATS


def attended_bytes(count: CycleCount) -> int:
    """Return the bytes of card memory that a launch reads."""
    return (count.beats + count.load_beats) * BEAT_BYTES
