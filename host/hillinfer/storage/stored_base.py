# SPDX-License-Identifier: Apache-2.0
"""Files that are read where they lie and never written: what a saved session holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hillinfer.errors import HillInferError
from hillinfer.storage.cold_file import IOMode


class ReadFile(Protocol):
    """A file that bytes are read from."""

    @property
    def descriptor(self) -> int:
        """Number of the open file, for who reads it by itself."""
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
    """The first groups of every layer.

    Parameters
    ----------
    files
        One per layer; group g starts at byte g · 64 · row_bytes.
    groups
        How many of them may be read.
    io_mode
        How the files are read.
    sums
        Checksums of the rows of each layer, uint32, from whoever verified the files; None where
        they are known to the store.
    """

    files: Sequence[ReadFile]
    groups: int
    io_mode: IOMode
    sums: Sequence[NDArray[np.uint32]] | None = None


@dataclass(frozen=True)
class ShadowBase:
    """The first slots of the shadow.

    Parameters
    ----------
    file
        Slot s starts at byte s · slot_bytes.
    slots
        How many there are.
    slot_bytes
        Size of a slot.
    sums
        Checksums of the slots, uint32, or None.
    """

    file: ReadFile
    slots: int
    slot_bytes: int
    sums: NDArray[np.uint32] | None = None


@dataclass(frozen=True)
class StoredBase:
    """What a runtime may read of a saved session, and closes with itself.

    Parameters
    ----------
    rows, shadow
        See there.
    """

    rows: RowBase
    shadow: ShadowBase

    def close(self) -> None:
        """Close all files; harmless when done twice."""
        for file in (*self.rows.files, self.shadow.file):
            file.close()
