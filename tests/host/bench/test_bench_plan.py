# SPDX-License-Identifier: Apache-2.0
"""Plans, cases, and what does not fit."""

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hillinfer.engine.budget_growth import ShadowChoice
from hillinfer.engine.budget_plan import staging_bytes
from hillinfer.errors import SettingsError
from hillinfer.hf.hooks import FIRST_PREDICTED
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.settings import Settings
from hillinfer.values import format_bytes
from hillinfer_bench.decode.measuring import blank_row
from hillinfer_bench.decode.plan import PLANS, Plan, check_one_traced, make_plan
from hillinfer_bench.decode.request import Chosen
from hillinfer_bench.decode.room import SLACK_BYTES, FreeRoom, PlanNeeds, why_left_out, why_no_model
from hillinfer_bench.systems.case import BenchSetting, Case, budget_bytes
from hillinfer_bench.systems.shapes import PAPER_SHAPES, SHAPES
from hillinfer_bench.systems.table import (
    CODED,
    CODED_IN_MEMORY,
    FLOOR,
    IN_MEMORY,
    IN_MEMORY_TRUE,
    make_system,
    selects,
    system_names,
)

REAL_MODEL = "smollm2-135m"


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_names_models_and_systems_that_are_there(name):
    for case in make_plan(name, REAL_MODEL).cases:
        assert case.model in (*SHAPES, REAL_MODEL)
        assert set(case.systems) <= set(system_names())


@pytest.mark.parametrize("name", PLANS)
def test_rows_of_every_plan_have_names_of_their_own(name):
    names = []
    for case in make_plan(name, REAL_MODEL).cases:
        assert len(case.systems) == len(set(case.systems))
        systems = {FLOOR, *case.systems}
        names += [blank_row(case, one, "float32", 4, 32).name for one in systems]
    assert len(names) == len(set(names))


def test_the_goals_are_about_the_papers_shapes_at_32k_with_a_fifth_in_dram():
    cases = make_plan("goals", REAL_MODEL).only(Chosen(contexts=(32_768,))).cases
    cases = [case for case in cases if case.part != "default"]
    assert {case.model for case in cases} == {"opt-6.7b", "llama-13b"}
    assert {(case.alpha, case.budget_share) for case in cases} == {(0.1, 0.2)}


def test_both_queries_stand_side_by_side_where_they_have_room():
    both = {IN_MEMORY, IN_MEMORY_TRUE}
    goals = make_plan("goals", REAL_MODEL).cases
    for model in (*PAPER_SHAPES, REAL_MODEL):
        own = [set(case.systems) for case in goals if case.model == model]
        assert any(both <= systems for systems in own)
    # A paper's shape has no room for both beside all rivals.
    full = [case for case in goals if {IN_MEMORY, "full-memory"} <= set(case.systems)]
    assert [case.model for case in full if IN_MEMORY_TRUE in case.systems] == [REAL_MODEL]
    with_true = [c for c in make_plan("full", REAL_MODEL).cases if IN_MEMORY_TRUE in c.systems]
    assert {case.model for case in with_true} == {REAL_MODEL}
    assert {case.alpha for case in with_true} == {0.05, 0.1, 0.2}


def test_the_default_settings_have_a_case_with_coded_tokens(cold_dir):
    default = Settings()
    for name in ("quick", "goals", "full"):
        cases = make_plan(name, REAL_MODEL).cases
        own = [case for case in cases if case.part == "default"]
        assert own
        for case in own:
            assert case.alpha == default.importance_rate
            assert {CODED, CODED_IN_MEMORY, "full-memory", "four-bit-memory"} <= set(case.systems)
        # The twin: no other case has a coded token.
        assert not any(
            make_system(one).codes for case in cases if case not in own for one in case.systems
        )
    goals = make_plan("goals", REAL_MODEL).only(Chosen(alphas=(default.importance_rate,))).cases
    assert [case.model for case in goals] == [*PAPER_SHAPES, REAL_MODEL]
    small = replace(setting(cold_dir, 1000), budget_bytes=64 << 20)
    small.model.config = SimpleNamespace(model_type="llama")
    for name in (CODED, CODED_IN_MEMORY):
        opened = make_system(name).open(small)
        used = opened.cache.engine.runtime.settings
        assert (used.exact_share, used.exact_floor) == (default.exact_share, default.exact_floor)
        assert used.has_coded_tokens
        opened.close()


