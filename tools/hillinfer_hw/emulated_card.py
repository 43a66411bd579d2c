# SPDX-License-Identifier: Apache-2.0
"""The interface of an emulated card for the code that generates with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class CardWork:
    """What a card did in one run.

    Parameters
    ----------
    launches
        Of its kernel.
    cycles
        Simulated; None where the emulator does not say.
    """

    launches: int
    cycles: int | None


@dataclass(frozen=True)
class EmulatedCard:
    """A card that can be generated with.

    Parameters
    ----------
    xclbin
        To be loaded.
    environment
        Variables for the process that generates.
    simulator
        What computes.
    xrt_version
        Of the XRT in front of it.
    work
        Says what the card did, from the report of the run that has just ended.
    """

    xclbin: Path
    environment: Mapping[str, str]
    simulator: str
    xrt_version: str
    work: Callable[[Mapping[str, Any]], CardWork]
