# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a device while it is used."""

from __future__ import annotations

from hillinfer.errors import HillInferError


class DeviceError(HillInferError):
    """A device failed, hung or vanished; what it held must be made again on the host."""
