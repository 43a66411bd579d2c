# SPDX-License-Identifier: Apache-2.0
"""Rows of a stored prefix as reads bring them, their checksums, and the hook that takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from hillinfer.native.library import native_library
from hillinfer_model.kernel_spec import GROUP_TOKENS


class PrefixSums:
    """Checksums of all groups of a prefix in all layers, and what each begins with.

    Parameters
    ----------
    keys
        Of each group, as long as each other.
    expected
        uint32 (layers, groups), the checksums that they were written with.

    Attributes
    ----------
    salts, expected
        uint32 (layers, groups): the checksum of a group's key and its layer's number, and as given.
    """

    def __init__(self, keys: Sequence[bytes], expected: NDArray[np.uint32]) -> None:
        layers, groups = expected.shape
        library = native_library()
        memory = np.frombuffer(b"".join(keys), np.uint8).reshape(groups, -1)
        # The same key begins a group's salts in all layers: its own checksum is taken once.
        begun = library.crc32c(memory, np.zeros(groups, np.uint32))
        numbers = np.repeat(np.arange(layers, dtype="<i4"), groups).view(np.uint8).reshape(-1, 4)
        salts = library.crc32c(numbers, np.tile(begun, layers))
        self.salts = salts.reshape(layers, groups)
        self.expected = np.ascontiguousarray(expected)

    def read_rows(
        self,
        layers: NDArray[np.int64],
        positions: NDArray[np.int64],
        tokens: NDArray[np.int64],
        addresses: NDArray[np.int64],
    ) -> ReadRows:
        """Return the rows that reads bring, with the places of their salts."""
        at = layers * self.salts.shape[1] + positions // GROUP_TOKENS
        salts = at * self.salts.itemsize + self.salts.ctypes.data
        return ReadRows(layers, positions, tokens, addresses, salts)


class ArrivedRows:
    """Rows of neighbouring groups in a layer, as a drive gave them.

    Parameters
    ----------
    layer, position
        Whose, and the first token's position in the prompt.
    rows
        uint8 (groups * 64, row_bytes), contiguous; their memory is used again once they were
        yielded.
    salts, expected
        uint32, of each group: the checksum of what comes before it, and the one it was written
        with.
    right
        Called with `restored_bytes`, once they are known to be right.
    wrong
        Called where they are not, with the number of the first wrong group among them; raises.

    Attributes
    ----------
    is_checked
        Whether they were compared and are right.
    """

    def __init__(
        self,
        layer: int,
        position: int,
        rows: NDArray[np.uint8],
        salts: NDArray[np.uint32],
        expected: NDArray[np.uint32],
        right: Callable[..., None],
        wrong: Callable[[int], NoReturn],
    ) -> None:
        self.layer, self.position = layer, position
        self.rows, self.salts = rows, salts
        self._expected = expected
        self._right, self._wrong = right, wrong
        self.is_checked = False

    def check(self, sums: NDArray[np.uint32] | None = None) -> None:
        """Compare rows with their checksums.

        Parameters
        ----------
        sums
            uint32, what each group's checksum is; computed here where None.

        Raises
        ------
        WrongBytesError
            Where they are not as they were written.
        """
        if sums is None:
            sums = native_library().crc32c(self.rows.reshape(len(self.salts), -1), self.salts)
        differs = sums != self._expected
        if differs.any():
            self._wrong(int(differs.argmax()))
        if not self.is_checked:
            self.is_checked = True
            self._right(restored_bytes=self.rows.nbytes)


@dataclass(frozen=True)
class ReadRows:
    """Rows that each of some reads brings: whole groups of one layer.

    Parameters
    ----------
    layers, positions, tokens
        int64 (reads,), whose they are, the first token's position in the prompt, and how many.
    addresses, salts
        int64 (reads,), where they come to, and where the checksums are that their groups begin
        with.
    """

    layers: NDArray[np.int64]
    positions: NDArray[np.int64]
    tokens: NDArray[np.int64]
    addresses: NDArray[np.int64]
    salts: NDArray[np.int64]


class Taker:
    """Takes rows of a stream as they arrive; this one leaves them to whoever they are yielded to.

    Attributes
    ----------
    most_layers
        Neighbouring layers that one read brings at most; None for as many as make it long.
    places_reads
        Whether `during` is asked. Where pages are encrypted it is not.
    """

    most_layers: int | None = None
    places_reads: bool = False

    def during(self, rows: ReadRows) -> NDArray[np.int64]:
        """Return what the threads that read place, int64 (reads, fields of `BlockRows`).

        `take` is told of the same rows once all of a piece are there.
        """
        raise NotImplementedError

    def take(self, arrived: Iterable[ArrivedRows]) -> None:
        """Take the rows of a piece, in a reading thread, in any order of pieces.

        Those that were just compared with their checksums are still in that processor's cache.
        """
        for one in arrived:
            one.check()

    def settle(self, arrived: Sequence[ArrivedRows]) -> bool:
        """Return once a piece's rows are in their places, and whether others may use their memory.

        Whoever they are yielded to aside.
        """
        return True
