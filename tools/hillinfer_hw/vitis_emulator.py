# SPDX-License-Identifier: Apache-2.0
"""Vitis' own emulation: an xclbin for hw_emu behind the XRT that belongs to the Vitis."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hillinfer_hw.emulated_card import CardWork, EmulatedCard
from hillinfer_hw.emulation import Engine
from hillinfer_hw.emulator import EmulatorName
from hillinfer_hw.generation_setting import GenerationSetting
from hillinfer_hw.kernel_xml import CLOCK_MHZ
from hillinfer_hw.surrounding import Surrounding, write_environment
from hillinfer_hw.toolchain import MissingToolError
from hillinfer_hw.vitis_build import KernelSource, Target, VitisBuild
from hillinfer_hw.vitis_flow import EMULATION_CONFIG, flow_steps, programs
from hillinfer_hw.vitis_run import run_steps
from hillinfer_hw.vitis_tools import missing
from hillinfer_hw.vitis_xclbin import finish, named_build, render_anew
from hillinfer_hw.xrt_binding import find_binding
from hillinfer_hw.xrt_installation import XRT_VARIABLE, sourced_xrt

# What settings64.sh and setup.sh set and the driver and the simulator need: with them in one file,
# a shell where nothing else was sourced can generate, too.
_SHELL = (XRT_VARIABLE, "XILINX_VITIS", "XILINX_VIVADO", "LD_LIBRARY_PATH", "PATH")


@dataclass(frozen=True)
class VitisEmulator:
    """Makes cards that Vitis simulates with its platform; see `Emulator`.

    Parameters
    ----------
    build
        Folder below which they are made.
    platform
        The platform's name, or the path of its `.xpfm`.
    """

    name: ClassVar[EmulatorName] = EmulatorName.VITIS
    label: ClassVar[str] = "hw_emu (real XRT, Vitis' emulation)"

    build: Path
    platform: str

    def check(self, setting: GenerationSetting, engines: Sequence[Engine]) -> None:
        """See that Vitis, the platform and an XRT are there; see `Emulator`."""
        builds = [self._build(setting, engine) for engine in engines]
        needed = dict.fromkeys(program for build in builds for program in programs(build))
        absent = missing(list(needed), self.platform)
        try:
            xrt = sourced_xrt(os.environ)
        except MissingToolError as error:
            absent.append(str(error))
        if absent:
            raise MissingToolError("Vitis cannot emulate a card:\n- " + "\n- ".join(absent))
        # A pyxrt that cannot be had is known now, and not after Vitis has run for an hour.
        find_binding(xrt)

    def card(self, setting: GenerationSetting, engine: Engine) -> EmulatedCard:
        """Build an xclbin and say beside it how to run it; see `Emulator`."""
        xrt = sourced_xrt(os.environ)
        build = self._build(setting, engine)
        render_anew(build)
        run_steps(flow_steps(build), build.folder, sys.stdout)
        folder = (self.build / "hw_emu" / build.name).resolve()
        xclbin = finish(build, folder, sys.stdout)
        shutil.copyfile(build.folder / EMULATION_CONFIG, folder / EMULATION_CONFIG)
        own = {"XCL_EMULATION_MODE": Target.HW_EMU.value, "EMCONFIG_PATH": str(folder)}
        shell = {name: os.environ[name] for name in _SHELL if name in os.environ}
        shell["PYTHONPATH"] = str(find_binding(xrt))
        made = Surrounding(folder, xclbin, own, shell)
        write_environment(made)
        return EmulatedCard(xclbin, own | made.for_process(), "xsim", xrt.version, _reported_work)

    def _build(self, setting: GenerationSetting, engine: Engine) -> VitisBuild:
        return named_build(
            setting.stem,
            setting.spec,
            KernelSource(engine.value),
            Target.HW_EMU,
            self.platform,
            CLOCK_MHZ,
            self.build / "vitis",
        )


def _reported_work(report: Mapping[str, Any]) -> CardWork:
    """Take the host's count: Vitis' simulator tells neither launches nor cycles."""
    return CardWork(report["kernel_launches"], None)
