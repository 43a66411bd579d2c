# SPDX-License-Identifier: Apache-2.0
"""The structures of the native library's C interface; host/native has the other side."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hillinfer_model.choices import Rule, Scope
from hillinfer_model.kernel_spec import KernelSpec

# --- Addresses of arrays ---


def address_of(array: NDArray[Any]) -> int:
    """Return where an array begins: in a third of the time that `ndarray.ctypes` takes."""
    buffer: Any = array
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    except (TypeError, ValueError):  # It is empty, or not to be written to, or has gaps.
        return int(array.ctypes.data)


def row_addresses(memory: NDArray[np.uint8], rows: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """Return where rows of a C-contiguous uint8 array (rows, row_bytes) lie, as uint64.

    Raises ValueError where the array has gaps or is not of rows, and IndexError where a row is not
    in it.
    """
    if memory.ndim != 2 or not memory.flags.c_contiguous:
        raise ValueError(f"rows of shape {memory.shape} must lie in one contiguous 2-D array")
    if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < len(memory)):
        raise IndexError(f"rows {rows.min()} to {rows.max()} of {len(memory)}")
    steps = rows.astype(np.uint64) * np.uint64(memory.shape[1])
    return np.asarray(steps + np.uint64(address_of(memory)))


class Addresses:
    """Remembers the addresses of arrays that come again at every step, as long as they live.

    Asking numpy takes longer than scoring the tokens of a small model's segment does.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[NDArray[Any]], int]] = {}

    def __len__(self) -> int:
        """Return how many arrays it remembers."""
        return len(self._known)

    def of(self, array: NDArray[Any]) -> int:
        """Return the address of the first byte of a C-contiguous array.

        Raises ValueError where the array has gaps.
        """
        key = id(array)
        known = self._known.get(key)
        if known is not None and known[0]() is array:
            return known[1]
        if not array.flags.c_contiguous:
            raise ValueError("the native library reads contiguous arrays; use ascontiguousarray")
        address: int = np.asarray(array).ctypes.data
        forget = self._known

        def drop(dead: weakref.ref[NDArray[Any]]) -> None:
            # Another array may have the same id by now.
            if forget.get(key, (None, 0))[0] is dead:
                del forget[key]

        self._known[key] = (weakref.ref(array, drop), address)
        return address


# --- Structures ---

_INT = ctypes.c_int32
_LONG = ctypes.c_int64


class Shape(ctypes.Structure):
    """What one call works on."""

    _fields_ = (
        ("kv_heads", _INT),
        ("heads", _INT),
        ("head_dim", _INT),
        ("padded_dim", _INT),
        ("code_bits", _INT),
        ("rule", _INT),
        ("scope", _INT),
        ("segment_tokens", _INT),
    )

    @classmethod
    def of(cls, spec: KernelSpec, scope: Scope) -> Shape:
        """Return the shape of a spec."""
        return cls(
            spec.kv_heads,
            spec.scored_heads // spec.kv_heads,
            spec.head_dim,
            spec.padded_head_dim,
            spec.key_mode.code_bits,
            0 if spec.rule is Rule.WEIGHT_SUM else 1,
            0 if scope is Scope.LAYER else 1,
            spec.segment_tokens,
        )


class PageRun(ctypes.Structure):
    """Pages that are sealed or opened under one key; see host/native/page_cipher.h."""

    _fields_ = (
        # Bytes, or where they lie.
        ("key", ctypes.c_char_p),
        ("pages", ctypes.c_void_p),
        ("tags", ctypes.c_void_p),
        ("writes", ctypes.c_void_p),
        ("first", _LONG),
        ("count", _LONG),
        ("seals", _INT),
    )


class PageSeal(ctypes.Structure):
    """Sealed pages of a file, one behind the other; see host/native/page_cipher.h."""

    _fields_ = (
        ("key", ctypes.c_void_p),
        ("tags", ctypes.c_void_p),
        ("writes", ctypes.c_void_p),
        ("origin", _LONG),
        ("count", _LONG),
        ("first", _LONG),
    )


class Sequence(ctypes.Structure):
    """Shape, query and segments of one call."""

    _fields_ = (
        ("shape", Shape),
        ("scaled", ctypes.c_void_p),
        ("segments", ctypes.c_void_p),
        ("segment_count", ctypes.c_int64),
        ("threads", _INT),
        ("coming", _INT),
    )


class Choice(ctypes.Structure):
    """A query, and how much is selected for it."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        ("head_stride", ctypes.c_int64),
        ("group_size", ctypes.c_int64),
        ("factor", ctypes.c_float),
        ("sinks", _INT),
        ("recent", ctypes.c_int64),
        ("count", ctypes.c_int64),
    )


class Quota(ctypes.Structure):
    """How much is selected of tuples that are there already."""

    _fields_ = (
        ("coming", _INT),
        ("sinks", _INT),
        ("recent", ctypes.c_int64),
        ("count", ctypes.c_int64),
    )


class Attention(ctypes.Structure):
    """One token's queries and what is in a row."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        ("kv_heads", _INT),
        ("group_size", _INT),
        ("head_dim", _INT),
        ("stored_type", _INT),
        ("scaling", ctypes.c_float),
        ("threads", _INT),
    )


