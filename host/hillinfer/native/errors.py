# SPDX-License-Identifier: Apache-2.0
"""Why the native library cannot be used."""

from __future__ import annotations

from hillinfer.errors import HillInferError

NOT_FINITE = "the query holds an infinity or a NaN, or becomes one when scaled"


class NativeError(HillInferError):
    """The native library is missing, is another version's, or refuses a call."""
