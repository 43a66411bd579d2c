# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer_model.selection import kept_positions, select_positions, selected_count

NONE = np.zeros(0, dtype=np.int64)


@pytest.mark.parametrize(
    ("length", "alpha", "kept", "limit", "expected"),
    [
        (0, 0.1, 0, None, 0),
        (1, 0.1, 0, None, 1),
        (1000, 0.1, 36, None, 100),
        (1004, 0.1, 36, None, 100),
        (1005, 0.1, 36, None, 101),
        (100, 0.1, 36, None, 37),
        (37, 0.1, 36, None, 37),
        (36, 0.1, 36, None, 36),
        (8192, 0.1, 36, 512, 512),
        (8192, 0.1, 36, 10, 37),
        (8192, 1.0, 36, None, 8192),
        # 0.29 · 50 is 14.499999999999998 in float64.
        (50, 0.29, 4, None, 14),
    ],
)
def test_selected_count(length, alpha, kept, limit, expected):
    assert selected_count(length, alpha, kept, limit) == expected


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**20), st.floats(1e-6, 1.0), st.integers(0, 100), st.integers(1, 10_000))
def test_selected_count_stays_between_its_bounds(length, alpha, kept, limit):
    count = selected_count(length, alpha, kept, limit)
    assert count == min(length, max(kept + 1, min(limit, math.floor(alpha * length + 0.5))))
    assert min(length, kept + 1) <= count <= length
    assert count <= selected_count(length, alpha, kept, None)


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.0001, math.nan, math.inf])
def test_an_alpha_outside_its_range_is_refused(alpha):
    with pytest.raises(ValueError, match=rf"alpha={alpha}.*\(0, 1\]"):
        selected_count(100, alpha, 4, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0.1, 4, None), "length=-1"),
        ((10, 0.1, -4, None), "kept=-4"),
        ((10, 0.1, 4, 0), "max_selected=0"),
    ],
)
def test_other_bad_values_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        selected_count(*arguments)


@pytest.mark.parametrize(
    ("length", "sinks", "recent", "expected"),
    [
        (0, 4, 32, []),
        (3, 4, 32, [0, 1, 2]),
        (10, 4, 32, list(range(10))),
        (10, 4, 3, [0, 1, 2, 3, 7, 8, 9]),
        (10, 0, 2, [8, 9]),
        (10, 2, 0, [0, 1]),
        (5, 4, 3, [0, 1, 2, 3, 4]),
    ],
)
def test_kept_positions(length, sinks, recent, expected):
    found = kept_positions(length, sinks, recent)
    assert found.dtype == np.int64
    assert found.tolist() == expected


def test_negative_kept_tokens_are_refused():
    for arguments, message in (((-1, 4, 32), "length"), ((9, -4, 32), "sinks"), ((9, 4, -1), "re")):
        with pytest.raises(ValueError, match=message):
            kept_positions(*arguments)


def by_sorting(codes, count, kept):
    others = [p for p in range(len(codes)) if p not in set(kept)]
    ranked = sorted(others, key=lambda p: (-codes[p], p))
    return sorted([*kept, *ranked[: count - len(kept)]])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 2, 40_000, 65_534, 65_535]), max_size=60),
    st.data(),
)
def test_selection_equals_sorting(codes, data):
    positions = st.integers(0, max(len(codes) - 1, 0))
    kept = sorted(data.draw(st.sets(positions, max_size=len(codes)))) if codes else []
    count = data.draw(st.integers(len(kept), len(codes)))
    found = select_positions(
        np.array(codes, dtype=np.uint16), count, np.array(kept, dtype=np.int64)
    )
    assert found.dtype == np.int64
    assert found.tolist() == by_sorting(codes, count, kept)


def test_ties_fall_to_the_lower_position():
    codes = np.array([5, 9, 9, 9, 1], dtype=np.uint16)
    assert select_positions(codes, 2, NONE).tolist() == [1, 2]
    assert select_positions(codes, 3, np.array([4])).tolist() == [1, 2, 4]


def test_invalid_tokens_rank_last_and_can_be_selected():
    codes = np.array([0, 0, 1, 0, 7], dtype=np.uint16)
    assert select_positions(codes, 2, NONE).tolist() == [2, 4]
    assert select_positions(codes, 3, NONE).tolist() == [0, 2, 4]
    assert select_positions(codes, 3, np.array([3])).tolist() == [2, 3, 4]


def test_a_changed_code_changes_the_selection():
    codes = np.arange(100, dtype=np.uint16)
    assert select_positions(codes, 3, NONE).tolist() == [97, 98, 99]
    codes[5] ^= 0x8000
    assert select_positions(codes, 3, NONE).tolist() == [5, 98, 99]


def test_wrong_calls_are_refused():
    codes = np.arange(10, dtype=np.uint16)
    with pytest.raises(ValueError, match="count=1 "):
        select_positions(codes, 1, np.array([2, 3]))
    with pytest.raises(ValueError, match="count=11"):
        select_positions(codes, 11, NONE)
    for kept in ([10], [-1, 3]):
        with pytest.raises(ValueError, match=r"outside 0\.\.9"):
            select_positions(codes, 5, np.array(kept))
    with pytest.raises(ValueError, match="twice"):
        select_positions(codes, 5, np.array([3, 3]))
    with pytest.raises(ValueError, match="uint16"):
        select_positions(codes.astype(np.int64), 5, NONE)
