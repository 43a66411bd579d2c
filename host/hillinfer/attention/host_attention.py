# SPDX-License-Identifier: Apache-2.0
"""Whether this host attends to rows in place."""

from __future__ import annotations

from hillinfer.attention.native_attention import MOST_GROUP_SIZE, NativeAttention
from hillinfer.model_shape import ModelShape
from hillinfer.native.errors import NativeError


def host_attention(shape: ModelShape) -> NativeAttention | None:
    """Return the native library's attention, or None where it is missing or has no room.

    Rows are then gathered and attended to by torch; without the library, scoring has said so.
    """
    if shape.group_size > MOST_GROUP_SIZE:
        return None
    try:
        return NativeAttention(shape)
    except NativeError:
        return None
