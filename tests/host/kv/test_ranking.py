# SPDX-License-Identifier: Apache-2.0
"""Kept tokens before pins, pins before worth, then what was selected later, then what is newer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer.kv.hot_pool import PoolMoment, rank
from hillinfer.kv.pool_policies import (
    MOST_HITS,
    PIN,
    POOL_POLICIES,
    PoolPolicy,
    RowHistory,
    make_pool_policy,
)

LENGTH = 131_072


def moment(step=1000, alpha=0.1, sinks=4, recent=32):
    return PoolMoment(step, LENGTH, alpha, sinks, recent)


def rows(*each, length=LENGTH):
    """Return the history of rows, each a tuple of position, hits and last selection."""
    columns = np.array(each, np.int64).reshape(-1, 3).T
    return RowHistory(
        columns[0].astype(np.int32),
        columns[1].astype(np.uint16),
        columns[2].astype(np.int32),
        np.full(len(each), length, np.int32),
        0.1,
    )


def order(policy, history, at):
    return np.argsort(rank(policy, history, at), kind="stable").tolist()


def test_kept_tokens_before_pins_before_worth():
    history = rows(
        (LENGTH - 1, 0, 0),  # recent, and pinned
        (3, 0, 0),  # the last sink
        (LENGTH - 33, 0, 0),  # pinned, and just not recent
        (4, MOST_HITS, 1000),  # just not a sink
        (5, 7, 1000),
        (6, 8, 10),
    )
    assert order(make_pool_policy("paper"), history, moment()) == [4, 5, 3, 2, 1, 0]
    # Without pins the same rows are told apart by hits.
    assert order(make_pool_policy("counts"), history, moment()) == [2, 4, 5, 3, 1, 0]


@pytest.mark.parametrize("name", POOL_POLICIES)
def test_kept_tokens_come_first_whatever_the_policy(name):
    kept = rows((0, 0, 0), (3, 0, 0), (LENGTH - 32, 0, 0), (LENGTH - 1, 0, 0))
    others = rows((4, MOST_HITS, 1000), (LENGTH - 33, MOST_HITS, 1000), (70_000, MOST_HITS, 1000))
    policy, at = make_pool_policy(name), moment()
    assert rank(policy, kept, at).min() > rank(policy, others, at).max()


def test_no_sinks_and_one_recent_token():
    at = moment(sinks=0, recent=1)
    history = rows((0, 0, 0), (LENGTH - 2, 9, 0), (LENGTH - 1, 0, 0))
    assert order(PoolPolicy(), history, at) == [0, 1, 2]
    assert rank(PoolPolicy(), history, at)[2] > rank(PoolPolicy(), rows((5, MOST_HITS, 1000)), at)


def test_rows_of_a_shorter_sequence_are_kept_by_their_own_length():
    history = RowHistory(
        np.array([99, 99, 60], np.int32),
        np.zeros(3, np.uint16),
        np.zeros(3, np.int32),
        np.array([100, LENGTH, 100], np.int32),
        0.1,
    )
    keys = rank(PoolPolicy(), history, moment())
    assert keys[0] > keys[1] > keys[2]
    assert keys[0] - keys[1] > keys[1] - keys[2]


def test_among_equals_what_was_selected_later_then_what_is_newer():
    history = rows((50, 3, 900), (60, 3, 900), (40, 3, 901), (70, 2, 999))
    assert order(PoolPolicy(), history, moment()) == [3, 0, 1, 2]


def test_equal_rows_are_equal():
    keys = rank(PoolPolicy(), rows((50, 3, 900), (50, 3, 900)), moment())
    assert keys[0] == keys[1]


def test_ages_and_positions_beyond_their_bits_are_equal_and_spill_nowhere():
    at = PoolMoment(1 << 30, 1 << 26, 0.1, 0, 1)
    far = 1 << 25
    history = rows(
        (5, 3, at.step - 1023),
        (5, 3, at.step - 1024),
        (5, 3, 0),
        ((1 << 20) - 1, 3, 0),
        (1 << 20, 3, 0),
        (far, 3, 0),
        (5, 4, 0),
        (far, 3, at.step),
        length=1 << 26,
    )
    keys = rank(PoolPolicy(), history, at)
    assert keys[0] == keys[1] == keys[2]
    assert keys[2] < keys[3] == keys[4] == keys[5] < keys[7] < keys[6]


def test_a_selection_after_the_moment_is_no_younger_than_one_in_it():
    """A pool may shrink by the moment of an earlier promotion."""
    at = moment(step=10)
    keys = rank(PoolPolicy(), rows((50, 3, 10), (50, 3, 500), (6, 4, 1)), at)
    assert keys[0] == keys[1] < keys[2]


class Greatest(PoolPolicy):
    def worth(self, rows):
        return np.full(len(rows.positions), 2 * PIN - 1, np.int64)


class Least(PoolPolicy):
    def worth(self, rows):
        return np.zeros(len(rows.positions), np.int64)


@pytest.mark.parametrize("policy", [Greatest, Least, *POOL_POLICIES.values()])
def test_no_key_leaves_an_int64(policy):
    step = np.iinfo(np.int32).max
    history = rows(
        *(
            (position, hits, last)
            for position in (0, 1 << 20, LENGTH - 1)
            for hits in (0, MOST_HITS)
            for last in (0, step - 1, step)
        )
    )
    at = moment(step=step)
    keys = rank(policy(), history, at)
    assert keys.dtype == np.int64
    assert (keys >= 0).all()
    worth = policy().worth(history)
    for i, key in enumerate(keys.tolist()):
        kept = history.positions[i] < 4 or history.positions[i] >= LENGTH - 32
        age = min(step - int(history.last_selected[i]), 1023)
        exact = (int(worth[i]) + 2 * PIN * kept) * 1024 + 1023 - age
        assert key == exact * 2**20 + min(int(history.positions[i]), 2**20 - 1)
        assert key < 2**63


@settings(max_examples=60, deadline=None)
@given(
    each=st.lists(
        st.tuples(st.integers(0, LENGTH - 1), st.integers(0, MOST_HITS), st.integers(0, 1000)),
        min_size=1,
        max_size=40,
    ),
    name=st.sampled_from(list(POOL_POLICIES)),
    sinks=st.integers(0, 5),
    recent=st.integers(1, 40),
)
def test_against_sorting_tuples(each, name, sinks, recent):
    at, history, policy = moment(sinks=sinks, recent=recent), rows(*each), make_pool_policy(name)
    worth = policy.worth(history).tolist()

    def expected(i):
        position, _, last = each[i]
        kept = position < sinks or position >= LENGTH - recent
        return kept, worth[i], -min(1000 - last, 1023), position

    assert order(policy, history, at) == sorted(range(len(each)), key=expected)
