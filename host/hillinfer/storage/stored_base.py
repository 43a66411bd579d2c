# SPDX-License-Identifier: Apache-2.0
"""Files that are read where they lie and never written: what saved sessions hold."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hillinfer.errors import HillInferError
from hillinfer.storage.cold_file import IOMode

Result = TypeVar("Result")
Base = TypeVar("Base", "RowBase", "ShadowBase")


class ReadFile(Protocol):
    """A file that bytes are read from."""

    @property
    def descriptor(self) -> int:
        """Number of the open file, for who reads it by itself; it stays open until `close`."""
        ...

    def lend(self, use: Callable[[int], Result]) -> Result:
        """Call `use` with a descriptor that stays open meanwhile, and return what it returns."""
        ...

    def changed(self, byte_count: int, offset: int) -> HillInferError:
        """Return the error that says that bytes are not those that were written."""
        ...

    def read(self, into: memoryview, offset: int) -> None:
        """Fill all of `into` from `offset`, or raise an error naming file and bytes."""
        ...

    def close(self) -> None:
        """Close the file; harmless when done twice."""
        ...


@dataclass(frozen=True)
class RowBase:
    """A run of groups in every layer.

    Parameters
    ----------
    files
        One per layer; group i of them starts at byte i · 64 · row_bytes.
    count
        How many groups may be read.
    io_mode
        How the files are read.
    sums
        Checksums of the rows of each layer, uint32, from whoever verified the files; None where
        they are known to the store.
    key
        Equal to that of another base where both are the same files with the same content; None
        where nobody else can have them.
    """

    files: Sequence[ReadFile]
    count: int
    io_mode: IOMode
    sums: Sequence[NDArray[np.uint32]] | None = None
    key: Hashable = None

    def close(self) -> None:
        """Close all files; harmless when done twice."""
        for file in self.files:
            file.close()


@dataclass(frozen=True)
class ShadowBase:
    """A run of slots of the shadow.

    Parameters
    ----------
    file
        Slot i of them starts at byte i · slot_bytes.
    count
        How many there are.
    slot_bytes
        Size of a slot.
    sums
        Checksums of the slots, uint32, or None.
    key
        As for rows.
    """

    file: ReadFile
    count: int
    slot_bytes: int
    sums: NDArray[np.uint32] | None = None
    key: Hashable = None

    def close(self) -> None:
        """Close the file; harmless when done twice."""
        self.file.close()


@dataclass(frozen=True)
class StoredBase:
    """What a runtime may read of a saved session.

    Parameters
    ----------
    rows, shadow
        See there.
    """

    rows: RowBase
    shadow: ShadowBase

    def close(self) -> None:
        """Close all files; harmless when done twice."""
        self.rows.close()
        self.shadow.close()


@dataclass(frozen=True)
class BasePart(Generic[Base]):
    """Those of some numbers that lie in one base, or in none.

    Parameters
    ----------
    chosen
        bool, a flag for each number.
    first
        First number of the base, 0 where there is none.
    base
        Which, or None for a store's own file.
    """

    chosen: NDArray[np.bool_]
    first: int
    base: Base | None


class BaseMap(Generic[Base]):
    """Which numbers of groups or slots lie in which base.

    It is replaced and never changed, so that any thread may look.

    Parameters
    ----------
    placed
        First number and base of each; no two overlap.
    """

    def __init__(self, placed: Sequence[tuple[int, Base]] = ()) -> None:
        self._placed: list[tuple[int, Base]] = sorted(placed, key=lambda one: one[0])
        self._firsts = np.array([first for first, _ in self._placed], np.int64)
        self._ends = np.array([first + base.count for first, base in self._placed], np.int64)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._placed)

    @property
    def bases(self) -> list[Base]:
        """All of them."""
        return [base for _, base in self._placed]

    def having(self, first: int, base: Base) -> BaseMap[Base]:
        """Return a map with one more, whose numbers begin at `first`."""
        return BaseMap(self._placed + [(first, base)])  # noqa: RUF005  (no type of a mixture)

    def without(self, first: int) -> tuple[Base | None, BaseMap[Base]]:
        """Return the base whose numbers begin at `first`, None for none, and a map without it."""
        rest = [(own, base) for own, base in self._placed if own != first]
        return next((base for own, base in self._placed if own == first), None), BaseMap(rest)

    def like(self, base: Base) -> int | None:
        """Return where the same files with at least as much to read begin, or None."""
        for first, own in self._placed:
            if base.key is not None and own.key == base.key and own.count >= base.count:
                return first
        return None

    def which(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a number for the base of each, -1 for none, int64."""
        if not self._placed:
            return np.full(len(numbers), -1)
        at = np.searchsorted(self._firsts, numbers, "right") - 1
        at[numbers >= self._ends[at]] = -1
        return at

    def of(self, number: int) -> tuple[int, Base | None]:
        """Return the first number and the base of the one that a number lies in, or 0 and None."""
        at = int(self.which(np.array([number]))[0])
        return self._placed[at] if at >= 0 else (0, None)

    def parts(self, numbers: NDArray[np.int64]) -> Iterator[BasePart[Base]]:
        """Yield the bases that some numbers lie in, and which do; the own file is one of them."""
        which = self.which(numbers)
        for at in np.unique(which).tolist():
            first, base = self._placed[at] if at >= 0 else (0, None)
            yield BasePart(which == at, first, base)
