# SPDX-License-Identifier: Apache-2.0
"""Finds and loads the native library, calls its functions, and raises its errors."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hillinfer.errors import HillInferError
from hillinfer.native.signatures import SIGNATURES, BlockRows
from hillinfer.native.structures import FileReads, Landing, PageRun, Promotion, ReadWay
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.kernel_spec import CONTRACT_VERSION

# --- Errors ---

NOT_FINITE = "the query holds an infinity or a NaN, or becomes one when scaled"


class NativeError(HillInferError):
    """The native library is missing, is another version's, or refuses a call."""


# --- Instruction sets ---


class Variant(StrEnum):
    """What the native library multiplies with; results are the same bits for each."""

    PORTABLE = "portable"
    AVX2 = "avx2"
    AVX512_VNNI = "avx512vnni"
    NEON = "neon"

    @property
    def number(self) -> int:
        """Its number in the library's C interface."""
        return _NUMBERS[self]


_NUMBERS = {variant: number for number, variant in enumerate(Variant)}
# Fastest first.
PREFERENCE = (Variant.AVX512_VNNI, Variant.AVX2, Variant.NEON, Variant.PORTABLE)

# --- The library ---

LIBRARY = Path(__file__).parent / "libhillinfer_native.so"
HOW_TO_BUILD = (
    "install a C++ compiler (apt install g++), then run python tools/build_native.py in the source "
    "tree or install HillInfer again"
)

_INTERFACE_VERSION = 34
PROMPT_ROUNDING = 1
"""Grows where a prompt's attention (prompt_attention_kernels.h) comes to round otherwise."""
_KEY_BYTES = 32
_NO_MEMORY, _FAILED, _NOT_FINITE = 2, 3, 4
_NOWHERE = "a position behind the last token, or in no group"
_COLD, _MISPLACED, LOST = 5, 6, 7


