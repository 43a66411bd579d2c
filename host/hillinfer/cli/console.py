# SPDX-License-Identifier: Apache-2.0
"""Standard error for people: plain text, never styled by what it happens to contain."""

from __future__ import annotations

import sys

from rich.console import Console


def error_console() -> Console:
    """Return a console on standard error as it is now."""
    return Console(file=sys.stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)


def quiet_transformers() -> None:
    """Keep transformers' progress bars and advice off standard error in this process."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