class LayerTable(ctypes.Structure):
    """The block table of one sequence in one layer: where its rows, hits and shadow lie.

    The library owns and changes it.
    """

    _fields_ = (
        ("groups", ctypes.c_void_p),
        ("group_count", ctypes.c_int64),
        ("tail", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("held", ctypes.c_int64),
        ("hits", ctypes.c_void_p),
        ("hit_count", ctypes.c_int64),
        ("segments", ctypes.c_void_p),
        ("segment_count", ctypes.c_int64),
        ("coded", ctypes.c_int64),
    )


class PoolTable(ctypes.Structure):
    """The slots of a layer's hot pool with all that is known of their rows.

    The library owns and changes it.
    """

    _fields_ = (
        ("slot_of_row", ctypes.c_void_p),
        ("row_count", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("last_selected", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("used", ctypes.c_int64),
        ("slots", ctypes.c_int64),
    )


class Promotion(ctypes.Structure):
    """Rows that may become hot, how they rank, and how many did."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("source_rows", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("keys", ctypes.c_void_p),
        ("slot_keys", ctypes.c_void_p),
        ("worth", _INT),
        ("step", _INT),
        ("length", _INT),
        ("settled_before", _INT),
        ("kept_sinks", ctypes.c_int64),
        ("kept_recent", ctypes.c_int64),
        ("alpha", ctypes.c_double),
        ("promoted", ctypes.c_int64),
        ("demoted", ctypes.c_int64),
    )


class DecodeStep(ctypes.Structure):
    """What one decode step of a layer is asked for."""

    _fields_ = (
        ("shape", Shape),
        ("query", ctypes.c_void_p),
        ("head_stride", ctypes.c_int64),
        ("query_type", _INT),
        ("group_size", _INT),
        ("stored_type", _INT),
        ("coming", _INT),
        ("factor", ctypes.c_float),
        ("scaling", ctypes.c_float),
        ("sinks", _INT),
        ("threads", _INT),
        ("recent", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("exact", ctypes.c_int64),
        ("kept_bytes", ctypes.c_int64),
        ("step", _INT),
        ("fade_shift", _INT),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("coded_at", ctypes.c_int64),
        ("chosen_at", ctypes.c_int64),
    )


class SelectedSets(ctypes.Structure):
    """Selected sets, and the rows that at least one of them has."""

    _fields_ = (
        ("set_count", ctypes.c_int64),
        ("set_rows", ctypes.c_int64),
        ("sets", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("numbers", ctypes.c_void_p),
        ("addresses", ctypes.c_void_p),
        ("count", ctypes.c_int64),
    )


class Misses(ctypes.Structure):
    """Rows of a selection that are not in memory, and what was read ahead."""

    _fields_ = (
        ("landed_positions", ctypes.c_void_p),
        ("landed_places", ctypes.c_void_p),
        ("landed_count", ctypes.c_int64),
        ("landed", ctypes.c_uint64),
        ("numbers", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("hits", ctypes.c_void_p),
        ("arrived", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("coming", ctypes.c_void_p),
    )


class Attending(ctypes.Structure):
    """A run of rows that are attended to while some of them come."""

    _fields_ = (
        ("step", ctypes.c_void_p),
        ("selected", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
        ("start", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("variant", _INT),
        ("is_begun", _INT),
        ("is_done", _INT),
        ("nanoseconds", ctypes.c_int64),
    )


# --- Reads of the drive ---

# What looks at reads and lets them fail; see host/native/file_reads.h.
EnterWatch = ctypes.CFUNCTYPE(_INT, _INT, ctypes.c_uint32, ctypes.c_uint32)
DoneWatch = ctypes.CFUNCTYPE(_LONG, _INT, ctypes.c_uint64, _LONG, _LONG, _LONG)


class Watch(ctypes.Structure):
    """Functions that are called in the kernel's place, and of each read that it is done with."""

    _fields_ = (("enter", EnterWatch), ("done", DoneWatch))


class ReadWay(ctypes.Structure):
    """How a file is read: in a ring, or by so many threads where that is null.

    A thread reads neighbours of a file in one call, up to so many joined bytes; 0 for none.
    """

    _fields_ = (
        ("ring", ctypes.c_void_p),
        ("watch", ctypes.c_void_p),
        ("descriptor", _INT),
        ("threads", _INT),
        ("joined_bytes", _LONG),
    )


class FileReads(ctypes.Structure):
    """Where the bytes of each read lie and go, and what the kernel said of it."""

    _fields_ = (
        ("count", _LONG),
        ("file_offsets", ctypes.c_void_p),
        ("addresses", ctypes.c_void_p),
        ("byte_counts", ctypes.c_void_p),
        ("results", ctypes.c_void_p),
    )


class Landing(ctypes.Structure):
    """Rows of a file that are brought to their places, and how far that has come."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("count", _LONG),
        ("row_bytes", _LONG),
        ("out", ctypes.c_void_p),
        ("out_rows", _LONG),
        ("buffer", ctypes.c_void_p),
        ("buffer_bytes", _LONG),
        ("sums", ctypes.c_void_p),
        ("sum_count", _LONG),
        ("starts", ctypes.c_void_p),
        ("start_count", _LONG),
        ("landed", _LONG),
        ("is_read", _LONG),
        ("reads", _LONG),
        ("byte_count", _LONG),
        ("wrong", _LONG),
        ("missing", _LONG),
        ("missing_offsets", ctypes.c_void_p),
        ("missing_addresses", ctypes.c_void_p),
        ("missing_counts", ctypes.c_void_p),
        ("attending", ctypes.c_void_p),
        ("numbers", ctypes.c_void_p),
        ("seals", ctypes.c_void_p),
        ("seal_count", _LONG),
        ("seals_groups", _LONG),
        ("unit_bytes", _LONG),
    )


# One segment: the addresses of its shadow, c, M and probe groups (or 0), and its tokens.
SEGMENT_WORDS = 5
# One piece of a launch: the addresses of its shadow, codes, exponents and addends, its position and
# tokens, the address of its tuples and how far its sets lie apart.
PIECE_WORDS = 8
