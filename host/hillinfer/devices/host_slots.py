# SPDX-License-Identifier: Apache-2.0
"""Devices whose slots are host memory, csim and PYNQ among them, and their kernel launches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hillinfer.devices.device import (
    ROWS_TOGETHER,
    DeviceSegment,
    FilePiece,
    ScoreArrays,
    ScoredTokens,
    StoredRows,
    StoredShadow,
    check_made,
    queries_each,
    shadow_descriptors,
)
from hillinfer.devices.row_slots import RowSlots, slot_beats
from hillinfer.drive.files import PAGE_BYTES, aligned_buffer, round_up
from hillinfer.errors import DeviceError
from hillinfer_model.beats import Beats
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec
from hillinfer_model.launch_error import ErrorCode, LaunchError
from hillinfer_model.launch_result import LaunchResult
from hillinfer_model.score_launch import ScoreLaunch, scope_number, scope_of
from hillinfer_model.shadow_launch import ShadowLaunch
from hillinfer_model.status_beat import StatusBeat

# --- Shadows in host memory ---

# As much as a SmartSSD's DRAM; memory that is not written to is not taken.
MEMORY_BYTES = 4 << 30


class HostSlots:
    """The slots of a `ScoringDevice` in host memory."""

    def __init__(self, spec: KernelSpec, slots: int) -> None:
        self._spec = spec
        self.slots = slots
        self._slot_beats = slot_beats(spec)
        size = slots * self._slot_beats * BEAT_BYTES
        self._memory = aligned_buffer(size)[:size].reshape(slots, self._slot_beats, BEAT_BYTES)

    def has_room(self, slot: int) -> bool:
        """Say whether there is such a slot; see `ScoringDevice`."""
        return slot < self.slots

    def write(self, slot: int, first_beat: int, beats: Beats) -> None:
        """Put beats into a slot's shadow; see `ScoringDevice`."""
        self._memory[slot, first_beat : first_beat + len(beats)] = beats

    def load(self, shadows: Sequence[StoredShadow]) -> None:
        """Fill slots from files; see `ScoringDevice`."""
        size = self._spec.segment_bytes
        for one in shadows:
            piece = FilePiece(one.file, one.offset, size)
            self._memory[one.slot] = _read(piece, "shadows").reshape(-1, BEAT_BYTES)

    def read(self, slot: int, into: Beats) -> None:
        """Read a slot's shadow; see `ScoringDevice`."""
        into[:] = self._memory[slot, : len(into)]

    @property
    def rows_together(self) -> int:
        """Say that it makes no shadows; see `ScoringDevice`."""
        return 0

    def make(self, rows: Sequence[StoredRows]) -> bool:
        """Make none; see `ScoringDevice`."""
        return False

    @property
    def queries_together(self) -> int:
        """Say that a pass scores one query; see `ScoringDevice`."""
        return 1


# --- Devices that take whole launches ---


class LaunchExecution(Protocol):
    """Runs a launch of `score_tokens` to its end."""

    def score(self, spec: KernelSpec, launch: ScoreLaunch) -> LaunchResult:
        """Return what the launch leaves in memory."""
        ...

    def close(self) -> None:
        """Let go of what runs launches; harmless when done twice."""
        ...


class ShadowExecution(Protocol):
    """Runs a launch of `make_shadow` to its end."""

    def make_shadow(self, spec: KernelSpec, launch: ShadowLaunch) -> LaunchResult:
        """Return what the launch leaves in memory."""
        ...


class KernelExecution(LaunchExecution, ShadowExecution, Protocol):
    """Runs launches of both kernels of any spec."""


class SmallestKernels:
    """Runs launches of one query in a kernel of one, which is built and simulated in less time.

    `execution` runs them, and those of several queries in the kernel that they are for.
    """

    def __init__(self, execution: KernelExecution) -> None:
        self._execution = execution

    def score(self, spec: KernelSpec, launch: ScoreLaunch) -> LaunchResult:
        """Run `score_tokens`; see `LaunchExecution`."""
        found = scope_of(launch.scope, spec.queries)
        is_single = found is not None and found[1] == 1
        return self._execution.score(replace(spec, queries=1) if is_single else spec, launch)

    def make_shadow(self, spec: KernelSpec, launch: ShadowLaunch) -> LaunchResult:
        """Run `make_shadow`, which knows no queries; see `ShadowExecution`."""
        return self._execution.make_shadow(replace(spec, queries=1), launch)

    def close(self) -> None:
        """Let go of what runs launches; harmless when done twice."""
        self._execution.close()


