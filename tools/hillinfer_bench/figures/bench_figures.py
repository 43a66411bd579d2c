# SPDX-License-Identifier: Apache-2.0
"""Pictures of a decode report: bars and lines per system."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hillinfer_bench.figures.canvas import new_figure
from hillinfer_bench.report.goals import speed_ups
from hillinfer_bench.report.rows import BenchRow
from hillinfer_bench.systems.table import ABLATION, FLOOR, HILLINFER, system_names

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Where values differ more, the small ones cannot be told apart on a linear scale.
_LARGE_RATIO = 10
# Above the largest value there is room for words.
_ROOM = 0.3


def scale_values(axes: Axes, values: Sequence[float]) -> None:
    """Scale the upright axis for positive values: from 0, or logarithmic where ratios are large."""
    least, most = min(values), max(values)
    if 0 < least * _LARGE_RATIO < most:
        from matplotlib.ticker import LogLocator, NullLocator

        axes.set_yscale("log")
        low = least / 1.5
        axes.set_ylim(low, most * (most / low) ** _ROOM)
        # A decade alone has too few ticks to read values by.
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:,g}")
    else:
        axes.set_ylim(0, most * (1 + _ROOM))


def name_places(axes: Axes, places: Sequence[float], names: Sequence[str]) -> None:
    """Give a logarithmic axis of base 2 ticks at these places and nowhere else."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, names)
    axes.set_xticks([], minor=True)


# Everything but the model that a row's case has; formats keep different values different.
FIELDS: Mapping[str, Callable[[BenchRow], str]] = MappingProxyType(
    {
        "context": lambda row: f"{row.context:,} tokens",
        "batch": lambda row: f"batch {row.batch}",
        "alpha": lambda row: f"α {row.alpha:.12g}",
        "budget_share": lambda row: f"budget {100 * row.budget_share:.12g}%",
        "shadow": lambda row: f"shadow {row.shadow}",
        "type": lambda row: row.type,
        "part": lambda row: row.part,
    }
)


def case_labels(rows: Sequence[BenchRow]) -> tuple[str, dict[tuple[object, ...], str]]:
    """Return what all cases of one model share, and what each has of its own, by case."""
    texts = {row.case: {name: text(row) for name, text in FIELDS.items()} for row in rows}
    own = [name for name in FIELDS if len({text[name] for text in texts.values()}) > 1]
    # A group of bars without a word below it looks like a fault.
    own = own or ["context"]
    first = next(iter(texts.values()))
    common = ", ".join(text for name, text in first.items() if name not in own and text)
    return common, {
        case: "\n".join(text[name] for name in own if text[name]) for case, text in texts.items()
    }


def model_title(row: BenchRow) -> str:
    """Return the model, how much of it was measured, and where selections come from."""
    part = "" if row.layers == row.all_layers else f", {row.layers} of {row.all_layers} layers"
    return f"{short_model(row.model)}{part}, {row.selection}"


def short_model(model: str) -> str:
    """Return a model's name without folders."""
    return model.rstrip("/").split("/")[-1]


def file_words(models: Sequence[str]) -> dict[str, str]:
    """Return a word for each model that file names can have, different for different models."""
    words: dict[str, str] = {}
    for model in models:
        plain = word = re.sub(r"[^\w.-]+", "-", short_model(model)).strip(".-") or "model"
        number = 1
        while word in words.values():
            number += 1
            word = f"{plain}-{number}"
        words[model] = word
    return words


# No fewer than systems stand side by side in one picture: these differ by colour alone.
_COLORS = (
    "#0072b2", "#56b4e9", "#777777", "#222222", "#009e73", "#d55e00",
    "#8c6d1f", "#cc79a7", "#e69f00", "#882255", "#6a51a3", "#b8b800", "#44aa99", "#ee3377",
    "#1b3a6b", "#66a61e", "#5e4b3c", "#f0a3c8", "#a50f15", "#bcbddc",
)  # fmt: skip
_HATCHES = ("", "//", "\\\\", "xx", "..", "++", "--", "oo")
_MARKERS = "os^Dv*PX"


@dataclass(frozen=True)
class SystemStyle:
    """What tells a system's bars and lines from those of others.

    Parameters
    ----------
    color
        Of bars and lines.
    hatch
        Of bars.
    marker
        Of lines.
    """

    color: str
    hatch: str
    marker: str

    @classmethod
    def of(cls, system: str) -> SystemStyle:
        """Return the style of a system of the table; no other one has its colour and hatch.

        Raises
        ------
        ValueError
            Where there is none of that name.
        """
        apart = (*ABLATION, FLOOR)
        order = [*(name for name in system_names() if name not in apart), *apart]
        number = order.index(system)
        # Systems of one colour move on by one more, as the lists may have a common divisor.
        shape = number + number // len(_COLORS)
        return cls(
            _COLORS[number % len(_COLORS)],
            _HATCHES[shape % len(_HATCHES)],
            _MARKERS[shape % len(_MARKERS)],
        )


