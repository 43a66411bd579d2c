# SPDX-License-Identifier: Apache-2.0
"""Whatever happens, no budget is passed on the way, and pinned documents stay."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placed_documents import CASES, MB, options, places, placing

from hillinfer.errors import BudgetError, SettingsError
from hillinfer.placement.options import Option

NAMES = st.sampled_from("abcdef")
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), NAMES, st.integers(1, 250), st.floats(0, 0.5)),
        st.tuples(st.just("used"), NAMES),
        st.tuples(st.just("remove"), NAMES),
        st.tuples(st.just("pin"), NAMES, st.sampled_from(["held", "int4", "half", "rows"])),
        st.tuples(st.just("unpin"), NAMES),
        st.tuples(st.just("resize"), st.sampled_from(["dram", "drive"]), st.integers(0, 400)),
    ),
    max_size=40,
)


class Follower:
    """Makes the changes that a placing returns, with a count of its own."""

    def __init__(self, budgets):
        self.budgets = budgets
        self.lies = {}

    def used(self, tier):
        return sum(option.byte_count for option in self.lies.values() if option.tier == tier)

    def follow(self, changes):
        for change in changes:
            assert self.lies.get(change.context) == change.before
            before = {tier: self.used(tier) for tier in self.budgets}
            self.lies.pop(change.context, None)
            if change.after is not None:
                self.lies[change.context] = change.after
            for tier, budget in self.budgets.items():
                # Where a budget has just shrunk, forms go down to it and never up.
                assert self.used(tier) <= max(budget, before[tier])
        for tier, budget in self.budgets.items():
            assert self.used(tier) <= budget


def tell(placed, event, now):
    what, *arguments = event
    if what == "put":
        name, size, dropped = arguments
        return placed.put(name, options(size, dropped), now)
    if what == "used":
        return placed.used(*arguments, now)
    if what == "resize":
        return placed.resize(arguments[0], arguments[1] * MB)
    return getattr(placed, what)(*arguments)


@pytest.mark.parametrize("policy", CASES)
@settings(max_examples=60, deadline=None)
@given(events=EVENTS)
def test_no_budget_is_passed_at_any_moment(policy, events):
    placed = placing(policy, dram=200, drive=300)
    follower = Follower({"dram": 200 * MB, "drive": 300 * MB})
    pinned = {}
    for number, event in enumerate(events):
        try:
            changes = tell(placed, event, number * 600.0)
        except SettingsError:
            assert event[1] not in placed.stock.contexts
            continue
        except BudgetError:
            # Only what is pinned may need more than there is.
            assert event[0] in ("pin", "resize") or event[1] in pinned
            changes, event = [], ("refused",)
        if event[0] == "resize":
            follower.budgets[event[1]] = event[2] * MB
        elif event[0] == "pin":
            pinned[event[1]] = event[2]
        elif event[0] in ("unpin", "remove"):
            pinned.pop(event[1], None)
        for change in changes:
            # Newer measurements may change the bytes of what stays where it is.
            old = follower.lies.get(change.context)
            if old is not None and change.before is not None and old.place == change.before.place:
                follower.lies[change.context] = change.before
        follower.follow(changes)
        for name in placed.stock.contexts:
            follower.lies[name] = placed.stock.option(name)
            if name in pinned:
                assert placed.stock.option(name).form == pinned[name]
        for tier, budget in follower.budgets.items():
            assert placed.stock.used(tier) == follower.used(tier) <= budget
        assert follower.lies.keys() == placed.stock.contexts.keys()


def test_what_passes_a_budget_would_be_seen():
    follower = Follower({"dram": 10})
    from hillinfer.placement.stock import Change

    with pytest.raises(AssertionError):
        follower.follow([Change("a", None, Option("x", "dram", 11, 1.0, 0.0))])


@pytest.mark.parametrize("policy", CASES)
def test_a_pinned_document_stays_while_others_come(policy):
    placed = placing(policy, dram=120)
    placed.put("a", options(), 0)
    placed.pin("a", "half")
    for now in range(1, 20):
        placed.put("b", options(), now)
        placed.used("b", now)
    assert places(placed)["a"] == ("half", "dram")
    assert placed.stock.used("dram") <= 120 * MB
    placed.unpin("a")
    placed.put("b", options(10), 30)
    placed.put("a", options(dropped=0.3), 31)
    assert places(placed)["a"] == ("held", "dram")


def test_a_pin_takes_the_fastest_tier_that_has_room_beside_other_pins():
    placed = placing(dram=150, drive=150)
    for now, name in enumerate("abc"):
        placed.put(name, options(), now)
        placed.pin(name, "held") if name != "c" else None
    assert places(placed)["a"] == ("held", "dram")
    assert places(placed)["b"] == ("held", "drive")
    with pytest.raises(
        BudgetError, match=r"c as held would take .* where 100000000 are pinned.*unpin a document"
    ):
        placed.pin("c", "held")
    # Pinning anew in another form counts the document once.
    placed.pin("a", "half")
    placed.pin("a", "held")
    assert places(placed)["a"] == ("held", "dram")
    with pytest.raises(BudgetError, match="50000000 bytes for dram is below the 100000000 bytes"):
        placed.resize("dram", 50 * MB)
    assert places(placed)["a"] == ("held", "dram")


def test_a_pinned_document_keeps_its_form_when_it_is_measured_anew():
    placed = placing(dram=150)
    placed.put("a", options(), 0)
    placed.pin("a", "half")
    placed.put("a", options(dropped=0.4), 1)
    assert placed.stock.option("a").quality == pytest.approx(0.6)
    with pytest.raises(BudgetError, match="a as half would take"):
        placed.put("a", options(5000), 2)


def test_what_is_unknown_is_named():
    placed = placing()
    with pytest.raises(SettingsError, match="no document is called 'x': put it first"):
        placed.used("x", 0)
    placed.put("a", options(), 0)
    with pytest.raises(SettingsError, match="a has no form 'int3': choose one of rows, held, int4"):
        placed.pin("a", "int3")
    with pytest.raises(SettingsError, match="tier 'tape' has no budget: choose one of dram, drive"):
        placed.resize("tape", 1)


def test_two_of_about_equal_use_do_not_take_turns():
    placed = placing(dram=110)
    placed.put("a", options(), 0)
    placed.put("b", options(), 1)
    changes = []
    for now in range(2, 60):
        changes += placed.used("ab"[now % 2], now)
    assert len(changes) <= 2
