# SPDX-License-Identifier: Apache-2.0
"""Exact attention over rows and blocks of them: in C++, and by kernels of torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.native.library import Variant, native_library
from hillinfer.native.signatures import PromptBlock
from hillinfer.native.structures import Attention

# --- Attention over rows in place ---

MOST_GROUP_SIZE = 128


class NativeAttention:
    """How steps attend to rows at any addresses, with one token's queries, reading each in place.

    Softmax and sums are float32; stored items are widened in registers. Output bits depend on the
    rows' values and order alone: not on their addresses, the number of threads or how many calls
    brought them. Instruction sets differ in the last bits. NaN and infinities spread as in torch.

    Parameters
    ----------
    shape
        The model's; it says what is in a row.
    variant
        Instructions to use; None for the best that this processor has.

    Attributes
    ----------
    shape, variant
        As given, or the best there is.
    state_bytes
        Memory of a softmax that goes on from call to call.

    Raises
    ------
    NativeError
        The library is missing, or the processor cannot run the variant.
    ValueError
        More query heads share a KV head than the library has room for.
    """

    def __init__(self, shape: ModelShape, variant: Variant | None = None) -> None:
        library = native_library()
        self.shape = shape
        self.variant = library.runnable(variant)
        if not 1 <= shape.group_size <= MOST_GROUP_SIZE:
            raise ValueError(
                f"{shape.group_size} query heads per KV head: the native library attends with 1 to"
                f" {MOST_GROUP_SIZE}; use torch"
            )
        self.state_bytes = library.attention_bytes(ctypes.byref(described(shape, None, 1.0)))


def described(shape: ModelShape, query: int | None, scaling: float) -> Attention:
    """Return what attention the library is to compute; `query` is the address of floats."""
    return Attention(
        query,
        shape.kv_heads,
        shape.group_size,
        shape.head_dim,
        0 if shape.stored_type is StoredType.BFLOAT16 else 1,
        scaling,
        torch.get_num_threads(),
    )


def host_attention(shape: ModelShape) -> NativeAttention | None:
    """Return the native library's attention, or None where it has no room for so large a group.

    Rows are then gathered and attended to by torch.

    Raises
    ------
    NativeError
        The native library is missing.
    """
    return None if shape.group_size > MOST_GROUP_SIZE else NativeAttention(shape)


# --- A prompt's queries, a block of rows after the other ---

# torch's kernel on a CPU packs each head's keys anew and wants them widened. Here a block is packed
# once for all query heads that share it, out of the 16 bits that it lies in.

_ITEM_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
FEWEST_ROWS = 48
"""Query heads of a KV head, times queries: for fewer of them packing takes longer than products."""


def is_worthwhile(query: torch.Tensor, kv_heads: int) -> bool:
    """Return whether queries (query_heads, queries, head_dim) are on the processor, and many."""
    return query.is_cpu and query.shape[0] // kv_heads * query.shape[1] >= FEWEST_ROWS


class PromptMerge:
    """Softmax over blocks as if all rows had been there at once, continued in place.

    Products and sums are float32. What a query gets depends on its own blocks and their order: not
    on the queries beside it, nor on threads.

    Parameters
    ----------
    query
        (query_heads, queries, head_dim) of any type, on the processor.
    variant
        What products are made with; None for the fastest that the processor has.

    Raises
    ------
    NativeError
        The processor lacks the variant.
    """

    def __init__(self, query: torch.Tensor, scaling: float, variant: Variant | None = None) -> None:
        self._library = native_library()
        self._variant = self._library.runnable(variant).number
        self._type = query.dtype
        self._query = _with_whole_heads(query.detach().to(torch.float32))
        self._scaling = scaling
        self._is_empty = True
        self._out = torch.zeros(query.shape, dtype=torch.float32)
        self._log_sums = torch.full(query.shape[:2], -torch.inf)

    def add_block(self, keys: torch.Tensor, values: torch.Tensor, first: int = 0) -> None:
        """Attend to a block that the queries from `first` on see, all of it.

        Parameters
        ----------
        keys, values
            (kv_heads, tokens, head_dim) each, both float16, bfloat16 or float32.
        first
            The first of these queries.

        Raises
        ------
        MemoryError
            There is none to pack them in.
        """
        keys, values = _with_whole_heads(keys), _with_whole_heads(values)
        self._call(self._block(keys, values, first, self._query.shape[1]))

    def add_causal(self, keys: torch.Tensor, values: torch.Tensor, first: int = 0) -> None:
        """Attend to as many queries' own tokens, causally; the first query is `first`.

        Parameters and errors as in `add_block`.
        """
        keys, values = _with_whole_heads(keys), _with_whole_heads(values)
        block = self._block(keys, values, first, first + keys.shape[1])
        block.is_causal = 1
        self._call(block)

    def result(self) -> torch.Tensor:
        """Return the merged output, (query_heads, queries, head_dim), in the query's type.

        Raises
        ------
        ValueError
            No block was added.
        """
        if self._is_empty:
            raise ValueError("attention over no rows: add a block first")
        return self._out.to(self._type)

    def _block(
        self, keys: torch.Tensor, values: torch.Tensor, first: int, stop: int
    ) -> PromptBlock:
        """Describe a block that queries from `first` to before `stop` see."""
        query = self._query[:, first:stop]
        out, log_sums = self._out[:, first:stop], self._log_sums[:, first:stop]
        heads, queries, head_dim = query.shape
        kv_heads, tokens, _ = keys.shape
        return PromptBlock(
            query.data_ptr(), *query.stride()[:2],
            keys.data_ptr(), *keys.stride()[:2],
            values.data_ptr(), *values.stride()[:2],
            out.data_ptr(), *out.stride()[:2],
            log_sums.data_ptr(), log_sums.stride(0),
            queries, tokens, kv_heads, heads // kv_heads, head_dim,
            _ITEM_TYPES[keys.dtype], 0, self._scaling, torch.get_num_threads(),
        )  # fmt: skip

    def _call(self, block: PromptBlock) -> None:
        self._library.call("hillinfer_attend_block", self._variant, block)
        self._is_empty = False


def _with_whole_heads(states: torch.Tensor) -> torch.Tensor:
    return states if states.stride(2) == 1 else states.contiguous()


# --- One block, in torch ---

_CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend_block(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to every token of a block.

    Query heads that share a KV head are stacked as rows of one matrix, so that no key is copied
    or read twice.

    Parameters
    ----------
    query
        (query_heads, queries, head_dim) in the type attention computes in.
    keys, values
        (kv_heads, tokens, head_dim), the same type and device.

    Returns
    -------
    The normalised output (query_heads, queries, head_dim), and log-sum-exp of the scaled inner
    products, float32 (query_heads, queries).
    """
    heads, queries, head_dim = query.shape
    packed = query.reshape(1, keys.shape[0], -1, head_dim)
    if query.device.type == "cpu":
        out, log_sum = _CPU_FLASH(packed, keys[None], values[None], scale=scaling)
    else:
        out, log_sum = attend_explicitly(packed, keys[None], values[None], scaling, None)
    return out.reshape(heads, queries, head_dim), log_sum.reshape(heads, queries)


