# SPDX-License-Identifier: Apache-2.0
"""The emulated card of this project behind Debian's XRT."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from hillinfer_hw.emulated_card import CardWork, EmulatedCard
from hillinfer_hw.emulation import Engine, make_surrounding
from hillinfer_hw.emulator import EmulatorName
from hillinfer_hw.generation_setting import GenerationSetting
from hillinfer_hw.surrounding import Surrounding
from hillinfer_hw.xrt_installation import XrtInstallation, debian_xrt
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.memory_model import REALISTIC

_LOG_VARIABLE = "HILLINFER_EMULATION_LOG"


def make_realistic(spec: KernelSpec, engine: Engine, folder: Path) -> Surrounding:
    """Make an emulated card whose memory has latency, one data bus and refresh.

    Parameters
    ----------
    spec, engine, folder
        As `make_surrounding` has them.
    """
    return make_surrounding(spec, engine, folder, REALISTIC)


@dataclass(frozen=True)
class OwnEmulator:
    """Makes cards that the project's own program plays; see `Emulator`.

    Parameters
    ----------
    build
        Folder below which they are made.
    make
        Makes the surrounding of a card; by default its memory takes what a real one does.
    find_xrt
        Returns the XRT that is installed.
    """

    name: ClassVar[EmulatorName] = EmulatorName.OWN
    label: ClassVar[str] = "hw_emu (real XRT, emulated card)"

    build: Path
    make: Callable[[KernelSpec, Engine, Path], Surrounding] = make_realistic
    find_xrt: Callable[[], XrtInstallation] = debian_xrt

    def check(self, setting: GenerationSetting, engines: Sequence[Engine]) -> None:
        """See that XRT is there; cards are made in seconds and say themselves what they miss."""
        self.find_xrt()

    def card(self, setting: GenerationSetting, engine: Engine) -> EmulatedCard:
        """Make a card; see `Emulator`."""
        folder = (self.build / "hw_emu" / f"{setting.stem}-{engine}").resolve()
        surrounding = self.make(setting.spec, engine, folder)
        log = folder / "card.log"
        log.unlink(missing_ok=True)
        simulator = "verilator" if engine is Engine.RTL else "g++"
        return EmulatedCard(
            surrounding.xclbin,
            {_LOG_VARIABLE: str(log)} | surrounding.for_process(),
            simulator,
            self.find_xrt().version,
            partial(_logged_work, log),
        )


def _logged_work(log: Path, _: Mapping[str, Any]) -> CardWork:
    """Sum what every process that played the card has written as it ended."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return CardWork(sum(one["launches"] for one in lines), sum(one["cycles"] for one in lines))