def test_the_papers_plan_has_its_figures_systems_and_importance_rate():
    cases = make_plan("paper", REAL_MODEL).cases
    parts = {case.part for case in cases}
    assert parts == {"figure 12, 13", "figure 14", "figure 15", "figure 16a"}
    assert {case.alpha for case in cases} == {0.2}
    for case in cases:
        assert case.part == "figure 16a" or {"hillinfer", "full-drive"} <= set(case.systems)
    batches = {case.batch for case in cases if case.part in ("figure 14", "figure 15")}
    assert batches == {1, 2, 4, 10, 20, 25}
    longest = {case.model: case.context for case in cases}
    assert longest == {"opt-6.7b": 32_768, "llama-13b": 36_864}


@pytest.mark.parametrize("plan", ["goals", "paper"])
def test_no_model_of_a_plan_is_made_twice(plan):
    models = [case.model for case in make_plan(plan, REAL_MODEL).cases]
    made = [model for model, _ in groupby(models)]
    assert len(made) == len(set(made))
    assert len(models) > len(made)


def test_the_true_query_is_what_its_system_asks_for(cold_dir):
    small = replace(setting(cold_dir, 1000), budget_bytes=64 << 20)
    small.model.config = SimpleNamespace(model_type="llama")
    told = {}
    for name in (IN_MEMORY, IN_MEMORY_TRUE):
        opened = make_system(name).open(small)
        told[name] = opened.describe(), opened.cache.takes_predictions
        opened.close()
    assert told[IN_MEMORY_TRUE] == ("shadow int4, true query", False)
    assert told[IN_MEMORY] == ("shadow int4, predicted query", True)


@pytest.mark.parametrize("name", system_names())
def test_what_selects_is_known_of_every_system(name):
    full = {
        "floor", "full-memory", "full-drive", "full-swap", "transformers-dynamic",
        "transformers-static", "four-bit-memory", "four-bit-drive", "five-bit-memory",
        "five-bit-drive",
    }  # fmt: skip
    assert selects(name) is (name not in full)


def test_each_shadow_has_a_case_of_its_own_in_the_full_plan_alone():
    def named(plan):
        cases = make_plan(plan, REAL_MODEL).cases
        return sorted(
            (case.model, case.context, case.shadow) for case in cases if case.shadow != "auto"
        )

    assert named("full") == [("opt-6.7b", 32_768, "int4"), ("opt-6.7b", 32_768, "int8")]
    assert named("goals") == named("quick") == []


def test_layers_of_the_goals_shapes_are_predicted():
    cases = make_plan("goals", REAL_MODEL).only(Chosen(contexts=(32_768,))).cases
    assert all(SHAPES[case.model].layers >= FIRST_PREDICTED + 2 for case in cases)


def test_cases_and_rows_of_nearly_equal_budgets_have_names_of_their_own():
    cases = [Case("tiny", 100, ("hillinfer",), budget_share=share) for share in (0.15, 0.154)]
    assert "budget 15%" in cases[0].name
    assert "budget 15.4%" in cases[1].name
    assert len({blank_row(case, "hillinfer", "float32", 2, 2).name for case in cases}) == 2


def test_a_plan_is_cut_to_what_is_wanted():
    plan = make_plan("full", REAL_MODEL).only(Chosen(systems=("hillinfer",), alphas=(0.05,)))
    assert {case.systems for case in plan.cases} == {("hillinfer",)}
    assert {case.alpha for case in plan.cases} == {0.05}


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"batches": (4,)}, "batch", 4),
        ({"budgets": (0.3,)}, "budget_share", 0.3),
        ({"shadows": ("auto",)}, "shadow", "auto"),
        ({"models": ("llama-13b",)}, "model", "llama-13b"),
    ],
)
def test_each_filter_leaves_its_values_alone(given, field, value):
    cases = make_plan("full", REAL_MODEL).only(Chosen(**given)).cases
    assert {getattr(case, field) for case in cases} == {value}
    everything = make_plan("full", REAL_MODEL).cases
    assert cases == tuple(case for case in everything if getattr(case, field) == value)


