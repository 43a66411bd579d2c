# SPDX-License-Identifier: Apache-2.0
"""The C interface of several sequences that take a step together.

See host/native/step_rows.h and few_rows.h.
"""

from __future__ import annotations

import ctypes
from typing import Any

from hillinfer.native.structures import DecodeStep, Shape

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int32
_LONG = ctypes.c_int64


class RowStates(ctypes.Structure):
    """Numbers of a batch as the model made them: where a row's heads lie."""

    _fields_ = (
        ("numbers", _POINTER),
        ("row_stride", _LONG),
        ("head_stride", _LONG),
        ("number_type", _LONG),
    )


class StepRow(ctypes.Structure):
    """One sequence, which a whole step is asked for alike."""

    _fields_ = (
        ("tables", _POINTER),
        ("row", _LONG),
        ("selected", _POINTER),
        ("misses", _POINTER),
        ("split", _POINTER),
        ("is_left_out", _INT),
        ("outcome", _INT),
        ("step", DecodeStep),
    )


class StepRows(ctypes.Structure):
    """What a layer of several sequences is asked for."""

    _fields_ = (
        ("rows", _POINTER),
        ("count", _LONG),
        ("layer", _LONG),
        ("variant", _INT),
        ("threads", _INT),
        ("predicted_factor", ctypes.c_float),
        ("query", RowStates),
        ("predicted", RowStates),
        ("out", _POINTER),
    )


class FewRows(ctypes.Structure):
    """Rows of all sequences, and a linear layer that they go through."""

    _fields_ = (
        ("rows", _POINTER),
        ("row_count", _LONG),
        ("row_stride", _LONG),
        ("inputs", _LONG),
        ("weights", _POINTER),
        ("bias", _POINTER),
        ("outputs", _LONG),
        ("out", _POINTER),
        ("threads", _INT),
    )


_ROWS, _STATES = ctypes.POINTER(StepRows), ctypes.POINTER(RowStates)
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "hillinfer_few_rows": (_INT, [_INT, ctypes.POINTER(FewRows)]),
    "hillinfer_attend_rows": (_INT, [_ROWS, _POINTER]),
    "hillinfer_attend_split_rows": (_INT, [_ROWS, _POINTER, _POINTER]),
    "hillinfer_store_rows": (None, [_ROWS, ctypes.POINTER(Shape), _STATES, _STATES, _POINTER]),
}
