# SPDX-License-Identifier: Apache-2.0
"""Standard error for people: plain text, never styled by what it happens to contain."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console

from hillinfer.errors import HillInferWarning, SetupWarning
from hillinfer.option_names import without_python_names

_FILE_COLUMNS = 100


def printable(text: str) -> str:
    """Return a text that moves no cursor: control characters become escapes."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


class _Lines(Console):
    """A console whose lines stay lines, whatever names they hold."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as `Console` does, control characters of texts as escapes."""
        shown = (printable(one) if isinstance(one, str) else one for one in objects)
        super().print(*shown, **options)


def error_console() -> Console:
    """Return a console on standard error as it is now."""
    console = _Lines(file=sys.stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _FILE_COLUMNS
    return console


@contextmanager
def shown_warnings() -> Iterator[None]:
    """Show each of HillInfer's own warnings once, as a line, for the time of a command."""
    shown = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, HillInferWarning):
            error_console().print(f"hillinfer: warning: {without_python_names(str(message))}")
        else:
            shown(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        warnings.simplefilter("default", HillInferWarning)
        warnings.showwarning = show
        yield


@contextmanager
def setup_warnings_shown() -> Iterator[None]:
    """Keep warnings about drive and budget quiet, because the checks of a run showed them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SetupWarning)
        yield


def quiet_transformers() -> None:
    """Keep transformers' advice off standard error, and its bars where nobody watches them.

    To be called before transformers is imported for the first time.
    """
    watched = sys.stderr.isatty()
    if not watched:
        os.environ.setdefault("TQDM_DISABLE", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not watched:
        logging.disable_progress_bar()
