# SPDX-License-Identifier: Apache-2.0
"""One step of a trace: lanes as rows, spans as bars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hillinfer.timeline.lane import Lane
from hillinfer.timeline.span import Span
from hillinfer_bench.figures.canvas import new_figure, plain_text
from hillinfer_bench.figures.step_trace import StepTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _ROW_HEIGHT, _MARGIN = 16.0, 0.42, 1.5
_BAR = 0.8
# Told apart by their place too.
_COLORS = {
    Lane.STEPS: "#bbbbbb",
    Lane.COMPUTE: "#0072b2",
    Lane.HOST_SCORING: "#d55e00",
    Lane.DEVICE_SCORING: "#cc79a7",
    Lane.READS: "#009e73",
    Lane.COPIES: "#8c6d1f",
    Lane.WRITES: "#56b4e9",
}
# Narrower bars have no room for the number of their layer.
_LEAST_NUMBERED = 0.012


def lanes_figure(trace: StepTrace, name: str) -> Figure:
    """Return a row for each thread of each lane, bars numbered by layer, time in milliseconds."""
    rows = _rows(trace)
    figure = new_figure(_WIDTH, _ROW_HEIGHT * len(rows) + _MARGIN)
    axes = figure.subplots()
    for place, (lane, spans) in enumerate(rows):
        _draw(axes, place, lane, spans, trace)
    axes.set_yticks(range(len(rows)), [_label(lane, spans) for lane, spans in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, trace.nanoseconds / 1e6)
    axes.set_xlabel("ms since the step began (bars carry the number of their layer)")
    axes.grid(axis="x", alpha=0.3)
    milliseconds = f"{trace.nanoseconds / 1e6:.2f} ms"
    figure.suptitle(f"Step {trace.step.step} of {plain_text(name)}: {milliseconds}")
    return figure


def _rows(trace: StepTrace) -> list[tuple[Lane, list[Span]]]:
    """Return the spans of each thread that did something in each lane; a row for idle lanes."""
    rows: list[tuple[Lane, list[Span]]] = []
    for lane in Lane:
        threads: dict[int, list[Span]] = {}
        for span in trace.of(lane):
            threads.setdefault(span.thread, []).append(span)
        rows += [(lane, threads[thread]) for thread in sorted(threads)] or [(lane, [])]
    return rows


def _label(lane: Lane, spans: list[Span]) -> str:
    names = ", ".join(sorted({one.name for one in spans}))
    return f"{lane.value}: {names}" if names else lane.value


def _draw(axes: Axes, place: int, lane: Lane, spans: list[Span], trace: StepTrace) -> None:
    bars = [(_ms(one.start, trace), _ms(one.stop, trace)) for one in spans]
    axes.broken_barh(
        [(start, stop - start) for start, stop in bars],
        (place - _BAR / 2, _BAR),
        facecolors=_COLORS[lane],
        edgecolors="white",
        linewidth=0.3,
    )
    least = _LEAST_NUMBERED * trace.nanoseconds / 1e6
    for span, (start, stop) in zip(spans, bars, strict=True):
        if "layer" in span.details and stop - start >= least:
            label = str(span.details["layer"])
            axes.text((start + stop) / 2, place, label, ha="center", va="center", fontsize=6)


def _ms(moment: int, trace: StepTrace) -> float:
    """Return a moment as drawn: what began before the step is cut, and what goes on after it."""
    return (min(max(moment, trace.step.start), trace.step.stop) - trace.step.start) / 1e6
