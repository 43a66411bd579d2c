# SPDX-License-Identifier: Apache-2.0
"""CUDA GPUs as torch sees them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuFacts:
    """One GPU.

    Parameters
    ----------
    name
        As the driver calls it.
    free_bytes, total_bytes
        Device memory.
    """

    name: str
    free_bytes: int
    total_bytes: int


def visible_gpus() -> tuple[GpuFacts, ...] | None:
    """Return the GPUs that torch can use; None where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(
        GpuFacts(torch.cuda.get_device_name(index), *torch.cuda.mem_get_info(index))
        for index in range(torch.cuda.device_count())
    )
