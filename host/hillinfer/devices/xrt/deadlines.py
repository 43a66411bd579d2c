# SPDX-License-Identifier: Apache-2.0
"""How long the host waits for a card before it gives it up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hillinfer.devices.xrt.xclbin import HW_EMU, Xclbin

_VITIS = "XILINX_VITIS"


@dataclass(frozen=True)
class Deadlines:
    """How long the host waits for the card, in seconds.

    Parameters
    ----------
    load
        For the worker and the card's image.
    answer
        For a copy.
    progress
        For the next sign of a launch that is under way.
    """

    load: float = 120.0
    answer: float = 30.0
    progress: float = 60.0


_CARD = Deadlines()
# A simulator takes minutes to start; Vitis' advances by few cycles a second, as it simulates the
# platform with the kernels. Guessed, not measured: late is better than giving up what works.
_SIMULATOR = Deadlines(load=900.0, answer=300.0, progress=1800.0)


def deadlines_of(xclbin: Xclbin, environment: Mapping[str, str]) -> Deadlines:
    """Return how long to wait for what an xclbin is for: a card, or Vitis' simulator of one.

    Parameters
    ----------
    xclbin
        Its mode says whether it is for a card.
    environment
        Variables of the process that loads it; those of Vitis are among them where Vitis emulates.
    """
    return _SIMULATOR if xclbin.mode == HW_EMU and _VITIS in environment else _CARD