def test_shadows_are_told_apart():
    made = [Case("tiny", 100, ("hillinfer",), shadow=one) for one in ("int4", "int8")]
    assert Plan(tuple(made)).only(Chosen(shadows=("int8",))).cases == (made[1],)


def test_steps_are_replaced_in_every_case_and_in_no_other_way():
    plan = make_plan("goals", REAL_MODEL)
    fewer = plan.only(Chosen(steps=3))
    assert {case.steps for case in fewer.cases} == {3}
    assert fewer.cases == tuple(replace(case, steps=3) for case in plan.cases)
    assert plan.only(Chosen()).cases == plan.cases
    with pytest.raises(SettingsError, match="steps=0"):
        plan.only(Chosen(steps=0))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"batches": (3,)}, "for --batches 3; it has batches: 1, 2, 4, 8$"),
        (
            {"budgets": (0.2, 0.9)},
            "for --budgets 0.9; it has budgets: 0.15, 0.2, 0.25, 0.3, 0.5, 2.0$",
        ),
        ({"shadows": ("int3",)}, "for --shadows int3; it has shadows: auto, int4, int8$"),
        ({"alphas": (0.1, 0.3)}, "for --alphas 0.3; it has alphas: 0.02, 0.05"),
        ({"systems": ("hillinfer", "h3o")}, "for --systems h3o; it has systems: four-bit-drive"),
        (
            {"batches": (8,), "contexts": (65_536,)},
            "no case has all of these at once; it has systems: .*; batches: 1, 2, 4, 8; .*budgets:",
        ),
    ],
)
def test_a_value_that_no_case_has_is_refused_beside_what_there_is(given, told):
    with pytest.raises(SettingsError, match=told):
        make_plan("full", REAL_MODEL).only(Chosen(**given))


def test_a_plan_with_nothing_left_names_what_there_is():
    with pytest.raises(SettingsError, match=r"contexts: 2048, 8192"):
        make_plan("quick", REAL_MODEL).only(Chosen(contexts=(1,)))


def test_unknown_plans_and_systems_are_refused_by_name():
    with pytest.raises(SettingsError, match="plan='goal': choose one of quick, goals, full"):
        make_plan("goal", REAL_MODEL)
    with pytest.raises(SettingsError, match="system='h3o': choose one of hillinfer"):
        make_system("h3o")


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"budget_share": 0.0}, {"alpha": 2.0}])
def test_cases_that_mean_nothing_are_refused(wrong):
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        Case("tiny", 100, ("hillinfer",), **wrong)


def setting(cold_dir, context):
    shape = SHAPES["tiny"].kv_shape(4096, torch.float32)
    case = Case("tiny", context, ("hillinfer",))
    model = SimpleNamespace(dtype=torch.float32)
    return BenchSetting(case, model, shape, budget_bytes(case, shape, 2), cold_dir, None)


def test_what_does_not_fit_says_what_is_needed_and_what_is_free(cold_dir):
    large = setting(cold_dir, 10**12)
    in_memory = [make_system("transformers-dynamic")]
    assert (
        "of memory"
        in why_left_out(large, in_memory, FreeRoom.read(cold_dir))["transformers-dynamic"]
    )
    on_drive = [make_system("full-drive")]
    left_out = why_left_out(replace(large, budget_bytes=0), on_drive, FreeRoom.read(cold_dir))
    assert "on the drive" in left_out["full-drive"]
    assert "weights need" in why_no_model(1 << 60)


def test_what_fits_is_let_through(cold_dir):
    small = setting(cold_dir, 1000)
    systems = [make_system(name) for name in system_names()]
    assert why_left_out(small, systems, FreeRoom.read(cold_dir)) == {}
    assert why_no_model(1 << 20) is None


# Of bytes, more than any case asks for.
LARGE_MEMORY = LARGE_DRIVE = 1 << 60
OF_A_LARGE_CASE = ("hillinfer", "full-drive", "h2o-drop", "full-memory", "transformers-dynamic")


