# SPDX-License-Identifier: Apache-2.0
"""The golden model's selection against the oracle."""

import numpy as np
import oracle_scores
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_arrays import flipped, same

from hillinfer_model.selection import kept_positions, select_positions, selected_count

ALPHAS = [0.001, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.29, 0.3, 1 / 3, 0.5, 0.7, 0.999, 1.0]


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize(("kept", "bound"), [(36, 4096), (36, 1), (0, 10**9), (4, 500), (1, 37)])
def test_selected_count(alpha, kept, bound):
    lengths = [*range(1, 60), *range(95, 1100, 5), 4095, 4096, 4097, 65536, 131071, 1_000_003]
    found = [selected_count(n, alpha, kept, bound) for n in lengths]
    expected = [oracle_scores.selected_count(n, alpha, kept, bound) for n in lengths]
    assert found == expected
    assert all(type(k) is int for k in found)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 2**40),
    st.floats(2.0**-40, 1.0),
    st.integers(0, 5000),
    st.one_of(st.none(), st.integers(1, 2**40)),
)
def test_any_selected_count(length, alpha, kept, bound):
    limit = length if bound is None else bound
    assert selected_count(length, alpha, kept, bound) == oracle_scores.selected_count(
        length, alpha, kept, limit
    )


def test_selected_count_is_taken_in_float64():
    # 0.29 · 50 is below 14.5 in float64; α one step higher is not.
    assert selected_count(50, 0.29, 4, 99) == oracle_scores.selected_count(50, 0.29, 4, 99) == 14
    above = float(np.nextafter(0.29, 1))
    assert selected_count(50, above, 4, 99) == oracle_scores.selected_count(50, above, 4, 99) == 15


@pytest.mark.parametrize("length", [1, 3, 4, 5, 31, 32, 33, 35, 36, 37, 100])
@pytest.mark.parametrize(("sinks", "recent"), [(4, 32), (0, 0), (4, 0), (0, 1), (40, 40)])
def test_kept_positions(length, sinks, recent):
    found = kept_positions(length, sinks, recent)
    expected = oracle_scores.kept_positions(length, sinks, recent)
    assert same(found, np.int64, expected)
    if len(found):
        assert not same(flipped(found), np.int64, expected)


def selects_alike(codes, count, kept, golden_codes=None):
    found = select_positions(codes if golden_codes is None else golden_codes, count, kept)
    return same(found, np.int64, oracle_scores.select(codes.tolist(), count, kept.tolist()))


def positions(values):
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("count", range(10))
def test_ties_go_to_the_lower_position(count):
    codes = np.array([7, 9, 7, 7, 0, 9, 7, 0, 65535], dtype=np.uint16)
    assert selects_alike(codes, count, positions([]))
    if 0 < count < 9:
        assert not selects_alike(codes, count, positions([]), golden_codes=codes[::-1].copy())


@pytest.mark.parametrize("count", range(3, 10))
def test_kept_tokens_are_inside_the_count(count):
    codes = np.array([0, 0, 5, 5, 5, 5, 9, 9, 1], dtype=np.uint16)
    kept = positions([0, 6, 8])
    assert selects_alike(codes, count, kept)
    assert len(select_positions(codes, count, kept)) == count


def test_invalid_tokens_can_be_selected():
    codes = np.array([0, 3, 0, 0, 2], dtype=np.uint16)
    assert selects_alike(codes, 4, positions([3]))
    assert select_positions(codes, 4, positions([3])).tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize("bit", [0, 6, 15])
def test_selection_notices_a_flipped_bit(bit):
    codes = np.array([40000, 40001], dtype=np.uint16)
    assert selects_alike(codes, 1, positions([]))
    assert not selects_alike(codes, 1, positions([]), golden_codes=flipped(codes, 1, bit))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_selection(data):
    length = data.draw(st.integers(1, 80))
    code = st.integers(0, data.draw(st.sampled_from([0, 1, 5, 65535])))
    codes = np.array(data.draw(st.lists(code, min_size=length, max_size=length)), dtype=np.uint16)
    kept = kept_positions(length, data.draw(st.integers(0, 5)), data.draw(st.integers(0, 9)))
    count = selected_count(length, data.draw(st.sampled_from(ALPHAS)), len(kept), None)
    assert selects_alike(codes, count, kept)
