# SPDX-License-Identifier: Apache-2.0
"""Attention over blocks of rows, and the products with rows that rivals score by."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.attention.kernels import MOST_GROUP_SIZE, SoftmaxMerge, described
from hillinfer.kv.sequence import RowLayout
from hillinfer.model_shape import ModelShape
from hillinfer.native.library import NativeError, native_library
from hillinfer.native.structures import row_addresses
from hillinfer_bench.precision.in_place_attention import in_place_attention
from hillinfer_bench.rivals.rival import RivalSetup
from hillinfer_model.selection import selected_count

# A contiguous uint8 array (any, row_bytes), and which of its rows, int64.
Part = tuple[NDArray[np.uint8], NDArray[np.int64]]


def whole(rows: NDArray[np.uint8]) -> Part:
    """Return all rows of an array as a part of a batch."""
    return rows, np.arange(len(rows))


class BlockAttention:
    """Attends to rows where they lie with the native library, or block by block with torch.

    Parameters
    ----------
    shape, layout
        What is in a row.
    block_rows
        Rows that torch attends to at a time: what it widens stays in the processor's caches.
    """

    def __init__(self, shape: ModelShape, layout: RowLayout, block_rows: int) -> None:
        self._native = in_place_attention(shape)
        self._layout = layout
        self._block_rows = block_rows

    def attend(
        self,
        query: torch.Tensor,
        batches: Iterable[Sequence[Part]],
        scaling: float,
    ) -> torch.Tensor:
        """Attend to batches of rows as if they were one.

        Parameters
        ----------
        query
            (query_heads, 1, head_dim).
        batches
            Parts that are there at once. Every batch but the last has a multiple of 64 rows.
        scaling
            Factor on inner products.

        Returns
        -------
        (query_heads, 1, head_dim) in the query's type.
        """
        if self._native is None or query.device.type != "cpu":
            return self._with_torch(query, batches, scaling)
        softmax = self._native.begin(query[:, 0], scaling)
        for batch in batches:
            places = [row_addresses(*part) for part in batch]
            softmax.add([np.concatenate(places)])
        return softmax.result()[:, None].to(query.dtype)

    def _with_torch(
        self,
        query: torch.Tensor,
        batches: Iterable[Sequence[Part]],
        scaling: float,
    ) -> torch.Tensor:
        # FP16 kernels are slow and coarse on a CPU.
        kind = torch.float32 if query.dtype == torch.float16 else query.dtype
        merge = SoftmaxMerge(query.to(kind), scaling)
        for batch in batches:
            for rows, chosen in batch:
                for start in range(0, len(chosen), self._block_rows):
                    block = torch.from_numpy(rows[chosen[start : start + self._block_rows]])
                    keys, values = self._layout.keys(block), self._layout.values(block)
                    merge.add_block(keys.transpose(0, 1).to(kind), values.transpose(0, 1).to(kind))
        return merge.result().to(query.dtype)


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


def count(setup: RivalSetup, length: int) -> int:
    """Return k: α of the length, between the kept tokens and all, as for every system."""
    return selected_count(length, setup.alpha, setup.kept_tokens, None)


def best_tokens(setup: RivalSetup, scores: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the kept tokens and the best of the others, k of them, int64 ascending.

    Parameters
    ----------
    setup
        α and the kept tokens.
    scores
        float32, one for each token, higher is better.
    """
    length = len(scores)
    chosen = count(setup, length)
    if chosen == length:
        return np.arange(length)
    middle = scores[setup.kept_sinks : length - setup.kept_recent]
    wanted = chosen - setup.kept_tokens
    best = np.argpartition(middle, len(middle) - wanted)[len(middle) - wanted :]
    return np.concatenate(
        [
            np.arange(setup.kept_sinks),
            np.sort(best) + setup.kept_sinks,
            np.arange(length - setup.kept_recent, length),
        ]
    )


def head_logits(query: torch.Tensor, keys: torch.Tensor, scaling: float, out: torch.Tensor) -> None:
    """Compute scaled inner products in float32, keys read once for all heads that share them.

    Parameters
    ----------
    query
        (query_heads, 1, d).
    keys
        (kv_heads, tokens, d).
    scaling
        Factor on inner products.
    out
        float32 (query_heads, tokens), may be a view.
    """
    packed = query.float().reshape(keys.shape[0], -1, query.shape[-1]) * scaling
    scores = torch.matmul(packed, keys.float().transpose(1, 2))
    out.copy_(scores.reshape(out.shape))


