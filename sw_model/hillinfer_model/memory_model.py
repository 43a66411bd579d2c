# SPDX-License-Identifier: Apache-2.0
"""Latency, bus and refresh of the memory behind a kernel, in cycles."""

from __future__ import annotations

from dataclasses import dataclass, replace

BURST_BEATS = 64


@dataclass(frozen=True)
class MemoryModel:
    """How long memory takes; cycles of the kernel's clock throughout.

    Parameters
    ----------
    name
        As reports call it.
    read_latency
        Least and most cycles from a read address to its first beat; answers come in order.
    write_latency
        The same from the last written beat to the response.
    shared_bus
        Whether all ports share one beat per cycle, reads and writes together.
    refresh
        Period, and the cycles of it in which no beat passes; (0, 0) for none.
    outstanding
        Bursts of 64 beats that a port may have open.
    turnaround
        Cycles that a shared bus loses by turning to writes and back, and the write bursts that its
        controller collects for one such turn; (0, 0) for none. Modelled only: the simulated memory
        has none.
    """

    name: str
    read_latency: tuple[int, int] = (0, 0)
    write_latency: tuple[int, int] = (0, 0)
    shared_bus: bool = False
    refresh: tuple[int, int] = (0, 0)
    outstanding: int = 16
    turnaround: tuple[int, int] = (0, 0)

    def beats_end(self, start: float, beats: float) -> float:
        """Return when beats that follow each other from `start` have passed, refresh left out."""
        period, pause = self.refresh
        if not period:
            return start + beats
        window, within = divmod(start, period)
        # Time in which beats pass, counted from the first window.
        passed = window * (period - pause) + max(within - pause, 0) + beats
        whole, rest = divmod(passed, period - pause)
        if rest == 0 and beats:
            # The last beat ends with its window, not after the next pause.
            return whole * period
        return whole * period + pause + rest

    @property
    def bus_share(self) -> float:
        """Share of all cycles in which a beat can pass."""
        period, pause = self.refresh
        return 1 - pause / period if period else 1.0


IDEAL = MemoryModel("ideal")
# One DDR4 channel behind an interconnect: what a card with one memory bank gives.
REALISTIC = MemoryModel(
    "realistic",
    read_latency=(100, 200),
    write_latency=(30, 70),
    shared_bus=True,
    refresh=(2340, 105),
)
# DDR4-2400: from reads to writes 8, from writes to reads 25 of its clocks, so 8 cycles of the
# kernel. That the controller collects 16 bursts is assumed.
TURNING = replace(REALISTIC, name="realistic, with turnaround", turnaround=(8, 16))
MEMORIES = {model.name: model for model in (IDEAL, REALISTIC)}
