# SPDX-License-Identifier: Apache-2.0
"""Rows that a kernel casts to codes while it scores them (key mode `fp16`; HillInfer, CEC)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from hillinfer.devices.device import DeviceSegment, FilePiece, ScoreArrays, StoredRows
from hillinfer.drive.files import round_up
from hillinfer.errors import DeviceError
from hillinfer.scoring.native import NativeScorer
from hillinfer_model.beats import Beats
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import KeyMode, Scope
from hillinfer_model.descriptor import FP16_BYTES
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec
from hillinfer_model.launch_shape import key_value_row_beats
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
    """Knows how the rows of each slot are to be read.

    Parameters
    ----------
    spec
        Of the kernel, in key mode `fp16`.
    """

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

        Parameters
        ----------
        slot
            Whose.
        content
            What it holds, uint8 (beats, 64).
        into
            The first beats of the segment's shadow; filled.
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

    Parameters
    ----------
    spec
        Of the kernel.
    slot, base_position, statistics
        As for `StoredRows`.
    keys
        float16 of shape (segment_tokens, kv_heads, head_dim) on the CPU. What further heads hold is
        skipped, as values are.

    Raises
    ------
    DeviceError
        Where the host has no memory or no descriptor for the file.
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
