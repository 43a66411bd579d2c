# SPDX-License-Identifier: Apache-2.0
"""A `ScoringDevice` over an execution that takes whole launches: memory is an array."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from hillinfer.devices.errors import DeviceError
from hillinfer.devices.score_arrays import ScoreArrays
from hillinfer.devices.scoring_device import DeviceSegment, ScoredTokens, StoredShadow
from hillinfer.storage.aligned_buffer import PAGE_BYTES, aligned_buffer
from hillinfer_model.beats import Beats
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec
from hillinfer_model.launch_error import ErrorCode, LaunchError
from hillinfer_model.launch_result import LaunchResult
from hillinfer_model.score_launch import SCOPE_NUMBERS, ScoreLaunch
from hillinfer_model.status_beat import StatusBeat

# As much as a SmartSSD's DRAM; memory that is not written to is not taken.
MEMORY_BYTES = 4 << 30


class LaunchExecution(Protocol):
    """Runs a launch of `score_tokens` to its end."""

    def score(self, spec: KernelSpec, launch: ScoreLaunch) -> LaunchResult:
        """Return what the launch leaves in memory."""
        ...

    def close(self) -> None:
        """Let go of what runs launches; harmless when done twice."""
        ...


class LaunchDevice:
    """Shadows in host memory, scored by an execution: csim, and PYNQ, which copies every launch.

    Parameters
    ----------
    spec
        Of the kernel that the execution runs.
    execution
        Scores.
    slots
        Shadows there is room for.
    """

    def __init__(self, spec: KernelSpec, execution: LaunchExecution, slots: int) -> None:
        self._spec = spec
        self._execution = execution
        self.slots = slots
        # Memory that is never written to is never taken.
        self._memory = np.zeros((slots * spec.segment_beats, BEAT_BYTES), dtype=np.uint8)
        self._launches = 0

    def has_room(self, slot: int) -> bool:
        """Say whether there is such a slot; see `ScoringDevice`."""
        return slot < self.slots

    def write(self, slot: int, first_beat: int, beats: Beats) -> None:
        """Put beats into a slot's shadow; see `ScoringDevice`."""
        start = slot * self._spec.segment_beats + first_beat
        self._memory[start : start + len(beats)] = beats

    def load(self, shadows: Sequence[StoredShadow]) -> None:
        """Fill slots from files; see `ScoringDevice`."""
        pages = aligned_buffer(-(-self._spec.segment_bytes // PAGE_BYTES) * PAGE_BYTES)
        for one in shadows:
            if os.preadv(one.file, [pages.data], one.offset) < self._spec.segment_bytes:
                raise DeviceError(
                    f"the file of shadows ends before byte {one.offset + pages.nbytes}"
                )
            self.write(one.slot, 0, pages[: self._spec.segment_bytes].reshape(-1, BEAT_BYTES))

    def read(self, slot: int, into: Beats) -> None:
        """Read a slot's shadow; see `ScoringDevice`."""
        start = slot * self._spec.segment_beats
        into[:] = self._memory[start : start + len(into)]

    def score(
        self, scope: Scope, queries: Beats, segments: Sequence[DeviceSegment]
    ) -> Iterator[ScoredTokens]:
        """Score segments, all before the first are handed out; see `ScoringDevice`."""
        arrays = ScoreArrays(self._spec, scope, segments)
        self._launches += 1
        result = self._execution.score(
            self._spec,
            ScoreLaunch(
                segments=arrays.descriptors(
                    [one.slot * self._spec.segment_beats for one in segments]
                ),
                shadow=self._memory,
                statistics=np.zeros((0, BEAT_BYTES), dtype=np.uint8),
                queries=queries,
                scores=np.zeros((arrays.beats, BEAT_BYTES), dtype=np.uint8),
                scope=SCOPE_NUMBERS[scope],
                launch_id=self._launches,
            ),
        )
        for index in range(len(segments)):
            self._check(index, result)
        return (
            arrays.scored(index, 0, one.tokens, result.output) for index, one in enumerate(segments)
        )

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
