# SPDX-License-Identifier: Apache-2.0
"""Reads files that somebody else may have made: regular ones alone, of a sensible size."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

_MOST_LINE = 1 << 20


def read_plain(file: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises
    ------
    OSError
        Where it is none, is larger than `most_bytes`, or cannot be read; the reason is its
        `strerror`.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as opened:
        size = _checked(file, descriptor, most_bytes)
        # One byte more shows a file that grew since.
        return opened.read(size + 1)


def open_plain(file: Path, encoding: str, most_bytes: int) -> TextIO:
    """Open a regular file as text, lines as they are; errors as those of `read_plain`."""
    # A pipe does not wait for its other end.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    opened = os.fdopen(descriptor, encoding=encoding, newline="")
    try:
        _checked(file, descriptor, most_bytes)
    except BaseException:
        opened.close()
        raise
    return opened


def plain_lines(opened: TextIO) -> Iterator[str]:
    """Yield the lines of a file, newlines included.

    Raises
    ------
    ValueError
        Where one is longer than any that is written: a mebibyte.
    """
    while line := opened.readline(_MOST_LINE):
        if len(line) == _MOST_LINE:
            raise ValueError("a line has no end")
        yield line


def _checked(file: Path, descriptor: int, most_bytes: int) -> int:
    facts = os.fstat(descriptor)
    if stat.S_ISDIR(facts.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(file))
    if facts.st_size > most_bytes:
        raise OSError(errno.EFBIG, f"its {facts.st_size} bytes are more than {most_bytes}", file)
    return facts.st_size
