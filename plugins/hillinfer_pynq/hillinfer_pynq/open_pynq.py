# SPDX-License-Identifier: Apache-2.0
"""The device `pynq` for the host's table of devices: finds PYNQ's environment and opens a card.

It sends whole launches, each with what it reads of the shadows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.device_shadows import DeviceShadows, Pace
from hillinfer.devices.slots import MEMORY_BYTES, LaunchDevice
from hillinfer.devices.xrt.process import deadlines_of, environment_of
from hillinfer.devices.xrt.xclbin import (
    HW_EMU,
    Xclbin,
    XclbinError,
    kernels_for,
    recorded_spec,
)
from hillinfer.errors import DeviceError, SettingsError, warn_of_loss
from hillinfer.scoring.native import NativeScorer
from hillinfer.settings import DeviceOptions
from hillinfer.trace.recorder import SILENT, Recorder
from hillinfer_model.choices import Scope
from hillinfer_model.descriptor import Descriptor
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.launch_result import LaunchResult
from hillinfer_model.layout import shadow_beats
from hillinfer_model.score_launch import ScoreLaunch
from hillinfer_pynq.execution import Card, PynqExecution
from hillinfer_pynq.front_process import PynqError

VARIABLE = "HILLINFER_PYNQ_PYTHON"
# Where `make pynq-env` makes it; in an installed package nothing is there.
_MADE = Path(__file__).resolve().parents[3] / "build" / "pynq-env" / "bin" / "python"


def open_pynq(
    spec: KernelSpec, scope: Scope, options: DeviceOptions, recorder: Recorder = SILENT
) -> DeviceScorer:
    """Return a scorer whose device is a card that PYNQ loads and starts.

    Raises
    ------
    SettingsError
        Where no xclbin is named, or it is damaged or for other kernels or another platform
        (`XclbinError`), PYNQ's environment or XRT is missing, or the card cannot be loaded.
    """
    if options.xclbin is None:
        raise SettingsError(
            "device=pynq needs the image of the card's kernels: --xclbin FILE; `make bitstream` "
            "builds one with Vitis, `make hw_emu` one for an emulated card"
        )
    python = pynq_python(options.pynq_python, os.environ)
    xclbin = Xclbin.read(options.xclbin)
    kernels = kernels_for(spec, recorded_spec(xclbin, str(options.xclbin)))
    environment = environment_of(options.xclbin)
    variables = {**os.environ, **environment}
    if not variables.get("XILINX_XRT"):
        raise SettingsError(
            "device=pynq needs XRT, which XILINX_XRT names: source /opt/xilinx/xrt/setup.sh; for "
            "an emulated card, environment.json or setup.sh beside the xclbin names it"
        )
    card = Card(options.xclbin, xclbin.platform, environment)
    deadlines = deadlines_of(xclbin, variables)
    # A launch through files says nothing before its end.
    execution = PynqExecution(python, lambda _: card, max(deadlines.load, deadlines.progress))
    try:
        execution.load(kernels)
    except (PynqError, OSError) as error:
        raise SettingsError(f"device=pynq: {error}") from error
    device = LaunchDevice(kernels, PynqLaunches(execution), MEMORY_BYTES // kernels.segment_bytes)
    pace = Pace.EMULATED if xclbin.mode == HW_EMU else Pace.REAL
    shadows = DeviceShadows(spec, device, options.beta, warn_of_loss, pace)
    return DeviceScorer(NativeScorer(spec, scope), shadows, recorder)


def pynq_python(named: Path | None, environment: Mapping[str, str], made: Path = _MADE) -> Path:
    """Return the interpreter that the PYNQ front runs in.

    Parameters
    ----------
    named
        What the user chose; None for the environment variable, or else for `made`.
    environment
        Variables of this process.
    made
        The one of the source tree.

    Raises
    ------
    SettingsError
        Where it is no program.
    """
    found = named or Path(environment.get(VARIABLE) or made)
    if not (found.is_file() and os.access(found, os.X_OK)):
        raise SettingsError(
            f"device=pynq needs the interpreter of PYNQ's environment, and {found} is none: "
            "`make pynq-env` in HillInfer's source tree makes it (build/pynq-env/bin/python), "
            f"--pynq-python FILE or {VARIABLE} names one"
        )
    # Links are kept, because an environment's interpreter is one; the front works elsewhere.
    return found.absolute()


class PynqLaunches:
    """Sends what a launch reads and nothing else, and loses the device where PYNQ fails.

    Parameters
    ----------
    execution
        Runs the launches.
    """

    def __init__(self, execution: PynqExecution) -> None:
        self._execution = execution

    def score(self, spec: KernelSpec, launch: ScoreLaunch) -> LaunchResult:
        """Run `score_tokens`.

        Raises
        ------
        DeviceError
            Where the front fails, or its folder has no room for the launch.
        """
        try:
            return self._execution.score(spec, packed_launch(spec, launch))
        except (PynqError, XclbinError, OSError) as error:
            raise DeviceError(str(error)) from error

    def close(self) -> None:
        """Let the card go."""
        self._execution.close()


def packed_launch(spec: KernelSpec, launch: ScoreLaunch) -> ScoreLaunch:
    """Return a launch with the same scores whose shadows lie one behind the other.

    Parameters
    ----------
    spec
        Of the kernel; it has shadows, so its key mode is not `fp16`.
    launch
        With at least one segment, and sound descriptors.
    """
    descriptors, shadows, start = [], [], 0
    for index in range(launch.segments.shape[0]):
        one = Descriptor.unpack(launch.segments[index : index + 1])
        beats = shadow_beats(one.tokens, spec)
        shadows.append(launch.shadow[one.shadow : one.shadow + beats])
        descriptors.append(replace(one, shadow=start).pack())
        start += beats
    return replace(launch, segments=np.concatenate(descriptors), shadow=np.concatenate(shadows))
