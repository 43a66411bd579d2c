# SPDX-License-Identifier: Apache-2.0
"""A step of a trace in words."""

from __future__ import annotations

from hillinfer.byte_size import format_bytes
from hillinfer.timeline.lane import Lane
from hillinfer_bench.figures.step_trace import StepTrace

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
        f"step {step.step} ({of_steps}): {_ms(trace.nanoseconds)}, {tokens} new token(s) a row",
        f"{'lane':<16}{'busy':>12}{'of the step':>13}{'spans':>7}{'hidden behind compute':>23}",
    ]
    for lane in Lane:
        if lane is Lane.STEPS:
            continue
        busy, spans = trace.busy(lane), trace.of(lane)
        if not spans:
            lines.append(f"{lane.value:<16}{'-':>12}")
            continue
        line = f"{lane.value:<16}{_ms(busy):>12}{_share(busy, trace.nanoseconds):>13}"
        line += f"{len(spans):>7}"
        if lane in _HIDEABLE:
            line += f"{_share(trace.hidden(lane), busy):>23}"
        counts = [one.details.get("bytes") for one in spans]
        byte_count = sum(count for count in counts if isinstance(count, int))
        lines.append(line + (f"  {format_bytes(byte_count)}" if byte_count else ""))
    return "\n".join(lines)


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.3f} ms"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
