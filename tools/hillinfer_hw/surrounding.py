# SPDX-License-Identifier: Apache-2.0
"""Environment variables that lead a process to an emulated card, and the file that holds them."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hillinfer.devices.xrt.process import ENVIRONMENT_FILE


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
        Variables that the host finds beside the xclbin.
    shell
        Variables that it does not: they name programs and libraries elsewhere, so the process must
        have them from whoever starts it.
    """

    folder: Path
    xclbin: Path
    environment: dict[str, str]
    shell: Mapping[str, str] = field(default_factory=dict)

    def for_process(self) -> dict[str, str]:
        """Return the variables of `shell` as a process that this one starts needs them."""
        return {
            name: os.pathsep.join(dict.fromkeys([value, *_more(name)]))
            for name, value in self.shell.items()
        }


# What a shell sources to get the others; what it has of these already stays behind them.
SETUP_FILE = "setup.sh"
_LISTS = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "PYTHONPATH")


def _more(name: str) -> list[str]:
    return [os.environ[name]] if name in _LISTS and os.environ.get(name) else []


def write_environment(surrounding: Surrounding) -> None:
    """Leave beside the xclbin what the host reads there, and what its user's shell may source.

    Nobody else may write the folder then: the host refuses it otherwise.

    Parameters
    ----------
    surrounding
        The card's.
    """
    folder = surrounding.xclbin.parent
    inside = {
        name: os.path.relpath(value, folder) if name != "XCL_EMULATION_MODE" else value
        for name, value in surrounding.environment.items()
    }
    lines = ["# Source this to use the emulated card beside it."]
    for name, value in surrounding.shell.items():
        more = f"${{{name}:+:${name}}}" if name in _LISTS else ""
        lines.append(f"export {name}={shlex.quote(value)}{more}")
    (folder / SETUP_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    file = folder / ENVIRONMENT_FILE
    file.write_text(json.dumps(inside, indent=1) + "\n", encoding="utf-8")
    for path in (folder, surrounding.xclbin, file, folder / SETUP_FILE):
        path.chmod(path.stat().st_mode & 0o755)