@pytest.mark.parametrize(
    ("spare", "left_out"),
    [
        (0, []),
        (-1, ["transformers-dynamic"]),
        (-4, ["transformers-dynamic"]),
        (-5, ["full-memory", "transformers-dynamic"]),
        (-7, ["full-memory", "h2o-drop", "transformers-dynamic"]),
        (-8, list(OF_A_LARGE_CASE)),
    ],
)
def test_systems_that_hold_all_kv_are_left_out_the_largest_first(cold_dir, spare, left_out):
    """In KV caches the five want 0.2, 0.2, 1.2, 2 and 4 of memory."""
    large = setting(cold_dir, 100_000)
    systems = [make_system(name) for name in OF_A_LARGE_CASE]
    wanted = sum(one.needs(large).memory for one in systems)
    free = wanted + SLACK_BYTES + spare * large.kv_bytes
    found = why_left_out(large, systems, FreeRoom(free, LARGE_DRIVE))
    assert sorted(found) == sorted(left_out)
    assert all("are free" in reason for reason in found.values())
    assert len({*found.values()}) == len(found) or spare == -8


@pytest.mark.parametrize(
    ("model", "context", "gib", "left_out"),
    [
        ("opt-6.7b", 65_536, 32, 0),
        ("llama-13b", 65_536, 32, ["full-memory"]),
        ("llama-3.2-1b", 65_536, 32, ["transformers-dynamic"]),
        (
            "llama-3.2-3b",
            65_536,
            32,
            ["full-memory", "hillinfer-in-memory", "transformers-dynamic", "transformers-static"],
        ),
        ("llama-3.2-3b", 32_768, 16, 11),
    ],
)
def test_docs_say_what_machines_have_room_for(cold_dir, model, context, gib, left_out):
    """Of the machine's memory all but 2 GiB and the weights are free, and the drive is large."""
    cases = make_plan("full", REAL_MODEL).only(Chosen(contexts=(context,), models=(model,))).cases
    case = max(cases, key=lambda case: len(case.systems))
    shape = SHAPES[model]
    part = shape.kv_shape(context + case.all_steps, torch.float32)
    model = SimpleNamespace(dtype=torch.float32)
    budget = budget_bytes(case, part, shape.all_layers)
    planned = BenchSetting(case, model, part, budget, cold_dir, None, shape.all_layers)
    free = ((gib - 2) << 30) - 4 * shape.layer_weights * shape.layers
    systems = [make_system(name) for name in case.systems]
    found = why_left_out(planned, systems, FreeRoom(free, LARGE_DRIVE))
    assert (sorted(found) if isinstance(left_out, list) else len(found)) == left_out


def test_systems_that_hold_all_kv_are_known():
    assert {name for name in system_names() if make_system(name).holds_all} == {
        "hillinfer-in-memory",
        "hillinfer-in-memory-true",
        "hillinfer-coded-in-memory",
        "full-memory",
        "four-bit-memory",
        "five-bit-memory",
        "h2o-drop",
        "transformers-dynamic",
        "transformers-static",
    }


def test_memory_left_out_for_nothing_on_the_drive_stays(cold_dir):
    """Where only the drive is short, a system that is not on it frees nothing."""
    large = setting(cold_dir, 100_000)
    systems = [make_system(name) for name in ("full-drive", "full-memory", "hillinfer-in-memory")]
    free = make_system("full-drive").needs(large).drive
    found = why_left_out(large, systems, FreeRoom(LARGE_MEMORY, free))
    assert list(found) == ["hillinfer-in-memory"]


def test_layers_get_their_part_of_the_budget_and_the_staging_once():
    case = Case("opt-6.7b", 32_768, ("hillinfer",))
    opt = SHAPES["opt-6.7b"]
    part = opt.kv_shape(40_000, torch.float32)
    whole = replace(part, layers=32)
    staging = staging_bytes(part, case.settings().changed(shadow="int4"))
    all_of_it = budget_bytes(case, whole, 32)
    assert all_of_it == int(0.2 * (32_768 + case.all_steps) * 32 * part.row_bytes)
    assert budget_bytes(case, part, 32) == staging + (all_of_it - staging) * opt.layers // 32


