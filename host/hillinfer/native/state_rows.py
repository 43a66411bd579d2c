# SPDX-License-Identifier: Apache-2.0
"""The C interface of rows that become keys and values in memory.

See host/native/state_rows.h, block_rows.h and idle_rows.h.
"""

from __future__ import annotations

import ctypes
from typing import Any

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int32
_LONG = ctypes.c_int64


class StateRows(ctypes.Structure):
    """Rows of tokens that follow one another, and where their keys and values go."""

    _fields_ = (
        ("rows", _POINTER),
        ("tokens", _LONG),
        ("row_bytes", _LONG),
        ("kv_heads", _LONG),
        ("head_dim", _LONG),
        ("room_items", _LONG),
        ("keys", _POINTER),
        ("values", _POINTER),
        ("stored_type", _INT),
        ("is_widened", _INT),
    )


class BlockRows(ctypes.Structure):
    """Rows of tokens that follow one another, and the blocks of another engine's cache."""

    _fields_ = (
        ("rows", _POINTER),
        ("tokens", _LONG),
        ("row_bytes", _LONG),
        ("position", _LONG),
        ("first", _LONG),
        ("stop", _LONG),
        ("kv_heads", _LONG),
        ("head_dim", _LONG),
        ("block_tokens", _LONG),
        ("item_bytes", _LONG),
        ("block_bytes", _LONG),
        ("blocks", _POINTER),
        ("numbers", _POINTER),
        ("order", _POINTER),
        ("salts", _POINTER),
        ("sums", _POINTER),
    )


class CheckedRows(ctypes.Structure):
    """Groups of rows that are checked and placed at once."""

    _fields_ = (
        ("states", StateRows),
        ("placed", _LONG),
        ("salts", _POINTER),
        ("sums", _POINTER),
    )


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "hillinfer_place_states": (None, [ctypes.POINTER(StateRows)]),
    "hillinfer_rows_to_blocks": (None, [ctypes.POINTER(BlockRows)]),
    "hillinfer_rows_from_blocks": (None, [ctypes.POINTER(BlockRows)]),
    "hillinfer_offer_rows": (_POINTER, [ctypes.POINTER(CheckedRows), _LONG]),
    "hillinfer_place_offered": (None, [_POINTER, _INT]),
    "hillinfer_await_offered": (_INT, [_POINTER, _INT]),
    "hillinfer_end_offer": (_INT, [_POINTER, _INT]),
}
