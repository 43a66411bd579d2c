# SPDX-License-Identifier: Apache-2.0
"""Pictures of a benchmark, after the paper's figures 12 to 16."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hillinfer.bench.goals import speed_ups
from hillinfer.bench.row import BenchRow
from hillinfer.bench.systems.table import ABLATION, FLOOR, HILLINFER
from hillinfer.figures.canvas import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d1f", "#56b4e9", "#777777", "#e69f00",
)  # fmt: skip
_HATCHES = ("", "//", "\\\\", "xx", "..", "++", "--", "oo")
_MARKERS = "os^Dv*PX"


def bench_figures(
    rows: Sequence[BenchRow], beta: Mapping[str, Any] | None = None
) -> dict[str, Figure]:
    """Return the pictures that these rows have something for, by name.

    `latency` and `speedup` by model and system (figures 12 and 13), `batch` and `throughput` by
    batch (14 and 15), `ablation` (16a) and `context`; `beta` (16b) from the sweep in the report.
    """
    measured = [row for row in rows if row.median_ms is not None and row.system != FLOOR]
    figures = {
        "latency": _bars(measured, "ms per decode step", lambda row: row.median_ms or 0.0),
        "speedup": _speed_up_bars(measured),
        "batch": _lines(measured, "batch", "ms per decode step", lambda row: row.median_ms or 0.0),
        "throughput": _lines(
            measured, "batch", "tokens per second", lambda row: row.tokens_per_second or 0.0
        ),
        "context": _lines(
            measured, "context", "ms per decode step", lambda row: row.median_ms or 0.0
        ),
        "ablation": _bars(
            [row for row in measured if row.system in ABLATION],
            "ms per decode step",
            lambda row: row.median_ms or 0.0,
        ),
        "beta": _beta_lines(beta) if beta else None,
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def _bars(
    rows: Sequence[BenchRow], label: str, value: Callable[[BenchRow], float]
) -> Figure | None:
    """Return a group of bars per case, a bar per system; None without rows."""
    if not rows:
        return None
    cases = list(dict.fromkeys(row.case for row in rows))
    systems = list(dict.fromkeys(row.system for row in rows))
    figure = new_figure(max(6.0, 0.28 * len(cases) * len(systems) + 2), 4.6)
    axes = figure.subplots()
    width = 0.8 / len(systems)
    for number, system in enumerate(systems):
        own = [row for row in rows if row.system == system]
        axes.bar(
            [cases.index(row.case) + (number - (len(systems) - 1) / 2) * width for row in own],
            [value(row) for row in own],
            width,
            label=system,
            color=_COLORS[number % len(_COLORS)],
            hatch=_HATCHES[number % len(_HATCHES)],
            edgecolor="white",
        )
    titles = [_case_text(next(row for row in rows if row.case == case)) for case in cases]
    axes.set_xticks(range(len(cases)), titles, rotation=20, ha="right", fontsize="small")
    axes.set_ylabel(label)
    axes.set_yscale("log")
    _finish(figure, axes)
    return figure


def _speed_up_bars(rows: Sequence[BenchRow]) -> Figure | None:
    ups = speed_ups(rows)
    if not ups:
        return None
    figure = new_figure(max(6.0, 0.5 * len(ups) + 2), 4.8)
    axes = figure.subplots()
    places = range(len(ups))
    axes.bar(places, [up.value for up in ups], 0.6, color=_COLORS[0], label="measured")
    axes.scatter(
        places, [up.allowed for up in ups], marker="_", s=220, color=_COLORS[1],
        label="allowed by bytes and rates (modelled)",
    )  # fmt: skip
    names = [f"{up.against.split(',')[0]}, {up.context}\n{up.name[8:]}" for up in ups]
    axes.set_xticks(places, names, rotation=30, ha="right", fontsize="small")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("times faster")
    _finish(figure, axes)
    return figure


def _beta_lines(sweep: Mapping[str, Any]) -> Figure:
    """Return latency over the segments that the host scores, measured and modelled."""
    figure = new_figure(6.4, 4.6)
    axes = figure.subplots()
    rows = sorted(sweep["rows"], key=lambda row: row["host_segments"])
    places = [row["host_segments"] for row in rows]
    axes.plot(
        places, [1e3 * row["seconds"] for row in rows], marker="o", color=_COLORS[0],
        label="measured",
    )  # fmt: skip
    for number, kind in enumerate(rows[0]["modelled_seconds"], 1):
        axes.plot(
            places,
            [1e3 * row["modelled_seconds"].get(kind, float("nan")) for row in rows],
            linestyle="--",
            color=_COLORS[number % len(_COLORS)],
            label=f"{kind} (modelled)",
        )
    axes.axvline(sweep["chosen_host_segments"], color="black", linewidth=0.8, label="chosen (auto)")
    axes.set_xlabel("segments that the host scores")
    axes.set_ylabel("ms per decode step")
    axes.set_title(f"{sweep['shape']}, {sweep['tokens']} tokens", fontsize="medium")
    _finish(figure, axes)
    return figure


def _lines(
    rows: Sequence[BenchRow], by: str, label: str, value: Callable[[BenchRow], float]
) -> Figure | None:
    """Return a line per system over `by`, for the model that has most of it; None without one."""
    series: dict[tuple[object, ...], list[BenchRow]] = {}
    for row in rows:
        key = (
            row.model,
            row.alpha,
            row.budget_share,
            row.shadow,
            row.context if by == "batch" else row.batch,
        )
        series.setdefault(key, []).append(row)
    best = max(series.values(), key=lambda own: len({getattr(row, by) for row in own}), default=[])
    if len({getattr(row, by) for row in best}) < 2:
        return None
    figure = new_figure(6.4, 4.6)
    axes = figure.subplots()
    for number, system in enumerate(dict.fromkeys(row.system for row in best)):
        own = sorted(
            (row for row in best if row.system == system), key=lambda row: getattr(row, by)
        )
        axes.plot(
            [getattr(row, by) for row in own],
            [value(row) for row in own],
            marker=_MARKERS[number % len(_MARKERS)],
            color=_COLORS[number % len(_COLORS)],
            linewidth=2.4 if system == HILLINFER else 1.2,
            label=system,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("sequences" if by == "batch" else "tokens of context")
    axes.set_ylabel(label)
    axes.set_title(f"{best[0].model}, α = {best[0].alpha:g}, {best[0].selection}")
    _finish(figure, axes)
    return figure


def _case_text(row: BenchRow) -> str:
    part = "" if row.layers == row.all_layers else f", {row.layers} layers"
    return f"{row.model}{part}\n{row.context}, batch {row.batch}, α {row.alpha:g}"


def _finish(figure: Figure, axes: Axes) -> None:
    axes.grid(axis="y", linewidth=0.3)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
