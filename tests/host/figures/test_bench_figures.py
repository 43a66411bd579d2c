# SPDX-License-Identifier: Apache-2.0
"""Pictures of rows made by hand: who is told from whom, and what is drawn at all."""

from dataclasses import replace
from itertools import combinations

import pytest
from bench.bench_cases import measured_row
from matplotlib.backends.backend_agg import FigureCanvasAgg

from hillinfer_bench.figures.bench_figures import (
    SystemStyle,
    bench_figures,
    case_labels,
    file_words,
)
from hillinfer_bench.systems.table import ABLATION, FLOOR, system_names

SYSTEMS = ("hillinfer", "full-drive", "h2o-all-keys")


def rows(systems=SYSTEMS, **changes):
    return [measured_row(one, 10.0 * place, **changes) for place, one in enumerate(systems, 1)]


def lines(figure):
    """Return the labelled lines of each panel by name."""
    return [
        {one.get_label() for one in axes.lines if not one.get_label().startswith("_")}
        for axes in figure.axes
    ]


def ticks(axes):
    return [one.get_text() for one in axes.get_xticklabels()]


@pytest.mark.parametrize("shape", ["hatch", "marker"])
def test_no_two_systems_look_alike(shape):
    looks = {name: SystemStyle.of(name) for name in system_names()}
    assert len(looks) == len({(look.color, getattr(look, shape)) for look in looks.values()})
    # The twin: one of the two alone is not enough for so many.
    assert len({look.color for look in looks.values()}) < len(looks)
    assert len({getattr(look, shape) for look in looks.values()}) < len(looks)


def test_systems_that_stand_side_by_side_differ_in_colour():
    apart = (*ABLATION, FLOOR)
    side = [SystemStyle.of(name).color for name in system_names() if name not in apart]
    assert len(set(side)) == len(side)
    assert len({SystemStyle.of(name).color for name in ABLATION}) == len(ABLATION)


def test_a_system_looks_the_same_with_others_left_out():
    (alone,) = bench_figures(rows(["h2o-drop"]))["latency"].axes[0].patches
    among = bench_figures(rows(["hillinfer", "quest", "h2o-drop"]))["latency"].axes[0].patches
    assert alone.get_facecolor() == among[2].get_facecolor() != among[0].get_facecolor()
    assert alone.get_hatch() == among[2].get_hatch()


def test_each_model_has_a_context_and_a_batch_picture_of_its_own():
    made = []
    for model in ("opt-6.7b", "llama-13b"):
        for context in (4096, 8192):
            made += rows(model=model, context=context)
        made += rows(model=model, context=8192, batch=4)
    made += rows(model="tiny")
    names = set(bench_figures(made))
    assert names == {"latency", "speedup"} | {
        f"{kind}-{model}"
        for kind in ("context", "batch", "throughput")
        for model in ("opt-6.7b", "llama-13b")
    }


@pytest.mark.parametrize(
    ("field", "values", "name"),
    [
        ("context", (4096, 8192), "context"),
        ("batch", (1, 8), "batch"),
        ("alpha", (0.05, 0.1), "alpha"),
        ("budget_share", (0.15, 0.2, 0.5), "budget"),
    ],
)
def test_lines_are_drawn_only_where_there_are_several_values(field, values, name):
    made = [row for value in values for row in rows(**{field: value})]
    figure = bench_figures(made)[f"{name}-opt-6.7b"]
    assert lines(figure) == [set(SYSTEMS)]
    (axes,) = figure.axes
    assert len(ticks(axes)) == len(values)
    assert axes.get_xlabel()
    assert axes.get_ylabel() == "ms per decode step"
    assert not any(one.startswith(name) for one in bench_figures(rows(**{field: values[0]})))


def test_parts_of_the_plan_are_not_mixed_into_lines():
    made = [row for context in (4096, 32_768) for row in rows(context=context)]
    apart = rows(ABLATION, part="ablation") + rows(["hillinfer", "full-swap"], part="swap")
    figure = bench_figures(made + apart)["context-opt-6.7b"]
    assert lines(figure) == [set(SYSTEMS)]
    # The twin: of the same part they belong together.
    together = bench_figures(made + rows(["full-swap"]))["context-opt-6.7b"]
    assert lines(together) == [{*SYSTEMS, "full-swap"}]


