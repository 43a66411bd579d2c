# SPDX-License-Identifier: Apache-2.0
"""Weights in the order of memory that oneDNN's kernels read fastest, with the same numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hillinfer.errors import UnsupportedFeatureError
from hillinfer.hf.projections.projection_way import PackedLinear, ProjectionWay, Restores


class Prepacked(ProjectionWay):
    """oneDNN's own order of the joined weights; the same numbers up to the order of summing.

    The plain weight comes back from the packed one bit for bit, so the model's own is let go
    unless another module, such as a tied embedding, needs it.
    """

    restores: ClassVar[Restores] = Restores.FROM_COPY

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Reorder the weight once, for any number of rows of the input."""
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            raise UnsupportedFeatureError(
                f"projections='prepacked': oneDNN cannot pack {str(weight.dtype)[6:]} weights on "
                f"this machine ({str(error).splitlines()[0]}): use float32, or projections='fused'"
            ) from error
        return _PrepackedLinear(packed, bias)

    def held_bytes(self, outputs: int, inputs: int, bias: int, item_bytes: int) -> int:
        """Return those of a reordered copy; see `ProjectionWay`."""
        return (outputs * inputs + bias) * item_bytes


@dataclass(frozen=True)
class _PrepackedLinear:
    restores: ClassVar[Restores] = Restores.FROM_COPY

    packed: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            states, self.packed, self.bias, "none", [], ""
        )
        return out

    @property
    def held_bytes(self) -> int:
        # Opaque tensors do not tell their size; oneDNN pads the outputs of a block, if at all.
        weight = self.packed.numel() * self.packed.dtype.itemsize
        return weight + (0 if self.bias is None else self.bias.nbytes)

    def plain_weight(self) -> torch.Tensor:
        return self.packed.to_dense()
