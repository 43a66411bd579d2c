# SPDX-License-Identifier: Apache-2.0
"""Hit rates of pool policies over pool sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hillinfer_bench.figures.canvas import new_figure
from hillinfer_bench.replay.table import (
    DEMAND,
    EQUAL,
    MISSES,
    PREFETCH,
    PoolRow,
    earlier_rate,
    means,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart without colour too; the first is the default policy's.
_MARKERS = "os^Dv*"
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d1f", "#56b4e9")
_BOUNDS = {DEMAND: "--", PREFETCH: ":"}
_PANEL_WIDTH, _PANEL_HEIGHT = 5.2, 4.4


def pools_figure(rows: Sequence[PoolRow]) -> Figure:
    """Return a panel per rule and α: a line per policy, Belady's bounds, the earlier figures."""
    rows = means(rows)
    kinds = list(dict.fromkeys((row.rule, row.shadow) for row in rows))
    alphas = list(dict.fromkeys(row.alpha for row in rows))
    figure = new_figure(_PANEL_WIDTH * len(alphas), _PANEL_HEIGHT * len(kinds) + 0.8)
    panels = figure.subplots(len(kinds), len(alphas), squeeze=False, sharey=True)
    for line, (rule, shadow) in enumerate(kinds):
        for column, alpha in enumerate(alphas):
            own = [
                row for row in rows if (row.rule, row.shadow, row.alpha) == (rule, shadow, alpha)
            ]
            axes = panels[line, column]
            _draw(axes, own)
            axes.set_title(f"{rule} {shadow.upper()}, α = {alpha:g}")
            axes.set_xlabel("hot pool of a layer, in α·N")
            if column == 0:
                axes.set_ylabel("selected tokens found in DRAM")
    entries: dict[str, Artist] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=5)
    figure.suptitle("Hit rates of pool policies on recorded selections (means over texts)")
    return figure


def _draw(axes: Axes, rows: Sequence[PoolRow]) -> None:
    policies = dict.fromkeys(row.policy for row in rows if row.policy not in _BOUNDS)
    for number, policy in enumerate(policies):
        color = _COLORS[number % len(_COLORS)]
        marker = _MARKERS[number % len(_MARKERS)]
        own = [row for row in rows if row.policy == policy and row.sizes == EQUAL]
        sizes = [row.pool_alphas for row in own]
        axes.plot(sizes, [row.hit_rate for row in own], marker=marker, color=color, label=policy)
        by_misses = [row for row in rows if row.policy == policy and row.sizes == MISSES]
        if by_misses:
            axes.plot(
                [row.pool_alphas for row in by_misses],
                [row.hit_rate for row in by_misses],
                linestyle="none",
                marker=marker,
                markersize=10,
                markerfacecolor="none",
                color=color,
                label=f"{policy}, sizes by misses",
            )
        earlier = [(row.pool_alphas, earlier_rate(row)) for row in own]
        known = [(size, rate) for size, rate in earlier if rate is not None]
        if known:
            axes.plot(*zip(*known, strict=True), linestyle="none", marker="x", color=color)
    if any(earlier_rate(row) is not None for row in rows):
        axes.plot([], [], linestyle="none", marker="x", color="0.3", label="measured earlier")
    for bound, style in _BOUNDS.items():
        own = [row for row in rows if row.policy == bound and row.sizes == EQUAL]
        axes.plot(
            [row.pool_alphas for row in own],
            [row.hit_rate for row in own],
            linestyle=style,
            color="0.25",
            label=bound.capitalize(),
        )
    axes.set_xscale("log", base=2)
    ticks = sorted({row.pool_alphas for row in rows})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
