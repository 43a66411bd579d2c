# SPDX-License-Identifier: Apache-2.0
"""Groups are handed out lowest first and free once nobody owns them."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer.drive.regions import GroupTable


def closed(table):
    """Close a table's idle regions, and return them."""
    left = []
    table.close_idle_regions(left.append)
    return left


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
        assert table.parts_in_use == len(owners)


MOVES = ["take", "share", "give", "open", "let go", "close"]


@settings(max_examples=200, deadline=None)
@given(moves=st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 30)), max_size=60))
def test_regions_are_shared_and_never_handed_out(moves):
    table, owners, regions, held = GroupTable(), Counter(), {}, set()

    def inside():
        return {first + i for first, count in regions.items() for i in range(count)}

    for move, number in moves:
        owned = sorted(owners)
        if move == "take":
            group = table.take()
            assert group == next(i for i in range(2000) if i not in owners and i not in inside())
            owners[group] = 1
        elif move == "open":
            count, end = number % 7 + 1, table.groups
            taken = {*owners} | inside()
            first = table.open_region(count)
            run = range(first, first + count)
            assert not taken & {*run}
            # Numbers come in no place behind a run that is free.
            assert first == next(i for i in range(2000) if not taken & {*range(i, i + count)})
            assert table.groups == max(end, first + count)
            regions[first] = count
            held.add(first)
        elif move == "let go" and held:
            first = sorted(held)[number % len(held)]
            held.remove(first)
            table.let_go(first)
        elif move == "close":
            idle = {
                first
                for first, count in regions.items()
                if first not in held and not {*owners} & {*range(first, first + count)}
            }
            assert {*closed(table)} == idle
            for first in idle:
                del regions[first]
        elif move == "share":
            choices = sorted({*owned, *inside()})
            if choices:
                group = choices[number % len(choices)]
                table.share(group)
                owners[group] += 1
        elif move == "give" and owned:
            group = owned[number % len(owned)]
            owners -= Counter([group])
            assert table.give(group) == (group not in owners)
        assert table.parts_in_use == len(owners)


def test_groups_that_are_sealed_go_with_their_last_owner():
    table = GroupTable()
    assert [table.take() for _ in range(3)] == [0, 1, 2]
    table.share(1)
    table.seal(3)
    assert table.take() == 3
    for group in (0, 1, 2):
        table.give(group)
    assert closed(table) == []
    assert table.take() == 4
    table.give(1)
    assert closed(table) == [0]
    assert [table.take() for _ in range(3)] == [0, 1, 2]


def test_a_region_whose_files_are_not_closed_yet_is_closed_by_the_next():
    table, left = GroupTable(), []
    first = table.open_region(2)
    table.let_go(first)

    def broken(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        table.close_idle_regions(broken)
    # Nobody gets a number that is known by where it lay.
    assert table.take() == 2
    table.close_idle_regions(left.append)
    assert left == [first]
    assert [table.take(), table.take()] == [0, 1]


def test_what_begins_where_a_region_does_is_sealed_in_its_place():
    table = GroupTable()
    for _ in range(4):
        table.take()
    # The first time Ctrl-C comes before anything is in its place.
    table.seal(2)
    table.seal(4)
    for group in range(4):
        table.give(group)
    assert closed(table) == [0]
    assert [table.take() for _ in range(5)] == [0, 1, 2, 3, 4]


def test_what_is_given_back_twice_has_one_owner_less_each_time():
    table = GroupTable()
    shared, own = table.take(), table.take()
    table.share(shared)
    assert table.of_one_owner([shared, own]) == [own]
    assert table.of_one_owner([shared, own, shared]) == [shared, own]
    given = [shared, own, shared]
    table.give_all(given)
    assert given == []
    assert [table.take(), table.take(), table.take()] == [0, 1, 2]


def test_regions_that_come_and_go_need_no_more_numbers():
    table = GroupTable()
    for count in [5, 9, 2] * 300:
        first = table.open_region(count)
        table.share(first + 1)
        table.let_go(first)
        assert closed(table) == []
        table.give(first + 1)
        assert closed(table) == [first]
    assert table.groups == 9


def test_a_group_of_no_region_is_not_shared_before_somebody_takes_it():
    table = GroupTable()
    table.give(table.take())
    with pytest.raises(ValueError, match="nobody owns group 0, which lies in no region"):
        table.share(0)
    with pytest.raises(IndexError):
        table.share(7)


def test_parts_of_groups_add_up_as_long_as_somebody_owns_them():
    table = GroupTable()
    half, whole = table.take(0.5), table.take()
    assert table.parts_in_use == 1.5
    table.share(half)
    assert not table.give(half)
    assert table.parts_in_use == 1.5
    assert table.give(half)
    assert table.parts_in_use == 1
    # The number is handed out again, and used as a whole.
    assert table.take() == half
    assert table.parts_in_use == 2
    table.give(half)
    table.give(whole)
    assert table.parts_in_use == 0
