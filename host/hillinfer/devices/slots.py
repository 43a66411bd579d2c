# SPDX-License-Identifier: Apache-2.0
"""Slots of devices: of rows that a kernel casts, and in host memory, as csim and PYNQ have them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
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
    finished_status,
    queries_each,
    shadow_descriptors,
)
from hillinfer.drive.files import PAGE_BYTES, aligned_buffer, round_up
from hillinfer.errors import DeviceError
from hillinfer.scoring.native import NativeScorer
from hillinfer_model.beats import Beats
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import KeyMode, Scope
from hillinfer_model.descriptor import FP16_BYTES
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec
from hillinfer_model.launch_result import LaunchResult
from hillinfer_model.launch_shape import key_value_row_beats
from hillinfer_model.score_launch import ScoreLaunch, scope_number, scope_of
from hillinfer_model.shadow_launch import ShadowLaunch
from hillinfer_model.statistics_block import pack_statistics

# --- What a slot holds ---


def slot_beats(spec: KernelSpec) -> int:
    """Return the beats of a device's slot: a segment's shadow, or its rows in key mode `fp16`."""
    if spec.key_mode is KeyMode.FP16:
        return spec.segment_tokens * key_value_row_beats(spec)
    return spec.segment_beats


@dataclass(frozen=True)
class _Held:
    """What is known of the rows in a slot: beats from one to the next, and their statistics."""

    stride: int
    statistics: ChannelStatistics
    block: Beats


class RowSlots:
    """Knows how the rows of each slot are to be read, in key mode `fp16`."""

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec
        self._held: dict[int, _Held] = {}
        self._scorer = NativeScorer(spec, Scope.LAYER)

    def note(self, rows: StoredRows) -> None:
        """Learn whose rows a slot holds from here on."""
        stride = rows.byte_count // (self._spec.segment_tokens * BEAT_BYTES)
        block = pack_statistics(rows.statistics, self._spec)
        self._held[rows.slot] = _Held(stride, rows.statistics, block)

    def blocks(
        self, arrays: ScoreArrays, segments: Sequence[DeviceSegment], places: Sequence[int]
    ) -> dict[str, Beats]:
        """Return a launch's blocks `segments` and `statistics` (contract, section 10).

        `places` says where the rows of each segment lie, in beats from the start of the buffer.
        """
        held = [self._held[one.slot] for one in segments]
        return {
            "segments": arrays.descriptors(places, [one.stride for one in held]),
            "statistics": np.concatenate([one.block for one in held]),
        }

    def cast(self, slot: int, content: Beats, into: Beats) -> None:
        """Code the keys of a slot's rows as the kernel does, bit for bit.

        `content` is what it holds, uint8 (beats, 64); `into` are the first beats of the segment's
        shadow, which are filled.
        """
        spec, held = self._spec, self._held[slot]
        width, own = spec.kv_heads * spec.padded_head_dim, spec.segment_tokens * held.stride
        rows = content[:own].reshape(spec.segment_tokens, -1).view(np.float16)
        heads = rows[:, :width].reshape(spec.segment_tokens, spec.kv_heads, -1)
        keys = torch.from_numpy(np.ascontiguousarray(heads[..., : spec.head_dim]))
        shadow = np.zeros((spec.segment_beats, BEAT_BYTES), dtype=np.uint8)
        self._scorer.encode(keys, held.statistics, shadow, 0)
        into[:] = shadow[: len(into)]


# --- Keys that the host hands over ---


class GivenRows(StoredRows):
    """`StoredRows` of keys alone, in memory: of rows that a device cannot read on the drive."""

    @property
    def drive_bytes(self) -> int:
        """None of them."""
        return 0


@contextmanager
def given_rows(
    spec: KernelSpec,
    slot: int,
    base_position: int,
    statistics: ChannelStatistics,
    keys: torch.Tensor,
) -> Iterator[GivenRows]:
    """Put a segment's keys into a file in memory, as a plane of keys alone (contract, section 9).

    `slot`, `base_position` and `statistics` are as for `StoredRows`; `keys` are float16 of shape
    (segment_tokens, kv_heads, head_dim) on the CPU. What further heads hold is skipped, as values
    are. Raises DeviceError where the host has no memory or no descriptor for the file.
    """
    tokens, heads, _ = keys.shape
    width = heads * spec.padded_head_dim
    # Rows begin at beats: an odd number of slices of channels leaves half a beat at the end.
    plane = np.zeros((tokens, round_up(FP16_BYTES * width, BEAT_BYTES) // FP16_BYTES), np.float16)
    padded = plane[:, :width].reshape(tokens, heads, -1)
    padded[..., : spec.head_dim] = keys.detach().numpy()
    with ExitStack() as files:
        try:
            file = os.memfd_create("hillinfer-keys", os.MFD_CLOEXEC)
            files.callback(os.close, file)
            left, at = plane.reshape(-1).view(np.uint8).data, 0
            while at < plane.nbytes:
                at += os.pwrite(file, left[at:], at)
        except OSError as error:
            raise DeviceError(f"keys cannot be handed over: {error}") from error
        yield GivenRows(slot, base_position, statistics, [FilePiece(file, 0, plane.nbytes)])


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
            finished_status(result.status, index)
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


class RowsDevice(LaunchDevice):
    """Rows in host memory, whose keys an execution casts while it scores them (key mode `fp16`)."""

    @cached_property
    def _rows(self) -> RowSlots:
        return RowSlots(self._spec)

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
