# SPDX-License-Identifier: Apache-2.0
"""Which rows each goal is judged by; every verdict has a twin that turns it."""

from dataclasses import asdict, replace

import pytest
from bench_cases import measured_row

from hillinfer_bench.report.bench_report import bench_report, table_text
from hillinfer_bench.report.goal_record import (
    AtLeast,
    AtMost,
    GoalPoint,
    GoalRecord,
    MoreThan,
    judged,
    unjudged,
)
from hillinfer_bench.report.goals import (
    GOALS,
    goal_names,
    goal_records,
    memory_goal_names,
    memory_goal_records,
    memory_ratios,
    quality_goal_names,
    quality_goal_records,
    reached,
    speed_ups,
)
from hillinfer_bench.report.report_check import report_faults
from hillinfer_bench.report.rows import MachineRates

RIVALS = ("full-drive", "h2o-all-keys", "infinigen", "leoam")
MODELS = ("opt-6.7b", "llama-13b")
REAL = {
    "model": "smollm2-135m", "layers": 30, "all_layers": 30, "context": 7936,
    "selection": "measured selection", "perplexity": 9.0, "agreement": 1.0,
}  # fmt: skip


def case(model="opt-6.7b", ratio=10.0, memory_ratio=3.0, **changes):
    """Return rows of one case; every rival takes `ratio` times as long, with a limit as far off."""
    rows = [
        measured_row(model=model, **changes),
        *(measured_row(name, 10.0 * ratio, model=model, **changes) for name in RIVALS),
        measured_row("hillinfer-in-memory", 10.0, model=model, **changes),
        measured_row("full-memory", 10.0 * memory_ratio, model=model, **changes),
    ]
    return [replace(row, limit_ms=row.median_ms / 2) for row in rows]


def papers(**changes):
    """Return the rows of both of the paper's shapes, which meet every goal."""
    return [row for model in MODELS for row in case(model, **changes)]


def speed_records(rows):
    """Return the speed-up goals and those of the allowed share, each by its scalar."""
    records = goal_records(speed_ups(rows))
    by_name = {record.goal: record for record in records}
    return (
        {goal.name: by_name[goal.speed_name] for goal in GOALS},
        {goal.name: by_name[goal.share_name] for goal in GOALS},
    )


def only(records, start):
    """Return the one record whose goal begins so."""
    (found,) = [record for record in records if record.goal.startswith(start)]
    return found


def test_the_papers_shapes_meet_every_speed_up():
    speeds, shares = speed_records(papers())
    assert {record.met for record in (*speeds.values(), *shares.values())} == {True}
    assert speeds["speedup_vs_leoam"].reached == pytest.approx(10)
    slower, _ = speed_records(papers(ratio=5.0))
    met = {name: record.met for name, record in slower.items()}
    assert met == {
        "speedup_vs_full_drive": False, "speedup_vs_h2o": False,
        "speedup_vs_infinigen": True, "speedup_vs_leoam": True, "speedup_vs_full_memory": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        {"alpha": 0.02},
        {"alpha": 0.05},
        {"alpha": 0.2},
        {"budget_share": 0.15},
        {"budget_share": 0.3},
        {"budget_share": 0.5},
        {"batch": 4},
        {"context": 8192},
        {"part": "ablation"},
        {"model": "llama-3.2-1b"},
        {"model": "llama-3.2-3b"},
    ],
)
def test_rows_of_a_full_plan_beside_the_goals_cases_are_not_judged(other):
    """Each is slower than everybody, and would miss every speed-up."""
    made = papers() + case(**{"ratio": 0.5, **other})
    speeds, _ = speed_records(made)
    assert all(speeds[f"speedup_vs_{name}"].met for name in ("full_drive", "h2o", "leoam"))
    assert reached(GOALS[0], speed_ups(made)).value == pytest.approx(10)
    # The same rows on the goal's own case do miss them.
    worse, _ = speed_records(case(ratio=0.5) + case("llama-13b"))
    assert not any(worse[f"speedup_vs_{name}"].met for name in ("full_drive", "h2o", "leoam"))


