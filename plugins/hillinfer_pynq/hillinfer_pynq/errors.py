# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with the PYNQ front."""

from __future__ import annotations

from hillinfer.errors import HillInferError


class PynqError(HillInferError):
    """A front that does not start, fails, answers wrongly or hangs; nothing of it is left."""
