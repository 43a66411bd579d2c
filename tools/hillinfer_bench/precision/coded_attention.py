# SPDX-License-Identifier: Apache-2.0
"""Attention of one token over rows and coded tokens, in C++, defined to the bit (section 16)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.native.library import Variant, native_library
from hillinfer.native.signatures import BlockPartials, CodedCall, CodedTokens
from hillinfer.native.structures import row_addresses
from hillinfer.scoring.coded import NativeValueCoder
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.coded_attention import BLOCK_TOKENS
from hillinfer_model.kernel_spec import BEAT_BYTES, GROUP_TOKENS, KernelSpec
from hillinfer_model.value_layout import code_row_bytes, value_group_beats, value_segment_beats

MOST_CHANNELS = 256

# --- Values of a whole segment ---


class ShadowValueCoder(NativeValueCoder):
    """Writes value codes where a segment's value shadow holds them, which no cache has."""

    def encode(
        self,
        values: torch.Tensor,
        statistics: ChannelStatistics,
        shadow: NDArray[np.uint8],
        first_token: int,
    ) -> None:
        """Code consecutive tokens into a segment's value shadow (contract, section 14).

        Parameters
        ----------
        values
            float16 of shape (tokens, kv_heads, head_dim), strided as it may be.
        statistics
            Of the segment's values.
        shadow
            uint8 of shape (value_segment_beats, 64); fresh ones are all zero.
        first_token
            Index of the first token within the segment.

        Raises
        ------
        ValueError
            Where a type or shape does not fit, or tokens lie outside the segment.
        """
        self.check(values, statistics)
        beats = value_segment_beats(self.spec), BEAT_BYTES
        if shadow.shape != beats or shadow.dtype != np.uint8 or not shadow.flags.c_contiguous:
            raise ValueError(f"a value shadow of {shadow.dtype} {shadow.shape}, not uint8 {beats}")
        last = first_token + values.shape[0]
        if first_token < 0 or last > self.spec.segment_tokens:
            raise ValueError(
                f"tokens {first_token}..{last} lie outside a segment of {self.spec.segment_tokens}"
            )
        self.call("hillinfer_encode_values", values, statistics, shadow, first_token)


# --- Where codes lie ---


@dataclass(frozen=True)
class CodePlaces:
    """Where tokens' value codes lie; their memory is kept as long as this is.

    Parameters
    ----------
    code_rows
        Addresses of code rows, uint64 of shape (tokens,).
    exponents
        Addresses of the first KV head's exponents, likewise.
    exponent_stride
        Bytes from one KV head's exponent to the next one's.
    memory
        What the addresses point into.
    """

    code_rows: NDArray[np.uint64]
    exponents: NDArray[np.uint64]
    exponent_stride: int
    memory: NDArray[np.uint8]

    @classmethod
    def in_shadow(
        cls, shadow: NDArray[np.uint8], tokens: NDArray[np.int64], spec: KernelSpec
    ) -> CodePlaces:
        """Return where tokens of a segment's value shadow lie (contract, section 14).

        Parameters
        ----------
        shadow
            uint8 of shape (value_segment_beats, 64), C-contiguous.
        tokens
            Which ones, counted from the segment's start.
        spec
            Shape.

        Raises
        ------
        ValueError
            The shadow has another shape.
        IndexError
            A token lies outside the segment.
        """
        if shadow.shape != (value_segment_beats(spec), BEAT_BYTES) or not shadow.flags.c_contiguous:
            raise ValueError(f"a value shadow of shape {shadow.shape}")
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < spec.segment_tokens:
            raise IndexError(f"tokens {tokens.min()} to {tokens.max()} of {spec.segment_tokens}")
        group, within = np.divmod(tokens.astype(np.int64), GROUP_TOKENS)
        starts = shadow.ctypes.data + group * (value_group_beats(spec) * BEAT_BYTES)
        rows = starts + spec.kv_heads * BEAT_BYTES + within * code_row_bytes(spec)
        return cls(rows.astype(np.uint64), (starts + within).astype(np.uint64), BEAT_BYTES, shadow)

    @classmethod
    def in_rows(
        cls, memory: NDArray[np.uint8], rows: NDArray[np.int64], spec: KernelSpec
    ) -> CodePlaces:
        """Return where tokens lie that are kept by themselves (`NativeValueCoder.encode_rows`).

        Parameters
        ----------
        memory
            uint8 of shape (rows, row_bytes), C-contiguous.
        rows
            Which ones.
        spec
            Shape.

        Raises
        ------
        ValueError
            The memory has gaps, or its rows have no room for a token's codes.
        IndexError
            A row is not in it.
        """
        addresses = row_addresses(memory, rows)
        if memory.shape[1] < code_row_bytes(spec) + spec.kv_heads:
            raise ValueError(f"rows of {memory.shape[1]} bytes hold no codes of {spec}")
        return cls(addresses, addresses + np.uint64(code_row_bytes(spec)), 1, memory)


