# SPDX-License-Identifier: Apache-2.0
"""One span of time in one lane."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hillinfer.timeline.lane import Lane
from hillinfer.timeline.recorder import Detail


class Span(NamedTuple):
    """What one thread did for a while.

    Parameters
    ----------
    lane, name
        Where it is shown and as what.
    start, stop
        Nanoseconds; of `time.perf_counter_ns` while recorded, since the trace began in a file.
    thread
        Tells threads apart.
    step
        The step that had begun last when it started.
    details
        Shown with it.
    """

    lane: Lane
    name: str
    start: int
    stop: int
    thread: int
    step: int
    details: Mapping[str, Detail]
