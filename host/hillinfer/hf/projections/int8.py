# SPDX-License-Identifier: Apache-2.0
"""Weights as INT8 codes with a scale per output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import linear

from hillinfer.hf.projections.projection_way import PackedLinear, ProjectionWay, Restores

_LARGEST_CODE = 127
# From here on widening the codes once costs less than torch's kernel, which is made for few rows.
_MANY_ROWS = 64
# The kernel reads a row of codes in vectors of this many and runs past the end of any other.
_VECTOR = 16


class Int8(ProjectionWay):
    """INT8 weights, inputs as they are: activations are not quantised.

    A weight is rounded to the nearest of 255 multiples of its output's scale, a bfloat16. With few
    rows torch's weight-only kernel computes, on inputs in bfloat16 and with float32 sums; with
    more the codes are widened and products are float32. The model's own weights stay,
    since they cannot be had back.
    """

    packing_copies: ClassVar[int] = 3

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Code every output's weights with a scale of its own."""
        wide = weight.float()
        tiny = torch.finfo(torch.float32).tiny
        # Codes follow from the scale as it is stored, so rounding the scale loses nothing more.
        scales = (wide.abs().amax(1) / _LARGEST_CODE).clamp_min(tiny).to(torch.bfloat16)
        codes = (wide / scales.float()[:, None]).round_().clamp_(-_LARGEST_CODE, _LARGEST_CODE)
        return _Int8Linear(codes.to(torch.int8), scales, bias)

    def held_bytes(self, outputs: int, inputs: int, bias: int, item_bytes: int) -> int:
        """Return those of codes, scales and bias; see `ProjectionWay`."""
        return outputs * inputs + 2 * outputs + bias * item_bytes


@dataclass(frozen=True)
class _Int8Linear:
    restores: ClassVar[Restores] = Restores.NOTHING

    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        rows = states.reshape(-1, states.shape[-1])
        if len(rows) < _MANY_ROWS and rows.shape[1] % _VECTOR == 0:
            few = rows.to(torch.bfloat16).contiguous()
            out = torch._weight_int8pack_mm(few, self.codes, self.scales).to(states.dtype)
        else:
            wide = linear(rows.float(), self.codes.float()) * self.scales.float()
            out = wide.to(states.dtype)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*states.shape[:-1], -1)

    @property
    def held_bytes(self) -> int:
        parts = (self.codes, self.scales, self.bias)
        return sum(one.nbytes for one in parts if one is not None)

    def plain_weight(self) -> torch.Tensor:
        raise NotImplementedError("rounded weights give nothing back")
