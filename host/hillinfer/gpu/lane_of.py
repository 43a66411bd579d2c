# SPDX-License-Identifier: Apache-2.0
"""Which copies a model needs, by where it lies."""

from __future__ import annotations

from collections.abc import Collection

import torch

from hillinfer.gpu.copy_lane import CopyLane
from hillinfer.gpu.cuda_lane import CudaLane


def lane_of(devices: Collection[torch.device]) -> CopyLane | None:
    """Return a lane to the one CUDA GPU that a whole model is on, or None.

    On a processor rows are attended to where they lie. Other accelerators, and models in parts on
    several devices, get plain copies.

    Parameters
    ----------
    devices
        Those of the model's parameters, each once.
    """
    if len(devices) != 1:
        return None
    (device,) = devices
    return CudaLane(device) if device.type == "cuda" else None
