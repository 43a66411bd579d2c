# SPDX-License-Identifier: Apache-2.0
"""The C interface of value codes and of attention over rows and codes; see host/native/coded.h."""

from __future__ import annotations

import ctypes
from typing import Any

from hillinfer.native.structures import Sequence

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int32
_LONG = ctypes.c_int64


class CodedCall(ctypes.Structure):
    """What attention over rows and codes is computed, and for which KV heads."""

    _fields_ = (
        ("query", _POINTER),
        ("kv_heads", _INT),
        ("group_size", _INT),
        ("head_dim", _INT),
        ("stored_type", _INT),
        ("first_head", _INT),
        ("head_count", _INT),
        ("threads", _INT),
    )


class CodedTokens(ctypes.Structure):
    """Coded tokens of one segment."""

    _fields_ = (
        ("aligned", _POINTER),
        ("invalid_keys", _POINTER),
        ("code_rows", _POINTER),
        ("exponents", _POINTER),
        ("exponent_stride", _LONG),
        ("channel_exponents", _POINTER),
        ("means", _POINTER),
        ("stride", _LONG),
        ("tokens", _LONG),
    )


class BlockPartials(ctypes.Structure):
    """Where softmax over blocks goes, or lies."""

    _fields_ = (
        ("powers", _POINTER),
        ("totals", _POINTER),
        ("outputs", _POINTER),
        ("broken", _POINTER),
    )


class CodeSlots(ctypes.Structure):
    """Codes of a layer's tokens by row number; see host/native/coded_slots.h."""

    _fields_ = (
        ("slot_of_row", _POINTER),
        ("worth", _POINTER),
        ("row_count", _LONG),
        ("numbers", _POINTER),
        ("rows", _POINTER),
        ("slot_count", _LONG),
        ("chunks", _POINTER),
        ("row_bytes", _LONG),
        ("step_worth", ctypes.c_float),
        ("most_worth", ctypes.c_float),
    )


class SplitSelection(ctypes.Structure):
    """Selected sets, what of them is exact and what is coded; see host/native/coded_step.h."""

    _fields_ = (
        ("set_rows", _LONG),
        ("sets", _POINTER),
        ("exact", _POINTER),
        ("coded", _POINTER),
        # Bytes: three words of each segment.
        ("segments", ctypes.c_char_p),
        ("segment_count", _LONG),
        ("aligned", _POINTER),
        ("invalid", _POINTER),
        ("arrived", _POINTER),
        ("row_bytes", _LONG),
        ("settled_count", _LONG),
        ("rows_end", _LONG),
        ("rows", _POINTER),
        ("missing", _POINTER),
        ("missing_count", _LONG),
        ("read_count", _LONG),
        ("numbers", _POINTER),
        ("sources", _POINTER),
        ("cold_positions", _POINTER),
        ("cold_rows", _POINTER),
        ("cold_numbers", _POINTER),
        ("cold_count", _LONG),
    )


_SEQUENCE, _CALL, _PARTIALS = map(ctypes.POINTER, (Sequence, CodedCall, BlockPartials))
_ENCODED = [_INT, _SEQUENCE, _POINTER, _POINTER, *[_LONG] * 3, _POINTER, _LONG, _LONG]
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "hillinfer_aligned_tokens": (_INT, [_INT, _SEQUENCE, _POINTER, _LONG, _POINTER, _POINTER]),
    "hillinfer_encode_values": (_INT, _ENCODED),
    "hillinfer_encode_value_rows": (_INT, _ENCODED),
    "hillinfer_coded_attend": (_INT, [_INT, _CALL, _POINTER, _LONG, _POINTER, _LONG, _POINTER]),
    # Every layer calls these at every step.
    "hillinfer_choose_split": (_INT, [_INT, *[_POINTER] * 5]),
    "hillinfer_list_cold": (_INT, [*[_POINTER] * 3, _INT, _LONG, _LONG, _POINTER]),
    "hillinfer_attend_split": (_INT, [_INT, *[_POINTER] * 7]),
    "hillinfer_decode_split": (_INT, [_INT, *[_POINTER] * 7]),
    "hillinfer_code_cold": (_INT, [_INT, *[_POINTER] * 2, _LONG, _LONG, _POINTER]),
    "hillinfer_end_split": (_INT, [_INT, *[_POINTER] * 5]),
    "hillinfer_want_codes": (None, [_POINTER, _POINTER, _LONG]),
    "hillinfer_offer_codes": (_INT, [*[_POINTER] * 4, _LONG, _LONG, ctypes.POINTER(_LONG)]),
    "hillinfer_exact_blocks": (_INT, [_INT, _CALL, _POINTER, _LONG, _PARTIALS]),
    "hillinfer_coded_blocks": (_INT, [_INT, _CALL, ctypes.POINTER(CodedTokens), _PARTIALS]),
    "hillinfer_merge_blocks": (_INT, [_INT, _CALL, _PARTIALS, _LONG, _POINTER]),
}
