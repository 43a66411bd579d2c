# SPDX-License-Identifier: Apache-2.0
"""How keys and values of one token become one row."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.model_shape import ModelShape, StoredType

_FP16_MAX = 65504.0
_ITEM_BYTES = 2


class RowLayout:
    """Packs and views rows: K of all KV heads, then V, in the stored type (design, section 2).

    Parameters
    ----------
    shape
        The model's.
    """

    def __init__(self, shape: ModelShape) -> None:
        self._kv_heads = shape.kv_heads
        self._head_dim = shape.head_dim
        self._items = shape.kv_heads * shape.head_dim
        self.row_bytes = shape.row_bytes
        self._padded = shape.row_bytes > 2 * self._items * _ITEM_BYTES
        self.stored_type = (
            torch.bfloat16 if shape.stored_type is StoredType.BFLOAT16 else torch.float16
        )

    def round(self, states: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Round keys or values to the stored type.

        Parameters
        ----------
        states
            Keys or values of any shape in the model's type.

        Returns
        -------
        The rounded tensor in the stored type, and how many finite values did not fit FP16 (they
        become ±65504).
        """
        if states.dtype == self.stored_type:
            return states, 0
        rounded = states.to(self.stored_type)
        if self.stored_type is torch.bfloat16:
            return rounded, 0
        # One pass where nothing overflows, as in all models that suit the type; NaN goes on below.
        least, most = states.aminmax() if states.numel() else (states.new_zeros(()),) * 2
        if float(least) >= -_FP16_MAX and float(most) <= _FP16_MAX:
            return rounded, 0
        overflowed = int((rounded.isinf() & states.isfinite()).sum())
        if overflowed:
            rounded = torch.where(
                states.isfinite(), states.clamp(-_FP16_MAX, _FP16_MAX), states
            ).to(self.stored_type)
        return rounded, overflowed

    def pack(self, keys: torch.Tensor, values: torch.Tensor, out: NDArray[np.uint8]) -> None:
        """Write rows.

        Parameters
        ----------
        keys, values
            Stored type, shape (kv_heads, tokens, head_dim), on the CPU.
        out
            uint8 of shape (tokens, row_bytes).
        """
        # Through numpy: the views of a single token cost torch thrice as much.
        codes, used = out.view(np.int16), 2 * self._items
        both = codes[:, :used].reshape(len(out), 2, self._kv_heads, self._head_dim)
        for part, states in enumerate((keys, values)):
            both[:, part] = states.detach().view(torch.int16).numpy().transpose(1, 0, 2)
        if self._padded:
            codes[:, used:] = 0

    def keys(self, rows: torch.Tensor) -> torch.Tensor:
        """View the keys of uint8 rows (tokens, row_bytes) as (tokens, kv_heads, head_dim)."""
        return self._part(rows, 0)

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        """View the values of uint8 rows (tokens, row_bytes) as (tokens, kv_heads, head_dim)."""
        return self._part(rows, self._items)

    def _part(self, rows: torch.Tensor, start: int) -> torch.Tensor:
        items = rows.view(self.stored_type)[:, start : start + self._items]
        return items.view(len(rows), self._kv_heads, self._head_dim)