def attend_causal(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to a block of the queries' own tokens, each query to itself and those before it.

    Shapes as in `attend_block`, with as many tokens as queries.
    """
    heads, queries, head_dim = query.shape
    kv_heads = keys.shape[0]
    if query.device.type == "cpu":
        # KV heads stand where the kernel has its batch: it reads the same keys for a whole group.
        shape = (kv_heads, heads // kv_heads, queries, head_dim)
        out, log_sum = _CPU_FLASH(
            query.reshape(shape),
            keys[:, None].expand(shape),
            values[:, None].expand(shape),
            is_causal=True,
            scale=scaling,
        )
        return out.reshape(heads, queries, head_dim), log_sum.reshape(heads, queries)
    keys, values = (states.repeat_interleave(heads // kv_heads, dim=0) for states in (keys, values))
    future = torch.ones(queries, queries, dtype=torch.bool, device=query.device).triu(1)
    return attend_explicitly(query, keys, values, scaling, future)


def attend_explicitly(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    hidden: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with plain products, in float32, on a device without a kernel of its own.

    Inner products would overflow FP16, and BF16 would round them coarsely.

    Parameters
    ----------
    query
        (any, rows, head_dim); every leading dimension is the keys', too.
    keys, values
        (any, tokens, head_dim).
    hidden
        Bool (rows, tokens), true where a row must not look; None where it may everywhere.

    Returns
    -------
    As `attend_block`, float32.
    """
    scores = torch.matmul(query.float(), keys.float().transpose(-1, -2)) * scaling
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    log_sum = torch.logsumexp(scores, dim=-1)
    return torch.matmul(torch.exp(scores - log_sum[..., None]), values.float()), log_sum


# --- Blocks merged, in torch ---

BlockKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]
]