FLAG = "!: flagged"
_ALLOWED = "allowed by bytes and rates (modelled)"
# Inches of a bar, and of what lies beside and above the axes.
_BAR, _PANEL, _BESIDE, _ABOVE_BAR = 0.26, 3.4, 1.2, 1.1
_LEAST_BAR_WIDTH = 8.0
# Bars that fit into a panel, and as many as words below a group take.
_MOST_BARS, _LEAST_BARS = 60, 5
_GAP = 1.0


@dataclass(frozen=True)
class Bar:
    """One bar.

    Parameters
    ----------
    row
        Whose case it belongs to.
    system
        Whose style it has.
    label
        For the legend.
    value
        Its end.
    flagged
        What it was made from is.
    allowed
        A mark beside its end; None for none.
    """

    row: BenchRow
    system: str
    label: str
    value: float
    flagged: bool
    allowed: float | None = None


def bar_figure(bars: Sequence[Bar], axis: str, base: float = 0.0) -> Figure | None:
    """Return panels of at most 60 bars, each of one model; None without bars.

    Parameters
    ----------
    bars
        Those of a case one after the other.
    axis
        What the values are, with their unit.
    base
        Where bars begin.
    """
    if not bars:
        return None
    panels = list(_panels(bars))
    widest = max(sum(_places(group) for group in panel) for panel in panels)
    width = max(_LEAST_BAR_WIDTH, _BAR * widest + _BESIDE)
    figure = new_figure(width, _PANEL * len(panels) + _ABOVE_BAR)
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        _draw_bars(axes, panel, base)
        # A bar is as wide in every panel.
        axes.set_xlim(0, widest)
        axes.set_ylabel(axis)
    handles: dict[str, Artist] = {}
    for axes in figure.axes:
        handles |= {
            label: one for one, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
    figure.legend(
        list(handles.values()), list(handles), loc="outside upper center", fontsize="small",
        ncols=max(2, int(width / 2.2)), title=FLAG if any(bar.flagged for bar in bars) else None,
        title_fontsize="small",
    )  # fmt: skip
    return figure


def _panels(bars: Sequence[Bar]) -> Iterator[list[list[Bar]]]:
    """Yield groups of bars, a group per case."""
    models: dict[str, dict[tuple[object, ...], list[Bar]]] = {}
    for bar in bars:
        models.setdefault(bar.row.model, {}).setdefault(bar.row.case, []).append(bar)
    for cases in models.values():
        panel: list[list[Bar]] = []
        for group in cases.values():
            if panel and sum(map(len, panel)) + len(group) > _MOST_BARS:
                yield panel
                panel = []
            panel.append(group)
        yield panel


def _places(group: Sequence[Bar]) -> float:
    return max(_LEAST_BARS, len(group)) + _GAP


def _draw_bars(axes: Axes, panel: Sequence[Sequence[Bar]], base: float) -> None:
    rows = [group[0].row for group in panel]
    common, labels = case_labels(rows)
    ends = [bar.value for group in panel for bar in group]
    ends += [bar.allowed for group in panel for bar in group if bar.allowed is not None]
    scale_values(axes, [*ends, base] if base else ends)
    ticks, left = [], 0.0
    for group in panel:
        middle = left + _places(group) / 2
        ticks.append(middle)
        for number, bar in enumerate(group):
            _draw_bar(axes, bar, middle + number - (len(group) - 1) / 2, base)
        left += _places(group)
    axes.set_xticks(ticks, [labels[row.case] for row in rows], fontsize="small")
    axes.set_title(f"{model_title(rows[0])}; {common}", fontsize="medium")
    axes.grid(axis="y", linewidth=0.3)
    axes.set_axisbelow(True)
    if base:
        axes.axhline(base, color="black", linewidth=0.8)


def _draw_bar(axes: Axes, bar: Bar, place: float, base: float) -> None:
    style = SystemStyle.of(bar.system)
    axes.bar(
        place, bar.value - base, 0.86, bottom=base, label=bar.label, color=style.color,
        hatch=style.hatch, edgecolor="white", linewidth=0.4,
    )  # fmt: skip
    top = max(bar.value, base)
    if bar.allowed is not None:
        # White around it, for dark bars.
        for color, width, label in (("white", 4.0, "_edge"), ("black", 2.2, _ALLOWED)):
            axes.hlines(
                bar.allowed, place - 0.48, place + 0.48, colors=color, linewidth=width, label=label
            )
        top = max(top, bar.allowed)
    axes.annotate(
        _figure(bar.value) + ("!" if bar.flagged else ""), (place, top), (0, 3),
        textcoords="offset points", rotation=90, ha="center", va="bottom", fontsize=7,
    )  # fmt: skip


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


_PANEL_WIDTH, _PANEL_HEIGHT, _ABOVE_LINE = 5.2, 4.0, 1.5
_MOST_IN_A_ROW = 3
_LEAST_LINE_WIDTH = 7.0


@dataclass(frozen=True)
class Abscissa:
    """What lines go over.

    Parameters
    ----------
    field
        Of `BenchRow`.
    axis
        What it is, with its unit.
    text
        Writes a value at its tick.
    """

    field: str
    axis: str
    text: Callable[[float], str]

    def of(self, row: BenchRow) -> float:
        """Return a row's place."""
        return float(getattr(row, self.field))


def line_figure(
    rows: Sequence[BenchRow], over: Abscissa, axis: str, value: Callable[[BenchRow], float]
) -> Figure | None:
    """Return a panel for each series of one model; None where no series has two places.

    Parameters
    ----------
    rows
        Measured ones of one model.
    over
        What goes along. Rows of a series are equal in everything else, the part of the plan
        included.
    axis
        What the values are, with their unit.
    value
        Of a row.
    """
    panels = [own for own in _series(rows, over) if len({over.of(row) for row in own}) > 1]
    if not panels:
        return None
    columns = min(_MOST_IN_A_ROW, len(panels))
    lines = -(-len(panels) // columns)
    width = max(_LEAST_LINE_WIDTH, _PANEL_WIDTH * columns)
    figure = new_figure(width, _PANEL_HEIGHT * lines + _ABOVE_LINE)
    places = figure.subplots(lines, columns, squeeze=False).flat
    for axes, own in zip(places, panels, strict=False):
        _draw_lines(axes, own, over, value)
        # Panels are compared with each other.
        scale_values(axes, [value(row) for each in panels for row in each])
        axes.set_ylabel(axis)
    for axes in list(places)[len(panels) :]:
        axes.remove()
    figure.suptitle(model_title(rows[0]), fontsize="medium")
    handles: dict[str, Artist] = {}
    for axes in figure.axes:
        handles |= {
            label: one for one, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
    flagged = any(row.flagged for own in panels for row in own)
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", fontsize="small",
        ncols=max(3, int(width / 2.2)), title="hollow: flagged" if flagged else None,
        title_fontsize="small",
    )  # fmt: skip
    return figure


def _series(rows: Sequence[BenchRow], over: Abscissa) -> list[list[BenchRow]]:
    series: dict[tuple[str, ...], list[BenchRow]] = {}
    for row in rows:
        key = tuple(text(row) for name, text in FIELDS.items() if name != over.field)
        series.setdefault(key, []).append(row)
    return list(series.values())


def _draw_lines(
    axes: Axes, rows: Sequence[BenchRow], over: Abscissa, value: Callable[[BenchRow], float]
) -> None:
    for system in dict.fromkeys(row.system for row in rows):
        own = sorted((row for row in rows if row.system == system), key=over.of)
        style = SystemStyle.of(system)
        axes.plot(
            [over.of(row) for row in own],
            [value(row) for row in own],
            color=style.color,
            linewidth=2.4 if system == HILLINFER else 1.2,
            # HillInfer must not vanish where lines meet.
            zorder=3 if system == HILLINFER else 2,
        )
        for flagged in (False, True):
            some = [row for row in own if bool(row.flagged) is flagged]
            axes.plot(
                [over.of(row) for row in some], [value(row) for row in some], linestyle="",
                marker=style.marker, color=style.color, zorder=3,
                markerfacecolor="white" if flagged else style.color,
            )  # fmt: skip
        # The legend has the line with its mark, hollow points or not.
        axes.plot([], [], color=style.color, marker=style.marker, label=system)
    places = sorted({over.of(row) for row in rows})
    name_places(axes, places, [over.text(place) for place in places])
    axes.set_xlabel(over.axis)
    others = [text(rows[0]) for name, text in FIELDS.items() if name != over.field]
    axes.set_title(", ".join(filter(None, others)), fontsize="small")
    axes.grid(axis="y", linewidth=0.3)


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
