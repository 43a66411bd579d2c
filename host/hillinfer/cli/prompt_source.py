# SPDX-License-Identifier: Apache-2.0
"""Where the document comes from: a file, an argument or standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from hillinfer.prompt import PromptError

_STDIN = Path("-")


def read_document(file: Path | None, text: str | None) -> str:
    """Return the document.

    Parameters
    ----------
    file
        A file of UTF-8 text, `-` for standard input; None where there is none.
    text
        The document itself; None where there is none.

    Raises
    ------
    PromptError
        Where both or none are given, or what is given cannot be read or is empty.
    """
    if file is not None and text is not None:
        raise PromptError("give the prompt with --prompt or with --prompt-file, not both")
    if text is None and reads_stdin(file, text):
        if sys.stdin.isatty():
            raise PromptError(
                "no prompt: give a text with --prompt-file or --prompt, or pipe one into stdin"
            )
        document, place = _decoded(sys.stdin.buffer.read(), "standard input"), "standard input"
    elif text is None:
        assert file is not None
        document, place = _from_file(file), str(file)
    else:
        document, place = text, "--prompt"
    if not document.strip():
        raise PromptError(f"the prompt from {place} is empty: give a text to read")
    return document


def reads_stdin(file: Path | None, text: str | None) -> bool:
    """Whether `read_document` would take standard input."""
    return text is None and (file is None or file == _STDIN)


def _from_file(file: Path) -> str:
    try:
        return _decoded(file.read_bytes(), str(file))
    except OSError as error:
        raise PromptError(
            f"cannot read the prompt file {file}: {error.strerror}; check --prompt-file"
        ) from error


def _decoded(data: bytes, place: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{place} is not UTF-8 text (byte {error.start}): convert it, for example with iconv"
        ) from error
