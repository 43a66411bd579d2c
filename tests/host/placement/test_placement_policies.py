# SPDX-License-Identifier: Apache-2.0
"""What each placement policy does, by the table, and the paper's greedy step by step."""

import pytest
from placed_documents import CASES, MB, options, places, placing

from hillinfer.errors import SettingsError
from hillinfer.placement.options import (
    AnswerUtility,
    FadingUses,
    FirstTokenUtility,
    Option,
    TotalUses,
    above_floor,
)
from hillinfer.placement.policies import (
    LeastDropPerByte,
    LeastRecentlyUsed,
    MergedHulls,
    make_placement_policy,
)


@pytest.mark.parametrize("policy", CASES)
def test_all_that_fits_is_held(policy):
    placed = placing(policy, dram=200)
    for now, name in enumerate("ab"):
        placed.put(name, options(), now)
    assert places(placed) == {"a": ("held", "dram"), "b": ("held", "dram")}
    # Nothing moves for a use.
    assert placed.used("a", 5) == []


@pytest.mark.parametrize("policy", CASES)
def test_what_does_not_fit_takes_smaller_forms_or_moves_down(policy):
    placed = placing(policy, dram=200)
    for now, name in enumerate("abc"):
        placed.put(name, options(), now)
    forms = sorted(places(placed).values())
    if CASES[policy].shares:
        # 33 ms are lost by the smaller form in DRAM, 90 by all rows on the drive, 58 by both.
        by_drop = [("held", "dram"), ("held", "dram"), ("int4", "drive")]
        by_byte = [("held", "dram"), ("int4", "dram"), ("int4", "dram")]
        assert forms == (by_byte if policy == "per-byte" else by_drop)
    else:
        assert places(placed)["a"] == ("held", "drive")
        assert forms == [("held", "dram"), ("held", "dram"), ("held", "drive")]


@pytest.mark.parametrize("policy", CASES)
def test_only_some_move_up_when_room_is_left(policy):
    placed = placing(policy, dram=200)
    for now, name in enumerate("abc"):
        placed.put(name, options(), now)
    gone = next(name for name, place in places(placed).items() if place == ("held", "dram"))
    changes = placed.remove(gone)
    assert (len(changes) > 1) is CASES[policy].moves_up
    forms = sorted(places(placed).values())
    assert (forms == [("held", "dram")] * 2) is CASES[policy].moves_up


@pytest.mark.parametrize("policy", CASES)
def test_a_drive_that_is_full_too_is_left_likewise(policy):
    placed = placing(policy, dram=0, drive=100)
    for now, name in enumerate("abc"):
        placed.put(name, options(), now)
    assert placed.stock.used("dram") == 0
    assert 80 * MB <= placed.stock.used("drive") <= 100 * MB
    assert {place for _, place in places(placed).values()} <= {"drive", "rest"}


def test_the_papers_greedy_gives_up_least_utility_not_least_per_byte():
    expected = {
        "paper": {"large": ("held", "dram"), "small": ("held", "drive")},
        "per-byte": {"large": ("int4", "dram"), "small": ("held", "dram")},
    }
    for policy, places_expected in expected.items():
        placed = placing(policy, dram=105, uses=TotalUses())
        placed.put("large", options(100), 0)
        placed.put("small", options(10), 2)
        assert places(placed) == places_expected


def test_the_papers_greedy_counts_how_often_a_document_is_asked_for():
    for often in "ab":
        placed = placing("paper", dram=130, uses=TotalUses())
        placed.put("a", options(), 0)
        placed.used("a", 1)
        for _ in range(3):
            placed.used(often, 2) if often in places(placed) else None
        placed.put("b", options(), 3)
        for _ in range(5 if often == "b" else 0):
            placed.used("b", 4)
        # What came later is asked for once when it comes: it is the one that gives way.
        assert places(placed) == {"a": ("held", "dram"), "b": ("int4", "dram")}


def test_a_newcomer_begins_at_its_utility_or_as_printed_at_its_quality():
    slow_but_whole = [
        Option("rows", "rest", 0, 1.0, 1.0),
        Option("whole", "dram", 90 * MB, 1.0, 0.6),
        Option("half", "dram", 50 * MB, 0.9, 0.1),
    ]
    for policy, form in {"paper": "half", "paper-printed": "whole", "hulls": "half"}.items():
        placed = placing(policy)
        placed.put("a", slow_but_whole, 0)
        assert places(placed) == {"a": (form, "dram")}


def test_measured_anew_a_document_is_placed_by_what_is_known_now():
    for policy in ("hulls", "paper", "per-byte"):
        placed = placing(policy, dram=60)
        placed.put("a", options(dropped=0.01), 0)
        assert places(placed) == {"a": ("half", "dram")}
        assert placed.put("a", options(dropped=0.2), 1) != []
        assert places(placed) == {"a": ("int4", "dram")}


