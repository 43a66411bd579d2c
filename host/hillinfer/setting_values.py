# SPDX-License-Identifier: Apache-2.0
"""Single values that a user gives, as a person or a program writes them."""

from __future__ import annotations

import operator
from enum import StrEnum
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from hillinfer.byte_size import ByteSize
from hillinfer.errors import SettingsError

Choice = TypeVar("Choice", bound=StrEnum)

# What every library below takes, and writing out is short.
LARGEST = 2**63 - 1


def whole_number(name: str, value: Any) -> int:
    """Return a count, whatever type of integer it has.

    Raises
    ------
    SettingsError
        Where it is none; a bool, a text and 4.0 are none.
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

    Raises
    ------
    SettingsError
        Naming all values.
    """
    try:
        return kind(value)
    except ValueError as error:
        names = ", ".join(one.value for one in kind)
        raise SettingsError(f"{name}={value!r} is unknown: choose one of {names}") from error


def path(name: str, value: Any) -> Path:
    """Return a path, given as one or as text.

    Raises
    ------
    SettingsError
        Where it is neither, or empty.
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

    Raises
    ------
    SettingsError
        Where it is none of these.
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
