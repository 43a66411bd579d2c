# SPDX-License-Identifier: Apache-2.0
"""Plans keep the budget, prefer what is asked for, and say why."""

from dataclasses import replace

import pytest

from hillinfer.catalogue.planning import (
    PlanRules,
    drive_options,
    make_plan,
    options_of,
    tier_of,
)
from hillinfer.catalogue.records import (
    CatalogueError,
    DocumentUse,
    KnownDocument,
    MeasuredForm,
    RestingTimes,
)
from hillinfer.errors import BudgetError, SettingsError
from hillinfer.placement.policies import PLACEMENT_POLICIES

# Bytes, lower end of quality and seconds until the first token.
FORMS = {"held": (1000, 1.0, 0.05), "int8": (530, 0.97, 0.06), "int4": (280, 0.93, 0.07)}
REST = RestingTimes(text=4.0, rows=1.0, token=0.01)


def document(number, **changes):
    measured = tuple(
        MeasuredForm(name, size, lower, lower, lower, 0.0, seconds, 0.01)
        for name, (size, lower, seconds) in FORMS.items()
    )
    key = bytes([number]) * 32
    return replace(
        KnownDocument(key, f"d{number}", "m", b"n", 256, float(number), REST, measured=measured),
        **changes,
    )


def uses(documents, rates):
    return {
        one.key: DocumentUse(rate, rate, 100.0 + number, 10)
        for number, (one, rate) in enumerate(zip(documents, rates, strict=True))
    }


def forms(plan):
    return {one.document.title: one.after for one in plan.documents}


def test_what_is_asked_for_most_gets_the_room():
    known = [document(1), document(2), document(3)]
    asked = uses(known, (5.0, 1.0, 0.1))
    plan = make_plan(known, asked, PlanRules(1300))
    assert forms(plan) == {"d1": "held", "d2": "int4", "d3": "rows"}
    assert plan.used == 1280
    assert [one.document.title for one in plan.changes] == ["d1", "d2"]
    assert plan.utility_after > plan.utility_before
    # The twin: asked for the other way round, the other one has it.
    assert forms(make_plan(known, uses(known, (0.1, 1.0, 5.0)), PlanRules(1300)))["d3"] == "held"


def test_each_drive_is_a_tier_of_its_own():
    known = [document(number) for number in range(1, 5)]
    asked = uses(known, (5.0, 4.0, 3.0, 0.1))

    def options(drives):
        return lambda one: [*options_of(one), *drive_options(one, 4000, drives)]

    # Each drive has room for one document's INT8 codes, and memory for none.
    rules = PlanRules(0, floor=0.95, drive_budget=530, drives=2)
    plan = forms(make_plan(known, asked, rules, options(2)))
    assert sorted(plan.values()) == ["drive-int8", "drive2-int8", "rows", "rows"]
    assert {one for one, form in plan.items() if form != "rows"} == {"d1", "d2"}
    # The twin: with one drive one of them rests.
    alone = forms(make_plan(known, asked, replace(rules, drives=1), options(1)))
    assert sorted(alone.values()) == ["drive-int8", "rows", "rows", "rows"]
    assert [tier_of(f"drive{number}int8") for number in ("-", "2-", "13-")] == [
        "drive",
        "drive2",
        "drive13",
    ]


def test_reasons_name_what_was_gained_and_what_had_no_room():
    known = [document(1), document(2)]
    planned = make_plan(known, uses(known, (5.0, 0.001)), PlanRules(1000)).documents
    assert planned[0].reason == "0.95 s a use better than at rest, 5 uses an hour"
    assert planned[1].reason == "others gain more by the bytes of held (1000 B); 0.001 uses an hour"
    (alone,) = make_plan(known[:1], uses(known[:1], (1.0,)), PlanRules(600)).documents
    assert alone.after == "int8"
    assert alone.reason.endswith("no room for held (1000 B)")
    (small,) = make_plan(known[:1], uses(known[:1], (1.0,)), PlanRules(10)).documents
    assert small.reason == "held (1000 B) is more than the budget"
    slow = replace(known[0], resting=replace(REST, rows=0.01))
    (rest,) = make_plan([slow], uses([slow], (1.0,)), PlanRules(1000)).documents
    assert (rest.after, rest.reason) == ("rows", "no form is worth more than rows")


