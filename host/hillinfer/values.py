# SPDX-License-Identifier: Apache-2.0
"""Single values as people and programs write them: amounts of memory, counts, choices, paths."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from hillinfer.errors import SettingsError

# --- Amounts of memory ---

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
# More bytes than memory of today has, and more caches than a share can mean.
_MOST = 2.0**62
# From there on whole bytes are as short.
_MOST_DIGITS = 6
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*")


@dataclass(frozen=True)
class ByteSize:
    """A number of bytes, or a share of the KV cache's bytes.

    Parameters
    ----------
    byte_count
        Bytes; None where the size is a share.
    share
        Share of the KV cache, above 0; None where the size is in bytes.
    """

    byte_count: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str | int) -> ByteSize:
        """Read `67108864`, `64MiB`, `2GiB`, `1.5GB` or `25%`.

        Raises SettingsError where the text is none of these, or not above zero.
        """
        match = _AMOUNT.fullmatch(str(text))
        if match is None:
            raise SettingsError(f"'{text}' is not a size: write it like 64MiB, 2GiB or 25%")
        number, unit = float(match.group(1)), match.group(2)
        if number <= 0:
            raise SettingsError(f"'{text}' is not a size above zero")
        if unit == "%":
            return cls(share=_checked(text, number / 100))
        if unit.upper() not in _UNITS:
            raise SettingsError(
                f"'{text}' has the unknown unit '{unit}': use KiB, MiB, GiB, KB, MB, GB or %"
            )
        return cls(byte_count=int(_checked(text, number * _UNITS[unit.upper()])))

    def resolve(self, kv_bytes: int) -> int:
        """Return the size in bytes, given the bytes of the whole KV cache."""
        if self.share is not None:
            return int(self.share * kv_bytes)
        assert self.byte_count is not None
        return self.byte_count

    def __str__(self) -> str:
        """Write it as people do: `25%` or `64.0 MiB`."""
        if self.share is not None:
            return f"{100 * self.share:g}%"
        assert self.byte_count is not None
        return format_bytes(self.byte_count)


def _checked(text: str | int, amount: float) -> float:
    if amount > _MOST:
        raise SettingsError(f"'{text}' is more than any memory holds: write it like 64MiB or 25%")
    return amount


def format_bytes(count: float, digits: int = 1) -> str:
    """Write a number of bytes for people, like `34.6 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.{digits}f} {unit}"
        size /= 1024
    return f"{size:.{digits}f} TiB"


def format_apart(one: int, other: int) -> tuple[str, str]:
    """Write two numbers of bytes with as many digits as it takes to tell them apart."""
    for digits in range(1, _MOST_DIGITS):
        texts = format_bytes(one, digits), format_bytes(other, digits)
        if texts[0] != texts[1] or one == other:
            return texts
    return f"{one} B", f"{other} B"


# --- Numbers, choices, paths and texts ---

Choice = TypeVar("Choice", bound=StrEnum)

# What every library below takes, and writing out is short.
LARGEST = 2**63 - 1


def whole_number(name: str, value: Any) -> int:
    """Return a count, whatever type of integer it has.

    Raises SettingsError where it is none; a bool, a text and 4.0 are none.
    """
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    # A truth value is an integer to Python.
    if count is None or isinstance(value, bool):
        raise SettingsError(f"{name}={value!r} must be a whole number")
    if abs(count) > LARGEST:
        raise SettingsError(f"{name}={_shown(count)} must be at most {LARGEST}")
    return count


def real_number(name: str, value: Any) -> float:
    """Return a number, whatever type of number it has; errors as in `whole_number`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise SettingsError(f"{name}={value!r} must be a number")
    try:
        return float(value)
    except OverflowError as error:
        raise SettingsError(f"{name}={_shown(value)} must be a number of 64 bits") from error


def choice(name: str, kind: type[Choice], value: Any) -> Choice:
    """Return one of the values of an enumeration, given as itself or as text.

    Raises SettingsError naming all values.
    """
    try:
        return kind(value)
    except ValueError as error:
        names = ", ".join(one.value for one in kind)
        raise SettingsError(f"{name}={value!r} is unknown: choose one of {names}") from error


def path(name: str, value: Any) -> Path:
    """Return a path, given as one or as text.

    Raises SettingsError where it is neither, or empty.
    """
    if not isinstance(value, str | PathLike) or not str(value):
        raise SettingsError(f"{name}={value!r} must be a path")
    return Path(value)


def text(name: str, value: Any) -> str:
    """Return a name; SettingsError where it is no text."""
    if not isinstance(value, str):
        raise SettingsError(f"{name}={value!r} must be a text")
    return value


def byte_size(name: str, value: Any) -> ByteSize:
    """Return a size, given as one, as text or as a number of bytes.

    Raises SettingsError where it is none of these.
    """
    if isinstance(value, ByteSize):
        return value
    if isinstance(value, str):
        return ByteSize.parse(value)
    if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) <= LARGEST:
        raise SettingsError(
            f"{name}={_shown(value)} must be a number of bytes above zero and at most {LARGEST}, "
            "or text like 64MiB or 25%"
        )
    return ByteSize(byte_count=int(value))


def _shown(value: Any) -> str:
    """Return a value as Python writes it; it refuses to write numbers of thousands of digits."""
    try:
        return repr(value)
    except ValueError:
        return f"(a number of {abs(operator.index(value)).bit_length()} bits)"


# --- Threads ---

# OpenMP ends the process where it cannot have the threads that it was told to start.
MOST_THREADS = 1024


def check_threads(threads: int | None) -> None:
    """Refuse a number of compute threads that means nothing; None is the default's.

    Raises SettingsError where it is not between 1 and `MOST_THREADS`.
    """
    if threads is not None and threads < 1:
        raise SettingsError(f"threads={threads} must be at least 1")
    if threads is not None and threads > MOST_THREADS:
        raise SettingsError(f"threads={threads} must be at most {MOST_THREADS}")
