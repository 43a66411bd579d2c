# SPDX-License-Identifier: Apache-2.0
"""Inner products with keys, and weighted sums of values, where they lie, in C++."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.attention.native_attention import MOST_GROUP_SIZE
from hillinfer.attention.native_softmax import described
from hillinfer.model_shape import ModelShape
from hillinfer.native.errors import NativeError
from hillinfer.native.library import native_library


class NativeProducts:
    """The two halves of attention by themselves, for those that keep keys and values apart.

    Stored items are widened in registers; sums are float32. Bits do not depend on addresses or on
    the number of threads.

    Parameters
    ----------
    shape
        The model's; `head_dim` items of each KV head stand at a row's start.

    Raises
    ------
    NativeError
        The library is missing.
    """

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._library = native_library()
        self._variant = self._library.variants[0].number

    def logits(
        self, query: torch.Tensor, scaling: float, rows: NDArray[np.uint64], out: torch.Tensor
    ) -> None:
        """Compute scaled inner products of a token's queries with keys.

        Parameters
        ----------
        query
            (query_heads, head_dim) of any floating type, on the CPU.
        scaling
            Factor on them.
        rows
            Addresses of keys.
        out
            Float32 (query_heads, len(rows)); its rows may lie apart.

        Raises
        ------
        ValueError
            A shape or type is another one.
        """
        wide = query.detach().to(torch.float32).contiguous()
        if tuple(wide.shape) != (self._shape.query_heads, self._shape.head_dim):
            raise ValueError(f"query of shape {tuple(query.shape)}: give one token's, of all heads")
        self._check(rows, out)
        self._library.call(
            "hillinfer_inner_products",
            self._variant,
            ctypes.byref(described(self._shape, wide.data_ptr(), scaling)),
            rows.ctypes.data,
            len(rows),
            out.data_ptr(),
            out.stride(0),
        )

    def add_weighted(
        self, weights: torch.Tensor, rows: NDArray[np.uint64], out: torch.Tensor
    ) -> None:
        """Add values by weights to what is there.

        Parameters
        ----------
        weights
            Float32 (query_heads, len(rows)); its rows may lie apart.
        rows
            Addresses of values.
        out
            Contiguous float32 (query_heads, head_dim).

        Raises
        ------
        ValueError
            A shape or type is another one.
        """
        expected = (self._shape.query_heads, self._shape.head_dim)
        if tuple(out.shape) != expected or out.dtype != torch.float32 or not out.is_contiguous():
            raise ValueError(f"sums of shape {tuple(out.shape)}, not contiguous float32 {expected}")
        self._check(rows, weights)
        self._library.call(
            "hillinfer_weighted_sum",
            self._variant,
            ctypes.byref(described(self._shape, None, 1.0)),
            rows.ctypes.data,
            len(rows),
            weights.data_ptr(),
            weights.stride(0),
            out.data_ptr(),
        )

    def _check(self, rows: NDArray[np.uint64], table: torch.Tensor) -> None:
        if rows.dtype != np.uint64 or rows.ndim != 1 or not rows.flags.c_contiguous:
            raise ValueError(f"addresses of {rows.dtype}: give a contiguous uint64 vector")
        expected = (self._shape.query_heads, len(rows))
        dense = table.stride(1) == 1 or len(rows) < 2
        if tuple(table.shape) != expected or table.dtype != torch.float32 or not dense:
            raise ValueError(
                f"a table {tuple(table.shape)} of {table.dtype}: give float32 {expected}, the last "
                "dimension dense"
            )


def native_products(shape: ModelShape) -> NativeProducts | None:
    """Return the native library's products, or None where it is missing or has no room."""
    if shape.group_size > MOST_GROUP_SIZE:
        return None
    try:
        return NativeProducts(shape)
    except NativeError:
        return None
