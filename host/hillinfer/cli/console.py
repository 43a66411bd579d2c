# SPDX-License-Identifier: Apache-2.0
"""Standard error for people: plain text, never styled by what it happens to contain."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_FILE_COLUMNS = 100


def error_console() -> Console:
    """Return a console on standard error as it is now."""
    console = Console(file=sys.stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _FILE_COLUMNS
    return console


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
