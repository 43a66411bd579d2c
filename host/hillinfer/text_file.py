# SPDX-License-Identifier: Apache-2.0
"""Texts from files and pipes, in bounded time and memory whatever a path leads to."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from hillinfer.byte_size import format_bytes
from hillinfer.prompt import PromptError

# Fifty million tokens of English and more than any model has positions for.
MOST_BYTES = 256 << 20
_PIECE = 1 << 20


def read_text(file: Path, what: str, option: str) -> str:
    """Return the text in a file.

    A pipe is read to its end; one that nobody writes to is empty. Endless devices end at the
    largest size.

    Parameters
    ----------
    file
        Where.
    what, option
        What it is and the option that named it, for the error.

    Raises
    ------
    PromptError
        Where it cannot be read, is larger than `MOST_BYTES`, or is not UTF-8.
    """
    try:
        # Without waiting for a writer that may never come.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with os.fdopen(descriptor, "rb", buffering=0) as opened:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_size > MOST_BYTES:
                raise _too_large(str(file), status.st_size)
            begun = _begun(descriptor)
            os.set_blocking(descriptor, True)
            return decoded(begun + bounded(opened, str(file), len(begun)), str(file))
    except OSError as error:
        raise PromptError(f"cannot read {what} {file}: {error.strerror}; check {option}") from error


def bounded(source: BinaryIO, place: str, already: int = 0) -> bytes:
    """Return all bytes of an open file.

    Parameters
    ----------
    source
        The file, in blocking mode.
    place
        What it is, for the error.
    already
        Bytes of it that were read before.

    Raises
    ------
    PromptError
        Where there are more than `MOST_BYTES`.
    """
    pieces: list[bytes] = []
    while piece := source.read(_PIECE):
        already += len(piece)
        if already > MOST_BYTES:
            raise _too_large(place, already)
        pieces.append(piece)
    return b"".join(pieces)


def decoded(data: bytes, place: str) -> str:
    """Return bytes as text, a byte order mark left out.

    Raises
    ------
    PromptError
        Where they are not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{place} is not UTF-8 text (byte {error.start}): convert it, for example with iconv"
        ) from error


def check_text(text: str, option: str) -> None:
    """Refuse an argument whose bytes are not UTF-8, which Python hands over as half characters.

    Raises
    ------
    PromptError
        Where it holds any.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the text after {option} is not UTF-8 (character {error.start}): convert it, for "
            "example with iconv"
        ) from error


def _begun(descriptor: int) -> bytes:
    """Return what is there to read at once; nothing where a writer has not written yet."""
    try:
        return os.read(descriptor, _PIECE)
    except BlockingIOError:
        return b""


def _too_large(place: str, byte_count: int) -> PromptError:
    return PromptError(
        f"{place} has {format_bytes(byte_count)} or more, and no text longer than "
        f"{format_bytes(MOST_BYTES)} is read: give a part of it"
    )
