# SPDX-License-Identifier: Apache-2.0
"""The host's table of devices: which execution scores for which `--device`.

A package brings one more by an entry point of the group `hillinfer.devices`, named as the device.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.launch_devices import GoldenScorer, open_core, open_csim
from hillinfer.devices.xrt.device import open_xrt
from hillinfer.errors import SettingsError
from hillinfer.scoring.native import NativeScorer
from hillinfer.scoring.scorer import Scorer
from hillinfer.settings import DeviceOptions
from hillinfer.trace.recorder import SILENT, Recorder
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import KernelSpec

OpenDevice = Callable[[KernelSpec, Scope, DeviceOptions, Recorder], Scorer]

PLUGIN_GROUP = "hillinfer.devices"
# By device, the package that brings it and its place in the source tree.
PLUGINS = {"pynq": ("hillinfer-pynq", "plugins/hillinfer_pynq")}
DEVICES: dict[str, OpenDevice] = {
    "nvme": lambda spec, scope, *_: NativeScorer(spec, scope),
    "golden": lambda spec, scope, *_: GoldenScorer(spec, scope),
    "core": open_core,
    "csim": open_csim,
    "xrt": open_xrt,
}


def make_scorer(
    device: str,
    spec: KernelSpec,
    scope: Scope,
    options: DeviceOptions | None = None,
    recorder: Recorder = SILENT,
) -> Scorer:
    """Return the scorer of a device, or raise SettingsError naming the devices there are."""
    opening = DEVICES.get(device) or _plugin(device)
    return opening(spec, scope, options or DeviceOptions(), recorder)


def check_device(device: str, spec: KernelSpec, scope: Scope, options: DeviceOptions) -> None:
    """Open a device and let it go; raise SettingsError where it cannot be used."""
    scorer = make_scorer(device, spec, scope, options)
    if isinstance(scorer, DeviceScorer):
        scorer.shadows.close()


def _plugin(device: str) -> OpenDevice:
    """Return what opens a device that another package brings; only this imports any of it."""
    found = {one.name: one for one in entry_points(group=PLUGIN_GROUP)}
    if device in found:
        try:
            opening: OpenDevice = found[device].load()
        except (ImportError, AttributeError) as error:
            raise SettingsError(
                f"device={device}: {found[device].value} cannot be loaded ({error}); install its "
                "package again"
            ) from error
        return opening
    if device in PLUGINS:
        package, place = PLUGINS[device]
        raise SettingsError(
            f"device={device} needs the package {package}: pip install ./{place} in HillInfer's "
            "source tree"
        )
    names = ", ".join([*DEVICES, *sorted({*found, *PLUGINS} - {*DEVICES})])
    raise SettingsError(f"device={device!r} is unknown: choose one of {names}")
