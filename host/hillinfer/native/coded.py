# SPDX-License-Identifier: Apache-2.0
"""The C interface of value codes and of attention over rows and codes; see host/native/coded.h."""

from __future__ import annotations

import ctypes

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


_SEQUENCE, _CALL, _PARTIALS = map(ctypes.POINTER, (Sequence, CodedCall, BlockPartials))
_ENCODED = [_INT, _SEQUENCE, _POINTER, _POINTER, *[_LONG] * 3, _POINTER, _LONG, _LONG]
SIGNATURES = {
    "hillinfer_aligned_tokens": (_INT, [_INT, _SEQUENCE, _POINTER, _LONG, _POINTER, _POINTER]),
    "hillinfer_encode_values": (_INT, _ENCODED),
    "hillinfer_encode_value_rows": (_INT, _ENCODED),
    "hillinfer_coded_attend": (_INT, [_INT, _CALL, _POINTER, _LONG, _POINTER, _LONG, _POINTER]),
    "hillinfer_exact_blocks": (_INT, [_INT, _CALL, _POINTER, _LONG, _PARTIALS]),
    "hillinfer_coded_blocks": (_INT, [_INT, _CALL, ctypes.POINTER(CodedTokens), _PARTIALS]),
    "hillinfer_merge_blocks": (_INT, [_INT, _CALL, _PARTIALS, _LONG, _POINTER]),
}
