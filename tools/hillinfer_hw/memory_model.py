# SPDX-License-Identifier: Apache-2.0
"""How the memory behind a simulated kernel behaves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryModel:
    """Latencies, bus and faults of the simulated memory; cycles throughout.

    Parameters
    ----------
    name
        As reports call it.
    read_latency
        Least and most cycles from a read address to the first beat, uniform; answers in order.
    write_latency
        The same from the last written beat to the response.
    shared_bus
        Whether all ports share one beat per cycle, reads and writes together.
    refresh
        Period, and cycles of it without a beat; (0, 0) for none.
    outstanding
        Bursts per port and direction.
    stall_percent
        Chance per cycle that a channel waits: AR, R, AW, W, B.
    commit_at_response
        Whether written data is visible only when its response is given; status beats always are
        at once, the worst order a memory may choose.
    seed
        Of everything random.
    read_error
        Per port, which read beat comes with an error; -1 for none.
    write_error
        Which write response is an error; -1 for none.
    """

    name: str
    read_latency: tuple[int, int] = (0, 0)
    write_latency: tuple[int, int] = (0, 0)
    shared_bus: bool = False
    refresh: tuple[int, int] = (0, 0)
    outstanding: int = 16
    stall_percent: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    commit_at_response: bool = True
    seed: int = 1
    read_error: tuple[int, int, int] = (-1, -1, -1)
    write_error: int = -1


IDEAL = MemoryModel("ideal")
# One DDR4 channel behind an interconnect: what a card with one memory bank gives.
REALISTIC = MemoryModel(
    "realistic",
    read_latency=(100, 200),
    write_latency=(30, 70),
    shared_bus=True,
    refresh=(2340, 105),
)
STALLS = MemoryModel(
    "stalls", read_latency=(0, 40), write_latency=(0, 60), stall_percent=(30, 30, 30, 30, 30)
)
MEMORIES = {model.name: model for model in (IDEAL, REALISTIC, STALLS)}
