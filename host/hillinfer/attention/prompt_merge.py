# SPDX-License-Identifier: Apache-2.0
"""Exact attention of a prompt's queries on the processor, a block of rows after the other, in C++.

torch's kernel on a CPU packs each head's keys anew and wants them widened. Here a block is packed
once for all query heads that share it, out of the 16 bits that it lies in.
"""

from __future__ import annotations

import torch

from hillinfer.native.library import Variant, native_library
from hillinfer.native.signatures import PromptBlock

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
    scaling
        Factor on inner products.
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
