# SPDX-License-Identifier: Apache-2.0
"""Why the native scorer cannot be used."""

from __future__ import annotations

from hillinfer.errors import HillInferError


class NativeError(HillInferError):
    """The native library is missing, is another version's, or refuses a call."""