def test_least_recently_used_keeps_one_form_and_brings_it_back_when_asked():
    placed = placing(LeastRecentlyUsed("int4"), dram=60, drive=30)
    for now, name in enumerate("abcd"):
        placed.put(name, options(), now)
    assert places(placed) == {
        "a": ("rows", "rest"),
        "b": ("int4", "drive"),
        "c": ("int4", "dram"),
        "d": ("int4", "dram"),
    }
    placed.used("a", 9)
    assert places(placed) == {
        "a": ("int4", "dram"),
        "b": ("rows", "rest"),
        "c": ("int4", "drive"),
        "d": ("int4", "dram"),
    }
    # What fits nowhere rests; what fits on the drive alone goes there.
    placed.put("e", options(150), 10)
    assert places(placed)["e"] == ("int4", "dram")
    placed.put("f", options(300), 11)
    assert places(placed)["f"] == ("rows", "rest")


def test_hulls_follow_what_is_asked_for_now():
    uses = FadingUses(half_life=100.0)
    placed = placing(MergedHulls(), dram=110, uses=uses)
    for _ in range(50):
        placed.put("old", options(), 0)
        placed.used("old", 0)
    placed.put("new", options(), 0)
    assert places(placed)["old"] == ("held", "dram")
    assert placed.per_hour("old", 0) > 10 * placed.per_hour("new", 0)
    for now in (2000, 2001, 2002):
        placed.used("new", now)
    assert places(placed)["new"] == ("held", "dram")
    assert placed.per_hour("old", 2002) < placed.per_hour("new", 2002)


def test_weights_begin_anew_before_numbers_end():
    for policy in CASES:
        placed = placing(policy, dram=110, uses=FadingUses(half_life=1.0))
        placed.put("a", options(), 0)
        placed.put("b", options(), 1)
        for now in range(0, 5000, 500):
            placed.used("a", now)
            placed.used("b", now + 1)
        weights = [one.weight for one in placed.stock.contexts.values()]
        assert all(0 < weight < float("inf") for weight in weights)
        assert placed.stock.contexts["b"].weight > placed.stock.contexts["a"].weight
        assert placed.stock.used("dram") <= 110 * MB


def test_a_price_on_the_drive_is_seen_in_dram():
    """Of two documents the one that finds no room on the drive gains more from DRAM."""
    placed = placing(MergedHulls(0.0), dram=30, drive=100)
    placed.put("a", options(100), 0)
    placed.put("b", options(90), 1)
    used = {name: placed.stock.option(name).tier for name in "ab"}
    assert "dram" in used.values()
    assert placed.stock.used("drive") <= 100 * MB


def test_utilities_and_uses_by_hand():
    option = Option("x", "dram", 1, 0.9, 0.5, 0.01)
    assert FirstTokenUtility(2.0).value(option) == pytest.approx(1.3)
    assert AnswerUtility(2.0, tokens=50, decode_weight=0.5).value(option) == pytest.approx(1.05)
    assert TotalUses().used(3.0, 99.0) == 4.0
    assert TotalUses().per_hour(4.0, 7200.0) == 2.0
    uses = FadingUses(half_life=60.0)
    weight = uses.used(uses.used(0.0, 0.0), 60.0)
    assert weight == 3.0
    # One use in every minute for ever counts for 1 / ln 2 half-lives in all.
    assert uses.per_hour(weight, 60.0) == pytest.approx(1.5 * 0.6931 * 60, rel=1e-3)
    assert uses.moved(weight, 60.0) == 1.5


def test_a_floor_leaves_out_what_is_below_and_keeps_the_best():
    made = options(dropped=0.2)
    assert {one.form for one in above_floor(made, 0.97)} == {"rows", "held"}
    assert {one.form for one in above_floor(made, 0.95)} == {"rows", "held", "int4"}
    assert above_floor([made[-1]], 0.97) == (made[-1],)
    placed = placing(dram=60, floor=0.97)
    placed.put("a", made, 0)
    assert places(placed) == {"a": ("held", "drive")}
    with pytest.raises(SettingsError, match=r"floor=1.5 is not from 0 to 1"):
        above_floor(made, 1.5)


def test_names_that_are_unknown_and_settings_out_of_range():
    with pytest.raises(SettingsError, match="placement='best' is unknown: choose one of hulls"):
        make_placement_policy("best")
    with pytest.raises(SettingsError, match=r"hysteresis=-0.1 is below 0"):
        MergedHulls(-0.1)
    with pytest.raises(SettingsError, match="half_life=0 is no time"):
        FadingUses(0)
    assert isinstance(make_placement_policy("per-byte"), LeastDropPerByte)
