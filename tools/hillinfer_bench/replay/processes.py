# SPDX-License-Identifier: Apache-2.0
"""Runs functions in fresh processes, for work that threads of one interpreter do not speed up."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

_SAFE_PATH = "PYTHONSAFEPATH"


@contextmanager
def spawned_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Give fresh processes, which inherit no locks of threads that they do not have.

    multiprocessing starts them with `python -c`, which looks for modules in the current directory
    first, and there is no way to give it another option than by the environment.

    Parameters
    ----------
    count
        Most of them.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as workers:
            yield workers
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before
