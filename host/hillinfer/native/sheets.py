# SPDX-License-Identifier: Apache-2.0
"""The C interface of sheets that are compared with a prompt; see host/native/sheets.h."""

from __future__ import annotations

import ctypes
from typing import Any

_POINTER = ctypes.c_void_p
_LONG = ctypes.c_int64
_WORD = ctypes.c_uint32


class SheetMatch(ctypes.Structure):
    """What extents begin with, what is wanted of each, and how much of that they cover."""

    _fields_ = (
        ("data", _POINTER),
        ("count", _LONG),
        ("extent_bytes", _LONG),
        ("body_bytes", _LONG),
        ("said", ctypes.c_char_p),
        ("parents", ctypes.c_char_p),
        ("keys", ctypes.c_char_p),
        ("ids", ctypes.c_char_p),
        ("groups", _POINTER),
        ("covered", _POINTER),
        ("version", _WORD),
        ("layers", _WORD),
        ("row_bytes", _WORD),
        ("shadow_bytes", _WORD),
    )


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "hillinfer_match_sheets": (None, [ctypes.POINTER(SheetMatch)]),
}
