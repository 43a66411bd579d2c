# SPDX-License-Identifier: Apache-2.0
"""One step of a trace: read, told in words, and drawn."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hillinfer.errors import HillInferError, reason_of
from hillinfer.trace.recorder import Lane, Span
from hillinfer.trace.trace_file import PROCESS_NAME
from hillinfer.values import format_bytes
from hillinfer_bench.figures.canvas import new_figure, plain_text
from hillinfer_bench.figures.plain_text import open_plain, plain_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Stretch = tuple[int, int]


@dataclass(frozen=True)
class StepTrace:
    """One step and the spans that lie in it at least partly.

    Parameters
    ----------
    step
        The step itself.
    spans
        All others, by start.
    """

    step: Span
    spans: tuple[Span, ...]

    @property
    def nanoseconds(self) -> int:
        """How long the step took."""
        return self.step.stop - self.step.start

    def of(self, lane: Lane) -> tuple[Span, ...]:
        """Return the spans of a lane."""
        return tuple(one for one in self.spans if one.lane is lane)

    def busy(self, lane: Lane) -> int:
        """Return the nanoseconds of the step in which anything of a lane went on."""
        return _length(self._stretches(lane))

    def hidden(self, lane: Lane) -> int:
        """Return the nanoseconds in which a lane was busy while compute was, too."""
        return _length(_common(self._stretches(lane), self._stretches(Lane.COMPUTE)))

    def _stretches(self, lane: Lane) -> list[_Stretch]:
        first, last = self.step.start, self.step.stop
        return _union((max(one.start, first), min(one.stop, last)) for one in self.of(lane))


def _union(stretches: Iterable[_Stretch]) -> list[_Stretch]:
    """Return the same time without overlaps, ascending."""
    joined: list[_Stretch] = []
    for start, stop in sorted(stretches):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def _common(left: list[_Stretch], right: list[_Stretch]) -> list[_Stretch]:
    """Return the time that two unions share."""
    shared = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < stop:
            shared.append((start, stop))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return shared


def _length(stretches: list[_Stretch]) -> int:
    return sum(stop - start for start, stop in stretches)


STEP = "step"
_MOST_STEPS_NAMED = 8
_MOST_NANOSECONDS = 1 << 62
_MOST_BYTES = 1 << 34
_MOST_SPANS = 1_000_000
_MOST_THREADS = 256
# No `$` either: a picture would take what follows for a formula.
_WORD = re.compile(r"[ -#%-~]{0,200}")


class TraceError(HillInferError):
    """A file is no trace, or has no such step."""


@dataclass(frozen=True)
class TraceRecord:
    """The steps of a trace; their spans stay in the file until asked for.

    Parameters
    ----------
    file
        Where they lie.
    steps
        The spans of whole steps, in order.
    """

    file: Path
    steps: tuple[Span, ...]

    @classmethod
    def read(cls, file: Path) -> TraceRecord:
        """Read a file that `TraceFile` wrote; a last line that was cut off is left out.

        Raises
        ------
        TraceError
            Where it cannot be read or is something else; the message names the line.
        """
        steps = [one for one in _spans(file) if one.lane is Lane.STEPS and one.name == STEP]
        if not steps:
            raise TraceError(f"{file} holds no whole step: no forward pass ended in it")
        return cls(file, tuple(sorted(steps, key=lambda one: one.start)))

    @property
    def decode_steps(self) -> tuple[Span, ...]:
        """The steps of one token a row."""
        return tuple(one for one in self.steps if one.details.get("tokens") == 1)

    @property
    def median_step(self) -> int:
        """Number of the decode step of median time, the faster of two; of any where none is."""
        among = sorted(self.decode_steps or self.steps, key=lambda one: one.stop - one.start)
        return among[(len(among) - 1) // 2].step

    def step(self, number: int) -> StepTrace:
        """Read what went on during a step, work left over from steps before it included.

        Raises
        ------
        TraceError
            Where there is no such step.
        """
        found = [one for one in self.steps if one.step == number]
        if not found:
            raise TraceError(
                f"{self.file} has no step {number}: choose one of {_named(self.steps)}"
            )
        step = found[0]
        during = (
            one
            for one in _spans(self.file)
            if one.start < step.stop and one.stop > step.start and one != step
        )
        some = tuple(islice(during, _MOST_SPANS + 1))
        if len(some) > _MOST_SPANS:
            raise TraceError(
                f"{self.file} has more than {_MOST_SPANS} spans in step {number}: no step of "
                "hillinfer has so many"
            )
        if len({(one.lane, one.thread) for one in some}) > _MOST_THREADS:
            raise TraceError(
                f"{self.file} has more than {_MOST_THREADS} threads in step {number}: no step of "
                "hillinfer has so many"
            )
        return StepTrace(step, tuple(sorted(some, key=lambda one: one.start)))


def _named(steps: tuple[Span, ...]) -> str:
    numbers = [str(one.step) for one in steps]
    if len(numbers) <= _MOST_STEPS_NAMED:
        return ", ".join(numbers)
    return f"{numbers[0]} to {numbers[-1]}"


def _spans(file: Path) -> Iterator[Span]:
    try:
        with open_plain(file, "utf-8", _MOST_BYTES) as opened:
            yield from _complete_events(file, plain_lines(opened))
    except OSError as error:
        raise TraceError(f"cannot read the trace {file}: {reason_of(error)}") from error
    except ValueError as error:
        raise TraceError(f"{file} is no trace of hillinfer: {error}") from error


def _complete_events(file: Path, lines: Iterator[str]) -> Iterator[Span]:
    if next(lines, "").rstrip() != "[":
        raise TraceError(f"{file} is no trace of hillinfer: its first line must be [")
    damaged: str | None = None
    for number, line in enumerate(lines, start=2):
        if damaged is not None:
            raise TraceError(damaged)
        text = line.rstrip().removesuffix(",")
        if text == "]":
            damaged = f"{file}, line {number}: a trace ends at its closing bracket"
            continue
        try:
            event = json.loads(text)
            if number == 2 and event["args"] != {"name": PROCESS_NAME}:
                raise ValueError("of another program")
            if event["ph"] == "X":
                yield _span(event)
            elif event["ph"] != "M":
                raise ValueError("of another kind")
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            # A process that was killed may leave half a line, but only at the end.
            damaged = f"{file}, line {number}: {text[:80]!r} is no event of a trace of hillinfer"
            if number == 2:
                raise TraceError(damaged) from None


def _span(event: dict[str, Any]) -> Span:
    details = dict(event["args"])
    step, thread = details.pop("step"), event["tid"]
    if not (isinstance(step, int) and isinstance(thread, int) and isinstance(event["name"], str)):
        raise TypeError("step, thread or name")
    if not all(isinstance(value, int) or _WORD.fullmatch(value) for value in details.values()):
        raise TypeError("details")
    if not _WORD.fullmatch(event["name"]):
        raise ValueError("name")
    start, duration = _nanoseconds(event["ts"]), _nanoseconds(event["dur"])
    lane = Lane(event["cat"])
    return Span(lane, event["name"], start, start + duration, thread, step, details)


def _nanoseconds(microseconds: float) -> int:
    if not math.isfinite(microseconds):
        raise ValueError("time")
    value = round(microseconds * 1000)
    if not 0 <= value <= _MOST_NANOSECONDS:
        raise ValueError("time")
    return value


_HIDEABLE = (Lane.HOST_SCORING, Lane.DEVICE_SCORING, Lane.READS, Lane.COPIES, Lane.WRITES)


def step_text(trace: StepTrace, of_steps: str) -> str:
    """Return how busy each lane was, and how much of it was hidden behind compute.

    Parameters
    ----------
    trace
        Of the step.
    of_steps
        Which step it is, in words.
    """
    step = trace.step
    tokens = step.details.get("tokens", "?")
    lines = [
        f"step {step.step} ({of_steps}): {_as_ms(trace.nanoseconds)}, {tokens} new token(s) a row",
        f"{'lane':<16}{'busy':>12}{'of the step':>13}{'spans':>7}{'hidden behind compute':>23}",
    ]
    for lane in Lane:
        if lane is Lane.STEPS:
            continue
        busy, spans = trace.busy(lane), trace.of(lane)
        if not spans:
            lines.append(f"{lane.value:<16}{'-':>12}")
            continue
        line = f"{lane.value:<16}{_as_ms(busy):>12}{_share(busy, trace.nanoseconds):>13}"
        line += f"{len(spans):>7}"
        if lane in _HIDEABLE:
            line += f"{_share(trace.hidden(lane), busy):>23}"
        counts = [one.details.get("bytes") for one in spans]
        byte_count = sum(count for count in counts if isinstance(count, int))
        lines.append(line + (f"  {format_bytes(byte_count)}" if byte_count else ""))
    return "\n".join(lines)


def _as_ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.3f} ms"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


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
    Lane.BUBBLES: "#e5c100",
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
    bars = [(_ms_axis(one.start, trace), _ms_axis(one.stop, trace)) for one in spans]
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


def _ms_axis(moment: int, trace: StepTrace) -> float:
    """Return a moment as drawn: what began before the step is cut, and what goes on after it."""
    return (min(max(moment, trace.step.start), trace.step.stop) - trace.step.start) / 1e6
