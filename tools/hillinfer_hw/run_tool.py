# SPDX-License-Identifier: Apache-2.0
"""Runs a build tool, and shows its output only where it fails."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

_MOST_LETTERS = 8000


def run_tool(command: Sequence[str]) -> None:
    """Run a command to its end.

    Raises
    ------
    RuntimeError
        Where it fails; the message is its own.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stdout}{done.stderr}"[:_MOST_LETTERS])
