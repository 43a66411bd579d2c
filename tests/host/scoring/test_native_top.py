# SPDX-License-Identifier: Apache-2.0
"""The native selection against the golden model's full sort."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer.devices.opening import sorted_top
from hillinfer.scoring.native import native_top
from hillinfer.scoring.scorer import Wanted
from hillinfer_model.selection import kept_positions, select_positions


def tuples_of(codes):
    positions = np.arange(codes.shape[1]) & 0xFFFF
    return codes.astype(np.uint32) << 16 | positions.astype(np.uint32)


def golden_sets(codes, wanted, coming=0):
    tokens = codes.shape[1]
    kept = kept_positions(tokens + coming, wanted.sinks, wanted.recent)
    kept = kept[: len(kept) - coming]
    newest = np.arange(tokens, tokens + coming)
    return [np.append(select_positions(own, wanted.count - coming, kept), newest) for own in codes]


def same(mine, other):
    return len(mine) == len(other) and all(
        one.dtype == np.int64 and np.array_equal(one, own)
        for one, own in zip(mine, other, strict=True)
    )


@settings(max_examples=200, deadline=None)
@given(
    length=st.integers(1, 400),
    highest=st.sampled_from([0, 1, 3, 50, 65_535]),
    seed=st.integers(0, 10_000),
    data=st.data(),
)
def test_any_set_equals_a_full_sort(length, highest, seed, data):
    sets, coming = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 1))
    codes = np.random.default_rng(seed).integers(0, highest + 1, (sets, length), dtype=np.uint16)
    sinks, recent = data.draw(st.integers(0, 6)), data.draw(st.integers(coming, 40))
    count = data.draw(st.integers(min(sinks + recent, length + coming), length + coming))
    wanted = Wanted(count, sinks, recent)
    found = native_top(tuples_of(codes), wanted, coming)
    assert same(found, golden_sets(codes, wanted, coming))
    assert same(found, sorted_top(tuples_of(codes), wanted, coming))


@pytest.mark.parametrize("threads", [1, 3])
def test_beyond_a_window(threads):
    codes = np.random.default_rng(2).integers(0, 9, (2, 200_000), dtype=np.uint16)
    wanted, before = Wanted(9000, 5, 60), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = native_top(tuples_of(codes), wanted)
    finally:
        torch.set_num_threads(before)
    assert same(found, golden_sets(codes, wanted))
    assert not same(found[::-1], golden_sets(codes, wanted))


def test_a_code_that_changes_by_one_changes_the_set():
    """The twin."""
    codes, wanted = np.full((1, 50), 100, np.uint16), Wanted(10, 0, 0)
    before = golden_sets(codes, wanted)
    assert native_top(tuples_of(codes), wanted)[0].tolist() == list(range(10))
    codes[0, 40] ^= 1
    assert native_top(tuples_of(codes), wanted)[0].tolist() == [*range(9), 40]
    assert not same(native_top(tuples_of(codes), wanted), before)


def test_tuples_with_gaps_are_read_as_they_are():
    codes = np.random.default_rng(2).integers(0, 9, (2, 500), dtype=np.uint16)
    wide = np.zeros((2, 700), np.uint32)
    wide[:, :500] = tuples_of(codes)
    wanted = Wanted(60, 4, 8)
    assert same(native_top(wide[:, :500], wanted), golden_sets(codes, wanted))


def test_refuses_what_does_not_fit():
    tuples = tuples_of(np.zeros((1, 9), np.uint16))
    for count in (1, 10):
        with pytest.raises(ValueError, match="count"):
            native_top(tuples, Wanted(count, 1, 1))
    with pytest.raises(ValueError, match="coming"):
        native_top(tuples, Wanted(5, 1, 0), 1)
    for wrong in (tuples.astype(np.int64), tuples[0]):
        with pytest.raises(ValueError, match="uint32"):
            native_top(wrong, Wanted(5, 1, 1))
