# SPDX-License-Identifier: Apache-2.0
"""How many threads a user may ask for."""

from __future__ import annotations

from hillinfer.errors import SettingsError

# OpenMP ends the process where it cannot have the threads that it was told to start.
MOST_THREADS = 1024


def check_threads(threads: int | None) -> None:
    """Refuse a number of compute threads that means nothing; None is the default's.

    Raises
    ------
    SettingsError
        Where it is not between 1 and `MOST_THREADS`.
    """
    if threads is not None and threads < 1:
        raise SettingsError(f"threads={threads} must be at least 1")
    if threads is not None and threads > MOST_THREADS:
        raise SettingsError(f"threads={threads} must be at most {MOST_THREADS}")
