# SPDX-License-Identifier: Apache-2.0
"""What a user hears when a device is lost."""

from __future__ import annotations

import warnings

from hillinfer.devices.errors import DeviceError
from hillinfer.errors import HillInferWarning


def warn_of_loss(error: DeviceError) -> None:
    """Tell the user that scoring goes on without the device."""
    warnings.warn(
        f"{error}; the host goes on scoring and codes the lost shadow again: same tokens, slower",
        HillInferWarning,
        stacklevel=2,
    )
