# SPDX-License-Identifier: Apache-2.0
"""Layers that share an input as one matrix product, with the model's own numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import linear

from hillinfer.hf.projections.projection_way import PackedLinear, ProjectionWay, Restores


class Fused(ProjectionWay):
    """Query, key and value projection in one product, gate and up projection in another.

    The same products are summed; at most the order of summing changes. The model's weights move
    into the joined matrix, so nothing is held twice.
    """

    least_layers: ClassVar[int] = 2
    restores: ClassVar[Restores] = Restores.FROM_SHARED_MEMORY

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Keep the joined matrix as it is."""
        return _FusedLinear(weight, bias)

    def held_bytes(self, outputs: int, inputs: int, bias: int, item_bytes: int) -> int:
        """Return those of a joined bias; see `ProjectionWay`."""
        return bias * item_bytes


@dataclass(frozen=True)
class _FusedLinear:
    restores: ClassVar[Restores] = Restores.FROM_SHARED_MEMORY

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return linear(states, self.weight, self.bias)

    @property
    def held_bytes(self) -> int:
        # The weight is the model's own; only a joined bias is new.
        return 0 if self.bias is None else self.bias.nbytes

    def plain_weight(self) -> torch.Tensor:
        return self.weight
