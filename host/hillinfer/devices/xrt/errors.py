# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a card or with what is loaded on it."""

from __future__ import annotations

from hillinfer.errors import SettingsError


class XclbinError(SettingsError):
    """An xclbin that cannot be used; the message names the file and the reason."""
