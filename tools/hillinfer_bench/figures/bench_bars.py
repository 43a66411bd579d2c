# SPDX-License-Identifier: Apache-2.0
"""Bars of several systems side by side, a group per case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hillinfer_bench.decode.row import BenchRow
from hillinfer_bench.figures.canvas import new_figure
from hillinfer_bench.figures.case_labels import case_labels, model_title
from hillinfer_bench.figures.scale import scale_values
from hillinfer_bench.figures.system_style import SystemStyle

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FLAG = "!: spread above 20 %"
_ALLOWED = "allowed by bytes and rates (modelled)"
# Inches of a bar, and of what lies beside and above the axes.
_BAR, _PANEL, _BESIDE, _ABOVE = 0.26, 3.4, 1.2, 1.1
_LEAST_WIDTH = 8.0
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
        The spread of what it was made from is too large.
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
    width = max(_LEAST_WIDTH, _BAR * widest + _BESIDE)
    figure = new_figure(width, _PANEL * len(panels) + _ABOVE)
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        _draw(axes, panel, base)
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


def _draw(axes: Axes, panel: Sequence[Sequence[Bar]], base: float) -> None:
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
