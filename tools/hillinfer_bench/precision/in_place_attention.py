# SPDX-License-Identifier: Apache-2.0
"""Attention of one token over rows where they lie by itself, in C++: what steps do is one call."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.attention.kernels import NativeAttention, described, host_attention
from hillinfer.model_shape import ModelShape
from hillinfer.native.library import Variant, native_library

# --- Softmax over batches of rows ---

_LINE_BYTES = 64


class NativeSoftmax:
    """Attention of one token's queries to all rows added so far.

    Made by `InPlaceAttention.begin`. However rows are split into calls, output bits are those of
    one call.

    Parameters
    ----------
    shape, variant
        As `NativeAttention` has them.
    query, scaling
        As `InPlaceAttention.begin` takes them.
    state_bytes
        What `NativeLibrary.attention_bytes` says for the shape.

    Attributes
    ----------
    tile_rows
        What every set's number of rows is a multiple of in each `add` but its last.
    """

    def __init__(
        self,
        shape: ModelShape,
        variant: Variant,
        query: torch.Tensor,
        scaling: float,
        state_bytes: int,
    ) -> None:
        check_query(shape, query, scaling)
        self._shape = shape
        self._variant = variant.number
        self._library = native_library()
        self.tile_rows = self._library.tile_rows
        # Only until `begin` has copied it.
        wide = query.detach().to(torch.float32).contiguous()
        self._attention = described(shape, wide.data_ptr(), scaling)
        self._described = ctypes.byref(self._attention)
        self._memory = torch.empty(state_bytes + _LINE_BYTES, dtype=torch.uint8)
        address = self._memory.data_ptr()
        # Vectors that cross no line load faster.
        self._state = address + -address % _LINE_BYTES
        self._library.call("hillinfer_attention_begin", self._variant, self._described, self._state)
        self._attention.query = None
        self._rows = [0]

    def add(self, sets: Sequence[NDArray[np.uint64]]) -> None:
        """Attend to further rows, in the order given; they are read during the call only.

        Parameters
        ----------
        sets
            Addresses of rows (`RowLayout`), uint64: of one set for all KV heads, or of one set
            per KV head. The caller answers for what lies there.

        Raises
        ------
        ValueError
            There is another number of sets or an earlier call had another one, a set is no
            contiguous uint64 vector, an address is 0, or an earlier call ended inside a tile.
        MemoryError
            There is none to work in.
        """
        words: list[int] = []
        counts: list[int] = []
        for rows in sets:
            _check(rows)
            counts.append(len(rows))
            words += (rows.ctypes.data, len(rows))
        self._check_counts(counts)
        self._attention.threads = torch.get_num_threads()
        described = array("q", words)
        self._library.call(
            "hillinfer_attention_add",
            self._variant,
            self._described,
            described.buffer_info()[0],
            len(sets),
            self._state,
        )
        self._rows = [a + b for a, b in zip(self._rows, counts, strict=True)]

    def result(self) -> torch.Tensor:
        """Return the output over all rows so far, float32 (query_heads, head_dim).

        Raises
        ------
        ValueError
            A set has no rows.
        """
        if not all(self._rows):
            raise ValueError("attention over no rows: add some first")
        out = torch.empty((self._shape.query_heads, self._shape.head_dim))
        self._library.call(
            "hillinfer_attention_result",
            self._variant,
            self._described,
            self._state,
            out.data_ptr(),
        )
        return out

    def _check_counts(self, counts: list[int]) -> None:
        heads = self._shape.kv_heads
        if len(counts) not in (1, heads):
            raise ValueError(f"{len(counts)} sets of rows: give 1, or {heads}, one per KV head")
        if len(counts) != len(self._rows):
            if any(self._rows):
                raise ValueError(f"{len(counts)} sets of rows after {len(self._rows)}")
            self._rows = [0] * len(counts)
        for before, count in zip(self._rows, counts, strict=True):
            if count and before % self.tile_rows:
                raise ValueError(
                    f"{count} rows after {before}: every call but a set's last brings a multiple"
                    f" of {self.tile_rows}"
                )


def check_query(shape: ModelShape, query: torch.Tensor, scaling: float) -> None:
    """Raise ValueError where attention cannot take a query; see `InPlaceAttention.begin`."""
    expected = (shape.query_heads, shape.head_dim)
    if query.shape != expected:
        raise ValueError(f"query of shape {tuple(query.shape)}, not {expected}")
    if query.device.type != "cpu" or not query.is_floating_point():
        raise ValueError(f"query of {query.dtype} on {query.device}: give floats on the CPU")
    if not math.isfinite(scaling):
        raise ValueError(f"scaling {scaling} is not finite")


def _check(rows: NDArray[np.uint64]) -> None:
    if rows.ndim != 1 or rows.dtype != np.uint64 or not rows.flags.c_contiguous:
        raise ValueError(
            f"row addresses of {rows.dtype} and shape {rows.shape}: give a contiguous uint64 vector"
        )
    if len(rows) and not rows.all():
        raise ValueError(f"row {int(np.argmin(rows))} of {len(rows)} has the address 0")


# --- Attention over rows in place ---


class InPlaceAttention(NativeAttention):
    """Attends with one token's queries to rows at any addresses; parameters and errors as there."""

    def begin(self, query: torch.Tensor, scaling: float) -> NativeSoftmax:
        """Return a softmax over no rows yet, for rows that come in several batches.

        Parameters
        ----------
        query
            (query_heads, head_dim) of any floating type, on the CPU.
        scaling
            Factor on inner products.

        Raises
        ------
        ValueError
            The query has another shape, type or device, or the scaling is not finite.
        """
        return NativeSoftmax(self.shape, self.variant, query, scaling, self.state_bytes)

    def attend(
        self, query: torch.Tensor, scaling: float, sets: Sequence[NDArray[np.uint64]]
    ) -> torch.Tensor:
        """Attend to rows that are all here.

        Parameters
        ----------
        query, scaling
            As for `begin`.
        sets
            As for `NativeSoftmax.add`.

        Returns
        -------
        Float32 (query_heads, head_dim).

        Raises
        ------
        ValueError
            As from `begin` and `NativeSoftmax.add`, or a set is empty.
        """
        softmax = self.begin(query, scaling)
        softmax.add(sets)
        return softmax.result()


def in_place_attention(shape: ModelShape) -> InPlaceAttention | None:
    """Return it; None where the native library has no room for so large a group."""
    return None if host_attention(shape) is None else InPlaceAttention(shape)
