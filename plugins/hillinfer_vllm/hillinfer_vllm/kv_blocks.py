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

from hillinfer.native.library import native_library
from hillinfer.native.signatures import BlockRows
from hillinfer_model.kernel_spec import GROUP_TOKENS

# Called with keys and values, (tokens, kv_heads, head_dim), key and value halves of blocks,
# (blocks, kv_heads, block_tokens, head_dim), and slots, int64 (tokens,).
PutRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
_ROW_ALIGNMENT = 64
FIELDS = {name: at for at, (name, *_) in enumerate(BlockRows._fields_)}
"""Where fields of `BlockRows` are among what `KvBlocks.fields` returns; all have 8 bytes."""


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
        half = self.block_tokens * self._head_dim
        if self._codes.strides[1:] != (2 * half * blocks.itemsize, blocks.itemsize):
            raise UnknownBlocksError("KV blocks whose heads lie apart are not stored")
        order = self._probed()
        transposed = torch.arange(half).view(self._head_dim, self.block_tokens).t().reshape(-1)
        self._has_columns = bool(
            torch.equal(order[:half], transposed)
            and torch.equal(order[half:], torch.arange(half, 2 * half))
        )
        self._places = order.to(torch.int32).numpy()

    def scatter(self, rows: NDArray[np.uint8], first: int, blocks: Sequence[int]) -> None:
        """Write rows to their blocks.

        Parameters
        ----------
        rows
            uint8 (tokens, row_bytes), contiguous.
        first
            Token position of the first.
        blocks
            Blocks of the request from its first token on.
        """
        self._move("hillinfer_rows_to_blocks", rows, first, range(first, first + len(rows)), blocks)

    def land(
        self,
        rows: NDArray[np.uint8],
        position: int,
        wanted: range,
        blocks: Sequence[int] | NDArray[np.int64],
        salts: NDArray[np.uint32],
    ) -> NDArray[np.uint32]:
        """Write rows of whole groups to their blocks, and return the checksum of each group.

        Each group is placed while it is in the cache of the processor that took its checksum. Rows
        are known to be right once the caller has compared them.

        Parameters
        ----------
        rows
            uint8 (groups * 64, row_bytes), contiguous.
        position
            Token position of the first.
        wanted
            Token positions that go anywhere.
        blocks
            Blocks of the request from its first token on.
        salts
            uint32 (groups,), the checksum of what comes before each group.
        """
        sums = np.empty(len(salts), np.uint32)
        assert len(rows) == len(salts) * GROUP_TOKENS
        name, salts = "hillinfer_rows_to_blocks", np.ascontiguousarray(salts)
        self._move(name, rows, position, wanted, blocks, salts.ctypes.data, sums.ctypes.data)
        return sums

    def fields(self, wanted: range, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the fields of `BlockRows` for rows of a request; rows themselves are none yet.

        Parameters
        ----------
        wanted
            Token positions that go anywhere.
        blocks
            int64, blocks of the request from its first token on; they have to stay.
        """
        self._check(wanted, blocks)
        given = BlockRows(
            *(None, 0, self.row_bytes, 0, wanted.start, wanted.stop),
            *(self._heads, self._head_dim, self.block_tokens, self._type.itemsize),
            *(self._codes.strides[0], self._codes.ctypes.data, blocks.ctypes.data),
            *(None if self._has_columns else self._places.ctypes.data, None, None),
        )
        return np.frombuffer(bytes(given), np.int64)

    def gather(self, first: int, blocks: Sequence[int], out: NDArray[np.uint8]) -> None:
        """Read rows from their blocks.

        Parameters
        ----------
        first
            Token position of the first.
        blocks
            Blocks of the request from its first token on.
        out
            uint8 (tokens, row_bytes), contiguous.
        """
        # No team of threads for a copy: vLLM's own compute meanwhile.
        out[:, self._items * self._type.itemsize :] = 0
        name, wanted = "hillinfer_rows_from_blocks", range(first, first + len(out))
        self._move(name, out, first, wanted, blocks)

    # --- inside ----------------------------------------------------------------------------

    def _move(
        self,
        name: str,
        rows: NDArray[np.uint8],
        position: int,
        wanted: range,
        blocks: Sequence[int] | NDArray[np.int64],
        salts: int | None = None,
        sums: int | None = None,
    ) -> None:
        """Move rows of wanted positions; Python's global lock is let go of meanwhile."""
        numbers = np.asarray(blocks, np.int64)
        own = range(max(position, wanted.start), min(position + len(rows), wanted.stop))
        if not own:
            own = range(position, position)
        if not rows.flags.c_contiguous:
            raise IndexError("rows lie apart")
        self._check(own, numbers)
        given = BlockRows(
            *(rows.ctypes.data, len(rows), self.row_bytes, position, own.start, own.stop),
            *(self._heads, self._head_dim, self.block_tokens, self._type.itemsize),
            *(self._codes.strides[0], self._codes.ctypes.data, numbers.ctypes.data),
            *(None if self._has_columns else self._places.ctypes.data, salts, sums),
        )
        getattr(native_library().functions, name)(given)

    def _check(self, wanted: range, numbers: NDArray[np.int64]) -> None:
        """Raise IndexError where positions have no blocks, or none that are there."""
        size = self.block_tokens
        used = numbers[wanted.start // size : -(-wanted.stop // size)]
        if len(used) < -(-wanted.stop // size) - wanted.start // size:
            raise IndexError("rows have no blocks")
        if len(used) and not 0 <= used.min() <= used.max() < len(self._codes):
            raise IndexError("rows go to a block that is not there")

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