def test_series_that_differ_elsewhere_have_panels_of_their_own():
    made = [
        row for c in (4096, 8192) for alpha in (0.05, 0.1) for row in rows(context=c, alpha=alpha)
    ]
    figure = bench_figures(made)["context-opt-6.7b"]
    assert lines(figure) == [set(SYSTEMS)] * 2
    assert ["α 0.05" in axes.get_title() for axes in figure.axes] == [True, False]
    assert len({axes.get_ylim() for axes in figure.axes}) == 1


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("alpha", (0.1, 0.05)),
        ("budget_share", (0.15, 0.154)),
        ("batch", (1, 2)),
        ("shadow", ("int4", "int8")),
        ("part", ("", "swap")),
    ],
)
def test_bars_of_different_cases_have_different_labels(field, values):
    made = [row for value in values for row in rows(**{field: value})]
    for name in ("latency", "speedup"):
        (axes,) = bench_figures(made)[name].axes
        first, second = ticks(axes)
        assert first != second, name
    assert len(case_labels(rows())[1]) == 1


def test_what_cases_share_stands_in_the_title():
    (axes,) = bench_figures(rows(alpha=0.05) + rows(alpha=0.1))["latency"].axes
    assert ticks(axes) == ["α 0.05", "α 0.1"]
    for text in ("opt-6.7b", "2 of 32 layers", "32,768 tokens", "batch 1", "budget 20%"):
        assert text in axes.get_title()


def test_speed_ups_have_the_rivals_look_and_begin_at_one():
    made = [measured_row("hillinfer", 20.0), *rows(SYSTEMS[1:])]
    axes = bench_figures(made)["speedup"].axes[0]
    drive, keys = axes.patches
    assert drive.get_facecolor() != keys.get_facecolor()
    assert (drive.get_y(), keys.get_y()) == (1, 1)
    # 10 and 20 ms against 20 ms.
    assert [drive.get_height(), keys.get_height()] == pytest.approx([-0.5, 0.0])


def test_large_ratios_are_drawn_on_a_logarithmic_scale():
    small, large = [measured_row("hillinfer", 10.0)], [measured_row("full-drive", 200.0)]
    assert bench_figures(small + large)["latency"].axes[0].get_yscale() == "log"
    assert bench_figures(rows())["latency"].axes[0].get_yscale() == "linear"


def test_noisy_rows_are_marked():
    calm = bench_figures(rows())["latency"]
    noisy = bench_figures([replace(row, spread=0.5) for row in rows()])["latency"]
    words = [[text.get_text() for text in figure.axes[0].texts] for figure in (calm, noisy)]
    assert words == [["10", "20", "30"], ["10!", "20!", "30!"]]
    assert "flagged" in noisy.legends[0].get_title().get_text()


def test_long_lists_of_cases_go_on_in_another_panel():
    contexts = range(4096, 4096 * 30, 4096)
    made = [row for context in contexts for row in rows(context=context)]
    panels = bench_figures(made)["latency"].axes
    assert len(panels) == 2
    assert sum(len(axes.patches) for axes in panels) == len(made)
    assert all(len(axes.patches) <= 60 for axes in panels)


def test_no_legend_lies_over_an_axis():
    made = [row for context in (4096, 8192) for row in rows(context=context)]
    for figure in bench_figures(made).values():
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
        (legend,) = figure.legends
        for axes in figure.axes:
            assert not legend.get_window_extent(renderer).overlaps(axes.get_window_extent(renderer))


def test_models_have_words_that_files_can_be_named_by():
    models = ["/models/my model", "someone/my model", "smollm2-135m", "..", "a/b:c"]
    words = file_words(models)
    assert list(words) == models
    assert all(one != other for one, other in combinations(words.values(), 2))
    assert not any(set(" /:") & set(word) or word.startswith(".") for word in words.values())
    made = [row for context in (4096, 8192) for row in rows(context=context, model=models[0])]
    assert "context-my-model" in bench_figures(made)
