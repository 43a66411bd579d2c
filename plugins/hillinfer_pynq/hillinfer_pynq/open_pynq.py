# SPDX-License-Identifier: Apache-2.0
"""Opens a card behind PYNQ for the host's table of devices."""

from __future__ import annotations

import os

from hillinfer.devices.device import warn_of_loss
from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.device_shadows import DeviceShadows, Pace
from hillinfer.devices.launch_devices import MEMORY_BYTES, LaunchDevice
from hillinfer.devices.xrt.device import kernels_for
from hillinfer.devices.xrt.environment import deadlines_of, environment_of
from hillinfer.devices.xrt.xclbin import HW_EMU, Xclbin, recorded_spec
from hillinfer.errors import SettingsError
from hillinfer.scoring.native import NativeScorer
from hillinfer.settings import DeviceOptions
from hillinfer.trace.recorder import SILENT, Recorder
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_pynq.card import Card
from hillinfer_pynq.errors import PynqError
from hillinfer_pynq.execution import PynqExecution
from hillinfer_pynq.interpreter import pynq_python
from hillinfer_pynq.launches import PynqLaunches


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
