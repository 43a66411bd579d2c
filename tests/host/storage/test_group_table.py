# SPDX-License-Identifier: Apache-2.0
"""Groups are handed out lowest first and free once nobody owns them."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer.storage.group_table import GroupTable


@settings(max_examples=80, deadline=None)
@given(moves=st.lists(st.tuples(st.sampled_from(["take", "share", "give"]), st.integers(0, 30))))
def test_against_a_plain_count_of_owners(moves):
    table, owners, highest = GroupTable(), Counter(), -1
    for move, number in moves:
        owned = sorted(owners)
        if move == "take":
            lowest_free = next(i for i in range(1000) if i not in owners)
            group = table.take()
            assert group == lowest_free
            owners[group] = 1
            highest = max(highest, group)
        elif owned:
            group = owned[number % len(owned)]
            if move == "share":
                table.share(group)
                owners[group] += 1
            else:
                owners[group] -= 1
                assert table.give(group) == (owners[group] == 0)
                owners += Counter()
        assert table.groups == highest + 1
        assert table.groups_in_use == len(owners)


@settings(max_examples=80, deadline=None)
@given(
    before=st.integers(0, 6),
    given_back=st.sets(st.integers(0, 5)),
    fixed=st.integers(0, 9),
    moves=st.lists(st.tuples(st.sampled_from(["take", "share", "give"]), st.integers(0, 30))),
)
def test_fixed_groups_are_shared_and_never_handed_out(before, given_back, fixed, moves):
    table, owners = GroupTable(), Counter()
    for group in range(before):
        assert table.take() == group
        owners[group] = 1
    for group in given_back & set(range(before)):
        assert table.give(group)
        owners -= Counter([group])
    table.fix(fixed)
    assert table.groups == max(before, fixed)
    for move, number in moves:
        owned = sorted(owners)
        if move == "take":
            group = table.take()
            assert group >= fixed
            assert group == next(i for i in range(fixed, 1000) if i not in owners)
            owners[group] = 1
        elif move == "share":
            choices = sorted({*owned, *range(fixed)})
            if choices:
                group = choices[number % len(choices)]
                table.share(group)
                owners[group] += 1
        elif owned:
            group = owned[number % len(owned)]
            owners -= Counter([group])
            assert table.give(group) == (group not in owners)
        assert table.groups_in_use == len(owners)


def test_a_table_that_did_not_know_of_fixed_groups_would_hand_them_out():
    table = GroupTable()
    table.share(table.take())
    assert not table.give(0)
    assert table.give(0)
    assert table.take() == 0
    table.give(0)
    table.fix(1)
    assert table.take() == 1
    with pytest.raises(IndexError):
        table.share(7)
