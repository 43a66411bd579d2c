# SPDX-License-Identifier: Apache-2.0
"""What happened to the pools of one layer in one decode step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hillinfer.storage.read_cost import ReadCost


@dataclass
class LayerStep:
    """One entry of the pools' timeline: one sequence in one layer and step.

    Parameters
    ----------
    step, layer, length
        Which step and layer, and the context length N.
    hot_rows, cold_rows
        Selected rows found in DRAM (hits) and on the drive (misses).
    promoted, demoted
        Rows that became hot, and those that gave way to them.
    reads, read_bytes
        Calls to the drive and the bytes they brought.
    wait_seconds
        Time that attention waited for rows.
    """

    step: int
    layer: int
    length: int
    hot_rows: int = 0
    cold_rows: int = 0
    promoted: int = 0
    demoted: int = 0
    reads: int = 0
    read_bytes: int = 0
    wait_seconds: float = 0.0

    def note_reads(self, cost: ReadCost) -> None:
        """Add what some rows took to read."""
        self.reads += cost.reads
        self.read_bytes += cost.byte_count
