# SPDX-License-Identifier: Apache-2.0
"""Value codes of cold coded tokens on their way from the drive, and what they go through."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import PAGE_BYTES, round_up
from hillinfer.drive.landing import MAX_READ_BYTES
from hillinfer.drive.read_engines import ComingRows, LandingAhead
from hillinfer.native.signatures import Awaited
from hillinfer.native.signatures import ComingCodes as CodesTable
from hillinfer.native.structures import address_of
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec
from hillinfer_model.value_layout import code_row_bytes

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]

# Reads bring records that begin at multiples of it.
_ALIGNMENT = 64
_BATCHES = 4
_MOST_LANDING_BYTES = 4 << 20


def record_bytes(spec: KernelSpec) -> int:
    """Return what a token's code row and exponents take in the file, padded."""
    return round_up(code_row_bytes(spec) + spec.kv_heads, _ALIGNMENT)


def file_bytes(spec: KernelSpec, layers: int, tokens: int) -> int:
    """Return what codes of all full groups of so many tokens take on the drive."""
    return layers * (tokens & -GROUP_TOKENS) * record_bytes(spec)


def buffer_bytes(spec: KernelSpec, tokens: int) -> int:
    """Return what is read and written through, where a layer wants at most so many tokens."""
    written = round_up(spec.segment_tokens * record_bytes(spec), PAGE_BYTES)
    # Of the layer that attends, and of the next one.
    return written + landing_bytes(spec, tokens) + 2 * tokens * record_bytes(spec)


def landing_bytes(spec: KernelSpec, tokens: int) -> int:
    """Return what a layer's records go through, where they lie close together in a few batches.

    The thread that reads wakes several times for each, and then takes turns with those that
    compute.
    """
    wanted = round_up(tokens * record_bytes(spec) // _BATCHES, PAGE_BYTES)
    return min(max(MAX_READ_BYTES, wanted), _MOST_LANDING_BYTES) + 2 * PAGE_BYTES


class ComingCodes:
    """Tokens whose records are being read to a buffer.

    Parameters
    ----------
    layer, rows, numbers
        Whose they are: int64, contiguous, in the order of positions.
    buffer
        uint8 (at least as many, record_bytes).
    landed
        How they come.

    Attributes
    ----------
    table
        What the library was told of them; None where nothing was.
    """

    def __init__(
        self,
        layer: int,
        rows: Numbers,
        numbers: Numbers,
        buffer: NDArray[np.uint8],
        landed: ComingRows,
    ) -> None:
        self.layer, self.rows, self.numbers = layer, rows, numbers
        self.buffer, self.landed = buffer, landed
        self.table: CodesTable | None = None
        self._awaited: Awaited | None = None

    def told(self) -> int | None:
        """Return the address of what a call of the library is told that is to wait for them.

        None where the library's thread does not bring them.
        """
        if not isinstance(self.landed, LandingAhead):
            return None
        self._awaited = self.landed.awaited
        if self._awaited is None:
            return None
        self.table = CodesTable(
            ctypes.addressof(self._awaited),
            address_of(self.rows),
            address_of(self.numbers),
            len(self.rows),
            address_of(self.buffer),
            self.buffer.shape[1],
        )
        return ctypes.addressof(self.table)

    @property
    def memory(self) -> NDArray[np.uint8]:
        """All of the buffer that they lie in, which is that of others too where it is a part."""
        base = self.buffer.base
        return self.buffer if base is None else base

    @property
    def taken(self) -> int:
        """How many tokens the library has found codes of here: all that it wants, or none."""
        return 0 if self.table is None else int(self.table.taken)

    @property
    def waited_ns(self) -> int:
        """How long a call of the library has waited for them, where one has."""
        return 0 if self._awaited is None else int(self._awaited.nanoseconds)

    def is_of(self, rows: Numbers, numbers: Numbers) -> bool:
        """Say whether these are the very tokens, in the same order."""
        # Bytes compare faster than arrays.
        same = self.rows.tobytes() == rows.tobytes()
        return same and self.numbers.tobytes() == numbers.tobytes()

    def found(self, rows: Numbers, numbers: Numbers, filled: Flags) -> tuple[Numbers, Numbers]:
        """Return which records came of rows that are wanted and not filled, and which these are."""
        # What was begun is what is wanted, as a rule.
        if self.is_of(rows, numbers):
            (came,) = np.nonzero(~filled)
            return came, came
        order = np.argsort(self.rows)
        at = np.searchsorted(self.rows, rows, sorter=order)
        at = order[np.minimum(at, len(order) - 1)]
        same = (self.rows[at] == rows) & (self.numbers[at] == numbers)
        (came,) = np.nonzero(same & ~filled)
        return at[came], came
