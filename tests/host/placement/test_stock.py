# SPDX-License-Identifier: Apache-2.0
"""Changes come in an order that passes no budget, and what cannot be is refused."""

from dataclasses import replace

import pytest

from hillinfer.errors import BudgetError, SettingsError
from hillinfer.placement.options import Context, Option, Tier
from hillinfer.placement.stock import Stock

REST = Option("rows", "rest", 0, 1.0, 1.0)


def document(name, *sizes):
    """Return a document with a form in DRAM and one on the drive of each size, then its rest."""
    made = [
        Option(f"f{size}", tier, size, 1.0, 0.1) for size in sizes for tier in ("dram", "drive")
    ]
    return Context(name, (*made, REST), (*(1.0 for _ in made), 0.0))


def stocked(dram=100, drive=100, **documents):
    stock = Stock((Tier("dram", dram), Tier("drive", drive), Tier("rest")))
    for name, sizes in documents.items():
        stock.put(document(name, *sizes))
    return stock


def follow(stock, changes, used):
    """Make changes one by one with a count of their own, and return the most that was taken."""
    most = dict(used)
    for change in changes:
        if change.before is not None:
            used[change.before.tier] -= change.before.byte_count
        if change.after is not None:
            used[change.after.tier] += change.after.byte_count
        most = {tier: max(most[tier], used[tier]) for tier in used}
    for tier in used:
        assert used[tier] == stock.used(tier)
    return most


def test_what_comes_rests_until_it_is_planned():
    stock = stocked(a=(60,))
    assert stock.option("a") == REST
    assert stock.fresh == {"a"}
    changes = stock.arrange({"a": 0})
    assert [(one.context, one.before, one.after.place) for one in changes] == [
        ("a", REST, ("f60", "dram"))
    ]
    assert (stock.used("dram"), stock.free("dram"), stock.fresh) == (60, 40, set())
    assert stock.free("rest") == float("inf")
    assert stock.drop("a").after is None
    assert stock.used("dram") == 0


def test_what_takes_less_is_changed_first():
    stock = stocked(a=(80, 20), b=(70,))
    stock.arrange({"a": 0})
    used = {"dram": 80, "drive": 0, "rest": 0}
    changes = stock.arrange({"b": 0, "a": 2})
    assert [one.context for one in changes] == ["a", "b"]
    assert follow(stock, changes, used)["dram"] == 90


def test_two_that_wait_for_each_other_pass_by_where_one_rests():
    stock = stocked(a=(80,), b=(80,))
    stock.arrange({"a": 0, "b": 1})
    used = {"dram": 80, "drive": 80, "rest": 0}
    changes = stock.arrange({"a": 1, "b": 0})
    assert [(one.context, one.after.tier) for one in changes] == [
        ("a", "rest"),
        ("b", "dram"),
        ("a", "drive"),
    ]
    assert follow(stock, changes, used) == {"dram": 80, "drive": 80, "rest": 0}


def test_a_plan_that_passes_a_budget_is_refused_and_changes_nothing():
    stock = stocked(a=(80,), b=(30,))
    with pytest.raises(BudgetError, match="dram would take 110 bytes of 100: give it more"):
        stock.arrange({"a": 0, "b": 0})
    assert stock.used("dram") == 0
    assert len(stock.arrange({"a": 0, "b": 1})) == 2


def test_newer_measurements_keep_the_form_where_it_fits():
    stock = stocked(a=(80,), b=(15,))
    stock.arrange({"a": 0, "b": 0})
    larger = document("a", 80)
    grown = replace(larger.options[0], byte_count=85)
    stock.put(replace(larger, options=(grown, *larger.options[1:])))
    assert (stock.option("a"), stock.used("dram")) == (grown, 100)
    grown = replace(grown, byte_count=86)
    stock.put(replace(larger, options=(grown, *larger.options[1:])))
    assert (stock.option("a"), stock.used("dram")) == (REST, 15)


def test_documents_rest_as_what_is_best_of_all_that_takes_no_budget():
    text = Option("text", "rest", 0, 1.0, 9.0)
    stock = stocked()
    stock.put(Context("a", (text, REST), (0.5, 1.0)))
    assert stock.option("a") == REST
    stock.put(Context("b", (text, REST), (1.0, 0.5)))
    assert stock.option("b") == text


def test_tiers_and_options_that_cannot_be_are_refused():
    with pytest.raises(SettingsError, match="dram, dram, rest: each name may be there once"):
        Stock((Tier("dram", 1), Tier("dram", 2), Tier("rest")))
    with pytest.raises(SettingsError, match=r"the last tier must have no budget.*Tier\('text'\)"):
        Stock((Tier("dram", 1),))
    with pytest.raises(SettingsError, match="tier dram: a budget of -1 bytes is below 0"):
        Tier("dram", -1)
    stock = stocked()
    with pytest.raises(SettingsError, match="form x: tier 'tape' is unknown: choose one of dram"):
        stock.put(Context("a", (Option("x", "tape", 1, 1.0, 0.0), REST), (1.0, 0.0)))
    with pytest.raises(SettingsError, match="a has no option on a tier without a budget"):
        stock.put(Context("a", (Option("x", "dram", 1, 1.0, 0.0),), (1.0,)))
    with pytest.raises(SettingsError, match="tier 'rest' has no budget: choose one of dram, drive"):
        stock.resize("rest", 10)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"byte_count": -1}, "form x: -1 bytes are below 0"),
        ({"quality": 1.01}, "form x: quality 1.01 is not from 0 to 1"),
        ({"quality": float("nan")}, "form x: quality nan is not from 0 to 1"),
        ({"first_token": float("inf")}, "form x: inf is no time in seconds"),
        ({"token_seconds": -0.1}, "form x: -0.1 is no time in seconds"),
    ],
)
def test_options_out_of_range_are_refused(changed, message):
    with pytest.raises(SettingsError, match=message):
        replace(Option("x", "dram", 1, 1.0, 0.0), **changed)
