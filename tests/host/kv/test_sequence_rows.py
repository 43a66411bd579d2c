# SPDX-License-Identifier: Apache-2.0
"""Row numbers of a sequence's positions."""

import numpy as np
import pytest

from hillinfer.kv.sequence import Sequence
from hillinfer_model.kernel_spec import GROUP_TOKENS

GROUPS = [7, 2, 900, 0, 31]


def sequence_of(groups):
    sequence = Sequence(1, 8)
    sequence.groups += groups
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
    sequence.drop_groups(4)
    sequence.groups.append(5)
    assert sequence.rows(last).tolist() == [5 * GROUP_TOKENS]


def test_a_position_behind_the_last_group_is_refused():
    with pytest.raises(IndexError):
        sequence_of(GROUPS).rows(np.array([len(GROUPS) * GROUP_TOKENS]))


def test_a_group_is_a_power_of_two():
    """What the remainder is taken by."""
    assert GROUP_TOKENS & (GROUP_TOKENS - 1) == 0
