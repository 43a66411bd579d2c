# SPDX-License-Identifier: Apache-2.0
"""Cycles and beats of one launch, as the cycle model counts them (modelled)."""

from __future__ import annotations

from dataclasses import dataclass

CLOCK_HERTZ = 300_000_000


@dataclass(frozen=True)
class CycleCount:
    """Cycles and beats of one launch, modelled.

    Parameters
    ----------
    cycles
        From the start of the launch to its end.
    beats
        Beats read on the key port, exponents included.
    code_beats
        Those of them that hold codes or keys.
    load_beats
        Beats of descriptors, statistics and query blocks.
    write_beats
        Beats written, status included.
    """

    cycles: int
    beats: int
    code_beats: int
    load_beats: int
    write_beats: int

    @property
    def beats_per_cycle(self) -> float:
        """Key beats per cycle of the whole launch; 0 for a launch without tokens."""
        return self.beats / self.cycles if self.cycles else 0.0

    @property
    def seconds(self) -> float:
        """Time of the launch at 300 MHz."""
        return self.cycles / CLOCK_HERTZ
