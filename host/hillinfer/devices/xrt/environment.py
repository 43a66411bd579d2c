# SPDX-License-Identifier: Apache-2.0
"""Variables that lead to the card of an xclbin."""

from __future__ import annotations

import json
from pathlib import Path

from hillinfer.errors import SettingsError

# Beside an xclbin for an emulated card.
ENVIRONMENT_FILE = "environment.json"


def environment_of(xclbin: Path) -> dict[str, str]:
    """Return the variables beside an xclbin for an emulated card; none for a card.

    Raises
    ------
    SettingsError
        Where the file is there and does not hold names and values.
    """
    file = xclbin.with_name(ENVIRONMENT_FILE)
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict) or not all(
        isinstance(part, str) for item in content.items() for part in item
    ):
        raise SettingsError(f"{file} does not hold names and values of variables")
    return content
