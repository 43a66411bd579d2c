# SPDX-License-Identifier: Apache-2.0
"""Whether rows are attended to in place."""

from __future__ import annotations

from hillinfer.attention.native_attention import MOST_GROUP_SIZE, NativeAttention
from hillinfer.model_shape import ModelShape


def host_attention(shape: ModelShape) -> NativeAttention | None:
    """Return the native library's attention, or None where it has no room for so large a group.

    Rows are then gathered and attended to by torch.

    Raises
    ------
    NativeError
        The native library is missing.
    """
    return None if shape.group_size > MOST_GROUP_SIZE else NativeAttention(shape)
