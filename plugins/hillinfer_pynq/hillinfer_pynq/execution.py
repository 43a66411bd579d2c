# SPDX-License-Identifier: Apache-2.0
"""PYNQ as an execution: loads the kernels of a card, runs launches, returns buffers."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hillinfer.devices.xrt.xclbin import SectionKind, Xclbin, XclbinError, check_xclbin, spec_record
from hillinfer_model.beats import Beats
from hillinfer_model.choices import KeyMode
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec
from hillinfer_model.launch_result import STATUS_FILL, LaunchResult
from hillinfer_model.score_launch import ScoreLaunch
from hillinfer_model.shadow_launch import ShadowLaunch
from hillinfer_model.status_beat import HASH_BYTES
from hillinfer_pynq.front_process import GRACE_S, FrontProcess

PATIENCE_S = 120.0
_COUNT = struct.Struct("<i4x")
_BANK_BYTES = 40
_CONNECTIONS, _CONNECTION = struct.Struct("<i"), struct.Struct("<iii")
# `MEM_DRAM` of XRT's xclbin.h, a type that PYNQ knows; not used, so nobody asks what it is.
_DRAM, _HOST, _UNUSED = 2, 10, 0


@dataclass(frozen=True)
class Card:
    """A card, or its emulation.

    Parameters
    ----------
    xclbin
        Holds the kernels; the front gets a copy.
    platform
        Name of the card's shell, which must be the xclbin's.
    environment
        Variables that lead to XRT: `XILINX_XRT` at least.
    """

    xclbin: Path
    platform: str
    environment: Mapping[str, str]


class PynqExecution:
    """Runs launches through PYNQ's Overlay, in a process and an environment of its own.

    One front is held at a time, in `front`, for the spec that was asked for last; one that has
    failed is gone, and the next launch starts another.

    Parameters
    ----------
    python
        Interpreter of the environment that `make pynq-env` makes.
    card_of
        Returns the card that has a spec's kernels.
    patience
        Seconds in which a card must be loaded, and in which a launch must end.
    grace
        Seconds that the front has beyond them, to say what did not end.
    """

    name = "pynq"

    def __init__(
        self,
        python: Path,
        card_of: Callable[[KernelSpec], Card],
        patience: float = PATIENCE_S,
        grace: float = GRACE_S,
    ) -> None:
        self.python, self.card_of, self.patience, self.grace = python, card_of, patience, grace
        self._spec: KernelSpec | None = None
        self.front: FrontProcess | None = None

    def load(self, spec: KernelSpec) -> None:
        """Load a spec's kernels now, not with their first launch.

        Raises
        ------
        XclbinError
            Where the card's xclbin is damaged, or for another spec or platform.
        PynqError
            Where the front does not start in time.
        """
        self._front_of(spec)

    def score(self, spec: KernelSpec, launch: ScoreLaunch) -> LaunchResult:
        """Run `score_tokens`.

        Raises
        ------
        XclbinError
            Where the card's xclbin is damaged, or for another spec or platform.
        PynqError
            Where the front does not start, fails, or does not end in time.
        """
        buffers = {"segments": launch.segments, "shadow": launch.shadow}
        if spec.key_mode is KeyMode.FP16:
            buffers["statistics"] = launch.statistics
        buffers |= {"queries": launch.queries, "scores": launch.scores}
        scalars = {"scope": int(launch.scope), "launch_id": launch.launch_id}
        return self._run("score_tokens", spec, buffers, "scores", scalars)

    def make_shadow(self, spec: KernelSpec, launch: ShadowLaunch) -> LaunchResult:
        """Run `make_shadow`; raises as `score` does."""
        buffers = {
            "segments": launch.segments,
            "rows": launch.rows,
            "statistics": launch.statistics,
            "shadow": launch.shadow,
        }
        return self._run("make_shadow", spec, buffers, "shadow", {"launch_id": launch.launch_id})

    def close(self) -> None:
        """Let the card go."""
        if self.front is not None:
            self.front.close()
        self.front = None

    def _run(
        self,
        kernel: str,
        spec: KernelSpec,
        buffers: dict[str, Beats],
        output: str,
        scalars: dict[str, int],
    ) -> LaunchResult:
        segments = buffers["segments"].shape[0]
        status = np.full((segments, BEAT_BYTES), STATUS_FILL, dtype=np.uint8)
        return LaunchResult(
            *self._front_of(spec).launch(
                kernel,
                {**buffers, "status": status},
                {"segment_count": segments, **scalars},
                (output, "status"),
                self.patience,
            )
        )

    def _front_of(self, spec: KernelSpec) -> FrontProcess:
        if self.front is not None and self.front.running and self._spec == spec:
            return self.front
        self.close()
        card = self.card_of(spec)
        name = str(card.xclbin)
        xclbin = Xclbin.read(card.xclbin)
        check_xclbin(xclbin, spec, card.platform, name)
        # The front loads the bytes that were checked, not what the file holds by then.
        content = without_host_memory(xclbin, spec, name).pack()
        spec_hash = spec.digest()[:HASH_BYTES].hex()
        self.front = FrontProcess(
            self.python,
            content,
            card.platform,
            spec_hash,
            card.environment,
            self.patience,
            self.grace,
        )
        self._spec = spec
        return self.front


def without_host_memory(xclbin: Xclbin, spec: KernelSpec, name: str) -> Xclbin:
    """Return the xclbin with its banks of host memory marked as not used.

    PYNQ 3.0.1 knows types of memory up to 9, and host memory is 10. Banks keep their numbers, which
    connections name.

    Parameters
    ----------
    xclbin
        Checked against the spec.
    spec
        Its kernels'.
    name
        What error messages call it.

    Raises
    ------
    XclbinError
        Where its list of memories is missing or cut short, or a kernel reaches host memory.
    """
    topology = bytearray(xclbin.sections.get(SectionKind.MEM_TOPOLOGY, b""))
    count = _COUNT.unpack_from(topology)[0] if len(topology) >= _COUNT.size else -1
    if count < 0 or len(topology) < _COUNT.size + count * _BANK_BYTES:
        raise XclbinError(f"{name} is damaged: its list of memories is missing or cut short")
    places = {index: _COUNT.size + index * _BANK_BYTES for index in range(count)}
    hidden = {index for index, place in places.items() if topology[place] == _HOST}
    if not hidden:
        return xclbin
    reached = _reached_banks(xclbin.sections.get(SectionKind.CONNECTIVITY, b""), name)
    if not hidden.isdisjoint(reached):
        raise XclbinError(f"{name}: a kernel reaches host memory, which PYNQ 3.0.1 does not know")
    for index in hidden:
        topology[places[index] : places[index] + 2] = bytes((_DRAM, _UNUSED))
    sections = {**xclbin.sections, SectionKind.MEM_TOPOLOGY: bytes(topology)}
    del sections[SectionKind.USER_METADATA]
    sections[SectionKind.USER_METADATA] = spec_record(spec, sections)
    return replace(xclbin, sections=sections)


def _reached_banks(connections: bytes, name: str) -> set[int]:
    """Return the banks that kernels reach; XclbinError where the list is cut short."""
    size, each = _CONNECTIONS.size, _CONNECTION.size
    count = _CONNECTIONS.unpack_from(connections)[0] if len(connections) >= size else -1
    if count < 0 or len(connections) < size + count * each:
        raise XclbinError(f"{name} is damaged: its list of connections is cut short")
    listed = _CONNECTION.iter_unpack(connections[size : size + count * each])
    return {bank for _, _, bank in listed}