@dataclass(frozen=True)
class CodedSegment:
    """Coded tokens of one segment, in ascending positions.

    Parameters
    ----------
    aligned
        L', int32 of shape (query_heads, tokens) (contract, section 5).
    invalid_keys
        bool of shape (kv_heads, tokens).
    places
        Where their value codes lie.
    statistics
        Of the segment's values.
    """

    aligned: NDArray[np.int32]
    invalid_keys: NDArray[np.bool_]
    places: CodePlaces
    statistics: ChannelStatistics


@dataclass(frozen=True)
class BlockSoftmax:
    """Softmax over blocks, each relative to a power of two (contract, section 16).

    Parameters
    ----------
    powers
        R, int32 of shape (blocks, query_heads).
    totals
        W, int64 likewise, in units of 2^-40.
    outputs
        O, float32 of shape (blocks, query_heads, head_dim).
    broken
        bool of shape (blocks, query_heads): whether a token has no weight that could be told.
    """

    powers: NDArray[np.int32]
    totals: NDArray[np.int64]
    outputs: NDArray[np.float32]
    broken: NDArray[np.bool_]

    @classmethod
    def empty(cls, blocks: int, shape: ModelShape) -> BlockSoftmax:
        """Return room for so many blocks."""
        heads = blocks, shape.query_heads
        return cls(
            np.zeros(heads, np.int32),
            np.zeros(heads, np.int64),
            np.zeros((*heads, shape.head_dim), np.float32),
            np.zeros(heads, np.bool_),
        )

    def __add__(self, other: BlockSoftmax) -> BlockSoftmax:
        """Return these blocks and those that follow them."""
        return BlockSoftmax(
            np.concatenate((self.powers, other.powers)),
            np.concatenate((self.totals, other.totals)),
            np.concatenate((self.outputs, other.outputs)),
            np.concatenate((self.broken, other.broken)),
        )

    def described(self) -> BlockPartials:
        """Return where the arrays lie, for the library."""
        return BlockPartials(
            self.powers.ctypes.data,
            self.totals.ctypes.data,
            self.outputs.ctypes.data,
            self.broken.ctypes.data,
        )


@dataclass(frozen=True)
class DescribedSegments:
    """Segments as the library reads them (`CodedAttention.described`).

    Parameters
    ----------
    described
        One for each.
    segments
        What they point into.
    """

    described: ctypes.Array[CodedTokens]
    segments: tuple[CodedSegment, ...]


# --- Attention ---


