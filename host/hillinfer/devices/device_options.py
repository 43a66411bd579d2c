# SPDX-License-Identifier: Apache-2.0
"""What a user can choose about a device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DeviceOptions:
    """How a device is opened and what it is given.

    Parameters
    ----------
    beta
        Host-scored to device-scored segments, Mc/Ms (HillInfer equation 4); 0 gives the device
        every full group. None for what the rates of host and device say.
    xclbin
        Image of the kernels; devices `xrt` and `pynq` need one.
    pynq_python
        Interpreter of PYNQ's environment; None for the one that `pynq_python` finds.
    """

    beta: float | None = None
    xclbin: Path | None = None
    pynq_python: Path | None = None
