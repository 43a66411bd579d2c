# SPDX-License-Identifier: Apache-2.0
"""The C interface of value codes and of attention over rows and codes; see host/native/coded.h."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    """Codes of a layer's tokens by row number; see host/native/coded_step.h."""

    _fields_ = (
        ("slot_of_row", _POINTER),
        ("row_count", _LONG),
        ("numbers", _POINTER),
        ("chunks", _POINTER),
        ("row_bytes", _LONG),
    )


class CodedSelection(ctypes.Structure):
    """A selected set, and what of it is coded."""

    _fields_ = (
        ("selected", _POINTER),
        ("selected_count", _LONG),
        ("exact", _POINTER),
        ("exact_count", _LONG),
        # Bytes: three words of each segment.
        ("segments", ctypes.c_char_p),
        ("segment_count", _LONG),
        ("coded", _POINTER),
        ("rows", _POINTER),
        ("codes", _POINTER),
        ("missing", _POINTER),
        ("coded_count", _LONG),
        ("settled_count", _LONG),
        ("missing_count", _LONG),
        ("arrived", _POINTER),
    )


# The number of a segment's values, and the addresses of c and M.
VALUE_WORDS = 3
_WORD_BYTES = 8


class FoundCodes:
    """A selected set as the library sees it, and what it says of the coded tokens.

    Parameters
    ----------
    selected
        Positions, int64, ascending, contiguous.
    exact
        Those of them that are exact, likewise.
    segments
        `VALUE_WORDS` words of each segment from the first one on.

    Attributes
    ----------
    address
        What the library is told.
    """

    def __init__(
        self, selected: NDArray[np.int64], exact: NDArray[np.int64], segments: bytes
    ) -> None:
        self._kept = selected, exact
        room = len(selected)
        self._memory = np.empty((4, room), np.int64)
        self._coded, self._rows, _, self._missing = self._memory
        first: int = self._memory.ctypes.data
        size = _WORD_BYTES * room
        self.table = CodedSelection(
            selected.ctypes.data,
            room,
            exact.ctypes.data,
            len(exact),
            segments,
            len(segments) // (VALUE_WORDS * _WORD_BYTES),
            first,
            first + size,
            first + 2 * size,
            first + 3 * size,
        )
        self.address = ctypes.addressof(self.table)

    @property
    def count(self) -> int:
        """How many tokens are coded."""
        return int(self.table.coded_count)

    @property
    def in_tail(self) -> int:
        """How many of them are in the tail: the last ones."""
        return int(self.table.coded_count - self.table.settled_count)

    @property
    def rows(self) -> NDArray[np.int64]:
        """Row numbers of the others, int64."""
        return self._rows[: self.table.settled_count]

    @property
    def missing(self) -> NDArray[np.int64]:
        """Which of these have no codes, int64, ascending."""
        return self._missing[: self.table.missing_count]

    def positions(self, which: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return positions of some coded tokens."""
        return self._coded[which]


_SEQUENCE, _CALL, _PARTIALS = map(ctypes.POINTER, (Sequence, CodedCall, BlockPartials))
_ENCODED = [_INT, _SEQUENCE, _POINTER, _POINTER, *[_LONG] * 3, _POINTER, _LONG, _LONG]
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "hillinfer_aligned_tokens": (_INT, [_INT, _SEQUENCE, _POINTER, _LONG, _POINTER, _POINTER]),
    "hillinfer_encode_values": (_INT, _ENCODED),
    "hillinfer_encode_value_rows": (_INT, _ENCODED),
    "hillinfer_coded_attend": (_INT, [_INT, _CALL, _POINTER, _LONG, _POINTER, _LONG, _POINTER]),
    # Every layer calls these at every step.
    "hillinfer_find_codes": (_INT, [_POINTER, _POINTER, _INT, _LONG, _POINTER]),
    "hillinfer_code_missing": (_INT, [_INT, *[_POINTER] * 2, _LONG, _POINTER, _LONG, _LONG]),
    "hillinfer_attend_codes": (_INT, [_INT, *[_POINTER] * 3, _LONG, *[_POINTER] * 2]),
    "hillinfer_exact_blocks": (_INT, [_INT, _CALL, _POINTER, _LONG, _PARTIALS]),
    "hillinfer_coded_blocks": (_INT, [_INT, _CALL, ctypes.POINTER(CodedTokens), _PARTIALS]),
    "hillinfer_merge_blocks": (_INT, [_INT, _CALL, _PARTIALS, _LONG, _POINTER]),
}
