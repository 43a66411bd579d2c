# SPDX-License-Identifier: Apache-2.0
"""What a partial softmax from a card would gain, against numbers worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.coded_attention import PartialSoftmax, merge
from hillinfer_model.coded_cycles import (
    Banks,
    attend_cycles,
    block_count,
    partial_beats,
    product_beats,
)
from hillinfer_model.cycle_model import kept_score_cycles, score_cycles
from hillinfer_model.kernel_figures import launch_segments
from hillinfer_model.memory_model import IDEAL, REALISTIC
from hillinfer_model.partial_softmax_figures import Rates, Step, Way, drawn_sets, way_figures
from hillinfer_model.presets import preset_spec

LLAMA = preset_spec("llama-3.1-8b", KeyMode.INT4, Rule.WEIGHT_SUM)
RATES = Rates(20e9, 2e9, 50e-6)
STEP = Step(32768)


def test_beats_of_llama():
    # 32 query heads: 4 bytes of L' each are two beats; R, W and a mark are 16 bytes of each, and
    # 128 channels of 4 bytes.
    assert product_beats(1, LLAMA) == 2
    assert partial_beats(LLAMA) == 32 * 16 // 64 + 32 * 128 * 4 // 64 == 264


def test_sets_of_a_step():
    sets = drawn_sets(LLAMA, STEP)
    # 6,553.6 tokens are selected, 655.36 exact; both rounded.
    assert sets.exact == 655
    assert sets.coded_count == 6554 - 655
    assert len(sets.coded) == 32
    assert all(np.all(np.diff(places) > 0) for places in sets.coded)
    assert max(places.max() for places in sets.coded) < 1024


def test_a_full_block_by_hand():
    segment = [np.arange(64)]
    count = attend_cycles(LLAMA, segment, IDEAL, Banks.TWO)
    # Two beats of L' a token, eight of exponents, eight of codes a token.
    assert count.beats == 128 + 8 + 512
    assert count.code_beats == 512
    # A list of a segment's tokens, a descriptor, means and channel exponents.
    assert count.load_beats == 2 + 1 + 64
    assert count.write_beats == 264 + 1
    # Read, then summed, then finished eight channels at a time, then written.
    least = (8 + 512) + 512 + 32 * 128 // 8 + 264
    assert least < count.cycles < least + 100
    one_bank = attend_cycles(LLAMA, segment, IDEAL, Banks.ONE)
    assert one_bank.cycles == count.cycles + 128


def test_scattered_tokens_take_longer_and_blocks_are_per_segment():
    together = [np.arange(64), np.arange(1)]
    apart = [np.arange(0, 1024, 16), np.arange(1)]
    assert block_count(together) == block_count(apart) == 2
    assert block_count([np.arange(65), np.arange(0), np.arange(64)]) == 3
    near, far = (attend_cycles(LLAMA, one, REALISTIC, Banks.ONE) for one in (together, apart))
    # Sixteen groups in place of one.
    assert far.beats == near.beats + 15 * 8
    assert far.cycles > near.cycles


def test_keeping_products_writes_two_beats_a_token():
    shapes = launch_segments(4096, LLAMA)
    kept = kept_score_cycles(LLAMA, Scope.LAYER, shapes, REALISTIC)
    plain = score_cycles(LLAMA, Scope.LAYER, shapes, REALISTIC)
    assert kept.write_beats == plain.write_beats + 2 * 4096
    assert kept.beats == plain.beats
    # On one bus they take as many cycles, refresh included, or a little less.
    assert 0.9 * 8192 < kept.cycles - plain.cycles < 1.1 * 8192


def test_bytes_over_the_link():
    found = {way: way_figures(LLAMA, 32, STEP, way, RATES) for way in Way}
    exact, scores, coded = 655 * 4096, 32768 * 4, 5899
    assert found[Way.ROWS].link_bytes == scores + exact + coded * 4096
    assert found[Way.CODES].coded_bytes == coded * (512 + 8 + 32 * 4)
    blocks = block_count(drawn_sets(LLAMA, STEP).coded)
    assert found[Way.BLOCKS].coded_bytes == blocks * 264 * 64
    assert found[Way.PARTIAL].coded_bytes == 264 * 64
    assert found[Way.PARTIAL].sent_bytes == 4096
    assert found[Way.HOST].link_bytes == exact
    assert found[Way.HOST].host_bytes == 2 * 520
    assert found[Way.HOST].host_seconds == pytest.approx(32768 * 520 / 20e9 + coded * 520 / 2e9)
    # Another step has others: the twin.
    other = way_figures(LLAMA, 32, replace(STEP, alpha=0.3), Way.CODES, RATES)
    assert other.coded_bytes != found[Way.CODES].coded_bytes


def test_both_shadows_of_128k_do_not_fit_a_card():
    figures = {
        way: way_figures(LLAMA, 32, Step(4096), way, RATES) for way in (Way.ROWS, Way.PARTIAL)
    }
    # 4e9 bytes less 64 MiB; 520 bytes of keys a token and layer, and as much of values; L' of two
    # segments.
    room = 4_000_000_000 - 67_108_864
    for way, byte_count in ((Way.ROWS, 520), (Way.PARTIAL, 1040)):
        per_segment = 32 * byte_count * 1024 + 2 * 1024 * 128
        assert figures[way].card_tokens == room // per_segment * 1024
    assert figures[Way.PARTIAL].card_tokens < 131072 < figures[Way.ROWS].card_tokens


def test_adding_blocks_before_the_exact_ones_changes_bits():
    """Why one answer for a layer is not the contract's: float32 sums have an order."""
    generator = np.random.default_rng(0)

    def block(seed):
        return PartialSoftmax(
            np.array([seed % 3]),
            np.array([2**40]),
            generator.normal(0, 1, (1, 128)).astype(np.float32),
            np.zeros(1, np.bool_),
        )

    exact, *coded = [block(seed) for seed in range(4)]
    powers = np.max([one.powers for one in coded], axis=0)
    outputs = np.zeros((1, 128), np.float32)
    for one in coded:
        outputs += np.ldexp(one.outputs, (one.powers - powers)[:, np.newaxis].astype(np.int32))
    totals = np.array([sum(int(one.totals[0]) >> int(powers[0] - one.powers[0]) for one in coded)])
    together = PartialSoftmax(powers, totals, outputs, np.zeros(1, np.bool_))
    nested, flat = merge([exact, together]), merge([exact, *coded])
    assert np.allclose(nested, flat, rtol=1e-4, atol=1e-6)
    assert not np.array_equal(nested, flat)
