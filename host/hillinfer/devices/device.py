# SPDX-License-Identifier: Apache-2.0
"""The interface of whatever holds key shadows and scores them where they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hillinfer.errors import DeviceError
from hillinfer.scoring.launches import LaunchQueries
from hillinfer.scoring.layout import ProbeShadow
from hillinfer.scoring.scorer import SegmentShadow
from hillinfer_model.beats import Beats, beat_count
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import Scope
from hillinfer_model.descriptor import TUPLE_BYTES, Descriptor
from hillinfer_model.kernel_spec import BEAT_BYTES, SLICE_CHANNELS, KernelSpec
from hillinfer_model.launch_error import ErrorCode, LaunchError
from hillinfer_model.launch_shape import query_beats, statistics_beats
from hillinfer_model.score_tuples import WINDOW_TOKENS
from hillinfer_model.statistics_block import pack_statistics
from hillinfer_model.status_beat import StatusBeat

# --- Segments on a device ---


class ResidentShadow(SegmentShadow):
    """A `SegmentShadow` of which a device holds the first tokens, and the host the probe tokens.

    `slot` is where it lies on the device, which holds `resident_tokens`, whole groups; `held` is
    the whole shadow where DRAM holds it, too. `bring_back` makes the whole shadow in DRAM again,
    from the device or from rows; valid until another segment's is asked for.
    """

    def __init__(
        self,
        base_position: int,
        tokens: int,
        statistics: ChannelStatistics,
        slot: int,
        resident_tokens: int,
        probes: ProbeShadow,
        held: NDArray[np.uint8] | None,
        bring_back: Callable[[], NDArray[np.uint8]],
    ) -> None:
        # The class is frozen, and its `shadow` is no field here.
        vars(self).update(
            base_position=base_position, tokens=tokens, statistics=statistics, slot=slot,
            resident_tokens=resident_tokens, _probes=probes, _held=held, _bring_back=bring_back,
        )  # fmt: skip

    slot: int
    resident_tokens: int
    _probes: ProbeShadow
    _held: NDArray[np.uint8] | None
    _bring_back: Callable[[], NDArray[np.uint8]]

    @property
    def shadow(self) -> NDArray[np.uint8]:
        """Return the whole shadow, uint8 of shape (segment_beats, 64)."""
        return self._bring_back() if self._held is None else self._held

    @property
    def on_drive(self) -> bool:
        """Whether looking at `shadow` takes more than a look."""
        return self._held is None

    @property
    def device_tokens(self) -> int:
        """How many of the first tokens the device scores."""
        return self.resident_tokens

    @property
    def probes(self) -> ProbeShadow:
        """The host's copy of the probe tokens among them."""
        return self._probes


# --- The device's interface ---


@dataclass(frozen=True)
class DeviceSegment:
    """What one launch scores of one segment.

    So many tokens of the shadow in a slot; `base_position` is that of the first.
    """

    slot: int
    base_position: int
    tokens: int


@dataclass(frozen=True)
class ScoredTokens:
    """Tuples of consecutive tokens that a device has finished.

    `segment` counts those of the call, `first_token` within the segment; `tuples` is uint32 of
    shape (sets, tokens): 1 set, or one per KV head, of one query after the other.
    """

    segment: int
    first_token: int
    tuples: NDArray[np.uint32]


@dataclass(frozen=True)
class StoredShadow:
    """The shadow of a whole segment in a file, and where on a device it is to go.

    `file` is a readable descriptor, with direct I/O where the file system allows it; `offset` is a
    multiple of 4,096 bytes, and the file holds whole pages.
    """

    slot: int
    file: int
    offset: int


class FilePiece(NamedTuple):
    """Bytes of a file, from a page on: a readable descriptor, where they begin, and how many."""

    file: int
    offset: int
    size: int


@dataclass(frozen=True)
class StoredRows:
    """FP16 rows of a whole segment in files, and the slot where a device is to take them.

    `base_position` is that of the first token, `statistics` are what its keys are coded with, and
    `pieces` say where its rows lie, one behind the other.
    """

    slot: int
    base_position: int
    statistics: ChannelStatistics
    pieces: Sequence[FilePiece]

    @property
    def byte_count(self) -> int:
        """Bytes of all its rows."""
        return sum(one.size for one in self.pieces)

    @property
    def drive_bytes(self) -> int:
        """Bytes of them that come from the drive."""
        return self.byte_count


