# SPDX-License-Identifier: Apache-2.0
"""The host's table of devices: which execution scores for which `--device`, and how each is opened.

Those that run on this host are here: `core`, `csim` and the golden model. A package brings one more
by an entry point of the group `hillinfer.devices`, named as the device.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.devices.device import (
    DeviceSegment,
    ScoredTokens,
    StoredShadow,
    queries_each,
    unpack_query_blocks,
)
from hillinfer.devices.device_scorer import DeviceScorer, EngineScorer
from hillinfer.devices.device_shadows import DeviceShadows, Pace
from hillinfer.devices.slots import (
    MEMORY_BYTES,
    HostSlots,
    KernelExecution,
    LaunchDevice,
    RowsDevice,
    SmallestKernels,
    slot_beats,
)
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
    check_xclbin,
    kernels_for,
    recorded_spec,
)
from hillinfer.errors import DeviceError, SettingsError, warn_of_loss
from hillinfer.native.library import Variant
from hillinfer.scoring.launches import LaunchThread, NativePieces, Piece
from hillinfer.scoring.native import NativeScorer
from hillinfer.scoring.scorer import SegmentShadow, Wanted
from hillinfer.settings import DeviceOptions
from hillinfer.system.files import user_cache_dir
from hillinfer.trace.recorder import SILENT, Recorder
from hillinfer_model.beats import Beats
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import KeyMode, Scope
from hillinfer_model.coded_segment import CodedSegment
from hillinfer_model.golden import GoldenModel
from hillinfer_model.hardware_spec import HardwareSpecError, check_hardware_spec, most_queries
from hillinfer_model.kernel_spec import BEAT_BYTES, MOST_QUERIES, KernelSpec
from hillinfer_model.layout import read_codes, write_codes
from hillinfer_model.score_tuples import make_tuples
from hillinfer_model.selection import kept_positions, select_positions

# --- The device `core` ---


def open_core(
    spec: KernelSpec, scope: Scope, options: DeviceOptions, recorder: Recorder = SILENT
) -> DeviceScorer:
    """Return a scorer whose device is one more thread of this process.

    Raises NativeError where the native library is missing.
    """
    shadows = DeviceShadows(spec, CoreDevice(spec), options.beta, warn_of_loss, Pace.REAL)
    return DeviceScorer(NativeScorer(spec, scope), shadows, recorder)


class CoreDevice(HostSlots):
    """A `ScoringDevice` on a processor core of this machine, which stands for one near the drive.

    It works in parallel to the host wherever there is a second core.

    It is given bytes in the launch format and answers with score arrays, as a card does, and its
    memory is as large as a SmartSSD's; but that memory is this machine's, which M0 does not count.

    `core` runs launches and is closed with this; a thread of the native library where None. Raises
    NativeError where the native library is missing.
    """

    def __init__(self, spec: KernelSpec, core: LaunchThread | None = None) -> None:
        super().__init__(spec, MEMORY_BYTES // spec.segment_bytes)
        # Kept views, because an address that is known need not be asked for.
        self._views: dict[int, NDArray[np.uint8]] = {}
        self._pieces = {scope: NativePieces(spec, scope) for scope in Scope}
        self._core = LaunchThread() if core is None else core

    def write(self, slot: int, first_beat: int, beats: Beats) -> None:
        """Put beats into a slot's shadow; see `ScoringDevice`."""
        self._wait()
        super().write(slot, first_beat, beats)

    def load(self, shadows: Sequence[StoredShadow]) -> None:
        """Fill slots from files; see `ScoringDevice`."""
        self._wait()
        super().load(shadows)

    def score(
        self,
        scope: Scope,
        queries: Beats,
        segments: Sequence[DeviceSegment],
        ahead: Sequence[StoredShadow] = (),
    ) -> Iterator[ScoredTokens]:
        """Score segments on the other core, beside what the host does; see `ScoringDevice`."""
        self._wait()
        each = queries_each(self._spec, queries, len(segments))
        given = unpack_query_blocks(self._spec, queries, each * len(segments))
        # A shadow is in the cache when the next query comes to it.
        pieces = [
            Piece(each * number + query, self._view(one.slot), one.tokens, one.base_position)
            for number, one in enumerate(segments)
            for query in range(each)
        ]
        waiting = self._pieces[scope].begin(given, pieces, self._core)

        def scored() -> Iterator[ScoredTokens]:
            # Into other slots than those that are being scored.
            super(CoreDevice, self).load(ahead)
            # Waits where the first tuples are asked for.
            found = waiting()
            for index in range(len(segments)):
                own = found[each * index : each * (index + 1)]
                yield ScoredTokens(index, 0, own[0] if each == 1 else np.concatenate(own))

        return scored()

    @property
    def queries_together(self) -> int:
        """As many queries as a kernel may score in a pass; see `ScoringDevice`."""
        return MOST_QUERIES

    def close(self) -> None:
        """Let the core go; memory goes with the object."""
        self._core.close()

    def _view(self, slot: int) -> NDArray[np.uint8]:
        if slot not in self._views:
            self._views[slot] = self._memory[slot]
        return self._views[slot]

    def _wait(self) -> None:
        """Wait for a launch that nobody reads any more: its shadows must not change under it."""
        # Whoever wants its tuples is told what became of it.
        with suppress(MemoryError):
            self._core.wait()


# --- The device `csim` ---


