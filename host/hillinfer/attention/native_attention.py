# SPDX-License-Identifier: Apache-2.0
"""Attention of one token over rows where they lie, in C++."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.attention.native_softmax import NativeSoftmax, described
from hillinfer.model_shape import ModelShape
from hillinfer.native.errors import NativeError
from hillinfer.native.library import native_library
from hillinfer.native.variant import Variant

MOST_GROUP_SIZE = 128


class NativeAttention:
    """Attends with one token's queries to rows at any addresses, reading each once, in place.

    Softmax and sums are float32; stored items are widened in registers. Output bits depend on the
    rows' values and order alone: not on their addresses, the number of threads or how many calls
    brought them. Instruction sets differ in the last bits. NaN and infinities spread as in torch.

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
        More query heads share a KV head than the library has room for.
    """

    def __init__(self, shape: ModelShape, variant: Variant | None = None) -> None:
        library = self._library = native_library()
        self.shape = shape
        self.variant = variant or library.variants[0]
        if self.variant not in library.variants:
            raise NativeError(f"this processor has no {self.variant}")
        # Asking an enumeration takes long, and every layer would at every step.
        self._number = self.variant.number
        if not 1 <= shape.group_size <= MOST_GROUP_SIZE:
            raise ValueError(
                f"{shape.group_size} query heads per KV head: the native library attends with 1 to"
                f" {MOST_GROUP_SIZE}; use torch"
            )
        self._state_bytes = library.attention_bytes(ctypes.byref(described(shape, None, 1.0)))

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
        return NativeSoftmax(self.shape, self.variant, query, scaling, self._state_bytes)

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
