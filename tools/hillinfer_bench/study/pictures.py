# SPDX-License-Identifier: Apache-2.0
"""Pictures of a study: figure 14 as modelled, and quality over bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hillinfer_bench.figures.canvas import new_figure, save_figure
from hillinfer_bench.study.accuracy import by_length, cells
from hillinfer_bench.study.modelled import BASELINES, OWN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What the text claims of batch 10, seconds (section 5.3).
_ABOVE, _BELOW = 50.0, 25.0
_SYSTEM = ", "


def batch_figure(modelled: Mapping[str, Any]) -> Figure:
    """Return figure 14: seconds of an answer over the batch, each system a line.

    Parameters
    ----------
    modelled
        The part of a report.
    """
    rows = [row for row in modelled["rows"] if row["figure"] == "14"]
    figure = new_figure(7.0, 4.2)
    axes = figure.subplots()
    for name in (*BASELINES, *OWN):
        marker = "o" if name in OWN else "s"
        seconds = [row["run_seconds"][name] for row in rows]
        axes.plot([row["batch"] for row in rows], seconds, marker=marker, label=name)
    batch = rows[-1]["batch"]
    for claim, text in ((_ABOVE, "paper: baselines above"), (_BELOW, "paper: HillInfer below")):
        axes.axhline(claim, color="gray", linestyle=":", linewidth=1)
        axes.annotate(f"{text} {claim:g} s at {batch}", (1, claim + 1), fontsize="small")
    axes.set_xlabel("batch, OPT-6.7B, 1,920 + 128 tokens, the paper's machine (modelled)")
    axes.set_ylabel("seconds")
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    return figure


def bytes_figure(accuracy: Mapping[str, Any]) -> Figure | None:
    """Return KL on text over the bytes that a step reads; None without texts.

    Parameters
    ----------
    accuracy
        The part of a report.
    """
    found = cells(accuracy["answers"], by_length)
    texts = [rows for column, rows in found.items() if column.startswith("text,")]
    if not texts:
        return None
    figure = new_figure(7.0, 4.6)
    axes = figure.subplots()
    lines: dict[str, list[tuple[float, float]]] = {}
    for way in accuracy["ways"]:
        cell = texts[0].get(way["way"])
        if cell is not None and cell.means["kl"] > 0:
            system = way["way"].rpartition(_SYSTEM)[0]
            read = 100 * (way["rows"] + way["ranking"])
            lines.setdefault(system, []).append((read, cell.means["kl"]))
    for name, points in lines.items():
        points.sort()
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_yscale("log")
    axes.set_xlabel("bytes that a step reads, rows and what ranks them, % of all rows (computed)")
    axes.set_ylabel("KL to the full cache, nats (measured)")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    return figure


def write_pictures(record: Mapping[str, Any], beside: Path) -> list[Path]:
    """Draw what a report has and return the files, which lie beside it.

    Parameters
    ----------
    record
        A report of `hillinfer-bench study`.
    beside
        Its file; pictures have its name and one more word.
    """
    drawn = {
        "batch": batch_figure(record["modelled"]) if "modelled" in record else None,
        "bytes": bytes_figure(record["accuracy"]) if "accuracy" in record else None,
    }
    files = []
    for word, figure in drawn.items():
        if figure is not None:
            files.append(beside.with_name(f"{beside.stem}-{word}.svg"))
            save_figure(figure, files[-1])
    return files
