# SPDX-License-Identifier: Apache-2.0
"""Variables that lead to the card of an xclbin."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

from hillinfer.devices.xrt.xclbin import HW_EMU, Xclbin
from hillinfer.errors import SettingsError

# Beside an xclbin for an emulated card.
ENVIRONMENT_FILE = "environment.json"


def environment_of(xclbin: Path) -> dict[str, str]:
    """Return the variables beside an xclbin for an emulated card; none for a card's.

    Parameters
    ----------
    xclbin
        Path of the image.

    Raises
    ------
    SettingsError
        Where the file is there and does not hold names and values, or others than the user could
        have written it: its variables decide what runs.
    XclbinError
        Where the image cannot be read.
    """
    file = xclbin.with_name(ENVIRONMENT_FILE)
    if not file.is_file() or Xclbin.read(xclbin).mode != HW_EMU:
        return {}
    facts = file.stat()
    if facts.st_uid not in (0, os.getuid()) or facts.st_mode & stat.S_IWOTH:
        raise SettingsError(
            f"{file} says what runs beside this process, and others may have written it: own it "
            "and take the right to write it from others"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict) or not all(
        isinstance(part, str) for item in content.items() for part in item
    ):
        raise SettingsError(f"{file} does not hold names and values of variables")
    return content
