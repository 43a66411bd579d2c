# SPDX-License-Identifier: Apache-2.0
"""Opens a card for the host's table of devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from hillinfer.devices.device_options import DeviceOptions
from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.device_shadows import DeviceShadows, Pace
from hillinfer.devices.errors import DeviceError
from hillinfer.devices.loss_warning import warn_of_loss
from hillinfer.devices.xrt.deadlines import Deadlines, deadlines_of
from hillinfer.devices.xrt.environment import environment_of
from hillinfer.devices.xrt.errors import XclbinError
from hillinfer.devices.xrt.memory_claims import MemoryClaims
from hillinfer.devices.xrt.spec_record import check_xclbin, recorded_spec
from hillinfer.devices.xrt.worker_process import WorkerProcess
from hillinfer.devices.xrt.xclbin import HW_EMU, Xclbin
from hillinfer.devices.xrt.xrt_device import XrtDevice
from hillinfer.errors import SettingsError
from hillinfer.hie.native_scorer import NativeScorer
from hillinfer.timeline.recorder import Recorder
from hillinfer.timeline.silent import SILENT
from hillinfer.user_cache import user_cache_dir
from hillinfer_model.choices import Scope
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
) -> DeviceScorer:
    """Return a scorer whose device is a card that an xclbin is loaded on.

    Parameters
    ----------
    spec, scope, options, recorder
        As for every device.
    start
        Starts the process that has the card.
    wait
        When to give the card up; None for what is right for a card, or a simulator of one.

    Raises
    ------
    SettingsError
        Where no xclbin is named, or it is damaged or for other kernels or another platform
        (`XclbinError`), or the card cannot be opened.
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
    try:
        worker = start(environment, _WINDOW_BYTES, deadlines.load)
        card = worker.ask("open", deadlines.load, xclbin=str(options.xclbin.resolve()), index=0)
    except DeviceError as error:
        raise SettingsError(f"device=xrt: {error}") from error
    try:
        check_xclbin(xclbin, kernels, str(card["name"]), name)
    except XclbinError:
        worker.close()
        raise
    memory = max(int(card["memory_bytes"]) - _RESERVED_BYTES, 0)
    claims = MemoryClaims(user_cache_dir("cards"), str(card["place"]), memory)
    device = XrtDevice(kernels, worker, memory, claims, deadlines)
    pace = Pace.EMULATED if xclbin.mode == HW_EMU else Pace.REAL
    shadows = DeviceShadows(spec, device, options.beta, warn_of_loss, pace)
    return DeviceScorer(NativeScorer(spec, scope), shadows, recorder)


def kernels_for(spec: KernelSpec, found: KernelSpec) -> KernelSpec:
    """Return a spec with what kernels may choose freely as the ones that were found have it.

    Multipliers and the size of score blocks change no score.
    """
    return replace(spec, product_style=found.product_style, block_tokens=found.block_tokens)
