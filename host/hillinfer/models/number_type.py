# SPDX-License-Identifier: Apache-2.0
"""Which floating-point type a model computes in."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from hillinfer.machine.processor import ProcessorFacts

if TYPE_CHECKING:
    import torch


class NumberType(StrEnum):
    """What `--dtype` takes."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    def resolve(self, own: torch.dtype, device: str, processor: ProcessorFacts) -> torch.dtype:
        """Return the torch type to load a model in.

        AUTO is the model's own type; on a CPU it is float32 where that is faster: for float16
        always, for bfloat16 where the processor does not multiply it in hardware.

        Parameters
        ----------
        own
            Type of the weights as stored.
        device
            `cpu` or `cuda`.
        processor
            The CPU.
        """
        import torch

        if self is not NumberType.AUTO:
            chosen = getattr(torch, self.value)
            assert isinstance(chosen, torch.dtype)
            return chosen
        slow = own is torch.float16 or (own is torch.bfloat16 and not processor.fast_bfloat16)
        return torch.float32 if device == "cpu" and slow else own
