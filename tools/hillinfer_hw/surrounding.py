# SPDX-License-Identifier: Apache-2.0
"""What leads a process to an emulated card, as an object and as the file that the host reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hillinfer.devices.xrt.environment import ENVIRONMENT_FILE


@dataclass(frozen=True)
class Surrounding:
    """What a process needs to find the emulated card.

    Parameters
    ----------
    folder
        Holds everything the variables point to.
    xclbin
        To be loaded.
    environment
        Variables to set.
    """

    folder: Path
    xclbin: Path
    environment: dict[str, str]


def write_environment(surrounding: Surrounding, binding: Path) -> None:
    """Leave the variables beside the xclbin, for the host's worker.

    Parameters
    ----------
    surrounding
        The card's.
    binding
        Folder of the module pyxrt, which the worker imports.
    """
    lead: Mapping[str, str] = surrounding.environment | {"PYTHONPATH": str(binding)}
    file = surrounding.xclbin.with_name(ENVIRONMENT_FILE)
    file.write_text(json.dumps(lead, indent=1) + "\n", encoding="utf-8")
