# SPDX-License-Identifier: Apache-2.0
"""The partial order kept while score blocks come is the full order, however they are cut."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer.devices.opening import TopAlpha
from hillinfer_model.score_block import ScoreBlock
from hillinfer_model.selection import select_positions

WINDOW = 1 << 16


def blocks_of(codes, cuts, first_position=0):
    """Cut score codes into blocks; a block never crosses a window of 65,536 positions."""
    positions = first_position + np.arange(len(codes), dtype=np.int64)
    tuples = codes.astype(np.uint32) << 16 | (positions & (WINDOW - 1)).astype(np.uint32)
    edges = sorted({0, len(codes), *cuts, *np.flatnonzero(positions % WINDOW == 0).tolist()})
    return [
        ScoreBlock(0, int(positions[start]) // WINDOW * WINDOW, tuples[start:stop])
        for start, stop in pairwise(edges)
    ]


def top(codes, count, kept, blocks):
    merged = TopAlpha(count, kept)
    for block in blocks:
        merged.merge(block)
    return merged.positions()


@st.composite
def scores(draw):
    length = draw(st.integers(1, 400))
    # Few different codes make many ties, at the cut too.
    highest = draw(st.sampled_from([1, 3, 50, 65_535]))
    codes = np.random.default_rng(draw(st.integers(0, 10_000))).integers(
        0, highest + 1, length, np.uint16
    )
    kept = np.array(sorted(draw(st.sets(st.integers(0, length - 1), max_size=30))), np.int64)
    count = draw(st.integers(len(kept), length))
    cuts = draw(st.sets(st.integers(1, length), max_size=20))
    order = draw(st.randoms(use_true_random=False))
    return codes, kept, count, cuts, order


@settings(max_examples=150, deadline=None)
@given(given_scores=scores())
def test_any_cut_in_any_order_equals_a_full_sort(given_scores):
    codes, kept, count, cuts, order = given_scores
    blocks = blocks_of(codes, cuts)
    order.shuffle(blocks)
    found = top(codes, count, kept, blocks)
    np.testing.assert_array_equal(found, select_positions(codes, count, kept))
    assert found.dtype == np.int64


@pytest.mark.parametrize("block_tokens", [1, 7, 256, 5000])
def test_many_blocks_settle_on_the_way(block_tokens):
    """More tuples than are let wait, so that the order is cut down again and again."""
    codes = np.random.default_rng(1).integers(0, 300, 30_000, np.uint16)
    kept = np.array([0, 1, 29_999])
    blocks = blocks_of(codes, range(0, len(codes), block_tokens))
    for count in (3, 4, 100, 20_000):
        np.testing.assert_array_equal(
            top(codes, count, kept, blocks), select_positions(codes, count, kept)
        )


def test_positions_beyond_a_window():
    """Tuples carry 16 bits of position; blocks say which window they lie in."""
    codes = np.random.default_rng(2).integers(0, 9, 3 * WINDOW + 77, np.uint16)
    kept = np.array([5, 2 * WINDOW + 3])
    blocks = blocks_of(codes, range(0, len(codes), 1000))
    np.testing.assert_array_equal(
        top(codes, 9000, kept, blocks[::-1]), select_positions(codes, 9000, kept)
    )


def test_ties_fall_to_the_lower_position():
    codes = np.full(100, 7, np.uint16)
    kept = np.array([99])
    blocks = blocks_of(codes, range(0, 100, 9))
    assert top(codes, 11, kept, blocks[::-1]).tolist() == [*range(10), 99]


def test_kept_tokens_push_nothing_out_and_are_in_whatever_their_score():
    codes = np.arange(100, dtype=np.uint16)
    kept = np.array([0, 98, 99])
    assert top(codes, 5, kept, blocks_of(codes, [])).tolist() == [0, 96, 97, 98, 99]


def test_only_kept_tokens():
    codes = np.arange(100, dtype=np.uint16)
    kept = np.array([3, 4])
    assert top(codes, 2, kept, blocks_of(codes, [50])).tolist() == [3, 4]


def test_a_code_that_changes_by_one_changes_the_set():
    codes = np.full(50, 100, np.uint16)
    before = top(codes, 10, np.empty(0, np.int64), blocks_of(codes, [20]))
    codes[40] += 1
    after = top(codes, 10, np.empty(0, np.int64), blocks_of(codes, [20]))
    assert before.tolist() == list(range(10))
    assert after.tolist() == [*range(9), 40]