class ScoringDevice(Protocol):
    """Holds shadows in slots of one segment and scores them (design, section 5).

    Every method may raise `DeviceError`, in bounded time; the device is then lost for good.
    """

    @property
    def slots(self) -> int:
        """Shadows of one segment that it has room for."""
        ...

    def has_room(self, slot: int) -> bool:
        """Say whether a slot can be used: memory may be shared with others who came first."""
        ...

    def write(self, slot: int, first_beat: int, beats: Beats) -> None:
        """Put beats, uint8 (beats, 64), into a slot's shadow."""
        ...

    def load(self, shadows: Sequence[StoredShadow]) -> None:
        """Fill slots with shadows of whole segments from open files, past host memory."""
        ...

    def read(self, slot: int, into: Beats) -> None:
        """Fill `into`, uint8 (beats, 64), with the first beats of a slot's shadow."""
        ...

    @property
    def rows_together(self) -> int:
        """Of how many segments it takes rows at once; 0 where it takes none."""
        ...

    def make(self, rows: Sequence[StoredRows]) -> bool:
        """Read rows from open files, past host memory, and make shadows of them in their slots.

        In key mode `fp16` the slots hold the rows themselves, which the kernel casts. At most
        `rows_together` segments, all with rows of one size. False, and nothing is made, where there
        is no room for rows.
        """
        ...

    @property
    def queries_together(self) -> int:
        """Queries that one pass over its shadows scores at most; 1 where it knows no more."""
        ...

    def score(
        self,
        scope: Scope,
        queries: Beats,
        segments: Sequence[DeviceSegment],
        ahead: Sequence[StoredShadow] = (),
    ) -> Iterator[ScoredTokens]:
        """Score segments and yield what is finished while the rest is still being scored.

        `scope` is what shares one selected set. `queries` are a query block per segment, one behind
        the other (contract, section 10), or as many of each as there are queries, up to
        `queries_together` (section 17). At least one segment is scored, each of at least one token.
        `ahead` is what the next launch scores, which is loaded meanwhile, into slots that this one
        leaves alone; it is there when the last tokens have been given.

        Every token comes once, each segment's in ascending order. The launch goes on while the
        caller does something else between two of them.
        """
        ...

    def close(self) -> None:
        """Let go of the device; harmless when done twice."""
        ...


# --- Score arrays ---

# The bits of a tuple that hold the token's position in its window.
_POSITION = np.uint32(WINDOW_TOKENS - 1)


class ScoreArrays:
    """Score arrays and query blocks of a launch's segments, one behind the other (section 10).

    Each segment has `each` queries (section 17).
    """

    def __init__(
        self, spec: KernelSpec, scope: Scope, segments: Sequence[DeviceSegment], each: int = 1
    ) -> None:
        self._spec = spec
        self._segments = segments
        self._each = each
        self._sets = each * (1 if scope is Scope.LAYER else spec.kv_heads)
        self._has_stride = scope is Scope.KV_HEAD or each > 1
        sizes = [beat_count(one.tokens * TUPLE_BYTES) for one in segments]
        self._sizes = sizes
        self.starts = np.concatenate([[0], np.cumsum(sizes) * self._sets]).tolist()

    @property
    def beats(self) -> int:
        """Beats of all score arrays."""
        return int(self.starts[-1])

    def descriptors(self, shadows: Sequence[int], strides: Sequence[int] = ()) -> Beats:
        """Return the launch's descriptors, uint8 of shape (segments, 64).

        `shadows` says where each segment's shadow lies, or its rows, in beats from the start of the
        buffer. Where they are rows `strides` are the beats between those of each; statistics blocks
        then lie one behind the other, as segments do.
        """
        block = statistics_beats(self._spec) if strides else 0
        return np.concatenate(
            [
                Descriptor(
                    shadow=shadow,
                    query=index * self._each * query_beats(self._spec),
                    score=start,
                    base_position=one.base_position,
                    tokens=one.tokens,
                    row_stride=strides[index] if strides else 0,
                    score_stride=size if self._has_stride else 0,
                    statistics=index * block,
                ).pack()
                for index, (one, shadow, start, size) in enumerate(
                    zip(self._segments, shadows, self.starts, self._sizes, strict=False)
                )
            ]
        )

    def scored(self, index: int, first: int, stop: int, scores: Beats) -> ScoredTokens:
        """Return the tuples first <= token < stop of a segment out of the score buffer.

        Raises DeviceError where they are not of these tokens: the device has left something else
        there.
        """
        start, size = self.starts[index], self._sizes[index]
        arrays = scores[start : start + self._sets * size].reshape(self._sets, -1).view("<u4")
        tuples = arrays[:, first:stop].astype(np.uint32)
        base = self._segments[index].base_position
        positions = np.arange(base + first, base + stop, dtype=np.uint32) & _POSITION
        if ((tuples & _POSITION) != positions).any():
            raise DeviceError(
                f"the device left no scores of tokens {base + first} to {base + stop - 1} where "
                "it counted them complete"
            )
        return ScoredTokens(index, first, tuples)


