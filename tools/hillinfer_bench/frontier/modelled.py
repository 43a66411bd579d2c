# SPDX-License-Identifier: Apache-2.0
"""Models the time of settings that nobody timed, by their bytes and measured rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from hillinfer.model_shape import ModelShape
from hillinfer_bench.frontier.swept import FOUR_BIT, Swept

LABEL = (
    "modelled: the loop's floor, measured, and the larger of drive bytes over the drive's rate and "
    "bytes read from memory over memory's rate. Of a system with a budget the share of its rows "
    "lies in memory that there is room for beside buffers and tables, pools hit no better than "
    "chance, and HillInfer reads whole units of the drive"
)


class Place(StrEnum):
    """Where rows and codes lie."""

    DRIVE = "on the drive"
    MEMORY = "in memory"


@dataclass(frozen=True)
class Machine:
    """Rates and sizes of one timed model.

    Parameters
    ----------
    model
        Its name.
    floor_ms
        A step without a context, measured.
    memory, drive
        Bytes per second.
    kv_bytes
        Rows of all tokens.
    budget
        M0 over these.
    shape
        Of the layers that are built.
    unit_bytes
        What reads of the drive are multiples of.
    beside
        By system, what of M0 holds neither rows nor codes nor what ranks, over `kv_bytes`: buffers,
        tables, and the rows that are always there.
    """

    model: str
    floor_ms: float
    memory: float
    drive: float
    kv_bytes: float
    budget: float
    shape: ModelShape
    unit_bytes: int = 1
    beside: Mapping[str, float] = field(default_factory=dict)

    def drive_bytes(self, system: Swept, share: float) -> float:
        """Return the bytes that a step reads from the drive, where rows lie there."""
        left = max(0.0, self.budget - self.beside.get(system.name, 0.0))
        return system.read_share(share, left, self.shape, self.unit_bytes) * self.kv_bytes

    def milliseconds(self, system: Swept, share: float, place: Place) -> float:
        """Return the time of a step.

        Parameters
        ----------
        system
            What is modelled.
        share
            Bytes of rows and codes over those of all rows; see `Swept.row_share`.
        place
            Where they lie.
        """
        memory = (share + system.ranked_share(self.shape)) * self.kv_bytes / self.memory
        drive = 0.0
        if place is Place.DRIVE:
            drive = self.drive_bytes(system, share) / self.drive
        return self.floor_ms + 1e3 * max(memory, drive)


def places(system: Swept) -> tuple[Place, ...]:
    """Return where a system is modelled: a cache of few bits is the alternative in both places."""
    return (Place.DRIVE, Place.MEMORY) if system.name == FOUR_BIT else (Place.DRIVE,)
