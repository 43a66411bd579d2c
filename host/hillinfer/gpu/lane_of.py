# SPDX-License-Identifier: Apache-2.0
"""Which copies a model's device needs."""

from __future__ import annotations

import torch

from hillinfer.gpu.copy_lane import CopyLane
from hillinfer.gpu.cuda_lane import CudaLane


def lane_of(device: torch.device) -> CopyLane | None:
    """Return a lane to a model's GPU; None on a processor, which reads rows where they lie.

    Other accelerators get plain copies.
    """
    return CudaLane(device) if device.type == "cuda" else None