class NativeLibrary:
    """The library's functions, with their results checked.

    Python's global lock is let go of while a call runs, except where the caller wants to keep it.

    Raises NativeError where it cannot be loaded, or is of another version.

    Attributes
    ----------
    functions, tables
        The functions themselves; while one of `tables` runs Python's global lock is kept.
    variants
        What this processor can run, fastest first.
    tile_rows
        Rows that attention takes at a time.
    """

    def __init__(self, path: Path = LIBRARY) -> None:
        try:
            self.functions = ctypes.CDLL(str(path))
            self.tables = ctypes.PyDLL(str(path))
            for functions in (self.functions, self.tables):
                for name, (result, arguments) in SIGNATURES.items():
                    function = getattr(functions, name)
                    function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            reason = "is not built" if not path.exists() else f"cannot be used ({error})"
            raise NativeError(f"the native library {reason}: {HOW_TO_BUILD}") from error
        found = self.functions.hillinfer_version()
        wanted = 100 * CONTRACT_VERSION + _INTERFACE_VERSION
        if found != wanted:
            raise NativeError(
                f"the native library is version {found}, not {wanted}: {HOW_TO_BUILD}"
            )
        self.variants = tuple(
            one for one in PREFERENCE if self.functions.hillinfer_has_variant(one.number)
        )
        self.tile_rows = int(self.functions.hillinfer_tile_rows())

    def runnable(self, variant: Variant | None) -> Variant:
        """Return a variant, the fastest where None; NativeError where this processor has it not."""
        found = variant or self.variants[0]
        if found not in self.variants:
            raise NativeError(f"this processor has no {found}")
        return found

    def call(self, name: str, *arguments: object) -> None:
        """Call a function that returns whether it did what it should.

        Raises
        ------
        MemoryError
            It could not get memory.
        NativeError
            The processor lacks the variant that was asked for, or the system refused something.
        NonFiniteQueryError
            A query that it was to scale is not finite.
        """
        self.check(name, getattr(self.functions, name)(*arguments))

    def make(self, name: str, *arguments: object) -> int:
        """Call a function that makes an object, and return where it lies; see `call`."""
        made = ctypes.c_void_p()
        self.call(name, *arguments, ctypes.byref(made))
        assert made.value is not None
        return made.value

    def closing(self, name: str) -> Callable[[int], None]:
        """Return a function that frees an object."""
        close: Callable[[int], None] = getattr(self.functions, name)
        return close

    def sequence_layers(self, sequence: int) -> int:
        """Return where the tables of a sequence's layers lie."""
        return int(self.functions.hillinfer_sequence_layers(sequence))

    def open_pool(self, slots: int, row_bytes: int) -> int:
        """Make the slots of a hot pool and return where they are described.

        Raises
        ------
        OSError
            The system does not reserve memory for so many.
        """
        return self._open("hillinfer_pool_open", slots, row_bytes)

    def _open(self, name: str, *arguments: object) -> int:
        """Call a function that makes an object or returns an error of the system, below 0."""
        made = ctypes.c_void_p()
        error = -getattr(self.functions, name)(*arguments, ctypes.byref(made))
        if error or made.value is None:
            raise OSError(error, os.strerror(error))
        return made.value

    def call_holding(self, name: str, *arguments: object) -> None:
        """Call a function that is done in a microsecond, and keep Python's global lock; see `call`.

        Where several threads run Python, who lets go of the lock waits for it afterwards.
        """
        self.check(name, getattr(self.tables, name)(*arguments))

    @staticmethod
    def check(name: str, outcome: int) -> None:
        """Raise what a function's outcome says went wrong, as `call` does."""
        if outcome == _NO_MEMORY:
            raise MemoryError(f"{name} found no memory to work in")
        if outcome == _FAILED:
            raise NativeError(f"{name} failed: the system refused it something")
        if outcome == _NOT_FINITE:
            raise NonFiniteQueryError(NOT_FINITE)
        if outcome:
            raise NativeError("this processor cannot run that variant of the native library")

    def attention_bytes(self, attention: object) -> int:
        """Return the bytes of a softmax's state, for a reference to an `Attention`."""
        return int(self.functions.hillinfer_attention_bytes(attention))

    def open_ring(self, depth: int) -> int:
        """Make a ring of io_uring for the calling thread and return its address.

        Raises
        ------
        OSError
            The kernel gives none.
        """
        return self._open("hillinfer_ring_open", depth)

    def close_ring(self, ring: int) -> None:
        """Give a ring back that reads nothing now."""
        self.functions.hillinfer_ring_close(ring)

    def read_file(self, way: ReadWay, reads: FileReads) -> bool:
        """Make many reads of a file at once; see host/native/file_reads.h.

        Returns whether none is under way: a ring may not have given its reads back.
        """
        return not self.functions.hillinfer_read_file(way, reads)

    def rows_to_blocks(self, rows: NDArray[np.int64]) -> None:
        """Place rows, int64 (fields of `BlockRows`,); see host/native/block_rows.h."""
        self.functions.hillinfer_rows_to_blocks(BlockRows.from_buffer(rows.data))

    def read_to_blocks(self, way: ReadWay, reads: FileReads, rows: NDArray[np.int64]) -> bool:
        """Do as `read_file`, and place what each read brought; see host/native/block_rows.h.

        Parameters
        ----------
        way, reads
            As there.
        rows
            int64 (reads, fields of `BlockRows`), the rows of each.
        """
        return not self.functions.hillinfer_read_to_blocks(way, reads, rows.ctypes.data)

    def land(self, way: ReadWay, landing: Landing) -> bool:
        """Bring rows of a file to their places; see host/native/landing.h.

        Returns whether no read is under way, as `read_file` does.

        Raises
        ------
        IndexError
            A row or a place is nowhere.
        MemoryError, NativeError
            As from `call`.
        """
        return self.has_landed(self.functions.hillinfer_land(way, landing))

    def has_landed(self, outcome: int) -> bool:
        """Return what `land` does where that is its outcome, or raise as it does."""
        if outcome == _MISPLACED:
            raise IndexError("a row has no place, or no checksum")
        if outcome == LOST:
            return False
        self.check("hillinfer_land", outcome)
        return True

    def promote(self, slots: int, promotion: Promotion) -> None:
        """Promote rows; see host/native/promotion.h.

        Raises
        ------
        IndexError
            A row or a place is nowhere.
        MemoryError, NativeError
            As from `call`.
        """
        outcome = self.functions.hillinfer_promote(slots, promotion)
        if outcome == _MISPLACED:
            raise IndexError("a row that is offered is nowhere")
        self.check("hillinfer_promote", outcome)

    def find_rows(
        self,
        table: int,
        pool: int,
        positions: NDArray[np.int64],
        step: int,
        out: NDArray[np.uint64],
    ) -> None:
        """Find rows; see host/native/row_places.h.

        `positions` and `out` are contiguous; that gets one address for each, 0 for a row that is
        cold. Slots are stamped with a step that is not below 0. Raises IndexError where a position
        is nowhere.
        """
        given = positions.ctypes.data, len(positions), step, out.ctypes.data
        if self.functions.hillinfer_find_rows(table, pool, *given):
            raise IndexError(_NOWHERE)

    def copy_rows(self, addresses: NDArray[np.uint64], out: NDArray[np.uint8]) -> int:
        """Copy rows to one place, and return how many.

        The caller answers for what lies at `addresses`, which are contiguous; a row at its own
        place stays. `out` is uint8 (at least as many rows, row_bytes), contiguous. Raises
        ValueError where there is no room for so many.
        """
        if out.ndim != 2 or not out.flags.c_contiguous or len(out) < len(addresses):
            raise ValueError(f"{len(addresses)} rows do not go to an array of shape {out.shape}")
        self.functions.hillinfer_copy_rows(
            addresses.ctypes.data, len(addresses), out.shape[1], out.ctypes.data
        )
        return len(addresses)

    def row_sums(
        self, memory: NDArray[np.uint8], places: NDArray[np.int64], sums: NDArray[np.uint32]
    ) -> None:
        """Take checksums of rows; see host/native/row_sums.h.

        `memory` is uint8 (any, row_bytes), contiguous, row_bytes a multiple of 64. `places` says
        which rows, int64; `sums` is uint32 and gets one for each; both are contiguous.

        Raises
        ------
        ValueError
            The memory has gaps, or its rows another size.
        IndexError
            A row is not in it.
        """
        if memory.ndim != 2 or not memory.flags.c_contiguous or memory.shape[1] % 64:
            raise ValueError(f"rows of shape {memory.shape} must be contiguous multiples of 64")
        if not len(places):
            return
        if int(places.min()) < 0 or int(places.max()) >= len(memory):
            raise IndexError(f"rows {places.min()} to {places.max()} of {len(memory)}")
        self.functions.hillinfer_row_sums(
            memory.ctypes.data, memory.shape[1], places.ctypes.data, len(places), sums.ctypes.data
        )

    def crc32c(self, memory: NDArray[np.uint8], salts: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return CRC-32C checksums of equal pieces of memory, one behind the other.

        Parameters
        ----------
        memory
            uint8 of shape (pieces, bytes), contiguous.
        salts
            uint32, contiguous, one per piece: the checksum of what comes before it, 0 for nothing.

        Raises
        ------
        ValueError
            The memory has gaps, or its pieces are not as many as the salts.
        """
        if memory.ndim != 2 or not memory.flags.c_contiguous or len(memory) != len(salts):
            raise ValueError(f"{len(salts)} salts for pieces of shape {memory.shape}")
        sums = np.empty(len(salts), np.uint32)
        self.functions.hillinfer_crc32c(
            memory.ctypes.data, memory.shape[1], len(memory), salts.ctypes.data, sums.ctypes.data
        )
        return sums

    @property
    def has_page_cipher(self) -> bool:
        """Whether the system has what `cipher_pages` needs."""
        return bool(self.functions.hillinfer_has_page_cipher())

    def cipher_pages(self, run: PageRun) -> int:
        """Seal or open pages with AES-256-GCM in their place, by the system's libcrypto.

        Returns how many were done: all, or those before the first one whose tag does not fit.

        Raises
        ------
        NativeError
            The system has none, or it refused.
        """
        done = int(self.functions.hillinfer_cipher_pages(ctypes.byref(run)))
        if done < 0:
            raise NativeError("hillinfer_cipher_pages failed: there is no libcrypto that does it")
        return done

    def prefix_keys(self, before: bytes, groups: NDArray[np.uint8]) -> bytes | None:
        """Return the chain of SHA-256 over groups, 32 bytes each; None without a libcrypto.

        `before` is the key of what comes before the first group, 32 bytes; `groups` is uint8
        (groups, bytes), contiguous. Raises ValueError where they are not.
        """
        if len(before) != _KEY_BYTES or groups.ndim != 2 or not groups.flags.c_contiguous:
            raise ValueError(f"a key of {len(before)} bytes before groups of {groups.shape}")
        keys = ctypes.create_string_buffer(_KEY_BYTES * len(groups) or 1)
        done = self.functions.hillinfer_prefix_keys(
            before, groups.ctypes.data, groups.shape[1], len(groups), keys
        )
        return keys.raw[: _KEY_BYTES * len(groups)] if done == 1 else None

    def decode(self, name: str, *arguments: int | None) -> bool:
        """Call one of the functions of decode_step.h; return whether all rows are in memory.

        `arguments` are numbers, and addresses of what is to live until this returns.

        Raises
        ------
        IndexError
            A position is nowhere.
        MemoryError, NativeError, NonFiniteQueryError
            As from `call`.
        """
        return self.are_here(name, getattr(self.functions, name)(*arguments))

    def are_here(self, name: str, outcome: int) -> bool:
        """Return whether an outcome is that all rows are in memory; raises as `decode` does."""
        if outcome == _MISPLACED:
            raise IndexError(_NOWHERE)
        if outcome and outcome != _COLD:
            self.check(name, outcome)
        return not outcome


@cache
def native_library() -> NativeLibrary:
    """Return the library, loaded once, or raise NativeError saying how to get it."""
    return NativeLibrary()
