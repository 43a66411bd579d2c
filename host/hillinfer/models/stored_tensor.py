# SPDX-License-Identifier: Apache-2.0
"""What a file says of one of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a weights file.

    Parameters
    ----------
    name
        As in the file.
    shape
        As torch writes it.
    """

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return prod(self.shape)
