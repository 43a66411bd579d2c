# SPDX-License-Identifier: Apache-2.0
"""What bytes and rates allow."""

from __future__ import annotations

from hillinfer.bench.rates import MachineRates
from hillinfer.bench.systems.system import Counted

LABEL = (
    "modelled: drive bytes over the drive's rate, plus bytes of KV, shadow and weights that a step "
    "reads over the memory's rate; nothing overlaps, nothing is computed"
)


def limit_ms(counted: Counted, steps: int, weight_bytes: int, rates: MachineRates) -> float:
    """Return the least milliseconds of one decode step; see `LABEL`.

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
    return (drive + memory) * 1e3
