# SPDX-License-Identifier: Apache-2.0
"""The seam between a model's linear layers and what computes them instead."""

from __future__ import annotations

from enum import Enum, auto
from typing import ClassVar, Protocol

import torch


class Restores(Enum):
    """What the plain weight can be had from, bit for bit, while it is packed."""

    NOTHING = auto()
    FROM_COPY = auto()
    FROM_SHARED_MEMORY = auto()


class PackedLinear(Protocol):
    """Weights of one or several linear layers that share their input, as one matrix.

    Parameters
    ----------
    restores
        Decides what the model's own weights do meanwhile: stay, are let go, or live in the packed
        memory.
    """

    restores: ClassVar[Restores]

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Return (..., outputs) of (..., inputs), in the type of `states`."""

    @property
    def held_bytes(self) -> int:
        """Bytes that packing allocated and that live as long as this does."""

    def plain_weight(self) -> torch.Tensor:
        """Return the weight (outputs, inputs) bit for bit; called unless `restores` is NOTHING."""


class ProjectionWay:
    """One way to compute linear layers; a subclass overrides `pack`, and says what it holds.

    Parameters
    ----------
    least_layers
        Layers that must share an input for packing to change anything.
    restores
        That of what `pack` returns.
    packing_copies
        Float32 copies of a matrix that packing makes for a moment, beside what it holds.
    """

    least_layers: ClassVar[int] = 1
    restores: ClassVar[Restores] = Restores.NOTHING
    packing_copies: ClassVar[int] = 0

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear | None:
        """Pack one matrix; None leaves the layers as they are, which is what stock means.

        Parameters
        ----------
        weight
            (outputs, inputs), contiguous, on the CPU, float32 or bfloat16; not to be changed.
        bias
            (outputs,), or None.

        Raises
        ------
        UnsupportedFeatureError
            Where this machine or this weight cannot be packed.
        """
        return None

    def held_bytes(self, outputs: int, inputs: int, bias: int, item_bytes: int) -> int:
        """Return the bytes that a packed matrix allocates, before it is packed.

        Parameters
        ----------
        outputs, inputs
            Of the matrix.
        bias
            Items of its bias, 0 without one.
        item_bytes
            Of the model's type.
        """
        return 0
