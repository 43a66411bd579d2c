# SPDX-License-Identifier: Apache-2.0
"""What happened to the pools of a run: its timeline, read and drawn as heat maps."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hillinfer.errors import HillInferError, reason_of
from hillinfer.trace.trace_file import COLUMNS
from hillinfer_bench.figures.canvas import new_figure, plain_text
from hillinfer_bench.figures.plain_text import open_plain, plain_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Matrix = NDArray[np.float64]
_MOST = 1 << 53
# A hundred thousand steps of a large model.
_MOST_BYTES = 1 << 30
# A layer has a line in every step, but for those that were not whole.
_MOST_EMPTY = 64
_MOST_LAYERS = 512


class TimelineError(HillInferError):
    """A file is no timeline of the pools."""


@dataclass(frozen=True)
class TimelineRecord:
    """What happened per layer and step, sequences of the same step added up.

    Parameters
    ----------
    steps
        int64, the numbers of the steps, ascending.
    columns
        By name, float64 of shape (layers, steps); NaN where a layer has no line in a step.
    """

    steps: NDArray[np.int64]
    columns: dict[str, Matrix]

    @property
    def hit_rates(self) -> Matrix:
        """Share of selected rows found in DRAM, (layers, steps)."""
        wanted = self.columns["hot_rows"] + self.columns["cold_rows"]
        rates: Matrix = self.columns["hot_rows"] / np.where(wanted > 0, wanted, np.nan)
        return rates

    @property
    def hit_rate(self) -> float:
        """Share of all selected rows found in DRAM; 1.0 where none was wanted."""
        hot, cold = (float(np.nansum(self.columns[name])) for name in ("hot_rows", "cold_rows"))
        return hot / (hot + cold) if hot + cold else 1.0

    @classmethod
    def read(cls, file: Path) -> TimelineRecord:
        """Read a file that `PoolTimeline` wrote; a last line that was cut off is left out.

        Raises
        ------
        TimelineError
            Where it cannot be read or is something else; the message names the line.
        """
        try:
            with open_plain(file, "ascii", _MOST_BYTES) as opened:
                numbers = chain.from_iterable(_entries(file, csv.reader(plain_lines(opened))))
                entries = np.fromiter(numbers, np.float64).reshape(-1, len(COLUMNS))
        except OSError as error:
            raise TimelineError(f"cannot read the timeline {file}: {reason_of(error)}") from error
        except (ValueError, csv.Error) as error:
            raise TimelineError(f"{file} is no pool timeline: {error}") from error
        if not len(entries):
            raise TimelineError(f"{file} holds no steps: nothing was decoded while it was written")
        steps, column_of = np.unique(entries[:, 0].astype(np.int64), return_inverse=True)
        layers = entries[:, 1].astype(np.int64)
        shape = int(layers.max()) + 1, len(steps)
        if shape[0] > len(entries):
            raise TimelineError(f"{file} names layer {shape[0] - 1} but has {len(entries)} lines")
        if shape[0] > _MOST_LAYERS:
            raise TimelineError(f"{file} names {shape[0]} layers: no model has so many")
        if shape[0] * shape[1] > _MOST_EMPTY * len(entries):
            raise TimelineError(
                f"{file} names {shape[0]} layers and {shape[1]} steps but has {len(entries)} lines"
            )
        lines_of = np.zeros(shape)
        np.add.at(lines_of, (layers, column_of), 1)
        columns = {}
        for number, name in enumerate(COLUMNS[2:], start=2):
            sums = np.zeros(shape)
            np.add.at(sums, (layers, column_of), entries[:, number])
            columns[name] = np.where(lines_of > 0, sums, np.nan)
        return cls(steps, columns)


def _entries(file: Path, lines: Iterator[list[str]]) -> Iterator[tuple[float, ...]]:
    header = next(lines, [])
    if tuple(header) != COLUMNS:
        raise TimelineError(
            f"{file} is no pool timeline: its first line must be {','.join(COLUMNS)}"
        )
    cut_off: str | None = None
    for number, cells in enumerate(lines, start=2):
        if cut_off is not None:
            raise TimelineError(cut_off)
        try:
            entry = tuple(_number(name, cell) for name, cell in zip(COLUMNS, cells, strict=True))
        except (ValueError, OverflowError):
            # A process that was killed may leave half a line, but only at the end.
            cut_off = f"{file}, line {number}: {','.join(cells)[:80]!r} is no line of a timeline"
        else:
            yield entry
    if cut_off is not None and number == 2:
        raise TimelineError(cut_off)


def _number(name: str, cell: str) -> float:
    value = float(cell) if name.endswith("_seconds") else float(int(cell))
    if not 0 <= value <= _MOST:
        raise ValueError(cell)
    return value


_WIDTH, _MARGIN = 13.0, 1.2
_LEAST_HEIGHT, _LAYER_HEIGHT = 2.0, 0.045
_MOST_TICKS = 12
# Few very slow reads would otherwise leave everything else in one colour.
_CLIPPED_AT = 99.0


@dataclass(frozen=True)
class _Panel:
    title: str
    values: Matrix
    colors: str
    limits: tuple[float, float]


def timeline_figure(record: TimelineRecord, name: str) -> Figure:
    """Return hits, promotions, demotions, reads and waits, a row per layer, a column per step.

    Where tokens are coded, missing codes stand below.

    Beside each heat map stands the mean of each layer.
    """
    columns = record.columns
    waits = columns["wait_seconds"] * 1e3
    panels = [
        _Panel("hit rate", record.hit_rates, "viridis", _rate_limits(record.hit_rates)),
        _counted("rows promoted", columns["promoted"]),
        _counted("rows demoted", columns["demoted"]),
        _counted("reads", columns["reads"]),
        _counted("MiB read", columns["read_bytes"] / 2**20),
        _counted("wait for rows, ms", waits),
    ]
    if np.nansum(columns["coded_tokens"]):
        # Hits and misses are those of the exact ones.
        missing = columns["coded_arrivals"]
        panels.append(_counted("coded tokens whose codes were not in DRAM", missing))
    layers = len(waits)
    height = max(_LEAST_HEIGHT, _LAYER_HEIGHT * layers)
    figure = new_figure(_WIDTH, height * len(panels) + _MARGIN)
    axes = figure.subplots(
        len(panels), 2, squeeze=False, sharey=True, gridspec_kw={"width_ratios": [8, 1]}
    )
    for (map_axes, mean_axes), panel in zip(axes, panels, strict=True):
        _draw_map(figure, map_axes, panel)
        _draw_means(mean_axes, panel)
        map_axes.set_ylabel("layer")
        _mark_steps(map_axes, record)
    axes[-1, 0].set_xlabel("step (dotted where passes without selection lie between)")
    figure.suptitle(
        f"Hot pools, {plain_text(name)}: {len(record.steps)} steps, {layers} layers, "
        f"{record.hit_rate:.1%} of the selected rows found in DRAM"
    )
    return figure


def _counted(title: str, values: Matrix) -> _Panel:
    known = values[np.isfinite(values)]
    most = float(np.percentile(known, _CLIPPED_AT)) if len(known) else 0.0
    return _Panel(title, values, "magma", (0.0, most or float(known.max(initial=0.0)) or 1.0))


def _rate_limits(rates: Matrix) -> tuple[float, float]:
    known = rates[np.isfinite(rates)]
    return (float(np.percentile(known, 100 - _CLIPPED_AT)) if len(known) else 0.0), 1.0


def _draw_map(figure: Figure, axes: Axes, panel: _Panel) -> None:
    least, most = panel.limits
    image = axes.imshow(
        panel.values,
        aspect="auto",
        interpolation="nearest",
        cmap=panel.colors,
        vmin=least,
        vmax=most if most > least else least + 1.0,
    )
    axes.set_facecolor("0.85")
    known = panel.values[np.isfinite(panel.values)]
    above, below = bool((known > most).any()), bool((known < least).any())
    extend = "both" if above and below else "max" if above else "min" if below else "neither"
    figure.colorbar(image, ax=axes, location="left", pad=0.01, fraction=0.03, extend=extend)
    axes.set_title(panel.title, loc="left", fontsize=10)


def _draw_means(axes: Axes, panel: _Panel) -> None:
    counts = np.isfinite(panel.values).sum(axis=1)
    means = np.nansum(panel.values, axis=1) / np.maximum(counts, 1)
    axes.barh(np.arange(len(means)), means, height=1.0, color="0.45")
    axes.set_title("mean of a layer", fontsize=9)
    axes.grid(axis="x", alpha=0.3)
    axes.tick_params(labelsize=8)


def _mark_steps(axes: Axes, record: TimelineRecord) -> None:
    steps = record.steps
    for place in np.flatnonzero(np.diff(steps) > 1):
        axes.axvline(place + 0.5, color="white", linewidth=1.0, linestyle=":")
    places = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _MOST_TICKS)).astype(int))
    axes.set_xticks(places, [str(steps[place]) for place in places])
