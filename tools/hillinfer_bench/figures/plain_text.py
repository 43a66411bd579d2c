# SPDX-License-Identifier: Apache-2.0
"""Text files that a run has left, read line by line in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from hillinfer.system.files import checked_size

_MOST_LINE = 1 << 20


def open_plain(file: Path, encoding: str, most_bytes: int) -> TextIO:
    """Open a regular file as text, lines as they are; errors as those of `read_plain`."""
    # A pipe does not wait for its other end.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    opened = os.fdopen(descriptor, encoding=encoding, newline="")
    try:
        checked_size(file, descriptor, most_bytes)
    except BaseException:
        opened.close()
        raise
    return opened


def plain_lines(opened: TextIO) -> Iterator[str]:
    """Yield the lines of a file, newlines included.

    Raises ValueError where one is longer than any that is written: a mebibyte.
    """
    while line := opened.readline(_MOST_LINE):
        if len(line) == _MOST_LINE:
            raise ValueError("a line has no end")
        yield line
