# SPDX-License-Identifier: Apache-2.0
"""What every pool policy promises, and what each of them ranks by."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_policy_cases import CASES, history

from hillinfer.errors import SettingsError
from hillinfer.kv.pool_policies import (
    MOST_HITS,
    PIN,
    POOL_POLICIES,
    DecayedCounts,
    PoolPolicy,
    make_pool_policy,
)

LONGEST = 1 << 24


@st.composite
def histories(draw):
    rows = draw(st.integers(0, 30))
    length = draw(st.sampled_from([1, 64, 4096, 131_072, LONGEST]))

    def column(most):
        return draw(st.lists(st.integers(0, most), min_size=rows, max_size=rows))

    return history(
        column(length - 1),
        column(MOST_HITS),
        column(np.iinfo(np.int32).max),
        length,
        draw(st.sampled_from([1e-9, 0.05, 0.5, 1.0])),
    )


def check_worth(policy, rows):
    """Range, shape and type of what rows are worth, which asking does not change."""
    before = {one.name: np.copy(getattr(rows, one.name)) for one in fields(rows)}
    worth = policy.worth(rows)
    assert worth.dtype == np.int64
    assert worth.shape == rows.positions.shape
    assert ((worth >= 0) & (worth < 2 * PIN)).all()
    for name, value in before.items():
        np.testing.assert_array_equal(getattr(rows, name), value)
    np.testing.assert_array_equal(policy.worth(rows), worth)


def check_tally(policy, counts, selected):
    """A step never wraps around, never lowers a selected token and never lifts another."""
    before, positions = counts.astype(np.int64), selected.copy()
    policy.tally(counts, selected)
    assert counts.dtype == np.uint16
    np.testing.assert_array_equal(selected, positions)
    after = counts.astype(np.int64)
    others = np.setdiff1d(np.arange(len(counts)), selected)
    assert (after[others] <= before[others]).all()
    assert (after[selected] >= before[selected]).all()
    below = selected[before[selected] < MOST_HITS]
    assert (after[below] > before[below]).all()


@pytest.mark.parametrize("name", CASES)
def test_worth_is_in_range_and_asking_changes_nothing(name):
    @settings(max_examples=40, deadline=None)
    @given(rows=histories())
    def check(rows):
        check_worth(make_pool_policy(name), rows)

    check()


@pytest.mark.parametrize("name", CASES)
def test_a_tally_saturates(name):
    @settings(max_examples=60, deadline=None)
    @given(
        counts=st.lists(
            st.integers(0, MOST_HITS) | st.integers(MOST_HITS - 3, MOST_HITS), max_size=40
        ),
        chosen=st.sets(st.integers(0, 39)),
    )
    def check(counts, chosen):
        selected = np.array(sorted(one for one in chosen if one < len(counts)), np.int64)
        check_tally(make_pool_policy(name), np.array(counts, np.uint16), selected)

    check()


@pytest.mark.parametrize("name", CASES)
def test_first_hits(name):
    policy, case = make_pool_policy(name), CASES[name]
    assert policy.observed_queries == case.observed_queries
    counts = np.zeros(5, np.uint16)
    for expected in case.after_hits:
        policy.tally(counts, np.array([2]))
        assert counts.tolist() == [0, 0, expected, 0, 0]


@pytest.mark.parametrize("name", CASES)
def test_hits_count_where_the_policy_learns(name):
    worth = make_pool_policy(name).worth(history([5, 5], counts=[1, 2]))
    assert (worth[0] < worth[1]) == CASES[name].learns


@pytest.mark.parametrize("name", CASES)
def test_the_order_of_rows_changes_nothing(name):
    """Rows in another order are worth the same: nothing depends on the slot a row lies in."""
    generator = np.random.default_rng(3)
    rows = history(
        generator.permutation(500)[:60],
        generator.integers(0, 99, 60),
        generator.integers(0, 99, 60),
        500,
    )
    order = generator.permutation(60)
    turned = history(rows.positions[order], rows.counts[order], rows.last_selected[order], 500)
    policy = make_pool_policy(name)
    np.testing.assert_array_equal(policy.worth(turned), policy.worth(rows)[order])


def test_an_unknown_policy_is_refused_with_those_there_are():
    with pytest.raises(SettingsError, match=r"pool_policy='best' .*" + ", ".join(POOL_POLICIES)):
        make_pool_policy("best")


# --- what each ranks by --------------------------------------------------------------------


def order(name, rows):
    """Return the positions of rows from the least to the most worth."""
    return rows.positions[np.argsort(make_pool_policy(name).worth(rows), kind="stable")].tolist()


def test_lru_ranks_by_the_last_selection():
    assert order("lru", history([1, 2, 3, 4], [9, 8, 7, 6], [30, 10, 40, 20])) == [2, 4, 1, 3]


def test_counts_rank_by_hits():
    assert order("counts", history([1, 2, 3, 4], [9, 6, 7, 8], [30, 10, 40, 20])) == [2, 3, 4, 1]


def test_recent_ranks_by_position():
    assert order("recent", history([7, 2, 900, 4], [9, 9, 0, 0], 5)) == [2, 4, 7, 900]


@pytest.mark.parametrize(
    ("length", "alpha", "pins"), [(1000, 0.1, 100), (1001, 0.1, 101), (9, 1.0, 9)]
)
def test_the_paper_pins_the_most_recent_share(length, alpha, pins):
    rows = history(np.arange(length), counts=MOST_HITS, length=length, alpha=alpha)
    worth = make_pool_policy("paper").worth(rows)
    assert np.flatnonzero(worth >= PIN).tolist() == list(range(length - pins, length))


def test_the_paper_pins_by_the_length_of_each_rows_own_sequence():
    rows = history([95, 95, 995], length=[100, 1000, 1000])
    worth = make_pool_policy("paper").worth(rows)
    assert (worth >= PIN).tolist() == [True, False, True]


def test_the_paper_ranks_the_others_by_hits():
    assert order("paper", history([1, 2, 3, 999, 998], [9, 6, 7, 0, 1])) == [2, 3, 1, 999, 998]


def test_decayed_counts_forget():
    """A token of 20 steps in a row falls behind one that has been selected twice since."""
    policy = make_pool_policy("decayed")
    counts = np.zeros(2, np.uint16)
    for _ in range(20):
        policy.tally(counts, np.array([0]))
    assert counts[0] > 50_000
    steps = 0
    while counts[0] > counts[1]:
        policy.tally(counts, np.array([1]) if steps % 4 == 0 else np.array([], np.int64))
        steps += 1
    assert steps < 20
    forgets = PoolPolicy()
    counts[:] = [20, 0]
    for _ in range(19):
        forgets.tally(counts, np.array([1]))
    assert counts.tolist() == [20, 19], "plain counts do not"


def test_decayed_counts_come_to_rest_at_the_largest_entry():
    policy = make_pool_policy("decayed")
    counts = np.zeros(1, np.uint16)
    for _ in range(200):
        policy.tally(counts, np.array([0]))
    assert counts[0] == MOST_HITS
    for _ in range(200):
        policy.tally(counts, np.array([], np.int64))
    assert counts[0] < 8


# --- mutation twins ------------------------------------------------------------------------


class Overflowing(PoolPolicy):
    def tally(self, counts, selected):
        counts[selected] += np.uint16(1)


class Lowering(PoolPolicy):
    def tally(self, counts, selected):
        counts -= counts >> 1
        super().tally(counts, selected)


class Lifting(PoolPolicy):
    def tally(self, counts, selected):
        counts += counts < MOST_HITS


@pytest.mark.parametrize("policy", [Overflowing, Lowering, Lifting])
def test_a_wrong_tally_is_noticed(policy):
    with pytest.raises(AssertionError):
        check_tally(policy(), np.array([5, MOST_HITS, 900], np.uint16), np.array([1, 2]))


class Pinning(PoolPolicy):
    def worth(self, rows):
        return super().worth(rows) + 2 * PIN


class Negative(PoolPolicy):
    def worth(self, rows):
        return rows.positions - rows.lengths.astype(np.int64)


class Narrow(PoolPolicy):
    def worth(self, rows):
        return rows.positions


class Meddling(PoolPolicy):
    def worth(self, rows):
        rows.counts[:] += 1
        return super().worth(rows)


@pytest.mark.parametrize("policy", [Pinning, Negative, Narrow, Meddling])
def test_a_wrong_worth_is_noticed(policy):
    with pytest.raises(AssertionError):
        check_worth(policy(), history([1, 2, 3]))


def test_a_hit_that_fades_saturates_at_every_count():
    def expected(hit):
        counts = np.arange(1 << 16, dtype=np.int64)
        faded = counts - (counts >> 2)
        return np.minimum(faded + hit, (1 << 16) - 1)

    counts = np.arange(1 << 16).astype(np.uint16)
    DecayedCounts().tally(counts, np.arange(1 << 16))
    np.testing.assert_array_equal(counts, expected(1 << 14))
    # The twin: a hit of one less must show.
    assert (counts != expected((1 << 14) - 1)).any()
