# SPDX-License-Identifier: Apache-2.0
"""The native selection against the golden model's full sort."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer.hie.native_top import native_top
from hillinfer.native.library import native_is_here
from hillinfer_model.selection import select_positions

pytestmark = pytest.mark.skipif(
    not native_is_here(), reason="the native scorer is not built: python tools/build_native.py"
)


def tuples_of(codes):
    return codes.astype(np.uint32) << 16 | (np.arange(len(codes)) & 0xFFFF).astype(np.uint32)


@settings(max_examples=200, deadline=None)
@given(
    length=st.integers(1, 400),
    highest=st.sampled_from([0, 1, 3, 50, 65_535]),
    seed=st.integers(0, 10_000),
    data=st.data(),
)
def test_any_set_equals_a_full_sort(length, highest, seed, data):
    codes = np.random.default_rng(seed).integers(0, highest + 1, length, dtype=np.uint16)
    kept = np.array(sorted(data.draw(st.sets(st.integers(0, length - 1), max_size=30))), np.int64)
    count = data.draw(st.integers(len(kept), length))
    found = native_top(tuples_of(codes), count, kept)
    np.testing.assert_array_equal(found, select_positions(codes, count, kept))


def test_beyond_a_window():
    codes = np.random.default_rng(2).integers(0, 9, 200_000, dtype=np.uint16)
    kept = np.array([5, 140_000])
    found = native_top(tuples_of(codes), 9000, kept)
    np.testing.assert_array_equal(found, select_positions(codes, 9000, kept))


def test_a_code_that_changes_by_one_changes_the_set():
    codes = np.full(50, 100, np.uint16)
    nothing = np.empty(0, np.int64)
    assert native_top(tuples_of(codes), 10, nothing).tolist() == list(range(10))
    codes[40] += 1
    assert native_top(tuples_of(codes), 10, nothing).tolist() == [*range(9), 40]


def test_refuses_what_does_not_fit():
    tuples, kept = tuples_of(np.zeros(9, np.uint16)), np.array([1, 2])
    for wrong in ([2, 1], [1, 1], [-1], [9]):
        with pytest.raises(ValueError, match="ascend"):
            native_top(tuples, 5, np.array(wrong))
    for count in (1, 10):
        with pytest.raises(ValueError, match="count"):
            native_top(tuples, count, kept)
    with pytest.raises(ValueError, match="uint32"):
        native_top(tuples.astype(np.int64), 5, kept)
