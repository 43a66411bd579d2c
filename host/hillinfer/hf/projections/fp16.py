# SPDX-License-Identifier: Apache-2.0
"""Weights as packed FP16, computed with in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hillinfer.errors import UnsupportedFeatureError
from hillinfer.hf.projections.projection_way import PackedLinear, ProjectionWay, Restores

_LARGEST = torch.finfo(torch.float16).max


class Fp16(ProjectionWay):
    """FBGEMM's packed FP16 weights; inputs, products and sums are float32.

    Weights of float32 are rounded to 11 bits, half the bytes; those of bfloat16 keep their bits
    down to 2^-14 and lose some below. The model's own weights stay, since they cannot be had back.
    """

    packing_copies: ClassVar[int] = 2

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Round and pack, and refuse weights beyond the range of FP16."""
        largest = float(weight.abs().max())
        if not largest <= _LARGEST:
            raise UnsupportedFeatureError(
                f"projections='fp16': a weight of {largest:g} is beyond FP16's {_LARGEST:g}: use "
                "projections='fused'"
            )
        try:
            packed = torch.ops.quantized.linear_prepack_fp16(
                weight.float(), None if bias is None else bias.float()
            )
        except RuntimeError as error:
            raise UnsupportedFeatureError(
                "projections='fp16': this torch has no FBGEMM for this machine "
                f"({str(error).splitlines()[0]}): use projections='fused'"
            ) from error
        held = 2 * weight.numel() + (0 if bias is None else 4 * bias.numel())
        return _Fp16Linear(packed, held)

    def held_bytes(self, outputs: int, inputs: int, bias: int, item_bytes: int) -> int:
        """Return two for each weight, four for each item of a bias; see `ProjectionWay`."""
        return 2 * outputs * inputs + 4 * bias


@dataclass(frozen=True)
class _Fp16Linear:
    restores: ClassVar[Restores] = Restores.NOTHING

    packed: Any
    held_bytes: int

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(states.float(), self.packed)
        return out.to(states.dtype)

    def plain_weight(self) -> torch.Tensor:
        raise NotImplementedError("rounded weights give nothing back")