def summed_weights(logits: torch.Tensor) -> NDArray[np.float32]:
    """Return the attention weights of each token, summed over heads; logits (heads, tokens)."""
    weights: NDArray[np.float32] = torch.softmax(logits, -1).sum(0).numpy()
    return weights


def replayed(
    setup: RivalSetup, layer: int, row: int, length: int, positions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return what a benchmark has this layer select in place of `positions`, or these."""
    return positions if setup.selections is None else setup.selections(layer, row, length)


def replayed_pages(
    setup: RivalSetup,
    layer: int,
    row: int,
    length: int,
    page_tokens: int,
    there: int,
    pages: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return in place of `pages` as many that hold the most tokens of a benchmark's selection.

    Parameters
    ----------
    setup, layer, row, length
        As for `replayed`.
    page_tokens, there
        Tokens of a page, and pages to choose from; the first is always chosen.
    pages
        Numbers of pages that the rival selected, int64 ascending.
    """
    if setup.selections is None:
        return pages
    positions = setup.selections(layer, row, length)
    held = np.bincount(positions // page_tokens, minlength=there)[:there]
    held[0] = page_tokens + 1
    # Among equals the newer page.
    order = np.lexsort((-np.arange(there), -held))
    return np.sort(order[: len(pages)])


class RowProducts:
    """What rivals rank by, and attend with where keys and values lie apart.

    The native library reads rows where they lie, as it does for HillInfer; without it torch widens
    some rows at a time.

    Parameters
    ----------
    shape
        Of a row: `head_dim` items of each KV head at its start.
    block_rows
        Rows that torch widens at a time.
    make_native
        Opens the native library's products; returns None where torch is to compute.
    """

    def __init__(
        self,
        shape: ModelShape,
        block_rows: int,
        make_native: Callable[[ModelShape], NativeProducts | None] | None = None,
    ) -> None:
        self._shape = shape
        self._kind = RowLayout(shape).stored_type
        self._block_rows = block_rows
        self._native = (make_native or native_products)(shape)

    def logits(
        self,
        query: torch.Tensor,
        scaling: float,
        rows: NDArray[np.uint8],
        chosen: NDArray[np.int64],
        out: torch.Tensor,
    ) -> None:
        """Compute scaled inner products.

        Parameters
        ----------
        query
            (query_heads, 1, head_dim).
        scaling
            Factor on them.
        rows
            Contiguous uint8 (any, row_bytes).
        chosen
            Which rows, int64.
        out
            Float32 (query_heads, len(chosen)); its rows may lie apart.
        """
        if not len(chosen):
            return
        if self._native is not None and query.device.type == "cpu":
            self._native.logits(query[:, 0], scaling, row_addresses(rows, chosen), out)
            return
        for start in range(0, len(chosen), self._block_rows):
            block = slice(start, start + self._block_rows)
            keys = self._states(rows[chosen[block]], 0)
            head_logits(query, keys, scaling, out[:, block])

    def add_weighted(
        self,
        weights: torch.Tensor,
        rows: NDArray[np.uint8],
        chosen: NDArray[np.int64],
        out: torch.Tensor,
        start_byte: int = 0,
    ) -> None:
        """Add values by weights.

        Parameters
        ----------
        weights
            Float32 (query_heads, len(chosen)); its rows may lie apart.
        rows, chosen
            As for `logits`.
        out
            Contiguous float32 (query_heads, head_dim).
        start_byte
            Where values begin in a row.
        """
        if not len(chosen):
            return
        if self._native is not None:
            addresses = row_addresses(rows, chosen) + np.uint64(start_byte)
            self._native.add_weighted(weights, addresses, out)
            return
        shape = self._shape
        grouped = weights.reshape(shape.kv_heads, -1, len(chosen))
        sums = out.view(shape.kv_heads, -1, shape.head_dim)
        for start in range(0, len(chosen), self._block_rows):
            block = slice(start, start + self._block_rows)
            values = self._states(rows[chosen[block]], start_byte)
            sums += torch.matmul(grouped[:, :, block], values.float())

    def _states(self, rows: NDArray[np.uint8], start_byte: int) -> torch.Tensor:
        """View rows as (kv_heads, rows, head_dim)."""
        shape = self._shape
        width = 2 * shape.kv_heads * shape.head_dim
        own = torch.from_numpy(rows)[:, start_byte : start_byte + width].contiguous()
        return own.view(self._kind).view(-1, shape.kv_heads, shape.head_dim).transpose(0, 1)