@pytest.mark.parametrize("policy", PLACEMENT_POLICIES)
@pytest.mark.parametrize("budget", [0, 279, 280, 900, 1999, 5000])
def test_no_policy_passes_the_budget(policy, budget):
    known = [document(number) for number in range(1, 6)]
    plan = make_plan(known, uses(known, (5, 4, 3, 2, 1)), PlanRules(budget, policy=policy))
    sizes = sum(FORMS[form][0] for form in forms(plan).values() if form in FORMS)
    assert sizes == plan.used <= budget
    assert len(plan.documents) == 5


def test_a_pinned_document_stays_and_has_its_room():
    known = [document(1), document(2, form="int4", is_pinned=True)]
    plan = make_plan(known, uses(known, (5.0, 0.0)), PlanRules(1000))
    assert forms(plan) == {"d1": "int8", "d2": "int4"}
    assert plan.documents[1].reason == "pinned as int4"
    # The twin: unpinned it gives way.
    free = [known[0], replace(known[1], is_pinned=False)]
    assert forms(make_plan(free, uses(free, (5.0, 0.0)), PlanRules(1000)))["d1"] == "held"
    # Below the floor too, because a user has chosen it.
    floored = make_plan(known, uses(known, (5.0, 0.0)), PlanRules(1000, floor=0.95))
    assert forms(floored)["d2"] == "int4"


def test_pinned_documents_above_the_budget_are_refused():
    known = [document(number, form="held", is_pinned=True) for number in (1, 2)]
    with pytest.raises(
        BudgetError, match=r"2 pinned documents take 2\.0 KiB, and the budget is 1\.5 KiB"
    ):
        make_plan(known, uses(known, (1, 1)), PlanRules(1500))
    make_plan(known, uses(known, (1, 1)), PlanRules(2000))
    lost = [replace(known[0], measured=())]
    with pytest.raises(CatalogueError, match="pinned as held, which was not measured"):
        make_plan(lost, uses(lost, (1,)), PlanRules(1500))


def test_a_floor_leaves_forms_out():
    known = [document(1), document(2)]
    asked = uses(known, (5.0, 4.0))
    assert set(forms(make_plan(known, asked, PlanRules(600))).values()) == {"int4"}
    assert set(forms(make_plan(known, asked, PlanRules(600, floor=0.95))).values()) == {
        "int8",
        "rows",
    }


def test_what_cannot_take_part_is_named():
    known = [document(1), document(2), document(3, resting=None)]
    asked = uses(known, (1, 1, 1))
    del asked[known[0].key]
    plan = make_plan(known, asked, PlanRules(1000))
    assert forms(plan) == {"d2": "held"}
    assert plan.left_out == {
        known[0].name: "its rows are gone from the store",
        known[2].name: "not measured",
    }
    assert make_plan([], {}, PlanRules(0)).documents == ()


def test_hulls_show_every_option_and_what_was_chosen():
    known = [document(1)]
    (planned,) = make_plan(known, uses(known, (1.0,)), PlanRules(600)).documents
    points = {one.form: one for one in planned.points}
    assert set(points) == {"rows", "text", *FORMS}
    assert [one.form for one in planned.points if one.is_chosen] == ["int8"]
    assert points["rows"].is_on_hull
    assert not points["text"].is_on_hull
    assert points["held"].value > points["int4"].value > points["rows"].value


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dram_budget": -1}, "dram_budget=-1 bytes are below 0"),
        ({"alpha": -1.0}, "alpha=-1.0 is no number of seconds"),
        ({"alpha": float("nan")}, "alpha=nan is no number"),
        ({"floor": 1.5}, "floor=1.5 is not from 0 to 1"),
        ({"policy": "best"}, "placement='best' is unknown: choose one of hulls"),
        ({"utility": "mood"}, "utility='mood' is unknown: choose one of answer"),
    ],
)
def test_rules_that_mean_nothing_are_refused(changes, said):
    with pytest.raises(SettingsError, match=said):
        PlanRules(**{"dram_budget": 1} | changes)
