# SPDX-License-Identifier: Apache-2.0
"""Rows that a thread of the native library lands, as it sees them."""

from __future__ import annotations

import ctypes
from typing import Any

from hillinfer.native.structures import ReadWay

_INT = ctypes.c_int32
_LONG = ctypes.c_int64
_POINTER = ctypes.c_void_p


class LandingErrand(ctypes.Structure):
    """Rows that are to land, and what came of it."""

    _fields_ = (
        ("way", ReadWay),
        ("landing", _POINTER),
        ("outcome", _INT),
        ("is_done", _INT),
        ("started_ns", _LONG),
        ("stopped_ns", _LONG),
    )


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "hillinfer_lander_open": (_INT, [ctypes.c_uint32, ctypes.POINTER(_POINTER)]),
    "hillinfer_lander_begin": (_INT, [_POINTER, ctypes.POINTER(LandingErrand)]),
    "hillinfer_lander_wait": (None, [_POINTER, ctypes.POINTER(LandingErrand)]),
    "hillinfer_lander_close": (None, [_POINTER]),
}
