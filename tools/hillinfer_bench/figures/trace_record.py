# SPDX-License-Identifier: Apache-2.0
"""A trace read back, one step at a time."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hillinfer.errors import HillInferError
from hillinfer.plain_file import open_plain, plain_lines
from hillinfer.system_reason import reason_of
from hillinfer.timeline.lane import Lane
from hillinfer.timeline.span import Span
from hillinfer.timeline.trace_file import PROCESS_NAME
from hillinfer_bench.figures.step_trace import StepTrace

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
