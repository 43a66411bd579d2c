# SPDX-License-Identifier: Apache-2.0
"""What bytes and rates allow."""

from __future__ import annotations

from dataclasses import dataclass

from hillinfer_bench.decode.rates import MachineRates
from hillinfer_bench.systems.system import Counted

LABEL = (
    "modelled: the larger of drive bytes over the drive's rate and bytes of KV, shadow and weights "
    "that a step reads over the memory's rate; both overlap and nothing is computed. serial: their "
    "sum, nothing overlaps. Memory's rate is the best of what was measured at the start and of "
    "what the case's fastest floor step read its weights with"
)
# Clocks and rates move by some percent between the start of a run and a row, and the fastest of
# many steps may have read a little less than the mean.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Limit:
    """Least milliseconds of one decode step; see `LABEL`.

    Parameters
    ----------
    drive_ms, memory_ms
        Reading from each alone.
    """

    drive_ms: float
    memory_ms: float

    @classmethod
    def of(cls, counted: Counted, steps: int, weight_bytes: int, rates: MachineRates) -> Limit:
        """Return the limit of one step.

        Parameters
        ----------
        counted
            Totals of so many steps.
        steps
            How many.
        weight_bytes
            Weights that each step reads.
        rates
            The machine's.
        """
        drive = counted.drive_read_bytes / steps / rates.drive
        memory = (counted.dram_read_bytes / steps + weight_bytes) / rates.memory
        return cls(drive * 1e3, memory * 1e3)

    @property
    def overlapped_ms(self) -> float:
        """What no step can be faster than: drive and memory are read at the same time."""
        return max(self.drive_ms, self.memory_ms)

    @property
    def serial_ms(self) -> float:
        """The same where one is read after the other."""
        return self.drive_ms + self.memory_ms


def is_beaten(limit_ms: float, min_ms: float) -> bool:
    """Say whether a step was faster than its limit by more than clocks and rates move."""
    return min_ms < (1 - TOLERANCE) * limit_ms
