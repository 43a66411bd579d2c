# SPDX-License-Identifier: Apache-2.0
"""Row numbers of a sequence's positions."""

import numpy as np
import pytest

from hillinfer.kv.sequence import Sequence
from hillinfer_model.kernel_spec import GROUP_TOKENS

GROUPS = [7, 2, 900, 0, 31]


def sequence_of(groups):
    sequence = Sequence(1, 8)
    sequence.append_groups(groups)
    return sequence


def rows_one_by_one(groups, positions):
    return [groups[one // GROUP_TOKENS] * GROUP_TOKENS + one % GROUP_TOKENS for one in positions]


def test_rows_are_those_of_each_positions_group():
    positions = np.random.default_rng(0).permutation(len(GROUPS) * GROUP_TOKENS)
    rows = sequence_of(GROUPS).rows(positions)
    assert rows.dtype == np.int64
    assert rows.tolist() == rows_one_by_one(GROUPS, positions.tolist())
    # The twin: one other group must show.
    assert rows.tolist() != rows_one_by_one([7, 2, 901, 0, 31], positions.tolist())


def test_groups_that_come_and_go_are_seen():
    sequence = sequence_of(GROUPS)
    last = np.array([4 * GROUP_TOKENS])
    assert sequence.rows(last).tolist() == [31 * GROUP_TOKENS]
    assert sequence.truncate(4 * GROUP_TOKENS) == [31]
    sequence.append_groups([5])
    assert sequence.groups == [7, 2, 900, 0, 5]
    assert sequence.rows(last).tolist() == [5 * GROUP_TOKENS]


def test_groups_that_somebody_looks_at_stay_while_more_come():
    """Another thread may look rows up meanwhile."""
    sequence = sequence_of(GROUPS)
    before = sequence.tables.groups()
    for number in range(10_000):
        sequence.append_groups([number])
    assert before.tolist() == GROUPS
    assert sequence.groups == [*GROUPS, *range(10_000)]
    assert sequence.group_count == 10_005


def test_a_fork_has_what_its_source_has_and_goes_on_by_itself():
    sequence = sequence_of(GROUPS)
    sequence.set_length(0, 323, 320)
    sequence.tails[0, :3] = 7
    sequence.hits.cover(0, 323)
    sequence.hits.counts[0][300] = 5
    fork = sequence.fork()
    found = (list(fork.lengths), list(fork.held_starts), fork.groups, fork.tails.tolist())
    assert found == ([323], [320], GROUPS, sequence.tails.tolist())
    assert fork.hits.counts[0].tolist() == sequence.hits.counts[0].tolist()
    fork.truncate(0)
    fork.tails[0, 0] = 1
    fork.append_groups([9])
    assert (list(sequence.lengths), sequence.groups) == ([323], GROUPS)
    assert sequence.hits.counts[0][300] == 5
    assert sequence.tails[0, 0, 0] == 7


def test_tables_are_changed_by_calls_alone():
    sequence = sequence_of(GROUPS)
    for table in (sequence.lengths, sequence.held_starts, sequence.tables.groups()):
        with pytest.raises((TypeError, ValueError), match=r"read-?only"):
            table[0] = 1


def test_what_is_looked_at_outlives_its_sequence():
    sequence = sequence_of(GROUPS)
    sequence.set_length(0, 5, 0)
    sequence.hits.cover(0, 5)
    sequence.hits.counts[0][:] = 3
    lengths, groups, hits = sequence.lengths, sequence.tables.groups(), sequence.hits.counts[0]
    sequence.hits.cover(0, 5000)
    del sequence
    others = [sequence_of([1] * 5) for _ in range(50)]
    assert (lengths[0], groups.tolist(), set(hits.tolist())) == (5, GROUPS, {3})
    del others


def test_a_position_behind_the_last_group_is_refused():
    with pytest.raises(IndexError):
        sequence_of(GROUPS).rows(np.array([len(GROUPS) * GROUP_TOKENS]))


def test_a_group_is_a_power_of_two():
    """What the remainder is taken by."""
    assert GROUP_TOKENS & (GROUP_TOKENS - 1) == 0


def test_what_is_told_of_tokens_goes_with_them():
    """Also of a band that got no row before its pass broke off: nothing is cut of it then."""
    sequence, rows = Sequence(2, 64), np.arange(3)
    sequence.tell_rows(5, rows)
    fork = sequence.fork()
    sequence.truncate(0)
    assert sequence.told_rows(5) is None
    # The twin: whose tokens stay keeps what it was told, for as many tokens.
    assert fork.told_rows(5) is rows
    assert fork.told_rows(6) is None
