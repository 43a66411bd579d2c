# SPDX-License-Identifier: Apache-2.0
"""Goals of the comparison that other commands' reports say, beside it in a folder."""

import json

import pytest

from hillinfer_bench.frontier.elsewhere import SPACE_FILE, STUDY_FILE, goals_elsewhere

WAY = "HillInfer, as the product, α = 0.2 and 0.02 exact (128 at least)"


def beside(nll, error=0.1, way=WAY, column="lines, 40 lines"):
    told = {"way": way, "column": column, "questions": 16, "right": 9, "full_right": 11}
    return told | {"nll": nll, "error": error}


def study(folder, *rows):
    told = {"accuracy": {"beside_full": list(rows)}}
    (folder / STUDY_FILE).write_text(json.dumps(told), encoding="utf-8")
    return goals_elsewhere(folder, 0.2)[0]


def space(folder, **changes):
    told = {
        "label": "measured; random rows in the shape of a 1B model",
        "tokens": 1 << 20,
        "shadow": "int2",
        "shape": {"layers": 4},
        "growth_bytes": (2040 + 46) << 20,
        "late_growth_bytes": 10 << 20,
        "slack_bytes": 64 << 20,
        "seconds_per_step": 0.128,
        "statistics": {"dram_peak_bytes": 2040 << 20, "dram_budget_bytes": 2 << 30},
    } | changes
    (folder / SPACE_FILE).write_text(json.dumps(told), encoding="utf-8")
    return goals_elsewhere(folder, 0.2)[1]


def test_reports_that_are_not_there_name_their_command(tmp_path):
    recall, million = goals_elsewhere(tmp_path, 0.2)
    assert recall.verdict == million.verdict == "not judged"
    assert "make study" in recall.record.row
    assert "tools/space.py --shape 1b" in million.record.row
    (tmp_path / STUDY_FILE).write_text("[")
    assert goals_elsewhere(tmp_path, 0.2)[0].record.reached is None


@pytest.mark.parametrize(
    ("rows", "verdict", "reached"),
    [
        ([beside(-0.05), beside(-0.2)], "met", -0.05),
        ([beside(-0.05), beside(0.3)], "missed", 0.3),
        # Above by less than twice its error nothing is known.
        ([beside(-0.05), beside(0.19)], "not judged", 0.19),
        ([beside(-0.05), beside(0.9, way="HillInfer, weight_sum, α = 0.1")], "met", -0.05),
    ],
    ids=["below", "above", "within the error", "another way"],
)
def test_the_products_own_way_is_judged_beside_the_full_cache(tmp_path, rows, verdict, reached):
    found = study(tmp_path, *rows)
    assert (found.verdict, found.record.reached) == (verdict, reached)
    assert "9 right beside 11 of 16" in found.record.row


def test_a_way_that_was_not_asked_is_not_judged(tmp_path):
    found = study(tmp_path, beside(-0.1, way="HillInfer, weight_sum, α = 0.1"))
    assert found.record.reached is None


def test_a_million_tokens_keep_memory_flat(tmp_path):
    found = space(tmp_path)
    assert found.verdict == "met"
    assert found.record.reached == 46
    assert "a step took 128 ms" in found.record.row
    assert space(tmp_path, late_growth_bytes=65 << 20).verdict == "missed"
    assert space(tmp_path, growth_bytes=2200 << 20).verdict == "missed"


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 1000},
        {"label": "measured; random rows in the shape of a 3B model"},
        {"statistics": {"dram_peak_bytes": 0, "dram_budget_bytes": 3 << 30}},
    ],
    ids=["fewer tokens", "another shape", "a larger budget"],
)
def test_another_context_says_nothing_of_it(tmp_path, changes):
    assert space(tmp_path, **changes).record.reached is None