def test_flagged_rows_of_other_cases_leave_a_speed_up_met():
    noisy = [replace(row, spread=0.5) for row in case(alpha=0.2)]
    speeds, shares = speed_records(papers() + noisy)
    assert speeds["speedup_vs_h2o"].met is True
    # That of what is allowed is about every row.
    assert (shares["speedup_vs_h2o"].met, shares["speedup_vs_h2o"].flagged) == (False, True)


def test_one_of_the_papers_shapes_alone_misses_or_tells_nothing():
    speeds, _ = speed_records(case("opt-6.7b"))
    record = speeds["speedup_vs_full_drive"]
    assert (record.met, record.reached) == (None, pytest.approx(10))
    assert record.row.endswith("; not measured: llama-13b")
    speeds, _ = speed_records(case("opt-6.7b", ratio=2.0))
    assert speeds["speedup_vs_full_drive"].met is False
    # In memory any model is enough.
    assert speeds["speedup_vs_full_memory"].met is True


@pytest.mark.parametrize(
    ("other", "met"),
    [
        ({"model": "llama-3.2-3b"}, False),
        ({"budget_share": 0.5}, False),
        ({"model": "llama-3.2-3b", "context": 16_384}, True),
        ({"model": "llama-3.2-3b", "alpha": 0.2}, True),
    ],
)
def test_in_memory_the_worst_model_at_32k_is_judged_and_named(other, met):
    made = case() + case(**{"memory_ratio": 1.5, **other})
    record = speed_records(made)[0]["speedup_vs_full_memory"]
    assert (record.met, record.reached) == (met, 3.0 if met else 1.5)
    judged_one, other_one = (row.name for row in made if row.system == "hillinfer-in-memory")
    assert record.row == (judged_one if met else other_one)
    listed = [up for up in speed_ups(made) if up.name == "speedup_vs_full_memory"]
    assert sorted(up.value for up in listed) == pytest.approx([1.5, 3])


@pytest.mark.parametrize(("limit_ms", "met"), [(3.9, False), (4.1, True)])
def test_a_low_share_at_8k_misses_what_is_allowed_in_every_row(limit_ms, met):
    """At 8k 10 times is reached; rivals' limit of 50 ms allows 12.8 or 12.2 times."""
    low = [
        replace(row, limit_ms=limit_ms) if row.system == "hillinfer" else row
        for row in case(context=8192)
    ]
    speeds, shares = speed_records(papers() + low)
    for name in ("full_drive", "h2o", "infinigen", "leoam"):
        assert speeds[f"speedup_vs_{name}"].met is True
        record = shares[f"speedup_vs_{name}"]
        assert (record.met, record.reached) == (met, pytest.approx(limit_ms / 5))
        assert "8192 tokens" in record.row


def test_shares_of_other_cases_can_miss_and_not_meet():
    other = case(context=8192)
    record = speed_records(other)[1]["speedup_vs_h2o"]
    assert (record.met, record.reached) == (None, pytest.approx(1))
    assert "not measured: 32768 tokens" in record.row
    low = [replace(row, limit_ms=1.0) if row.system == "hillinfer" else row for row in other]
    assert speed_records(low)[1]["speedup_vs_h2o"].met is False


def test_without_the_goals_cases_the_worst_is_told_and_not_judged():
    speeds, _ = speed_records(case(context=4096, ratio=3.0) + case(context=8192, ratio=2.0))
    record = speeds["speedup_vs_infinigen"]
    assert (record.reached, record.met) == (pytest.approx(2), None)
    assert "8192 tokens" in record.row
    nothing, shares = speed_records([measured_row()])
    for record in (nothing["speedup_vs_leoam"], shares["speedup_vs_leoam"]):
        assert asdict(record) == {
            "goal": record.goal, "reached": None, "met": None, "flagged": None,
            "row": "no case has both hillinfer and leoam",
        }  # fmt: skip


def floors(**times):
    """Return a case with a floor of 10 ms."""
    times = {"hillinfer-in-memory": 10.9, "hillinfer": 30.0} | {
        name.replace("_", "-"): value for name, value in times.items()
    }
    return [measured_row("floor", 10.0), *(measured_row(name, ms) for name, ms in times.items())]


