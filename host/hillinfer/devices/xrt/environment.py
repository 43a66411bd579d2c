# SPDX-License-Identifier: Apache-2.0
"""What a process needs to reach a card or its emulation: variables and deadlines."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hillinfer.devices.xrt.xclbin import HW_EMU, Xclbin
from hillinfer.errors import SettingsError

# --- Deadlines ---

_VITIS = "XILINX_VITIS"


@dataclass(frozen=True)
class Deadlines:
    """How long the host waits for the card, in seconds.

    Parameters
    ----------
    load
        For the worker and the card's image.
    answer
        For a copy.
    progress
        For the next sign of a launch that is under way.
    """

    load: float = 120.0
    answer: float = 30.0
    progress: float = 60.0


_CARD = Deadlines()
# A simulator takes minutes to start; Vitis' advances by few cycles a second, as it simulates the
# platform with the kernels. Guessed, not measured: late is better than giving up what works.
_SIMULATOR = Deadlines(load=900.0, answer=300.0, progress=1800.0)


def deadlines_of(xclbin: Xclbin, environment: Mapping[str, str]) -> Deadlines:
    """Return how long to wait for what an xclbin is for: a card, or Vitis' simulator of one.

    Parameters
    ----------
    xclbin
        Its mode says whether it is for a card.
    environment
        Variables of the process that loads it; those of Vitis are among them where Vitis emulates.
    """
    return _SIMULATOR if xclbin.mode == HW_EMU and _VITIS in environment else _CARD


# --- Variables of an emulated card ---

# Beside an xclbin for an emulated card.
ENVIRONMENT_FILE = "environment.json"
_MODE = "XCL_EMULATION_MODE"
# What XRT's driver for emulation is told of its folder. Nothing here names programs, libraries or
# modules elsewhere: those a shell must name that its user has set up.
_PATHS = ("EMCONFIG_PATH", "SDACCEL_EM_RUN_DIR", "XILINX_XRT", "XRT_INI_PATH")
_MOST_BYTES = 1 << 16
_MOST_CHARACTERS = 4096
_WRITE = stat.S_IWGRP | stat.S_IWOTH


def environment_of(xclbin: Path) -> dict[str, str]:
    """Return the variables beside an xclbin for an emulated card; none for a card's.

    Such an xclbin is a program, and what lies beside it decides what else runs. So it counts only
    where nobody but its user and root can have written it, and sets only what the emulation needs.

    Parameters
    ----------
    xclbin
        Path of the image; where it is a link, what it leads to.

    Returns
    -------
    `XCL_EMULATION_MODE` and paths inside the image's folder, absolute.

    Raises
    ------
    SettingsError
        Where the file is there and does not hold such variables, or where others than the user may
        have written it, the image or their folder.
    XclbinError
        Where the image cannot be read.
    """
    if Xclbin.read(xclbin).mode != HW_EMU:
        return {}
    image = xclbin.resolve()
    try:
        with closing(_Opened.folder(image.parent)) as folder:
            folder.check()
            with closing(_Opened.file(image, folder)) as own:
                own.check()
            try:
                beside = _Opened.file(image.with_name(ENVIRONMENT_FILE), folder)
            except FileNotFoundError:
                return {}
            with closing(beside):
                beside.check()
                content = beside.content()
    except OSError as error:
        raise SettingsError(
            f"{image.with_name(ENVIRONMENT_FILE)} cannot be read: {error.strerror}"
        ) from error
    return _variables(content, image.with_name(ENVIRONMENT_FILE))


@dataclass(frozen=True)
class _Opened:
    """A file or folder that stays the same one between the look at it and reading it."""

    path: Path
    descriptor: int

    @classmethod
    def folder(cls, path: Path) -> _Opened:
        return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    @classmethod
    def file(cls, path: Path, folder: _Opened) -> _Opened:
        # A link is not followed, and a pipe does not wait for its other end.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return cls(path, os.open(path.name, flags, dir_fd=folder.descriptor))

    def check(self) -> None:
        """Refuse what others than the user and root may have written."""
        facts = os.fstat(self.descriptor)
        if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & _WRITE:
            raise SettingsError(
                f"{self.path} decides what runs beside this process, and others may have written "
                f"it: own it, and chmod go-w {self.path}"
            )

    def content(self) -> bytes:
        """Return a regular file's bytes, which are few."""
        facts = os.fstat(self.descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise SettingsError(f"{self.path} is no regular file: make the card again")
        if facts.st_size > _MOST_BYTES:
            raise SettingsError(
                f"{self.path} of {facts.st_size} bytes is too large: make the card again"
            )
        # One byte more than there may be shows a file that grew since.
        return os.read(self.descriptor, _MOST_BYTES + 1)

    def close(self) -> None:
        os.close(self.descriptor)


def _variables(content: bytes, file: Path) -> dict[str, str]:
    try:
        named = json.loads(content.decode("utf-8"), object_pairs_hook=_unlike)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{file} cannot be read: {error}; make the card again") from error
    if not isinstance(named, dict):
        raise SettingsError(f"{file} does not hold names and values of variables")
    return {name: _value(name, value, file) for name, value in named.items()}


def _unlike(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a name is there twice")
    return dict(pairs)


def _value(name: str, value: object, file: Path) -> str:
    """Return what a variable is set to, a path made absolute."""
    if name != _MODE and name not in _PATHS:
        raise SettingsError(
            f"{file} sets {name!a:.99}, and only {', '.join((_MODE, *_PATHS))} may be set there: "
            "take it out, and set it in your own shell if you trust it"
        )
    if not isinstance(value, str) or len(value) > _MOST_CHARACTERS:
        raise SettingsError(f"{file}: {name} is no text of at most {_MOST_CHARACTERS} characters")
    if not _can_be_set(value):
        raise SettingsError(
            f"{file}: {name} is {value!a:.99}, which no variable can hold: make the card again"
        )
    if name == _MODE:
        if value != "hw_emu":
            raise SettingsError(f"{file}: {name} is {value!a:.99}, not 'hw_emu'")
        return value
    # By its name: links inside are as good as the folder, which is the user's.
    path = os.path.normpath(file.parent / value)
    if not Path(path).is_relative_to(file.parent):
        raise SettingsError(
            f"{file}: {name} is {value!a:.99}, which is not inside {file.parent}: set it in your "
            "own shell if you trust it"
        )
    return path


def _can_be_set(value: str) -> bool:
    try:
        return b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        # Half a character, which JSON can name.
        return False
