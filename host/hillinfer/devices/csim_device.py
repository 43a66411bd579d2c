# SPDX-License-Identifier: Apache-2.0
"""The device `csim`: the HLS C++ compiled for this machine."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import cast

from hillinfer.devices.device_options import DeviceOptions
from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.devices.launch_device import MEMORY_BYTES, LaunchDevice, LaunchExecution
from hillinfer.devices.loss_warning import warn_of_loss
from hillinfer.errors import SettingsError
from hillinfer.hie.native_scorer import NativeScorer
from hillinfer.timeline.recorder import Recorder
from hillinfer.timeline.silent import SILENT
from hillinfer_model.choices import Scope
from hillinfer_model.hardware_spec import HardwareSpecError, check_hardware_spec
from hillinfer_model.kernel_spec import KernelSpec


def open_csim(
    spec: KernelSpec, scope: Scope, options: DeviceOptions, recorder: Recorder = SILENT
) -> DeviceScorer:
    """Return a scorer whose device runs the compiled HLS C++.

    Raises
    ------
    SettingsError
        Outside HillInfer's source tree, where the C++ and what builds it are missing, and for a
        model that no kernel is built for.
    """
    try:
        check_hardware_spec(spec)
    except HardwareSpecError as error:
        raise SettingsError(f"device=csim: {error}, or choose nvme") from error
    execution = cast("LaunchExecution", _execution())
    device = LaunchDevice(spec, execution, MEMORY_BYTES // spec.segment_bytes)
    return DeviceScorer(
        NativeScorer(spec, scope), DeviceShadows(spec, device, options.beta, warn_of_loss), recorder
    )


def _execution() -> object:
    if importlib.util.find_spec("hillinfer_hw") is None:
        tools = Path(__file__).resolve().parents[3] / "tools"
        if not (tools / "hillinfer_hw").is_dir():
            raise SettingsError(
                "device=csim compiles the HLS C++ of HillInfer's source tree: run it from there, "
                "or choose nvme"
            )
        sys.path.append(str(tools))
    return importlib.import_module("hillinfer_hw.csim").CsimExecution()