FLOOR_GOAL = "hillinfer-in-memory: at most 1.1 times the loop's floor"


@pytest.mark.parametrize(("worst", "met"), [(10.99, True), (11.1, False)])
def test_every_context_is_judged_beside_the_loops_floor(worst, met):
    made = floors() + [replace(row, context=4096) for row in floors(hillinfer_in_memory=worst)]
    # The aim is about α 0.1 alone.
    made += [replace(row, alpha=0.2) for row in floors(hillinfer_in_memory=20.0)]
    record = only(memory_goal_records(made), FLOOR_GOAL)
    assert (record.met, record.flagged) == (met, False)
    assert record.reached == pytest.approx(worst / 10)
    assert "4096 tokens" in record.row


def test_the_floor_is_judged_for_the_default_query_and_others_are_told():
    made = floors(hillinfer_in_memory_true=10.2, hillinfer_in_memory=12.0)
    records = memory_goal_records(made)
    assert only(records, FLOOR_GOAL).met is False
    told = only(records, "hillinfer-in-memory-true: ")
    assert (told.met, told.reached) == (None, pytest.approx(1.02))
    told = only(records, "hillinfer: ")
    assert (told.met, told.reached) == (None, pytest.approx(3))
    ratios = {one.system: one.value for one in memory_ratios(made)}
    assert ratios == pytest.approx(
        {"hillinfer": 3, "hillinfer-in-memory": 1.2, "hillinfer-in-memory-true": 1.02}
    )


@pytest.mark.parametrize("noisy", ["floor", "hillinfer-in-memory", "hillinfer"])
def test_a_flagged_floor_or_row_meets_nothing(noisy):
    made = [replace(row, spread=0.5 if row.system == noisy else 0.1) for row in floors()]
    record = only(memory_goal_records(made), FLOOR_GOAL)
    other = noisy == "hillinfer"
    assert (record.met, record.flagged) == (other, not other)


def test_a_floor_that_was_not_measured_leaves_the_goal_open():
    skipped = replace(
        measured_row("hillinfer-in-memory", context=65_536), median_ms=None, skipped="no room"
    )
    record = only(memory_goal_records([*floors(), skipped]), FLOOR_GOAL)
    assert record.met is None
    assert "not measured: opt-6.7b (2 of 32) float32, 65536 tokens" in record.row
    record = only(memory_goal_records([*floors(), replace(skipped, alpha=0.2)]), FLOOR_GOAL)
    assert record.met is True
    # One context beyond the goal misses it, whatever else is not known.
    made = [*floors(hillinfer_in_memory=12.0), skipped]
    assert only(memory_goal_records(made), FLOOR_GOAL).met is False
    record = only(memory_goal_records([replace(row, alpha=0.2) for row in floors()]), FLOOR_GOAL)
    assert (record.met, record.reached) == (None, pytest.approx(1.09))
    record = only(memory_goal_records(floors()[1:]), FLOOR_GOAL)
    assert (record.met, record.reached) == (None, None)
    assert record.row == "no case has both hillinfer-in-memory and floor"


STOCK_GOAL = "hillinfer-in-memory: ahead of transformers' own caches"


def stock(own=8.0, dynamic=9.0, static=12.0, **changes):
    """Return a case of a real model with both stock caches."""
    times = {
        "hillinfer-in-memory": own,
        "transformers-dynamic": dynamic,
        "transformers-static": static,
    }
    return [measured_row(name, ms, **(REAL | changes)) for name, ms in times.items()]


@pytest.mark.parametrize(
    ("other", "met"),
    [
        ({"own": 8.9}, True),
        ({"own": 9.0}, False),
        ({"own": 9.5}, False),
        ({"own": 9.5, "context": 2048}, True),
        ({"own": 9.5, "context": 4096}, False),
        ({"dynamic": 20.0, "static": 7.0}, False),
    ],
)
def test_the_faster_stock_cache_is_judged_from_4k_on(other, met):
    record = only(memory_goal_records(stock(alpha=0.05) + stock(**other)), STOCK_GOAL)
    assert record.met is met
    if not met:
        assert record.reached <= 1
    assert record.flagged is False


