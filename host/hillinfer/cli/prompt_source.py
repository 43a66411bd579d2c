# SPDX-License-Identifier: Apache-2.0
"""Where the document comes from: a file, an argument or standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from hillinfer.prompt import PromptError
from hillinfer.text_file import bounded, check_text, decoded, read_text

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
        document, place = _from_stdin(), "standard input"
    elif text is None:
        assert file is not None
        document, place = read_text(file, "the prompt file", "--prompt-file"), str(file)
    else:
        check_text(text, "--prompt")
        document, place = text, "--prompt"
    if not document.strip():
        raise PromptError(f"the prompt from {place} is empty: give a text to read")
    return document


def reads_stdin(file: Path | None, text: str | None) -> bool:
    """Whether `read_document` would take standard input."""
    return text is None and (file is None or file == _STDIN)


def _from_stdin() -> str:
    if sys.stdin.isatty():
        raise PromptError(
            "no prompt: give a text with --prompt-file or --prompt, or pipe one into stdin"
        )
    try:
        return decoded(bounded(sys.stdin.buffer, "standard input"), "standard input")
    except OSError as error:
        raise PromptError(
            f"cannot read standard input: {error.strerror}; give the text with --prompt-file"
        ) from error
