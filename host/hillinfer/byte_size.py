# SPDX-License-Identifier: Apache-2.0
"""Amounts of memory as people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hillinfer.errors import SettingsError

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
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

        Raises
        ------
        SettingsError
            Where the text is none of these, or not above zero.
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
