# SPDX-License-Identifier: Apache-2.0
"""The RTL as an execution: launches in, buffers out, by the Verilated kernel and its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hillinfer_hw.harness import Outcome, Region, Session, SnapshotCheck
from hillinfer_hw.memory_model import IDEAL, MemoryModel
from hillinfer_hw.rtl_files import argument_offsets, render_rtl
from hillinfer_hw.verilate import build
from hillinfer_model.beats import Beats
from hillinfer_model.choices import KeyMode, Scope
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec
from hillinfer_model.launch_result import STATUS_FILL, LaunchResult
from hillinfer_model.layout import shadow_beats
from hillinfer_model.score_launch import ScoreLaunch, scope_of
from hillinfer_model.shadow_launch import ShadowLaunch

PAGE = 4096
# Between two buffers, so that a stray access falls into none.
_GAP = 16 * PAGE
_FIRST_ADDRESS = 0x40_0000_0000


class RtlError(RuntimeError):
    """A simulated kernel hung, broke a rule of the bus or touched memory that is not its own."""


@dataclass(frozen=True)
class RtlRun:
    """One simulated launch.

    Parameters
    ----------
    result
        What it left in memory.
    outcome
        Cycles, beats and everything the harness checked.
    beats, code_beats
        Beats read on the key port; without the exponent beats.
    """

    result: LaunchResult
    outcome: Outcome
    beats: int
    code_beats: int


class RtlSession:
    """One simulated kernel with the launches of a spec, from power-up on.

    Parameters
    ----------
    spec
        The kernel's.
    kernel
        `score_tokens` or `make_shadow`.
    library
        The built kernel; None builds this project's.
    """

    def __init__(self, spec: KernelSpec, kernel: str, *, library: Path | None = None) -> None:
        self._spec = spec
        self._kernel = kernel
        self._session = Session(library or build(render_rtl(spec, kernel)))

    def close(self) -> None:
        """End the simulation."""
        self._session.close()

    def run(
        self,
        launch: ScoreLaunch | ShadowLaunch,
        memory: MemoryModel = IDEAL,
        *,
        expected: Beats | None = None,
        reset_at: int = 0,
        max_cycles: int | None = None,
        offset_beats: int = 0,
    ) -> RtlRun:
        """Run one launch.

        Parameters
        ----------
        launch
            A `ScoreLaunch` for `score_tokens`, a `ShadowLaunch` for `make_shadow`.
        memory
            How memory behaves.
        expected
            The output buffer at the end: at every status beat, what is counted complete must
            equal it. None: not checked.
        reset_at
            Cycle in which reset falls; 0 for none.
        max_cycles
            After that many the launch counts as hung; None for a bound that no memory here
            needs.
        offset_beats
            How far behind a multiple of 4,096 bytes each buffer starts.

        Raises
        ------
        ValueError
            Where the launch is the other kernel's.
        """
        if isinstance(launch, ScoreLaunch) != (self._kernel == "score_tokens"):
            raise ValueError(f"a {type(launch).__name__} is no launch of {self._kernel}")
        inputs, output_name, output, scalars = launch_arguments(self._spec, launch)
        status = np.full((launch.segments.shape[0], 64), STATUS_FILL, dtype=np.uint8)
        contents = {**inputs, output_name: output.copy(), "status": status}
        regions = _place(contents, {output_name, "status"}, offset_beats)
        offsets = argument_offsets(self._spec, self._kernel)
        registers = []
        for name, region in regions.items():
            registers += [
                (offsets[name], region.address & 0xFFFF_FFFF),
                (offsets[name] + 4, region.address >> 32),
            ]
        registers += [(offsets[name], value) for name, value in scalars.items()]
        is_shadow = output_name == "shadow"
        known = scope_of(scalars.get("scope", 0), self._spec.queries)
        scope, queries = known or (Scope.LAYER, 1)
        arrays = queries * (self._spec.kv_heads if scope is Scope.KV_HEAD else 1)
        snapshot = SnapshotCheck(
            "status",
            output_name,
            expected,
            launch.segments,
            arrays,
            self._spec.group_beats if is_shadow else 0,
            tuple(shadow_beats(int(count), self._spec) for count in _tokens(launch.segments))
            if is_shadow
            else (),
        )
        if max_cycles is None:
            beats = sum(buffer.shape[0] for buffer in contents.values())
            max_cycles = 20_000 + 40 * beats + 4_000 * launch.segments.shape[0]
        outcome = self._session.run(regions, registers, memory, snapshot, max_cycles, reset_at)
        result = LaunchResult(regions[output_name].content, regions["status"].content)
        exponents = 0 if is_shadow else _exponent_beats(self._spec, launch.segments, result.status)
        beats = outcome.read_beats[0]
        return RtlRun(result, outcome, beats, beats - exponents)


@dataclass(frozen=True)
class RtlExecution:
    """Runs launches in the Verilated RTL (design, section 7).

    Parameters
    ----------
    memory
        How memory behaves.
    """

    memory: MemoryModel = IDEAL
    name: str = "rtl"

    def score(self, spec: KernelSpec, launch: ScoreLaunch) -> LaunchResult:
        """Run `score_tokens`.

        Raises
        ------
        ValueError
            Where no kernel can be rendered from the spec.
        MissingToolError
            Where it cannot be built.
        RtlError
            Where the launch hangs or breaks a rule that does not show in the buffers.
        """
        return run_launch(spec, "score_tokens", launch, self.memory).result

    def make_shadow(self, spec: KernelSpec, launch: ShadowLaunch) -> LaunchResult:
        """Run `make_shadow`; raises as `score` does."""
        return run_launch(spec, "make_shadow", launch, self.memory).result


def run_launch(
    spec: KernelSpec,
    kernel: str,
    launch: ScoreLaunch | ShadowLaunch,
    memory: MemoryModel,
    expected: Beats | None = None,
) -> RtlRun:
    """Run one launch in a fresh kernel and refuse what no kernel may do.

    Parameters
    ----------
    spec, kernel, launch, memory, expected
        As `RtlSession` takes them.

    Raises
    ------
    RtlError
        With everything the harness found.
    """
    session = RtlSession(spec, kernel)
    try:
        run = session.run(launch, memory, expected=expected)
    finally:
        session.close()
    faults = check_outcome(run.outcome)
    if faults:
        raise RtlError(f"{kernel} with memory {memory.name}: {'; '.join(faults)}")
    return run


def check_outcome(outcome: Outcome) -> list[str]:
    """Return what a launch did that no kernel may do, in words; empty where nothing."""
    faults = list(outcome.violations)
    if outcome.ended == "timeout":
        faults.append(f"not done after {outcome.cycles} cycles")
    for name in ("stray_reads", "stray_writes", "snapshot_errors"):
        if getattr(outcome, name):
            faults.append(f"{name.replace('_', ' ')}: {getattr(outcome, name)}")
    return faults


def _place(contents: Mapping[str, Beats], written: set[str], offset: int) -> dict[str, Region]:
    """Give every buffer its address, with pages between them that nobody owns."""
    regions = {}
    address = _FIRST_ADDRESS + BEAT_BYTES * offset
    for name, content in contents.items():
        regions[name] = Region(address, np.ascontiguousarray(content), name in written)
        address += -(-content.nbytes // PAGE) * PAGE + _GAP
    return regions


def launch_arguments(
    spec: KernelSpec, launch: ScoreLaunch | ShadowLaunch
) -> tuple[dict[str, Beats], str, Beats, dict[str, int]]:
    """Return the buffers that are read, the written one's name and content, and the scalars."""
    count = launch.segments.shape[0]
    inputs = {"segments": launch.segments}
    if isinstance(launch, ShadowLaunch):
        inputs |= {"rows": launch.rows, "statistics": launch.statistics}
        scalars = {"segment_count": count, "launch_id": launch.launch_id}
        return inputs, "shadow", launch.shadow, scalars
    inputs["shadow"] = launch.shadow
    if spec.key_mode is KeyMode.FP16:
        inputs["statistics"] = launch.statistics
    inputs["queries"] = launch.queries
    scalars = {"segment_count": count, "scope": launch.scope, "launch_id": launch.launch_id}
    return inputs, "scores", launch.scores, scalars


def _tokens(segments: Beats) -> npt.NDArray[np.uint32]:
    """Return the tokens of each descriptor."""
    return segments[:, 32:36].copy().view("<u4").reshape(-1)


def _exponent_beats(spec: KernelSpec, segments: Beats, status: Beats) -> int:
    """Return the exponent beats among the key beats of the segments that completed."""
    if spec.key_mode is KeyMode.FP16:
        return 0
    tokens = _tokens(segments)
    complete = status[:, 12:16].copy().view("<u4").reshape(-1)
    done = tokens[(complete == tokens) & (status[:, 16] == 0)].astype(np.int64)
    return int(spec.kv_heads * (-(-done // 64)).sum())
