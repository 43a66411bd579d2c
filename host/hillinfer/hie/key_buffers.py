# SPDX-License-Identifier: Apache-2.0
"""Memory that key codes pass through on their way from a shadow to the multiplication."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from hillinfer.hie.scratch import product_tokens
from hillinfer_model.kernel_spec import KernelSpec


class KeyBuffers:
    """Room for the key codes of one piece: as stored, and one place of every byte at a time.

    Parameters
    ----------
    spec
        Gives the size of a piece.

    Attributes
    ----------
    packed
        uint8, flat: the codes as stored.
    spread
        int64, flat: the bytes with one code each; empty where a byte stores no more than one.
    values
        float32, flat: those codes as numbers.
    """

    def __init__(self, spec: KernelSpec) -> None:
        codes = product_tokens(spec) * spec.kv_heads * spec.padded_head_dim
        packed_bytes = codes * spec.key_mode.code_bits // 8
        spread_words = 0 if packed_bytes == codes else packed_bytes // 8
        self.packed = np.empty(packed_bytes, dtype=np.uint8)
        self.spread = torch.empty(spread_words, dtype=torch.int64)
        self.values = torch.empty(packed_bytes, dtype=torch.float32)


class KeyBufferPool:
    """Buffers kept from one call to the next, one set for each call under way at once.

    New memory costs a page fault per 4 KiB when first written, as much time as the arithmetic.

    Parameters
    ----------
    spec
        Gives the size of the buffers.
    """

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec
        self._free: deque[KeyBuffers] = deque()

    def take(self) -> KeyBuffers:
        """Return buffers that nobody else holds."""
        try:
            return self._free.pop()
        except IndexError:
            return KeyBuffers(self._spec)

    def give_back(self, buffers: KeyBuffers) -> None:
        """Make buffers available to the next call."""
        self._free.append(buffers)
