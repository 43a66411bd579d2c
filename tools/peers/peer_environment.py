# SPDX-License-Identifier: Apache-2.0
"""Virtual environments of peers, made once from pinned requirements."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


class PeerSkippedError(Exception):
    """A peer cannot run here; the text says why."""


def peer_python(folder: Path, requirements: Path, seconds: float) -> Path:
    """Return the interpreter of an environment, made first where it is not up to date.

    Parameters
    ----------
    folder
        Where the environment is; its pip output is kept beside it.
    requirements
        Pinned. A copy in the environment says that it was installed to its end.
    seconds
        Longest time that installing may take.

    Raises
    ------
    PeerSkippedError
        Where the environment cannot be made.
    """
    python, mark = folder / "bin/python", folder / "installed.txt"
    if mark.exists() and mark.read_text() == requirements.read_text():
        return python
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    commands = (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)],
    )
    with log.open("w") as output:
        for command in commands:
            try:
                done = subprocess.run(
                    command, stdout=output, stderr=subprocess.STDOUT, timeout=seconds, check=False
                )
            except subprocess.TimeoutExpired as error:
                raise PeerSkippedError(
                    f"installing {requirements.name} took more than {seconds:.0f} s: raise "
                    "--install-seconds, or run again (what was fetched is kept)"
                ) from error
            if done.returncode:
                raise PeerSkippedError(
                    f"{requirements.name} cannot be installed: {_last_line(log)} (all of it: {log})"
                )
    mark.write_text(requirements.read_text())
    return python


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no output"
