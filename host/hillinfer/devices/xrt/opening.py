# SPDX-License-Identifier: Apache-2.0
"""Opens the device `xrt`: a card that an xclbin is loaded on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.device_shadows import DeviceShadows, Pace
from hillinfer.devices.xrt.device import CHUNK_BYTES, XrtDevice, XrtRowsDevice
from hillinfer.devices.xrt.process import (
    Deadlines,
    MemoryClaims,
    WorkerProcess,
    deadlines_of,
    environment_of,
)
from hillinfer.devices.xrt.worker import CASTING_KERNELS, KERNELS
from hillinfer.devices.xrt.xclbin import (
    HW_EMU,
    Xclbin,
    XclbinError,
    check_xclbin,
    kernels_for,
    recorded_spec,
)
from hillinfer.errors import DeviceError, SettingsError, warn_of_loss
from hillinfer.scoring.native import NativeScorer
from hillinfer.settings import DeviceOptions
from hillinfer.system.files import user_cache_dir
from hillinfer.trace.recorder import SILENT, Recorder
from hillinfer_model.choices import KeyMode, Scope
from hillinfer_model.kernel_spec import KernelSpec

# What the buffers of launches may take of the card's memory.
_RESERVED_BYTES = 256 << 20
# Queries, scores and status of the longest launches: untouched pages take no memory.
_WINDOW_BYTES = 256 << 20


def open_xrt(
    spec: KernelSpec,
    scope: Scope,
    options: DeviceOptions,
    recorder: Recorder = SILENT,
    start: Callable[[Mapping[str, str], int, float], WorkerProcess] = WorkerProcess,
    wait: Deadlines | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    reserved_bytes: int = _RESERVED_BYTES,
) -> DeviceScorer:
    """Return a scorer whose device is a card that an xclbin is loaded on.

    `start` starts the process that has the card, and `wait` says when to give it up; None is what
    is right for a card, or a simulator of one. `chunk_bytes` of the card's memory are taken at a
    time, and `reserved_bytes` are for the buffers of launches. Raises SettingsError where no xclbin
    is named, or it is damaged or for other kernels or another platform (`XclbinError`), or the card
    cannot be opened.
    """
    if options.xclbin is None:
        raise SettingsError(
            "device=xrt needs the image of the card's kernels: --xclbin FILE; `make bitstream` "
            "builds one with Vitis, `make hw_emu` one for an emulated card"
        )
    xclbin = Xclbin.read(options.xclbin)
    name = str(options.xclbin)
    kernels = kernels_for(spec, recorded_spec(xclbin, name))
    check_xclbin(xclbin, kernels, xclbin.platform, name)
    environment = environment_of(options.xclbin)
    deadlines = wait or deadlines_of(xclbin, {**os.environ, **environment})
    casts = spec.key_mode is KeyMode.FP16
    asked = CASTING_KERNELS if casts else KERNELS
    try:
        worker = start(environment, _WINDOW_BYTES, deadlines.load)
        path = str(options.xclbin.resolve())
        card = worker.ask("open", deadlines.load, xclbin=path, index=0, kernels=asked)
    except DeviceError as error:
        raise SettingsError(f"device=xrt: {error}") from error
    try:
        check_xclbin(xclbin, kernels, str(card["name"]), name)
    except XclbinError:
        worker.close()
        raise
    memory = max(int(card["memory_bytes"]) - reserved_bytes, 0)
    claims = MemoryClaims(user_cache_dir("cards"), str(card["place"]), memory)
    opened = XrtRowsDevice if casts else XrtDevice
    device = opened(kernels, worker, memory, claims, deadlines, chunk_bytes)
    pace = Pace.EMULATED if xclbin.mode == HW_EMU else Pace.REAL
    shadows = DeviceShadows(spec, device, options.beta, warn_of_loss, pace)
    return DeviceScorer(NativeScorer(spec, scope), shadows, recorder)