def test_the_shadow_is_chosen_as_in_the_whole_model(cold_dir):
    """Of some layers' budget the buffers take so much that less would stay in DRAM."""
    case = Case("opt-6.7b", 32_768, ("hillinfer",))
    part = SHAPES["opt-6.7b"].kv_shape(40_000, torch.float32)
    model = SimpleNamespace(dtype=torch.float32)
    built = BenchSetting(case, model, part, budget_bytes(case, part, 32), cold_dir, None, 32)
    whole = built.whole
    assert (whole.shape.layers, whole.tokens) == (32, built.tokens)
    assert whole.budget_bytes == budget_bytes(case, replace(part, layers=32), 32)
    assert whole.whole is whole

    def choice(setting):
        wanted = case.settings().changed(dram_budget=f"{setting.budget_bytes}")
        return ShadowChoice.of(setting.shape, wanted, setting.tokens)

    assert not choice(whole).plan.streamed_shadow_bytes
    assert choice(built).plan.streamed_shadow_bytes


# Of smollm2-135m; what is looked at in its outline.
OUTLINE = SimpleNamespace(
    shape=ModelShape(30, 3, 9, 64, StoredType.FLOAT16, 8192),
    dtype=torch.float32,
    weight_bytes=538_060_032,
)


def needs(cases, cold_dir):
    return PlanNeeds.of(cases, REAL_MODEL, OUTLINE, torch.float32, cold_dir)


def test_needs_of_a_plan_are_those_of_its_largest_case(cold_dir):
    cases = make_plan("goals", REAL_MODEL).cases
    found = needs(cases, cold_dir)
    largest = next(case for case in cases if case.model == "llama-13b" and not case.part)
    assert found.memory_case == found.drive_case == largest.name
    assert found == needs([largest], cold_dir) != needs(cases[:1], cold_dir)
    llama = SHAPES["llama-13b"]
    shape = llama.kv_shape(40_000, torch.float32)
    model = SimpleNamespace(dtype=torch.float32)
    built = BenchSetting(
        largest, model, shape, budget_bytes(largest, shape, 40), cold_dir, None, 40
    )
    each = [make_system(name).needs(built) for name in largest.systems]
    assert found.drive == sum(one.drive for one in each)
    weights = 4 * llama.layers * llama.layer_weights + OUTLINE.weight_bytes
    assert found.memory == sum(one.memory for one in each) + weights + SLACK_BYTES


def test_weights_are_needed_twice_while_they_are_made(cold_dir):
    case = Case("llama-13b", 1, ("full-memory",))
    weights = 4 * SHAPES["llama-13b"].layers * SHAPES["llama-13b"].layer_weights
    expected = 2 * weights + OUTLINE.weight_bytes + SLACK_BYTES
    assert needs([case], cold_dir).memory == expected


@pytest.mark.parametrize("name", PLANS)
def test_the_page_says_what_the_plans_need(name, cold_dir):
    page = (Path(__file__).parents[3] / "docs" / "bench.md").read_text(encoding="utf-8")
    found = needs(make_plan(name, REAL_MODEL).every, cold_dir)
    (line,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
    assert line.split("|")[3:5] == [
        f" {format_bytes(found.memory)} ",
        f" {format_bytes(found.drive)} ",
    ]


@pytest.mark.parametrize(
    ("plan", "chosen"),
    [
        ("quick", {"models": ("tiny",), "systems": ("hillinfer", "full-drive")}),
        ("goals", {"models": ("opt-6.7b",), "systems": ("hillinfer",)}),
    ],
)
def test_one_system_of_hillinfer_can_be_traced(plan, chosen):
    check_one_traced(make_plan(plan, REAL_MODEL).only(Chosen(**chosen)).cases)


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ({"systems": ("hillinfer",)}, "systems hillinfer, in 3 cases: choose with --systems"),
        ({"models": ("tiny",)}, "systems hillinfer, hillinfer-in-memory, in 1 cases"),
        ({"models": ("tiny",), "systems": ("full-drive",)}, "systems none, in 1 cases"),
    ],
)
def test_a_trace_of_several_or_none_is_refused(chosen, told):
    with pytest.raises(SettingsError, match=told):
        check_one_traced(make_plan("quick", REAL_MODEL).only(Chosen(**chosen)).cases)


@pytest.mark.parametrize("name", ["tiny", "tiny-opt"])
def test_shapes_build_what_they_say(name):
    shape = SHAPES[name]
    model = shape.build(128, torch.float32)
    layers = [weight for key, weight in model.named_parameters() if ".layers." in key]
    built = sum(weight.numel() for weight in layers if weight.ndim == 2)
    assert built == shape.layers * shape.layer_weights
    assert shape.kv_shape(128, torch.float32).kv_heads == shape.kv_heads
