# SPDX-License-Identifier: Apache-2.0
"""Groups are handed out lowest first and free once nobody owns them."""

from collections import Counter

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
