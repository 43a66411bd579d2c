# SPDX-License-Identifier: Apache-2.0
"""Picture of the comparison at equal quality: KL against bytes and against milliseconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hillinfer_bench.figures.bench_figures import short_model
from hillinfer_bench.figures.canvas import FigureError, new_figure, plain_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLES: Mapping[str, tuple[str, str]] = {
    "hillinfer-coded": ("#0072b2", "o"),
    "hillinfer": ("#56b4e9", "s"),
    "h2o-all-keys": ("#d55e00", "^"),
    "infinigen": ("#009e73", "v"),
    "leoam": ("#cc79a7", "D"),
    "quest": ("#e69f00", "P"),
    "four-bit": ("#222222", "X"),
    "four-bit-drive": ("#222222", "X"),
    "four-bit-memory": ("#222222", "x"),
    "five-bit-drive": ("#222222", "X"),
    "five-bit-memory": ("#222222", "x"),
    "h2o-drop": ("#8c6d1f", "*"),
}
_OTHER = ("#777777", "o")
# Bits of timed caches: nothing lies between two, so each has a KL of its own.
_FEW_BITS: Mapping[str, int] = {"four-bit": 4, "five-bit": 5}
# Of a system that is modelled in memory beside the drive.
_IN_MEMORY = "in memory"


def read_frontier(file: Path) -> dict[str, Any]:
    """Return a report of `hillinfer-bench frontier`.

    Raises
    ------
    FigureError
        Where it cannot be read, or is no such report.
    """
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        rows = report["sweep"]
        for row in rows:
            float(row["kl_divergence"]), float(row["row_byte_share"]), str(row["system"])
        complete = bool(rows) and "settings" in report and "times" in report
    except OSError as error:
        raise FigureError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise FigureError(f"{file} is no report of `hillinfer-bench frontier`") from error
    if not complete:
        raise FigureError(f"{file} has no sweep: let `hillinfer-bench frontier` end")
    return dict(report)


def frontier_figure(report: Mapping[str, Any]) -> Figure:
    """Return a panel of KL against bytes, and one against milliseconds for each timed model.

    Lines of milliseconds are modelled; marks with a rim were measured, at a KL of HillInfer. Those
    of a cache of few bits lie at its own, a cross where it is in memory.
    """
    rows = report["sweep"]
    models = list(dict.fromkeys(row["model"] for row in report["times"]))
    figure = new_figure(4.8 * (1 + len(models)), 4.6)
    panels: Sequence[Axes] = figure.subplots(1, 1 + len(models), sharey=True, squeeze=False)[0]
    _bytes_panel(panels[0], rows, report["settings"])
    for axes, model in zip(panels[1:], models, strict=True):
        _time_panel(axes, rows, report, model)
    panels[0].legend(fontsize=7)
    return figure


def _systems(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(row["system"], []).append(row)
    return grouped


def _bytes_panel(
    axes: Axes, rows: Sequence[Mapping[str, Any]], settings: Sequence[Mapping[str, Any]]
) -> None:
    for name, own in _systems(rows).items():
        color, mark = _STYLES.get(name, _OTHER)
        axes.plot(
            [row["row_byte_share"] for row in own],
            [row["kl_divergence"] for row in own],
            color=color,
            marker=mark,
            label=plain_text(name),
            markersize=5,
        )
    for equal in settings[:1]:
        axes.axhline(equal["kl"], color="#999999", linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("row bytes of a step, share of the KV")
    axes.set_ylabel("KL to the full cache, nats")
    axes.set_title("bytes (measured KL)", fontsize=9)


def _time_panel(
    axes: Axes, rows: Sequence[Mapping[str, Any]], report: Mapping[str, Any], model: str
) -> None:
    for name, own in _systems(rows).items():
        color, mark = _STYLES.get(name, _OTHER)
        for place in dict.fromkeys(key for row in own for key in row["modelled_ms"]):
            if not place.startswith(f"{model}, "):
                continue
            known = [row for row in own if place in row["modelled_ms"]]
            line = "--" if place.endswith(_IN_MEMORY) else "-"
            axes.plot(
                [row["modelled_ms"][place] for row in known],
                [row["kl_divergence"] for row in known],
                color=color,
                linestyle=line,
                linewidth=1,
            )
    for row in report["times"]:
        if row["model"] == model and row["median_ms"] is not None and row["system"] in _STYLES:
            color, mark = _STYLES[row["system"]]
            kl = _own_kl(rows, row["system"], row.get("at_kl", report["settings"][0]["kl"]))
            axes.plot([row["median_ms"]], [kl], marker=mark, color=color, markeredgecolor="black")
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds per token")
    axes.set_title(
        plain_text(f"{short_model(model)}: lines modelled, rimmed marks measured"), fontsize=8
    )


def _own_kl(rows: Sequence[Mapping[str, Any]], system: str, kl: float) -> float:
    """Return the KL of a timed system: of a cache of few bits that of its bits."""
    bits = _FEW_BITS.get(system.rsplit("-", 1)[0])
    own = (
        row["kl_divergence"] for row in rows if row["system"] == "four-bit" and row["value"] == bits
    )
    return float(next(own, kl))