# --- Query blocks ---


def queries_each(spec: KernelSpec, blocks: Beats, segments: int) -> int:
    """Return how many query blocks each of a launch's segments has."""
    return len(blocks) // (segments * query_beats(spec))


def pack_query_blocks(spec: KernelSpec, queries: LaunchQueries) -> Beats:
    """Return a query block per segment, one behind the other: `QueryBlock.pack` of each."""
    count, (kv_heads, slices, own, channels) = len(queries.exponents), _by_slice(spec)
    codes = queries.codes.reshape(count, kv_heads, own, slices, channels)
    parts = [
        queries.addends.astype("<i4").view(np.uint8).reshape(count, -1),
        queries.exponents.astype(np.int8).view(np.uint8),
        codes.swapaxes(2, 3).reshape(count, -1),
    ]
    sizes = [beat_count(part.shape[1]) * BEAT_BYTES for part in parts]
    blocks = np.zeros((count, sum(sizes)), dtype=np.uint8)
    start = 0
    for part, size in zip(parts, sizes, strict=True):
        blocks[:, start : start + part.shape[1]] = part.view(np.uint8)
        start += size
    return blocks.reshape(-1, BEAT_BYTES)


def unpack_query_blocks(spec: KernelSpec, blocks: Beats, count: int) -> LaunchQueries:
    """Return what `pack_query_blocks` was given, of `count` segments."""
    heads = spec.scored_heads
    rows = blocks.reshape(count, -1)
    exponents_at = beat_count(4 * heads) * BEAT_BYTES
    codes_at = exponents_at + beat_count(heads) * BEAT_BYTES
    by_slice = rows[:, codes_at : codes_at + heads * spec.padded_head_dim].view(np.int8)
    kv_heads, slices, own, channels = _by_slice(spec)
    return LaunchQueries(
        np.ascontiguousarray(
            by_slice.reshape(count, kv_heads, slices, own, channels)
            .swapaxes(2, 3)
            .reshape(count, heads, -1)
        ),
        rows[:, exponents_at : exponents_at + heads].view(np.int8).astype(np.int32),
        np.ascontiguousarray(rows[:, : 4 * heads]).view("<i4").astype(np.int32),
    )


def _by_slice(spec: KernelSpec) -> tuple[int, int, int, int]:
    slices = spec.padded_head_dim // SLICE_CHANNELS
    return spec.kv_heads, slices, spec.scored_heads // spec.kv_heads, SLICE_CHANNELS


# --- Launches that make shadows ---

# Segments whose rows lie in a device's memory at once.
ROWS_TOGETHER = 4


def shadow_descriptors(
    spec: KernelSpec, rows: Sequence[StoredRows], shadows: Sequence[int]
) -> tuple[Beats, Beats]:
    """Return descriptors and statistics of a launch that makes shadows (contract, section 10).

    They are uint8 of shapes (segments, 64) and (beats, 64). The segments' rows lie one behind the
    other in the kernel's buffer; `shadows` says where each shadow goes, in beats from the start of
    the buffer of shadows.
    """
    blocks = [pack_statistics(one.statistics, spec) for one in rows]
    descriptors, first = [], 0
    for index, (one, shadow) in enumerate(zip(rows, shadows, strict=True)):
        beats = one.byte_count // BEAT_BYTES
        descriptors.append(
            Descriptor(
                shadow=shadow,
                query=first,
                score=0,
                base_position=one.base_position,
                tokens=spec.segment_tokens,
                row_stride=beats // spec.segment_tokens,
                statistics=index * len(blocks[0]),
            ).pack()
        )
        first += beats
    return np.concatenate(descriptors), np.concatenate(blocks)


def finished_status(status: Beats, index: int) -> StatusBeat:
    """Return the status beat that a launch left of a segment; DeviceError where it failed.

    `status` is uint8 of shape (segments, 64), the launch's status beats.
    """
    try:
        beat = StatusBeat.unpack(status[index : index + 1])
    except (LaunchError, ValueError) as error:
        raise DeviceError(f"segment {index} of a launch left no status: {error}") from error
    if beat.error is not ErrorCode.NONE:
        raise DeviceError(f"segment {index} of a launch ended with error {beat.error.name}")
    return beat


def check_made(spec: KernelSpec, status: Beats) -> None:
    """Raise DeviceError where a launch has not made the shadow of every segment, by its status."""
    for index in range(len(status)):
        made = finished_status(status, index).tokens_complete
        if made != spec.segment_tokens:
            raise DeviceError(
                f"the device made a shadow of {made} of {spec.segment_tokens} tokens of segment "
                f"{index}"
            )