def open_csim(
    spec: KernelSpec, scope: Scope, options: DeviceOptions, recorder: Recorder = SILENT
) -> DeviceScorer:
    """Return a scorer whose device runs the compiled HLS C++.

    A pass scores as many queries as a kernel has room for. Raises SettingsError outside HillInfer's
    source tree, where the C++ and what builds it are missing, and for a model that no kernel is
    built for.
    """
    try:
        check_hardware_spec(spec)
    except HardwareSpecError as error:
        raise SettingsError(f"device=csim: {error}, or choose nvme") from error
    execution = SmallestKernels(cast("KernelExecution", _execution()))
    slots = MEMORY_BYTES // (slot_beats(spec) * BEAT_BYTES)
    kernels = replace(spec, queries=most_queries(spec))
    if spec.key_mode is KeyMode.FP16:
        device: LaunchDevice = RowsDevice(kernels, execution, slots)
    else:
        device = LaunchDevice(kernels, execution, slots, execution)
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


# --- The device `xrt` ---

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
    memory = max(int(card["memory_bytes"]) - reserved_bytes, 0)
    try:
        check_xclbin(xclbin, kernels, str(card["name"]), name)
        claims = MemoryClaims(user_cache_dir("cards"), str(card["place"]), memory)
    except SettingsError:
        worker.close()
        raise
    opened = XrtRowsDevice if casts else XrtDevice
    device = opened(kernels, worker, memory, claims, deadlines, chunk_bytes)
    pace = Pace.EMULATED if xclbin.mode == HW_EMU else Pace.REAL
    shadows = DeviceShadows(spec, device, options.beta, warn_of_loss, pace)
    return DeviceScorer(NativeScorer(spec, scope), shadows, recorder)


# --- The execution `golden` ---


class GoldenScorer:
    """The numpy golden model as a `Scorer`, for tests: right first, not fast."""

    # No device scores any of it.
    on_device = None

    def __init__(self, spec: KernelSpec, scope: Scope) -> None:
        self.spec = spec
        self.scope = scope
        self._model = GoldenModel(spec, scope)

    def statistics(
        self, keys: torch.Tensor, first_position: int, preceding: ChannelStatistics | None
    ) -> ChannelStatistics:
        """Take a segment's channel statistics (contract, section 3); see `Scorer`."""
        return self._model.statistics(_fp16_codes(keys), first_position, preceding)

    def encode(
        self,
        keys: torch.Tensor,
        statistics: ChannelStatistics,
        shadow: NDArray[np.uint8],
        first_token: int,
    ) -> None:
        """Write codes and exponents into a segment's shadow (contract, section 9); see `Scorer`."""
        write_codes(
            shadow, first_token, self._model.encode(_fp16_codes(keys), statistics), self.spec
        )

    @property
    def table_variant(self) -> Variant | None:
        """None: the library does not choose over its tables as this does."""
        return None

    def choose(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int,
        wanted: Sequence[Wanted],
    ) -> list[list[NDArray[np.int64]]]:
        """Select by score codes, fully sorted; see `Scorer`."""
        tuples = self.tuples(query, scaling, segments, coming)
        return [sorted_top(tuples, one, coming) for one in wanted]

    def tuples(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int = 0,
    ) -> NDArray[np.uint32]:
        """Score every token of consecutive segments (contract, sections 4 to 11); see `Scorer`."""
        if query.dtype != torch.float32:
            raise TypeError(f"a query is float32, not {query.dtype}; use query.float()")
        coded = [
            CodedSegment(
                segment.base_position,
                read_codes(segment.shadow, 0, segment.tokens, self.spec),
                segment.statistics,
            )
            for segment in segments
        ]
        return make_tuples(self._model.score(query.detach().numpy(), scaling, coded, coming), 0)


def sorted_top(tuples: NDArray[np.uint32], wanted: Wanted, coming: int) -> list[NDArray[np.int64]]:
    """Return the selected sets of a scorer that only scores, by a sort of all tokens.

    Parameters
    ----------
    tuples
        uint32 of shape (sets, N), in the order of positions.
    wanted, coming
        One size, and as for `Scorer.choose`, whose errors these are.

    Returns
    -------
    One ascending int64 array of positions per set.
    """
    tokens = tuples.shape[1]
    wanted.check(tokens + coming, coming)
    kept = kept_positions(tokens + coming, wanted.sinks, wanted.recent)
    # One that is coming is among the newest, which are kept.
    kept, newest = kept[: len(kept) - coming], np.arange(tokens, tokens + coming)
    codes = (tuples >> np.uint32(16)).astype(np.uint16)
    return [np.append(select_positions(own, wanted.count - coming, kept), newest) for own in codes]


def _fp16_codes(keys: torch.Tensor) -> NDArray[np.uint16]:
    """Return the codes of a float16 tensor on the CPU, without a copy where it is possible."""
    if keys.dtype != torch.float16:
        raise TypeError(f"keys are float16, not {keys.dtype}; use keys.to(torch.float16)")
    return np.asarray(keys.detach().numpy().view(np.uint16))


# --- The table ---

OpenDevice = Callable[[KernelSpec, Scope, DeviceOptions, Recorder], EngineScorer]

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
) -> EngineScorer:
    """Return the scorer of a device.

    `devices` says what opens a device of each name; those of packages come after them. `plugins`
    are the packages that bring devices, and where they lie in the source tree. Raises SettingsError
    where there is no such device, naming those there are, or it cannot be used.
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
    if scorer.on_device is not None:
        scorer.on_device.shadows.close()


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
