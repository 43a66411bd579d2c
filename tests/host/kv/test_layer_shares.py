# SPDX-License-Identifier: Apache-2.0
"""Shares of layers: always 1 in all, never below half of an equal one, never above three."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer.kv.pool_policies import LayerShares
from hillinfer.settings import PoolSizes


def shares_of(shares, layers):
    return np.array([shares.share(layer) for layer in range(layers)])


@pytest.mark.parametrize("layers", [1, 2, 30])
def test_shares_are_equal_at_first_and_stay_so_where_sizes_are(layers):
    shares = LayerShares(layers, PoolSizes.EQUAL)
    for _ in range(3):
        np.testing.assert_allclose(shares_of(shares, layers), 1 / layers)
        shares.note_misses(np.arange(layers) * 100)
    assert shares.largest == 1
    np.testing.assert_allclose(shares_of(LayerShares(layers, PoolSizes.MISSES), layers), 1 / layers)


@settings(max_examples=100, deadline=None)
@given(
    rounds=st.integers(1, 40).flatmap(
        lambda layers: st.lists(
            st.lists(st.integers(0, 5) | st.integers(0, 1 << 40), min_size=layers, max_size=layers),
            min_size=1,
            max_size=5,
        )
    )
)
def test_bounds_hold_whatever_is_missed(rounds):
    layers = len(rounds[0])
    shares = LayerShares(layers, PoolSizes.MISSES)
    for misses in rounds:
        shares.note_misses(np.array(misses, np.int64))
        found = shares_of(shares, layers)
        assert found.sum() == pytest.approx(1)
        assert (found >= 0.5 / layers - 1e-12).all()
        assert (found <= shares.largest / layers + 1e-12).all()


def test_more_misses_never_a_smaller_share():
    shares = LayerShares(8, PoolSizes.MISSES)
    shares.note_misses(np.array([0, 1, 2, 3, 5, 8, 13, 900]))
    found = shares_of(shares, 8)
    assert (np.diff(found) > -1e-12).all()
    assert found[7] == pytest.approx(3 / 8)
    assert found[0] > 0.5 / 8, "what the first may not have goes to the others"


def test_no_misses_at_all_are_equal_shares():
    shares = LayerShares(4, PoolSizes.MISSES)
    shares.note_misses(np.zeros(4, np.int64))
    np.testing.assert_allclose(shares_of(shares, 4), 0.25)


def test_half_of_what_was_known_is_forgotten():
    shares = LayerShares(2, PoolSizes.MISSES)
    shares.note_misses(np.array([100, 0]))
    assert shares.share(0) == pytest.approx(0.25 + 0.5)
    shares.note_misses(np.array([0, 50]))
    assert shares.share(0) == pytest.approx(0.5)
    for _ in range(60):
        shares.note_misses(np.array([0, 50]))
    assert shares.share(0) == pytest.approx(0.25)
