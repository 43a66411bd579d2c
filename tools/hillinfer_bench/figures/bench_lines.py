# SPDX-License-Identifier: Apache-2.0
"""Lines of several systems over one value of the cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hillinfer_bench.decode.row import BenchRow
from hillinfer_bench.figures.canvas import new_figure
from hillinfer_bench.figures.case_labels import FIELDS, model_title
from hillinfer_bench.figures.scale import name_places, scale_values
from hillinfer_bench.figures.system_style import SystemStyle
from hillinfer_bench.systems.table import HILLINFER

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL_WIDTH, _PANEL_HEIGHT, _ABOVE = 5.2, 4.0, 1.5
_MOST_IN_A_ROW = 3
_LEAST_WIDTH = 7.0


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
    width = max(_LEAST_WIDTH, _PANEL_WIDTH * columns)
    figure = new_figure(width, _PANEL_HEIGHT * lines + _ABOVE)
    places = figure.subplots(lines, columns, squeeze=False).flat
    for axes, own in zip(places, panels, strict=False):
        _draw(axes, own, over, value)
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
        ncols=max(3, int(width / 2.2)), title="hollow: spread above 20 %" if flagged else None,
        title_fontsize="small",
    )  # fmt: skip
    return figure


def _series(rows: Sequence[BenchRow], over: Abscissa) -> list[list[BenchRow]]:
    series: dict[tuple[str, ...], list[BenchRow]] = {}
    for row in rows:
        key = tuple(text(row) for name, text in FIELDS.items() if name != over.field)
        series.setdefault(key, []).append(row)
    return list(series.values())


def _draw(
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
