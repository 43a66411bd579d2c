# SPDX-License-Identifier: Apache-2.0
"""Settings of the memory behind a simulated kernel: timing, stalls, order and errors."""

from __future__ import annotations

from dataclasses import dataclass, fields

from hillinfer_model import memory_model as timing


@dataclass(frozen=True)
class MemoryModel(timing.MemoryModel):
    """The cycle model's memory, and what only a simulation can have.

    Parameters
    ----------
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

    stall_percent: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    commit_at_response: bool = True
    seed: int = 1
    read_error: tuple[int, int, int] = (-1, -1, -1)
    write_error: int = -1


def _simulated(model: timing.MemoryModel) -> MemoryModel:
    return MemoryModel(**{own.name: getattr(model, own.name) for own in fields(model)})


IDEAL = _simulated(timing.IDEAL)
REALISTIC = _simulated(timing.REALISTIC)
STALLS = MemoryModel(
    "stalls", read_latency=(0, 40), write_latency=(0, 60), stall_percent=(30, 30, 30, 30, 30)
)
MEMORIES = {model.name: model for model in (IDEAL, REALISTIC, STALLS)}