class CodedAttention:
    """Attends with one softmax to exact rows and coded tokens of one layer (section 16).

    Output bits are those of the golden model, for any variant, addresses and number of threads;
    where the golden model has a NaN of any kind this has numpy's.

    Parameters
    ----------
    shape
        The model's; it says what is in a row.
    variant
        Instructions to use; None for the best that this processor has.

    Raises
    ------
    NativeError
        The library is missing, or the processor cannot run the variant.
    ValueError
        Heads have more channels than the library has room for.
    """

    def __init__(self, shape: ModelShape, variant: Variant | None = None) -> None:
        self._library = native_library()
        self.shape = shape
        self.variant = self._library.runnable(variant)
        if shape.head_dim > MOST_CHANNELS:
            raise ValueError(f"heads of {shape.head_dim} channels: at most {MOST_CHANNELS}")
        self._number = self.variant.number

    def attend(
        self,
        scaled: NDArray[np.float32],
        rows: NDArray[np.uint64],
        coded: Sequence[CodedSegment] | DescribedSegments,
        heads: range | None = None,
    ) -> NDArray[np.float32]:
        """Attend to exact and coded tokens (contract, section 16).

        Parameters
        ----------
        scaled
            q', float32 of shape (query_heads, head_dim) (contract, section 4); not the sum of
            `raw_sum`.
        rows
            Addresses of the exact tokens' rows (`RowLayout`), uint64, in ascending positions. The
            caller answers for what lies there.
        coded
            The coded tokens, segment by segment, ascending; described ones take no time for that.
        heads
            KV heads that have this set, consecutive; None for all of them.

        Returns
        -------
        float32 of shape (query_heads, head_dim); 0 for the heads of other sets.

        Raises
        ------
        ValueError
            There is no token, or an array has another type or shape.
        """
        call = self._call(scaled, heads)
        _check_rows(rows)
        own = coded if isinstance(coded, DescribedSegments) else self.described(coded)
        segments = own.described
        if not len(rows) and not any(one.tokens for one in segments):
            raise ValueError("attention needs a token: both sets are empty")
        out = np.zeros(scaled.shape, np.float32)
        self._library.call(
            "hillinfer_coded_attend",
            self._number,
            ctypes.byref(call),
            rows.ctypes.data,
            len(rows),
            ctypes.addressof(segments),
            len(segments),
            out.ctypes.data,
        )
        return out

    def described(self, coded: Sequence[CodedSegment]) -> DescribedSegments:
        """Return segments as the library reads them, for several calls.

        Parameters
        ----------
        coded
            As for `attend`, whose errors it raises.
        """
        described = (CodedTokens * len(coded))(*(self._tokens(one) for one in coded))
        return DescribedSegments(described, tuple(coded))

    def exact_blocks(self, scaled: NDArray[np.float32], rows: NDArray[np.uint64]) -> BlockSoftmax:
        """Return the softmax over each block of 64 rows.

        Parameters
        ----------
        scaled, rows
            As for `attend`, whose errors it raises.
        """
        call = self._call(scaled, None)
        _check_rows(rows)
        made = BlockSoftmax.empty(_blocks(len(rows)), self.shape)
        described = made.described()
        self._library.call(
            "hillinfer_exact_blocks",
            self._number,
            ctypes.byref(call),
            rows.ctypes.data,
            len(rows),
            ctypes.byref(described),
        )
        return made

    def coded_blocks(self, segment: CodedSegment) -> BlockSoftmax:
        """Return the softmax over each block of 64 coded tokens of a segment.

        Parameters
        ----------
        segment
            As for `attend`, whose errors it raises.
        """
        tokens = self._tokens(segment)
        made = BlockSoftmax.empty(_blocks(tokens.tokens), self.shape)
        call, described = self._described(None, None), made.described()
        self._library.call(
            "hillinfer_coded_blocks",
            self._number,
            ctypes.byref(call),
            ctypes.byref(tokens),
            ctypes.byref(described),
        )
        return made

    def merge(self, blocks: BlockSoftmax) -> NDArray[np.float32]:
        """Return the output of blocks: exact ones first, each kind in ascending positions.

        Parameters
        ----------
        blocks
            At least one; the arrays are C-contiguous.

        Returns
        -------
        As `attend`.

        Raises
        ------
        ValueError
            There is no block.
        """
        if not len(blocks.powers):
            raise ValueError("attention needs a token: there is no block")
        out = np.empty((self.shape.query_heads, self.shape.head_dim), np.float32)
        call, described = self._described(None, None), blocks.described()
        self._library.call(
            "hillinfer_merge_blocks",
            self._number,
            ctypes.byref(call),
            ctypes.byref(described),
            len(blocks.powers),
            out.ctypes.data,
        )
        return out

    def _call(self, scaled: NDArray[np.float32], heads: range | None) -> CodedCall:
        shape = self.shape.query_heads, self.shape.head_dim
        if scaled.dtype != np.float32 or scaled.shape != shape or not scaled.flags.c_contiguous:
            raise ValueError(f"a query of {scaled.dtype} {scaled.shape}, not float32 {shape}")
        return self._described(scaled.ctypes.data, heads)

    def _described(self, query: int | None, heads: range | None) -> CodedCall:
        own = range(self.shape.kv_heads) if heads is None else heads
        if own.step != 1 or not 0 <= own.start < own.stop <= self.shape.kv_heads:
            raise ValueError(f"KV heads {own} of {self.shape.kv_heads}")
        return CodedCall(
            query,
            self.shape.kv_heads,
            self.shape.group_size,
            self.shape.head_dim,
            0 if self.shape.stored_type is StoredType.BFLOAT16 else 1,
            own.start,
            len(own),
            torch.get_num_threads(),
        )

    def _tokens(self, segment: CodedSegment) -> CodedTokens:
        count = len(segment.places.code_rows)
        channels = self.shape.kv_heads, self.shape.head_dim
        for name, array, dtype, shape in (
            ("L'", segment.aligned, np.int32, (self.shape.query_heads, count)),
            ("invalid keys", segment.invalid_keys, np.bool_, (self.shape.kv_heads, count)),
            ("code rows", segment.places.code_rows, np.uint64, (count,)),
            ("exponents", segment.places.exponents, np.uint64, (count,)),
            ("c", segment.statistics.exponents, np.int8, channels),
            ("M", segment.statistics.means, np.int32, channels),
        ):
            if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
                raise ValueError(f"{name} of {array.dtype} {array.shape}, not {dtype} {shape}")
        return CodedTokens(
            segment.aligned.ctypes.data,
            segment.invalid_keys.ctypes.data,
            segment.places.code_rows.ctypes.data,
            segment.places.exponents.ctypes.data,
            segment.places.exponent_stride,
            segment.statistics.exponents.ctypes.data,
            segment.statistics.means.ctypes.data,
            count,
            count,
        )


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def _check_rows(rows: NDArray[np.uint64]) -> None:
    if rows.ndim != 1 or rows.dtype != np.uint64 or not rows.flags.c_contiguous:
        raise ValueError(f"row addresses of {rows.dtype} {rows.shape}: give a uint64 vector")
    if len(rows) and not rows.all():
        raise ValueError(f"row {int(np.argmin(rows))} of {len(rows)} has the address 0")
