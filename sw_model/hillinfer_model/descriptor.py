# SPDX-License-Identifier: Apache-2.0
"""Segment descriptors: what a launch is told about each segment."""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass

from hillinfer_model.beats import Beats, beat_count, from_beats, to_beats
from hillinfer_model.choices import KeyMode, Scope
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec
from hillinfer_model.launch_error import ErrorCode, LaunchError

TUPLE_BYTES = 4
FP16_BYTES = 2
# The zero fields at bytes 44 and 56 are packed too, so that unpacking sees them.
_FORMAT = struct.Struct("<QQQQIIIIQQ")


@dataclass(frozen=True)
class Descriptor:
    """One segment of a launch, 64 bytes (contract, section 10).

    Offsets are in beats from the start of the buffer they point into.

    Parameters
    ----------
    shadow
        Offset of the shadow; in key mode `fp16`, of the rows to score.
    query
        Offset of the query block, behind which those of further queries lie; for `make_shadow`, of
        the rows to code.
    score
        Offset of the score array; 0 for `make_shadow`.
    base_position
        Position of the segment's first token.
    tokens
        Tokens of the segment that the launch covers.
    row_stride
        Beats from one row to the next; 0 where no rows are read.
    score_stride
        Beats from one score array to the next where a segment has several, else 0.
    statistics
        Offset of the statistics block; 0 where none is read.

    Raises
    ------
    ValueError
        Where a value does not fit its field.
    """

    shadow: int
    query: int
    score: int
    base_position: int
    tokens: int
    row_stride: int = 0
    score_stride: int = 0
    statistics: int = 0

    def __post_init__(self) -> None:
        """Refuse values that do not fit their fields."""
        for name, bits in (
            ("shadow", 64),
            ("query", 64),
            ("score", 64),
            ("base_position", 64),
            ("tokens", 32),
            ("row_stride", 32),
            ("score_stride", 32),
            ("statistics", 64),
        ):
            value = getattr(self, name)
            if not 0 <= value < 2**bits:
                raise ValueError(f"{name}={value} does not fit an unsigned field of {bits} bits")

    def pack(self) -> Beats:
        """Return the descriptor as one beat, uint8 of shape (1, 64)."""
        *head, statistics = astuple(self)
        return to_beats(_FORMAT.pack(*head, 0, statistics, 0))

    @classmethod
    def unpack(cls, block: Beats) -> Descriptor:
        """Read one beat, uint8 of shape (1, 64).

        Raises
        ------
        LaunchError
            Where a reserved field is not zero (`ErrorCode.RESERVED_NOT_ZERO`).
        """
        fields = _FORMAT.unpack(from_beats(block, BEAT_BYTES, "descriptor"))
        shadow, query, score, base_position, tokens, row_stride, score_stride = fields[:7]
        reserved_44, statistics, reserved_56 = fields[7:]
        if reserved_44 or reserved_56:
            raise LaunchError(
                ErrorCode.RESERVED_NOT_ZERO,
                f"reserved descriptor fields hold {reserved_44} and {reserved_56}, not 0",
            )
        return cls(
            shadow, query, score, base_position, tokens, row_stride, score_stride, statistics
        )


def check_score_descriptor(
    descriptor: Descriptor, spec: KernelSpec, scope: Scope, queries: int = 1
) -> None:
    """Refuse a descriptor that `score_tokens` must refuse (contract, sections 10 and 17).

    Parameters
    ----------
    descriptor, spec
        The segment's, and the kernel's.
    scope, queries
        What the launch says: what shares one selected set, and how many queries a segment has.

    Raises
    ------
    LaunchError
        With `ErrorCode.DESCRIPTOR`.
    """
    _check_segment(descriptor, spec)
    if spec.key_mode is KeyMode.FP16:
        _check_row_stride(descriptor, spec)
    else:
        _check(descriptor.row_stride == 0, "row_stride", descriptor.row_stride, "0 without rows")
        _check(descriptor.statistics == 0, "statistics", descriptor.statistics, "0 without rows")
    if scope is Scope.KV_HEAD or queries > 1:
        least = beat_count(descriptor.tokens * TUPLE_BYTES)
        wanted = f"at least the {least} beats of one score array"
        _check(descriptor.score_stride >= least, "score_stride", descriptor.score_stride, wanted)
    else:
        wanted = "0 where there is one score array"
        _check(descriptor.score_stride == 0, "score_stride", descriptor.score_stride, wanted)


def check_shadow_descriptor(descriptor: Descriptor, spec: KernelSpec) -> None:
    """Refuse a descriptor that `make_shadow` must refuse (contract, section 10).

    Raises
    ------
    LaunchError
        With `ErrorCode.DESCRIPTOR`.
    """
    _check(spec.key_mode is not KeyMode.FP16, "key_mode", spec.key_mode, "a shadow's")
    _check_segment(descriptor, spec)
    _check_row_stride(descriptor, spec)
    _check(descriptor.score == 0, "score", descriptor.score, "0")
    _check(descriptor.score_stride == 0, "score_stride", descriptor.score_stride, "0")


def _check_segment(descriptor: Descriptor, spec: KernelSpec) -> None:
    base = descriptor.base_position
    wanted = f"a multiple of {spec.segment_tokens}"
    _check(base % spec.segment_tokens == 0, "base_position", base, wanted)
    wanted = f"at most {spec.segment_tokens}"
    _check(descriptor.tokens <= spec.segment_tokens, "tokens", descriptor.tokens, wanted)


def _check_row_stride(descriptor: Descriptor, spec: KernelSpec) -> None:
    least = beat_count(spec.kv_heads * spec.padded_head_dim * FP16_BYTES)
    wanted = f"at least the {least} beats of one token's keys"
    _check(descriptor.row_stride >= least, "row_stride", descriptor.row_stride, wanted)


def _check(holds: object, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise LaunchError(ErrorCode.DESCRIPTOR, f"descriptor: {name} is {value}, not {wanted}")