def test_a_stock_cache_that_is_flagged_or_alone_meets_nothing():
    made = stock()
    made[2] = replace(made[2], spread=0.5)
    record = only(memory_goal_records(made), STOCK_GOAL)
    assert (record.met, record.flagged) == (False, True)
    made = [
        *stock(),
        *(replace(row, median_ms=None, skipped="no room", context=4096) for row in made),
    ]
    record = only(memory_goal_records(made), STOCK_GOAL)
    assert record.met is None
    assert "not measured: smollm2-135m float32, 4096 tokens" in record.row
    # Where no stock cache takes part, nothing is missing.
    made = [*stock(), measured_row("hillinfer-in-memory")]
    assert only(memory_goal_records(made), STOCK_GOAL).met is True
    below = only(memory_goal_records(stock(context=2048)), STOCK_GOAL)
    assert (below.met, below.reached) == (None, pytest.approx(1.125))


def quality(**changes):
    """Return the rows of a real model with a full cache, HillInfer and a rival."""
    rows = [
        measured_row("transformers-dynamic", **REAL),
        measured_row("hillinfer", **(REAL | {"perplexity": 9.9, "agreement": 0.9})),
        measured_row("h2o-drop", **(REAL | {"perplexity": 18.0, "agreement": 0.5})),
    ]
    return [replace(row, **changes) if row.system == "h2o-drop" else row for row in rows]


def test_the_worst_quality_is_told_beside_who_has_it():
    agreement, own, perplexity, own_perplexity = quality_goal_records(quality())
    assert (agreement.met, agreement.reached, perplexity.met) == (True, 0.5, True)
    assert agreement.row.endswith("h2o-drop")
    assert perplexity.reached == pytest.approx(2)
    assert (own.met, own.reached, own_perplexity.reached) == (None, 0.9, pytest.approx(1.1))
    assert own.row.endswith("hillinfer")


@pytest.mark.parametrize("missing", ["perplexity", "agreement"])
def test_a_time_without_quality_misses_the_goal(missing):
    record = quality_goal_records(quality(**{missing: None}))[0]
    assert record.met is False
    assert "no quality beside the time of 1 rows, first smollm2-135m" in record.row
    # A row without a time needs none.
    assert quality_goal_records(quality(median_ms=None, **{missing: None}))[0].met is True


def test_full_caches_and_the_floor_need_no_quality():
    bare = REAL | {"perplexity": None, "agreement": None}
    made = [*quality(), measured_row("floor", **bare), measured_row("full-drive", **bare)]
    assert quality_goal_records(made)[0].met is True
    assert quality_goal_records([*made, measured_row("quest", **bare)])[0].met is False


def test_random_weights_have_no_quality_and_the_record_says_so():
    record = quality_goal_records([*quality(), *papers()])[0]
    assert record.met is True
    # Full caches do not select.
    assert record.row.endswith("; 10 rows of random weights have none")
    record = quality_goal_records(papers())[0]
    assert (record.met, record.reached) == (None, None)
    assert record.row == "no row of a real model has it; 10 rows of random weights have none"


def report(rows, folder):
    return bench_report(
        rows, {"plan": "full"}, MachineRates(memory=10e9, drive=1e9), [], folder / "bench.json"
    )


def everything():
    """Return rows that meet all goals of the report itself."""
    return [
        *papers(),
        *(replace(row, context=4096) for row in floors()[:2]),
        *stock(),
        *quality()[1:],
    ]


@pytest.mark.parametrize("name", [*goal_names(), *memory_goal_names(), *quality_goal_names()])
def test_every_goal_is_stated_and_a_missing_one_is_found(name, tmp_path):
    for rows in (everything(), [measured_row("quest")]):
        told = report(rows, tmp_path)
        assert report_faults(told) == []
        told["goals"] = [goal for goal in told["goals"] if goal["goal"] != name]
        assert report_faults(told) == [f"goal {name!r} is missing"]


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda goal: goal.pop("row"), "row"),
        (lambda goal: goal.update(row=""), "must be texts"),
        (lambda goal: goal.update(reached="10"), "is no number"),
        (lambda goal: goal.update(reached=float("nan")), "is no number"),
        (lambda goal: goal.update(reached=True), "is no number"),
        (lambda goal: goal.update(met="yes"), "neither a bool"),
        (lambda goal: goal.update(flagged=1), "neither a bool"),
        (lambda goal: goal.update(reached=None), "without anything reached"),
        (lambda goal: goal.update(flagged=True), "met by what is flagged"),
        (lambda goal: goal.update(more=1), "more"),
    ],
)
def test_a_wrong_goal_is_found(spoil, fault, tmp_path):
    told = report(everything(), tmp_path)
    assert told["goals"][0]["met"] is True
    spoil(told["goals"][0])
    assert fault in report_faults(told)[0]


