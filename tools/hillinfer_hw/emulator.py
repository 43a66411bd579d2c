# SPDX-License-Identifier: Apache-2.0
"""The interface of the two emulators: this project's own program behind XRT, and Vitis."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from hillinfer_hw.emulated_card import EmulatedCard
from hillinfer_hw.emulation import Engine
from hillinfer_hw.generation_setting import GenerationSetting
from hillinfer_hw.vitis_tools import vitis_is_there


class EmulatorName(StrEnum):
    """The emulators there are."""

    VITIS = "vitis"
    OWN = "own"


class Emulator(Protocol):
    """Makes emulated cards."""

    @property
    def name(self) -> EmulatorName:
        """Which one it is."""

    @property
    def label(self) -> str:
        """What its results are of, in a few words."""

    def check(self, setting: GenerationSetting, engines: Sequence[Engine]) -> None:
        """See that cards can be made, before the first one takes its time.

        Raises
        ------
        MissingToolError
            Naming all that is missing.
        ValueError
            Where a setting is wrong.
        """

    def card(self, setting: GenerationSetting, engine: Engine) -> EmulatedCard:
        """Make a card.

        Raises
        ------
        MissingToolError
            As for `check`.
        RuntimeError
            Where a tool fails.
        """


def usual_emulator() -> EmulatorName:
    """Return Vitis where its compiler is on PATH, even where something else of it is missing."""
    return EmulatorName.VITIS if vitis_is_there() else EmulatorName.OWN
