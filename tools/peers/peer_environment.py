# SPDX-License-Identifier: Apache-2.0
"""Virtual environments of peers, made once from pinned requirements."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"


class PeerSkippedError(Exception):
    """A peer cannot run here; the text says why."""


@dataclass(frozen=True)
class PeerEnvironment:
    """One environment, of one peer or several.

    Parameters
    ----------
    name
        Of its folder and of its file of pinned requirements.
    removed
        Packages that come along and are taken out again.
    preloaded
        Patterns of libraries inside the environment that its makers want loaded first.
    hint
        What to do where it cannot be installed.
    folder
        Where the files of pinned requirements are.
    """

    name: str
    removed: tuple[str, ...] = ()
    preloaded: tuple[str, ...] = ()
    hint: str = ""
    folder: Path = REQUIREMENTS

    @property
    def requirements(self) -> Path:
        """File of pinned requirements."""
        return self.folder / f"{self.name}.txt"

    def python(self, build: Path, seconds: float) -> Path:
        """Return the environment's interpreter, made first where it is not up to date.

        Parameters
        ----------
        build
            Where the environment's folder is; pip's output is kept beside it.
        seconds
            Longest time that each step of installing may take.

        Raises
        ------
        PeerSkippedError
            Where the environment cannot be made.
        """
        folder = (build / self.name).absolute()
        # The mark says that everything was installed to its end.
        python, mark = folder / "bin/python", folder / "installed.txt"
        wanted = self.requirements.read_text() + "".join(f"# less {one}\n" for one in self.removed)
        if mark.exists() and mark.read_text() == wanted:
            return python
        folder.parent.mkdir(parents=True, exist_ok=True)
        mark.unlink(missing_ok=True)
        # Isolated, so that nothing in the current directory is taken for a module. Our own pip:
        # giving the environment one takes longer than all else there.
        pip = [sys.executable, "-I", "-m", "pip", "--python", str(python)]
        commands = [
            [sys.executable, "-I", "-m", "venv", "--without-pip", str(folder)],
            [*pip, "install", "--quiet", "-r", str(self.requirements)],
        ]
        if self.removed:
            commands.append([*pip, "uninstall", "--quiet", "--yes", *self.removed])
        log = folder.with_name(f"{self.name}-install.log")
        with log.open("w") as output:
            for command in commands:
                self._do(command, seconds, output.fileno(), log)
        mark.write_text(wanted)
        return python

    def libraries(self, build: Path) -> list[Path]:
        """Return the libraries to load first that are there."""
        folder = (build / self.name).absolute()
        return [one for pattern in self.preloaded for one in sorted(folder.glob(pattern))]

    def _do(self, command: list[str], seconds: float, output: int, log: Path) -> None:
        try:
            done = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise PeerSkippedError(
                f"installing {self.requirements.name} took more than {seconds:.0f} s: raise "
                "--install-seconds, or run again (what was fetched is kept)"
            ) from error
        if done.returncode:
            hint = f"; {self.hint}" if self.hint else ""
            raise PeerSkippedError(
                f"{self.requirements.name} cannot be installed: {_reason(log)} (all of it: {log})"
                f"{hint}; then run again"
            )


def _reason(log: Path) -> str:
    """Return the last line that pip calls an error, or else its last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no output"])[-1].strip()
