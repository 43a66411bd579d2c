# SPDX-License-Identifier: Apache-2.0
"""Rows to and from the blocks of vLLM's KV cache on a processor.

A block's bytes are a format of the instruction set and not of the model: keys are transposed on
AVX-512, grouped on AMX, and otherwise elsewhere. So rows are stored, and never blocks. How rows lie
in a block is found by writing numbers through vLLM's own operation and reading them back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

# Called with keys and values, (tokens, kv_heads, head_dim), key and value halves of blocks,
# (blocks, kv_heads, block_tokens, head_dim), and slots, int64 (tokens,).
PutRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
_ROW_ALIGNMENT = 64


def row_bytes_of(kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of a row: K of all KV heads, then V, padded to 64 bytes."""
    unpadded = 2 * kv_heads * head_dim * dtype.itemsize
    return -(-unpadded // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


class UnknownBlocksError(Exception):
    """Blocks that rows cannot be brought to and taken from."""


class KvBlocks:
    """The KV blocks of one layer.

    Parameters
    ----------
    blocks
        vLLM's tensor, (blocks, kv_heads, block_tokens, 2 * head_dim).
    put
        Writes rows to slots as vLLM does itself.

    Raises
    ------
    UnknownBlocksError
        Where the tensor is another, or what was written does not come back.

    Attributes
    ----------
    row_bytes
        Bytes of a row: K of all KV heads, then V, padded to 64 bytes.
    """

    def __init__(self, blocks: torch.Tensor, put: PutRows) -> None:
        if blocks.dim() != 4 or blocks.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise UnknownBlocksError(
                f"KV blocks of shape {tuple(blocks.shape)} and type {blocks.dtype} are not stored: "
                "the store takes (blocks, kv_heads, tokens, 2 * head_dim) in 16 or 32 bits"
            )
        self._put = put
        _, self._heads, self.block_tokens, double = blocks.shape
        self._head_dim = double // 2
        self._items = 2 * self._heads * self._head_dim
        self.row_bytes = row_bytes_of(self._heads, self._head_dim, blocks.dtype)
        self._type = blocks.dtype
        code = torch.int32 if blocks.element_size() == 4 else torch.int16
        self._codes = blocks.view(blocks.shape[0], self._heads, -1).view(code).numpy()
        self._keys, self._values = _halves(blocks)
        self._order = self._probed()
        half = self.block_tokens * self._head_dim
        transposed = torch.arange(half).view(self._head_dim, self.block_tokens).t().reshape(-1)
        self._has_columns = bool(
            torch.equal(self._order[:half], transposed)
            and torch.equal(self._order[half:], torch.arange(half, 2 * half))
        )

    def scatter(self, rows: NDArray[np.uint8], first: int, blocks: Sequence[int]) -> None:
        """Write rows to their blocks.

        Parameters
        ----------
        rows
            uint8 (tokens, row_bytes).
        first
            Token position of the first.
        blocks
            Blocks of the request from its first token on.
        """
        size, heads, dim = self.block_tokens, self._heads, self._head_dim
        if first % size or len(rows) % size:
            states = torch.from_numpy(rows).view(self._type)[:, : self._items]
            keys, values = states.view(len(rows), 2, heads, dim).unbind(1)
            slots = self._slots(first, len(rows), blocks)
            self._put(keys, values, self._keys, self._values, slots)
            return
        codes = rows.view(self._codes.dtype)[:, : self._items]
        half, begin = size * dim, first // size
        for at in range(len(rows) // size):
            target = self._codes[blocks[begin + at]]
            # (kv_heads, 2, tokens, head_dim)
            own = codes[at * size : (at + 1) * size].reshape(size, 2, heads, dim)
            own = own.transpose(2, 1, 0, 3)
            if self._has_columns:
                target[:, :half].reshape(heads, dim, size)[:] = own[:, 0].transpose(0, 2, 1)
                target[:, half:].reshape(heads, size, dim)[:] = own[:, 1]
            else:
                target[:, self._order.numpy()] = own.reshape(heads, 2 * half)

    def gather(self, first: int, blocks: Sequence[int], out: NDArray[np.uint8]) -> None:
        """Read rows from their blocks.

        Parameters
        ----------
        first
            Token position of the first.
        blocks
            Blocks of the request from its first token on.
        out
            uint8 (tokens, row_bytes).
        """
        # Through numpy, which needs no team of threads for a copy: vLLM's own compute meanwhile.
        size = self.block_tokens
        begin, end = first // size, -(-(first + len(out)) // size)
        own = self._ordered(self._codes[np.asarray(blocks[begin:end])])
        target = out.view(self._codes.dtype)
        target[:, self._items :] = 0
        both = target[:, : self._items].reshape(len(out), 2, self._heads, self._head_dim)
        at = 0
        for block in own:
            offset = (first + at) % size
            count = min(size - offset, len(out) - at)
            both[at : at + count] = block[:, :, offset : offset + count].transpose(2, 1, 0, 3)
            at += count

    # --- inside ----------------------------------------------------------------------------

    def _ordered(self, blocks: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return blocks, (n, kv_heads, items), as (n, kv_heads, 2, block_tokens, head_dim)."""
        count, tokens, dim = len(blocks), self.block_tokens, self._head_dim
        if not self._has_columns:
            whole = np.take(blocks, self._order.numpy(), axis=2)
            return whole.reshape(count, self._heads, 2, tokens, dim)
        half = tokens * dim
        whole = np.empty((count, self._heads, 2, tokens, dim), blocks.dtype)
        keys = blocks[:, :, :half].reshape(count, self._heads, dim, tokens)
        whole[:, :, 0] = keys.transpose(0, 1, 3, 2)
        whole[:, :, 1] = blocks[:, :, half:].reshape(count, self._heads, tokens, dim)
        return whole

    def _slots(self, first: int, count: int, blocks: Sequence[int]) -> torch.Tensor:
        positions = torch.arange(first, first + count)
        numbers = torch.tensor(blocks)[positions // self.block_tokens]
        return numbers * self.block_tokens + positions % self.block_tokens

    def _probed(self) -> torch.Tensor:
        """Return where the items of keys, then values, (2, tokens, head_dim), lie in a block."""
        tokens, dim = self.block_tokens, self._head_dim
        if max(tokens, dim) > 256:
            # Whole numbers up to there have codes of their own in all types.
            raise UnknownBlocksError(
                f"blocks of {tokens} tokens and heads of {dim} channels are not stored: 256 at most"
            )
        scratch = torch.zeros((1, self._heads, tokens, 2 * dim), dtype=self._type)
        slots = torch.arange(tokens)
        found = []
        numbers = torch.arange(tokens)[:, None], torch.arange(dim)[None, :]
        for part in (0, 1):
            for number in numbers:
                states = torch.zeros((2, tokens, self._heads, dim), dtype=self._type)
                # One more than the number: nothing else in the block is more than 0.
                states[part] = (number + 1).expand(tokens, dim)[:, None, :].to(self._type)
                scratch.zero_()
                self._put(states[0], states[1], *_halves(scratch), slots)
                found.append(scratch.view(1, self._heads, -1)[0, -1].to(torch.int64) - 1)
        order = torch.full((2, tokens, dim), -1)
        for part in (0, 1):
            token, channel = found[2 * part : 2 * part + 2]
            places = torch.nonzero((token >= 0) & (channel >= 0))[:, 0]
            if len(places) == tokens * dim:
                order[part, token[places], channel[places]] = places
        if (order < 0).any() or len(set(order.reshape(-1).tolist())) != 2 * tokens * dim:
            raise UnknownBlocksError(
                f"rows that were written to a block of {tokens} tokens do not come back from it: "
                "this build of vLLM lays its KV cache out in a way that the store does not know"
            )
        return order.reshape(-1)


def _halves(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the key and the value half of blocks, as vLLM's operation takes them."""
    count, heads, tokens, double = blocks.shape
    keys, values = blocks.view(count, heads, 2 * tokens, double // 2).chunk(2, dim=2)
    return keys, values