class LaunchDevice(HostSlots):
    """Shadows in host memory, scored by an execution: csim, and PYNQ, which copies every launch.

    `spec` is that of the execution's kernel, and `makes` runs `make_shadow` where there is one.
    """

    def __init__(
        self,
        spec: KernelSpec,
        execution: LaunchExecution,
        slots: int,
        makes: ShadowExecution | None = None,
    ) -> None:
        super().__init__(spec, slots)
        self._execution = execution
        self._makes = makes
        self._launches = 0

    @property
    def rows_together(self) -> int:
        """Of how many segments it makes shadows at once; see `ScoringDevice`."""
        return 0 if self._makes is None else ROWS_TOGETHER

    @property
    def queries_together(self) -> int:
        """Queries that a pass of its kernel scores; see `ScoringDevice`."""
        return self._spec.queries

    def make(self, rows: Sequence[StoredRows]) -> bool:
        """Run `make_shadow`; see `ScoringDevice`."""
        if self._makes is None:
            return super().make(rows)
        beats, self._launches = self._spec.segment_beats, self._launches + 1
        starts = [number * beats for number in range(len(rows))]
        descriptors, statistics = shadow_descriptors(self._spec, rows, starts)
        result = self._makes.make_shadow(
            self._spec,
            ShadowLaunch(
                segments=descriptors,
                rows=np.concatenate(
                    [_read(piece, "rows") for one in rows for piece in one.pieces]
                ).reshape(-1, BEAT_BYTES),
                statistics=statistics,
                shadow=np.zeros((len(rows) * beats, BEAT_BYTES), np.uint8),
                launch_id=self._launches,
            ),
        )
        check_made(self._spec, result.status)
        for one, start in zip(rows, starts, strict=True):
            self._memory[one.slot] = result.output[start : start + beats]
        return True

    def score(
        self,
        scope: Scope,
        queries: Beats,
        segments: Sequence[DeviceSegment],
        ahead: Sequence[StoredShadow] = (),
    ) -> Iterator[ScoredTokens]:
        """Score segments, all before the first are handed out; see `ScoringDevice`."""
        each = queries_each(self._spec, queries, len(segments))
        arrays = ScoreArrays(self._spec, scope, segments, each)
        blocks = self._blocks(arrays, segments, [one.slot * self._slot_beats for one in segments])
        self._launches += 1
        result = self._execution.score(
            self._spec,
            ScoreLaunch(
                segments=blocks["segments"],
                shadow=self._memory.reshape(-1, BEAT_BYTES),
                statistics=blocks["statistics"],
                queries=queries,
                scores=np.zeros((arrays.beats, BEAT_BYTES), dtype=np.uint8),
                scope=scope_number(scope, each),
                launch_id=self._launches,
            ),
        )
        for index in range(len(segments)):
            self._check(index, result)
        if ahead:
            self.load(ahead)
        return (
            arrays.scored(index, 0, one.tokens, result.output) for index, one in enumerate(segments)
        )

    def _blocks(
        self, arrays: ScoreArrays, segments: Sequence[DeviceSegment], places: Sequence[int]
    ) -> dict[str, Beats]:
        """Return what a launch is told of segments, whose keys lie at places of the memory."""
        nothing = np.zeros((0, BEAT_BYTES), dtype=np.uint8)
        return {"segments": arrays.descriptors(places), "statistics": nothing}

    def close(self) -> None:
        """Let the execution go; memory goes with the object."""
        self._execution.close()

    def _check(self, index: int, result: LaunchResult) -> None:
        try:
            status = StatusBeat.unpack(result.status[index : index + 1])
        except (LaunchError, ValueError) as error:
            raise DeviceError(f"segment {index} of a launch left no status: {error}") from error
        if status.error is not ErrorCode.NONE:
            raise DeviceError(f"segment {index} of a launch ended with error {status.error.name}")


class RowsDevice(LaunchDevice):
    """Rows in host memory, whose keys an execution casts while it scores them (key mode `fp16`).

    `spec`, `execution` and `slots` are as for `LaunchDevice`.
    """

    def __init__(self, spec: KernelSpec, execution: LaunchExecution, slots: int) -> None:
        super().__init__(spec, execution, slots)
        self._rows = RowSlots(spec)

    @property
    def rows_together(self) -> int:
        """Of how many segments it takes rows at once; see `ScoringDevice`."""
        return ROWS_TOGETHER

    def make(self, rows: Sequence[StoredRows]) -> bool:
        """Keep rows; see `ScoringDevice`."""
        for one in rows:
            content = np.concatenate([_read(piece, "rows") for piece in one.pieces])
            self._memory[one.slot].reshape(-1)[: len(content)] = content
            self._rows.note(one)
        return True

    def read(self, slot: int, into: Beats) -> None:
        """Cast a slot's keys to a shadow; see `ScoringDevice`."""
        self._rows.cast(slot, self._memory[slot], into)

    def _blocks(
        self, arrays: ScoreArrays, segments: Sequence[DeviceSegment], places: Sequence[int]
    ) -> dict[str, Beats]:
        return self._rows.blocks(arrays, segments, places)


def _read(piece: FilePiece, what: str) -> NDArray[np.uint8]:
    """Return bytes of a file that may want whole pages, uint8."""
    pages = aligned_buffer(round_up(piece.size, PAGE_BYTES))
    try:
        came = os.preadv(piece.file, [pages.data], piece.offset)
    except OSError as error:
        raise DeviceError(f"the file of {what} cannot be read: {error}") from error
    if came < piece.size:
        raise DeviceError(f"the file of {what} ends before byte {piece.offset + piece.size}")
    return pages[: piece.size]
