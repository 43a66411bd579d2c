# SPDX-License-Identifier: Apache-2.0
"""Pictures of a benchmark, after the paper's figures 12 to 16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hillinfer_bench.decode.goals import speed_ups
from hillinfer_bench.decode.row import BenchRow
from hillinfer_bench.figures.bench_bars import Bar, bar_figure
from hillinfer_bench.figures.bench_lines import Abscissa, line_figure
from hillinfer_bench.figures.canvas import new_figure
from hillinfer_bench.figures.case_labels import file_words
from hillinfer_bench.figures.scale import scale_values
from hillinfer_bench.systems.table import ABLATION, FLOOR

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LATENCY, _THROUGHPUT = "ms per decode step", "tokens per second"
_BATCH = Abscissa("batch", "sequences in the batch", "{:g}".format)
_LINES = (
    ("context", Abscissa("context", "tokens of context", "{:,.0f}".format)),
    ("batch", _BATCH),
    ("alpha", Abscissa("alpha", "importance rate α", "{:g}".format)),
    ("budget", Abscissa("budget_share", "DRAM budget, % of the KV", lambda v: f"{100 * v:g}")),
)


def bench_figures(
    rows: Sequence[BenchRow], beta: Mapping[str, Any] | None = None
) -> dict[str, Figure]:
    """Return the pictures that these rows have something for, by name.

    `latency` and `speedup` by model, case and system (figures 12 and 13), `ablation` (16a) and
    `beta` (16b) from the sweep in the report. For each model, where rows have several values:
    `batch-MODEL` and `throughput-MODEL` by batch (14 and 15), `context-MODEL`, `alpha-MODEL` and
    `budget-MODEL`.
    """
    measured = [row for row in rows if row.median_ms is not None and row.system != FLOOR]
    figures = {
        "latency": bar_figure(
            _bars([row for row in measured if row.system not in ABLATION]), _LATENCY
        ),
        "speedup": bar_figure(_speed_up_bars(measured), "times faster", 1.0),
        "ablation": bar_figure(
            _bars([row for row in measured if row.system in ABLATION]), _LATENCY
        ),
        "beta": _beta_lines(beta) if beta else None,
    }
    for model, word in file_words(list(dict.fromkeys(row.model for row in measured))).items():
        own = [row for row in measured if row.model == model]
        for name, over in _LINES:
            figures[f"{name}-{word}"] = line_figure(own, over, _LATENCY, _median)
        figures[f"throughput-{word}"] = line_figure(own, _BATCH, _THROUGHPUT, _tokens)
    return {name: figure for name, figure in figures.items() if figure is not None}


def _median(row: BenchRow) -> float:
    return row.median_ms or 0.0


def _tokens(row: BenchRow) -> float:
    return row.tokens_per_second or 0.0


def _bars(rows: Sequence[BenchRow]) -> list[Bar]:
    return [Bar(row, row.system, row.system, _median(row), bool(row.flagged)) for row in rows]


def _speed_up_bars(rows: Sequence[BenchRow]) -> list[Bar]:
    """Return a bar for each rival on each case, in the rival's style."""
    named = {row.name: row for row in rows}
    bars = []
    for up in speed_ups(rows):
        own, rival = named[up.row], named[up.against]
        label = f"{own.system} over {rival.system}"
        bars.append(Bar(own, rival.system, label, up.value, up.flagged, up.allowed))
    return bars


def _beta_lines(sweep: Mapping[str, Any]) -> Figure:
    """Return latency over the segments that the host scores, measured and modelled."""
    figure = new_figure(7.0, 4.8)
    axes = figure.subplots()
    rows = sorted(sweep["rows"], key=lambda row: row["host_segments"])
    places = [row["host_segments"] for row in rows]
    measured = [1e3 * row["seconds"] for row in rows]
    drawn = list(measured)
    axes.plot(places, measured, marker="o", color="#0072b2", label="measured")
    colors = ("#d55e00", "#009e73", "#cc79a7", "#8c6d1f")
    for kind, color in zip(rows[0]["modelled_seconds"], colors, strict=False):
        modelled = [1e3 * row["modelled_seconds"].get(kind, float("nan")) for row in rows]
        drawn += [value for value in modelled if value == value]
        axes.plot(places, modelled, linestyle="--", color=color, label=f"{kind} (modelled)")
    axes.axvline(sweep["chosen_host_segments"], color="black", linewidth=0.8, label="chosen (auto)")
    scale_values(axes, drawn)
    axes.set_xlabel("segments that the host scores")
    axes.set_ylabel(_LATENCY)
    axes.set_title(f"{sweep['shape']}, {sweep['tokens']:,} tokens", fontsize="medium")
    axes.grid(axis="y", linewidth=0.3)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    return figure
