# SPDX-License-Identifier: Apache-2.0
"""What brings many pieces of a file into memory at once."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hillinfer.storage.reads import Reads
from hillinfer.storage.stored_base import ReadFile


class ReadEngine(Protocol):
    """Makes many reads at once; any thread may use it at any time."""

    name: str
    """As in the table of engines."""

    def read(self, file: ReadFile, buffer: NDArray[np.uint8], reads: Reads) -> None:
        """Make all reads, or raise the file's error naming file, offset and bytes.

        Whatever happens, no read is under way any more when it returns or raises.

        Parameters
        ----------
        file
            Which file.
        buffer
            uint8, one contiguous stretch.
        reads
            Where the bytes lie and where in the buffer they go.
        """
        ...

    def close(self) -> None:
        """Wait for reads under way and give threads and rings back; harmless when done twice."""
        ...
