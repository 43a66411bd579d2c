# SPDX-License-Identifier: Apache-2.0
"""Heat maps of a timeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hillinfer_bench.figures.canvas import new_figure, plain_text
from hillinfer_bench.figures.timeline_record import Matrix, TimelineRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
