# SPDX-License-Identifier: Apache-2.0
"""The host's table of devices: which execution scores for which `--device`.

A package brings one more by an entry point of the group `hillinfer.devices`, named as the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from types import MappingProxyType

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
PLUGINS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"pynq": ("hillinfer-pynq", "plugins/hillinfer_pynq")}
)
DEVICES: Mapping[str, OpenDevice] = MappingProxyType(
    {
        "nvme": lambda spec, scope, *_: NativeScorer(spec, scope),
        "golden": lambda spec, scope, *_: GoldenScorer(spec, scope),
        "core": open_core,
        "csim": open_csim,
        "xrt": open_xrt,
    }
)


def make_scorer(
    device: str,
    spec: KernelSpec,
    scope: Scope,
    options: DeviceOptions | None = None,
    recorder: Recorder = SILENT,
    devices: Mapping[str, OpenDevice] = DEVICES,
    plugins: Mapping[str, tuple[str, str]] = PLUGINS,
) -> Scorer:
    """Return the scorer of a device.

    Parameters
    ----------
    device
        Its name.
    spec, scope, options, recorder
        What it is opened with.
    devices
        What opens a device of each name; those of packages come after them.
    plugins
        The packages that bring devices, and where they lie in the source tree.

    Raises
    ------
    SettingsError
        Where there is no such device, naming those there are, or it cannot be used.
    """
    opening = devices.get(device) or _plugin(device, devices, plugins)
    return opening(spec, scope, options or DeviceOptions(), recorder)


def check_device(
    device: str,
    spec: KernelSpec,
    scope: Scope,
    options: DeviceOptions,
    devices: Mapping[str, OpenDevice] = DEVICES,
) -> None:
    """Open a device and let it go; raise SettingsError where it cannot be used."""
    scorer = make_scorer(device, spec, scope, options, devices=devices)
    if isinstance(scorer, DeviceScorer):
        scorer.shadows.close()


def _plugin(
    device: str, devices: Mapping[str, OpenDevice], plugins: Mapping[str, tuple[str, str]]
) -> OpenDevice:
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
    if device in plugins:
        package, place = plugins[device]
        raise SettingsError(
            f"device={device} needs the package {package}: pip install ./{place} in HillInfer's "
            "source tree"
        )
    names = ", ".join([*devices, *sorted({*found, *plugins} - {*devices})])
    raise SettingsError(f"device={device!r} is unknown: choose one of {names}")