class SoftmaxMerge:
    """Collects attention over blocks as if all rows had been there at once.

    Each block gives an output and the log of its denominator; two of those merge exactly. The
    order of blocks changes output bits, so callers add them in ascending position.

    Parameters
    ----------
    query
        (query_heads, queries, head_dim) in the type attention computes in.
    attend
        The kernel for a block that all of some queries see.
    """

    def __init__(
        self, query: torch.Tensor, scaling: float, attend: BlockKernel = attend_block
    ) -> None:
        self._attend = attend
        self._query = query
        self._scaling = scaling
        self._out: torch.Tensor | None = None
        self._log_sum: torch.Tensor | None = None

    def add_block(self, keys: torch.Tensor, values: torch.Tensor, first: int = 0) -> None:
        """Attend to a block that the queries from `first` on see, all of it.

        Parameters
        ----------
        keys, values
            (kv_heads, tokens, head_dim) each.
        first
            The first of these queries.
        """
        out, log_sum = self._attend(self._query[:, first:], keys, values, self._scaling)
        self._merge(out, log_sum, first)

    def add_causal(self, keys: torch.Tensor, values: torch.Tensor, first: int = 0) -> None:
        """Attend to as many queries' own tokens, causally; the first query is `first`.

        Parameters as in `add_block`.
        """
        own = self._query[:, first : first + keys.shape[1]]
        out, log_sum = attend_causal(own, keys, values, self._scaling)
        self._merge(out, log_sum, first)

    def result(self) -> torch.Tensor:
        """Return the merged output, (query_heads, queries, head_dim)."""
        if self._out is None:
            raise ValueError("attention over no rows: add a block first")
        return self._out.to(self._query.dtype)

    def _merge(self, out: torch.Tensor, log_sum: torch.Tensor, first: int) -> None:
        if self._out is None or self._log_sum is None:
            if out.shape == self._query.shape:
                self._out, self._log_sum = out, log_sum
                return
            # Some queries wait for their first block, whose weight is then exactly 1.
            self._out = torch.zeros_like(self._query, dtype=torch.float32)
            self._log_sum = torch.full_like(self._out[..., 0], -torch.inf)
        # In place: these pass through memory once per block, which is what merging costs.
        self._out = self._out.float()
        part = slice(first, first + out.shape[1])
        old = self._log_sum[:, part]
        weight = torch.sigmoid(log_sum - old)
        self._out[:, part].lerp_(out.float(), weight[..., None])
        self._log_sum[:, part] = torch.logaddexp(old, log_sum)


def compute_type(query: torch.Tensor) -> torch.dtype:
    """Attention computes in the model's type, but FP16 kernels are slow and coarse on a CPU."""
    if query.dtype == torch.float16 and query.device.type == "cpu":
        return torch.float32
    return query.dtype
