# SPDX-License-Identifier: Apache-2.0
"""Copies the project's sources, so that a fault can be put into the copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mutants.mutant import Built, Mutant

_PLUGINS = ("hillinfer_hosts", "hillinfer_pynq", "hillinfer_vllm")
PACKAGES = ("hillinfer", "hillinfer_model", *_PLUGINS)
# Where they lie: what is installed of a checkout is found behind these alone.
_ROOMS = ("sw_model", "host", "tools", *(f"plugins/{name}" for name in _PLUGINS))
_LIBRARY = Path("host/hillinfer/native/libhillinfer_native.so")
# What the library is built of.
_NATIVE = ("host/native/*", "tools/build_native.py")


class CopyError(Exception):
    """The copy cannot be used; the message says why."""


class CopiedProject:
    """Sources of a project in a folder of their own, and what runs in them.

    Parameters
    ----------
    folder
        Where they lie.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, project: Path, folder: Path) -> CopiedProject:
        """Copy what git knows of a project, and files that it does not ignore, and build it.

        A library that is newer than what it is built of is copied as well.

        Raises
        ------
        CopyError
            Where something does not build, or Python takes the packages from elsewhere.
        """
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(listing, cwd=project, check=True, capture_output=True, text=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (project / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(project / name, folder / name)
        copied = cls(folder)
        if _is_built(project):
            shutil.copy2(project / _LIBRARY, folder / _LIBRARY)
        else:
            copied.build()
        copied.check_packages()
        return copied

    def again(self, folder: Path) -> CopiedProject:
        """Return another copy, which has what was built and compiled in this one."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return CopiedProject(folder)

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which Python takes the packages from here, installed or not."""
        places = [str(self.folder / room) for room in _ROOMS]
        # One thread: output bits depend on it, and several copies may be at work.
        return os.environ | {"PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}

    def check_packages(self) -> None:
        """Raise CopyError unless Python finds every package in this copy."""
        lines = [f"print(getattr(find_spec({name!r}), 'origin', None))" for name in PACKAGES]
        command = [
            sys.executable,
            "-c",
            "\n".join(["from importlib.util import find_spec", *lines]),
        ]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, check=True, capture_output=True
        )
        for line in done.stdout.decode().splitlines():
            if not Path(line).resolve().is_relative_to(self.folder.resolve()):
                raise CopyError(f"Python imports {line}, which is not in the copy {self.folder}")

    def build(self) -> None:
        """Compile the native library here; raise CopyError where that fails.

        Copies that lie beside each other share what they compile of the same text.
        """
        objects = str(self.folder.parent / "objects")
        command = [sys.executable, "tools/build_native.py", "--require", "--objects", objects]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        if done.returncode:
            raise CopyError(f"the native library does not build: {done.stdout}{done.stderr}")

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """Hold a mutant's fault, built where it must be, and take it back afterwards.

        Raises
        ------
        CopyError
            Where it does not build.
        ValueError
            Where its original text is not there exactly once.
        """
        file = self.folder / mutant.file
        text = file.read_text()
        stat = file.stat()
        library = (self.folder / _LIBRARY).read_bytes() if mutant.built is Built.NATIVE else b""
        try:
            # With the time of now: bytecode of before is not taken for this text's.
            file.write_text(mutant.applied_to(text))
            if library:
                self.build()
            yield
        finally:
            file.write_text(text)
            os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            if library:
                # Another file: a process that was ended may still have the old one in memory.
                whole = self.folder / _LIBRARY
                whole.unlink()
                whole.write_bytes(library)


def _is_built(project: Path) -> bool:
    library = project / _LIBRARY
    sources = [file for pattern in _NATIVE for file in project.glob(pattern)]
    return library.exists() and all(
        file.stat().st_mtime <= library.stat().st_mtime for file in sources
    )
