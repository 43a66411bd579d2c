# SPDX-License-Identifier: Apache-2.0
"""Computes a kernel's rates, its limits and what fits on a card, before it is built (modelled)."""

from __future__ import annotations

from dataclasses import dataclass

from hillinfer_model.choices import KeyMode, Scope
from hillinfer_model.cycle_count import CLOCK_HERTZ, CycleCount
from hillinfer_model.cycle_model import score_cycles
from hillinfer_model.hardware_spec import most_queries
from hillinfer_model.kernel_spec import BEAT_BYTES, SLICE_CHANNELS, KernelSpec
from hillinfer_model.launch_shape import (
    TUPLES_PER_BEAT,
    SegmentShape,
    code_beats,
    key_beats,
    key_value_row_beats,
    query_beats,
    row_beats,
    statistics_beats,
)
from hillinfer_model.memory_model import IDEAL, REALISTIC
from hillinfer_model.pass_figures import PassFigures, pass_figures

# 512 bit at 300 MHz, which is also the peak of one DDR4-2400 channel.
DDR_ROOF = BEAT_BYTES * CLOCK_HERTZ
P2P_ROOF = 3_200_000_000
CARD_BYTES = 4_000_000_000
# Two buffers of 32 MiB through which rows come from the drive.
STAGING_BYTES = 2 * 32 * 2**20
# Queries and scores of one layer are filled while those of another are used.
SLOTS = 2


@dataclass(frozen=True)
class KernelFigures:
    """Figures of one kernel and a launch of some tokens; all modelled.

    Parameters
    ----------
    key_codes_per_beat
        Key codes that a beat brings: lanes of the products.
    heads_per_code
        Query heads that each of them is multiplied with in one cycle.
    code_beats_per_token, exponent_beats_per_token
        Beats of the key port per token.
    thousand
        One launch of 1,024 tokens, ideal memory.
    launch, realistic
        One launch of the tokens asked for, with ideal and with realistic memory.
    rows, rows_realistic
        The same two with keys read from rows K‖V; key mode fp16 only.
    shadow_bytes_per_token
        Bytes per token and layer that stay on the card: shadow, or key-only plane.
    p2p_bytes_per_token
        Bytes per token and layer that come from the drive where keys are streamed: of a shadow or a
        key-only plane, and of rows K‖V (0 where the kernel reads none).
    card_tokens
        Tokens of all layers that fit on a card, whole segments.
    card_row_tokens
        The same where rows K‖V lie there, as `--shadow fp16` has them; 0 in other key modes.
    passes
        The launch with as many queries as a kernel has room for, with realistic memory.
    """

    key_codes_per_beat: int
    heads_per_code: int
    code_beats_per_token: float
    exponent_beats_per_token: float
    thousand: CycleCount
    launch: CycleCount
    realistic: CycleCount
    rows: CycleCount | None
    rows_realistic: CycleCount | None
    shadow_bytes_per_token: int
    p2p_bytes_per_token: tuple[int, int]
    card_tokens: int
    card_row_tokens: int
    passes: PassFigures


def kernel_figures(spec: KernelSpec, scope: Scope, layers: int, tokens: int) -> KernelFigures:
    """Return the figures of a spec's `score_tokens`.

    Parameters
    ----------
    spec, scope
        The kernel; what shares one selected set.
    layers
        Layers of the model, each with its own keys.
    tokens
        Tokens of the launch, in full segments but for the last.

    Raises
    ------
    ValueError
        Where `tokens` or `layers` is below 1.
    """
    if tokens < 1 or layers < 1:
        raise ValueError(f"tokens={tokens} and layers={layers} must be at least 1")
    fp16 = spec.key_mode is KeyMode.FP16
    halves = 2 if fp16 else 1
    tile = 1 if fp16 else spec.tile_tokens
    segment = spec.segment_tokens
    codes = code_beats(segment, spec) / segment
    exponents = key_beats(segment, spec) / segment - codes
    plane = key_beats(segment, spec) * BEAT_BYTES // segment
    row = key_value_row_beats(spec) if fp16 else 0
    by_rows = launch_segments(tokens, spec, row)
    return KernelFigures(
        key_codes_per_beat=halves * tile * SLICE_CHANNELS,
        heads_per_code=spec.scored_heads // spec.kv_heads,
        code_beats_per_token=codes,
        exponent_beats_per_token=exponents,
        thousand=score_cycles(spec, scope, launch_segments(1024, spec), IDEAL),
        launch=score_cycles(spec, scope, launch_segments(tokens, spec), IDEAL),
        realistic=score_cycles(spec, scope, launch_segments(tokens, spec), REALISTIC),
        rows=score_cycles(spec, scope, by_rows, IDEAL) if fp16 else None,
        rows_realistic=score_cycles(spec, scope, by_rows, REALISTIC) if fp16 else None,
        shadow_bytes_per_token=plane,
        p2p_bytes_per_token=(plane, row * BEAT_BYTES),
        card_tokens=card_tokens(spec, scope, layers),
        card_row_tokens=card_tokens(spec, scope, layers, segment * row) if fp16 else 0,
        passes=pass_figures(
            spec, scope, launch_segments(tokens, spec, row), REALISTIC, most_queries(spec)
        ),
    )


def launch_segments(tokens: int, spec: KernelSpec, row_stride: int = 0) -> list[SegmentShape]:
    """Return the segments of one sequence, one behind the other in memory."""
    shapes, at = [], 0
    for first in range(0, tokens, spec.segment_tokens):
        own = min(tokens - first, spec.segment_tokens)
        shapes.append(SegmentShape(own, row_stride, at))
        rows = row_stride or row_beats(spec)
        at += own * rows if spec.key_mode is KeyMode.FP16 else spec.segment_beats
    return shapes


def card_tokens(spec: KernelSpec, scope: Scope, layers: int, segment_beats: int = 0) -> int:
    """Return the tokens whose keys of all layers fit on a card of 4 GB, in whole segments.

    Beside the keys the card holds staging buffers, and for two layers at a time descriptors,
    query blocks, status beats and score arrays; with FP16 keys also every segment's statistics.
    `segment_beats` is what keys of a segment take, 0 for a shadow or a plane of keys.
    """
    segment = spec.segment_tokens
    arrays = spec.kv_heads if scope is Scope.KV_HEAD else 1
    launch = query_beats(spec) + 2 + arrays * (segment // TUPLES_PER_BEAT)
    keys = segment_beats or key_beats(segment, spec)
    if spec.key_mode is KeyMode.FP16:
        keys += statistics_beats(spec)
    per_segment = (layers * keys + SLOTS * launch) * BEAT_BYTES
    return (CARD_BYTES - STAGING_BYTES) // per_segment * segment
