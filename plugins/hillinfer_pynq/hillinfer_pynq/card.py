# SPDX-License-Identifier: Apache-2.0
"""What the PYNQ front is pointed to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Card:
    """A card, or its emulation.

    Parameters
    ----------
    xclbin
        Holds the kernels; the front gets a copy.
    platform
        Name of the card's shell, which must be the xclbin's.
    environment
        Variables that lead to XRT: `XILINX_XRT` at least.
    """

    xclbin: Path
    platform: str
    environment: Mapping[str, str]
