# SPDX-License-Identifier: Apache-2.0
"""Measures how fast the native library reads memory, which other loops are compared with."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hillinfer.native.library import LIBRARY, Variant, native_library

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


def read_rows(variant: Variant, rows: NDArray[np.uint64], row_bytes: int, threads: int) -> int:
    """Read rows at any addresses and return a sum of their words."""
    return int(
        _functions().hillinfer_read_rows(
            variant.number, rows.ctypes.data, len(rows), row_bytes, threads
        )
    )


def read_sum(variant: Variant, address: int, size: int, threads: int) -> int:
    """Read `size` bytes as fast as this machine can and return a sum of their words."""
    return int(_functions().hillinfer_read_sum(variant.number, address, size, threads))


@cache
def _functions() -> ctypes.CDLL:
    # Raises where the library is missing or another version's.
    native_library()
    functions = ctypes.CDLL(str(LIBRARY))
    for name, arguments in (
        ("hillinfer_read_rows", [_INT, _POINTER, _LONG, _LONG, _INT]),
        ("hillinfer_read_sum", [_INT, _POINTER, _LONG, _INT]),
    ):
        function = getattr(functions, name)
        function.restype, function.argtypes = ctypes.c_uint64, arguments
    return functions
