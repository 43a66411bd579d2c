# SPDX-License-Identifier: Apache-2.0
"""The host's table of devices: which execution scores for which `--device`."""

from __future__ import annotations

from collections.abc import Callable

from hillinfer.devices.core_device import open_core
from hillinfer.devices.csim_device import open_csim
from hillinfer.devices.device_options import DeviceOptions
from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.golden_scorer import GoldenScorer
from hillinfer.devices.pynq.open_pynq import open_pynq
from hillinfer.devices.scorer import Scorer
from hillinfer.devices.xrt.open_xrt import open_xrt
from hillinfer.errors import SettingsError
from hillinfer.hie.native_scorer import NativeScorer
from hillinfer.timeline.recorder import Recorder
from hillinfer.timeline.silent import SILENT
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import KernelSpec

DEVICES: dict[str, Callable[[KernelSpec, Scope, DeviceOptions, Recorder], Scorer]] = {
    "nvme": lambda spec, scope, *_: NativeScorer(spec, scope),
    "golden": lambda spec, scope, *_: GoldenScorer(spec, scope),
    "core": open_core,
    "csim": open_csim,
    "xrt": open_xrt,
    "pynq": open_pynq,
}


def make_scorer(
    device: str,
    spec: KernelSpec,
    scope: Scope,
    options: DeviceOptions | None = None,
    recorder: Recorder = SILENT,
) -> Scorer:
    """Return the scorer of a device, or raise SettingsError naming the devices there are."""
    if device not in DEVICES:
        raise SettingsError(f"device={device!r} is unknown: choose one of {', '.join(DEVICES)}")
    return DEVICES[device](spec, scope, options or DeviceOptions(), recorder)


def check_device(device: str, spec: KernelSpec, scope: Scope, options: DeviceOptions) -> None:
    """Open a device and let it go; raise SettingsError where it cannot be used."""
    scorer = make_scorer(device, spec, scope, options)
    if isinstance(scorer, DeviceScorer):
        scorer.shadows.close()