@pytest.mark.parametrize("name", ["speed_ups", "ratios"])
def test_wrong_ratios_are_found(name, tmp_path):
    told = report(everything(), tmp_path)
    assert told[name]
    told[name][0]["flagged"] = "no"
    assert report_faults(told) == [f"{name}: flagged is 'no'"]
    del told[name]
    assert report_faults(told) == [f"{name} are missing"]


def lines_of(rows, folder, start):
    """Return the cells of the table's lines that begin so."""
    text = table_text(rows, report(rows, folder))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return [line for line in lines if line and line[0].startswith(start)]


def test_flagged_speed_ups_and_ratios_are_marked_in_the_table(tmp_path):
    rows = [*papers(), *floors(hillinfer_in_memory=12.0)[:2]]
    rows[-1] = replace(rows[-1], context=4096)
    rows[-2] = replace(rows[-2], context=4096)
    up = lines_of(rows, tmp_path, "speedup_vs_h2o")
    assert [line[1:5] for line in up[:2]] == [["10.00", "10.00", "10.00", "1.00"]] * 2
    assert lines_of(rows, tmp_path, "over_floor")[0][1] == "1.20"
    assert lines_of(rows, tmp_path, FLOOR_GOAL)[0][1] == "1.20"
    noisy = [
        replace(row, spread=0.5)
        if (row.model, row.system) == ("opt-6.7b", "h2o-all-keys") or row.system == "floor"
        else row
        for row in rows
    ]
    up = lines_of(noisy, tmp_path, "speedup_vs_h2o")
    assert up[0][1:5] == ["10.00!", "10.00!", "10.00", "1.00!"]
    assert up[1][1] == "10.00"
    assert lines_of(noisy, tmp_path, "over_floor")[0][1] == "1.20!"
    goal = lines_of(noisy, tmp_path, FLOOR_GOAL)[0]
    assert goal[1:4] == ["1.20!", "no", "yes"]


POINTS = [GoalPoint(1.0, "one", False), GoalPoint(2.0, "two", False)]


@pytest.mark.parametrize(
    ("bound", "met", "row"),
    [
        (AtLeast(1.0), True, "one"),
        (AtLeast(1.1), False, "one"),
        (MoreThan(0.9), True, "one"),
        (MoreThan(1.0), False, "one"),
        (AtMost(2.0), True, "two"),
        (AtMost(1.9), False, "two"),
    ],
)
def test_bounds_are_reached_by_the_worst_point(bound, met, row):
    record = judged("aim", POINTS, bound)
    assert (record.met, record.row, record.flagged) == (met, row, False)
    assert unjudged("aim", POINTS, bound, "why").met is None
    assert unjudged("aim", [], bound, "why") == GoalRecord("aim", None, "why", None, None)


def test_what_is_flagged_or_missing_is_not_met_and_what_is_below_is_missed():
    unknown = [POINTS[0], GoalPoint(2.0, "two")]
    assert judged("aim", unknown, AtLeast(1.0)) == GoalRecord("aim", 1.0, "one", True, None)
    flagged = [POINTS[0], GoalPoint(2.0, "two", True)]
    assert judged("aim", flagged, AtLeast(1.0)) == GoalRecord("aim", 1.0, "one", False, True)
    record = judged("aim", POINTS, AtLeast(1.0), ["a", "b"])
    assert (record.met, record.row) == (None, "one; not measured: a and 1 more")
    assert judged("aim", POINTS, AtLeast(1.5), ["a"]).met is False
