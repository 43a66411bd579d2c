# SPDX-License-Identifier: Apache-2.0
"""The launch in exact fractions, from bytes, with nothing of the golden model but its enums.

Slow, so for small launches. It reads memory at the addresses that the oracle of the scoring
contract gives and computes with that oracle's numbers.
"""

import numpy as np
import oracle_keys
import oracle_layout
import oracle_queries
import oracle_scores

from hillinfer_model.launch_result import LaunchResult

BEAT = 64


class Memory:
    """A buffer as bytes; reads and writes by beat and byte."""

    def __init__(self, beats):
        self.content = bytearray(beats.tobytes())
        self.shape = beats.shape

    def number(self, beat, byte, width):
        start = BEAT * beat + byte
        assert start + width <= len(self.content), "read outside a buffer"
        return int.from_bytes(self.content[start : start + width], "little")

    def write(self, beat, content):
        start = BEAT * beat
        assert start + len(content) <= len(self.content), "write outside a buffer"
        self.content[start : start + len(content)] = content

    def beats(self):
        return np.frombuffer(bytes(self.content), dtype=np.uint8).reshape(self.shape)


def signed(value, bits):
    return value - 2**bits if value >= 2 ** (bits - 1) else value


class OracleExecution:
    """Both kernels, one token at a time."""

    name = "oracle"

    def score(self, spec, launch):
        scope = {0: "layer", 1: "kv_head"}.get(launch.scope & 255)
        further = launch.scope >> 8
        if further >= spec.queries:
            scope = None
        scores = Memory(launch.scores)

        def sound(fields):
            _shadow, _query, _score, base, tokens, row_stride, score_stride, statistics = fields
            if spec.key_mode.value == "fp16":
                rows = row_stride >= key_beats(spec)
            else:
                rows = row_stride == 0 and statistics == 0
            arrays = score_stride == 0
            if scope == "kv_head" or further:
                arrays = score_stride * BEAT >= 4 * tokens
            return scope is not None and segment_fits(spec, base, tokens) and rows and arrays

        def work(fields):
            place, query, score, *rest = fields
            sets = spec.kv_heads if scope == "kv_head" else 1
            heads = spec.kv_heads * (1 if spec.rule.value == "raw_sum" else spec.group_size)
            block = sum(-(-n // BEAT) for n in (4 * heads, heads, heads * spec.padded_head_dim))
            for number in range(further + 1):
                # Each query as a launch of its own: its block, and its arrays behind the others'.
                arrays = score + number * sets * rest[3]
                own = (place, query + number * block, arrays, *rest)
                self._score_segment(spec, scope, launch, own, scores)

        status = run(spec, launch, sound, work)
        return LaunchResult(scores.beats(), status.beats())

    def make_shadow(self, spec, launch):
        shadow = Memory(launch.shadow)

        def sound(fields):
            _shadow, _query, score, base, tokens, row_stride, score_stride, _statistics = fields
            rows = row_stride >= key_beats(spec)
            return segment_fits(spec, base, tokens) and rows and score == 0 and score_stride == 0

        def work(fields):
            place, rows, _, _, tokens, stride, _, statistics = fields
            coded = code_rows(
                spec, launch.rows, rows, stride, launch.statistics, statistics, tokens
            )
            image = oracle_layout.shadow(
                coded, spec.kv_heads, spec.padded_head_dim, spec.key_mode.value
            )
            shadow.write(place, image)

        status = run(spec, launch, sound, work)
        return LaunchResult(shadow.beats(), status.beats())

    def _score_segment(self, spec, scope, launch, fields, scores):
        place, query, score, base, tokens, row_stride, score_stride, statistics = fields
        mode, kv = spec.key_mode.value, spec.kv_heads
        if tokens == 0:
            return
        heads = read_query(spec, launch.queries, query)
        if mode == "fp16":
            keys = code_rows(
                spec, launch.shadow, place, row_stride, launch.statistics, statistics, tokens
            )
        else:
            keys = read_shadow(spec, launch.shadow, place, tokens)
        per_kv = len(heads) // kv
        aligned = [
            [
                oracle_queries.aligned_product(
                    *head, exponents[h // per_kv], codes[h // per_kv], mode
                )
                for exponents, codes in keys
            ]
            for h, head in enumerate(heads)
        ]
        invalid = [[t == oracle_keys.INVALID for t in exponents] for exponents, _ in keys]
        rule = spec.rule.value
        none = [0] * len(heads)
        tables = oracle_scores.score_codes(aligned, none, invalid, rule, scope, spec.group_size)
        for g, table in enumerate(tables):
            image = b"".join(
                oracle_layout.score_tuple(code, base + i).to_bytes(4, "little")
                for i, code in enumerate(table)
            )
            scores.write(score + g * score_stride, image + bytes(-len(image) % BEAT))


def run(spec, launch, sound, work):
    """Work through the descriptors and return the memory of the status beats."""
    segments = Memory(launch.segments)
    status = Memory(launch.segments)
    status.content[:] = b"\xa5" * len(status.content)
    for index in range(launch.segments.shape[0]):
        widths = [(0, 8), (8, 8), (16, 8), (24, 8), (32, 4), (36, 4), (40, 4), (48, 8)]
        fields = [segments.number(index, byte, width) for byte, width in widths]
        error = 0
        if segments.number(index, 44, 4) or segments.number(index, 56, 8):
            error = 3
        elif not sound(fields):
            error = 1
        else:
            work(fields)
        complete = 0 if error else fields[4]
        beat = oracle_layout.status_beat(spec.digest(), launch.launch_id, complete, error)
        status.write(index, beat)
        if error:
            break
    return status


def segment_fits(spec, base, tokens):
    return base % spec.segment_tokens == 0 and tokens <= spec.segment_tokens


def key_beats(spec):
    return oracle_layout.padded(2 * spec.kv_heads * spec.padded_head_dim) // BEAT


def read_query(spec, queries, first):
    """Return [(s, codes, addend)] of every scored head."""
    memory = Memory(queries)
    kv, d = spec.kv_heads, spec.padded_head_dim
    group = 1 if spec.rule.value == "raw_sum" else spec.group_size
    heads = kv * group
    second = oracle_layout.padded(4 * heads)
    third = second + oracle_layout.padded(heads)
    found = []
    for h in range(heads):
        g, r = divmod(h, group)
        codes = []
        for j in range(d):
            at = ((g * (d // 16) + j // 16) * group + r) * 16 + j % 16
            codes.append(signed(memory.number(first, third + at, 1), 8))
        addend = signed(memory.number(first, 4 * h, 4), 32)
        found.append((signed(memory.number(first, second + h, 1), 8), codes, addend))
    return found


def read_shadow(spec, shadow, first, tokens):
    """Return [(exponents[kv], codes[kv][d])] of a segment's tokens."""
    memory = Memory(shadow)
    kv, d, mode = spec.kv_heads, spec.padded_head_dim, spec.key_mode.value
    bits = oracle_layout.BITS[mode]
    found = []
    for token in range(tokens):
        exponents, codes = [], []
        for g in range(kv):
            beat, byte = oracle_layout.exponent_address(token, g, kv, d, mode)
            exponents.append(memory.number(first + beat, byte, 1))
            head = []
            for j in range(d):
                beat, bit = oracle_layout.code_address(token, g, j, kv, d, mode)
                value = memory.content[BEAT * (first + beat) + bit // 8] >> (bit % 8)
                head.append(signed(value % 2**bits, bits))
            codes.append(head)
        found.append((exponents, codes))
    return found


def code_rows(spec, rows, first, stride, statistics, block, tokens):
    """Return [(exponents[kv], codes[kv][d])] of rows of FP16 keys."""
    memory, numbers = Memory(rows), Memory(statistics)
    kv, d = spec.kv_heads, spec.padded_head_dim
    if tokens == 0:
        return []
    table = {
        (g, j): (
            signed(numbers.number(block, 4 * (g * d + j) + 3, 1), 8),
            signed(numbers.number(block, 4 * (g * d + j), 3), 24),
        )
        for g in range(kv)
        for j in range(d)
    }
    found = []
    for token in range(tokens):
        keys = [
            [memory.number(first + token * stride, 2 * (g * d + j), 2) for j in range(d)]
            for g in range(kv)
        ]
        found.append(oracle_keys.encode(keys, table, spec.key_mode.value))
    return found
