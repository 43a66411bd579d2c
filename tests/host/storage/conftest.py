# SPDX-License-Identifier: Apache-2.0
"""All ways of reading a drive, for all tests of storage."""

import pytest
from engine_cases import SKIP, kernel_permits_rings
from read_cases import random_pages

from hillinfer.native.library import HOW_TO_BUILD, native_is_here
from hillinfer.storage import read_engines
from hillinfer.storage.read_engines import IOChoice

PYTHON = "threads of Python"


@pytest.fixture(params=[IOChoice.URING, IOChoice.THREADS, PYTHON])
def engine_choice(request, monkeypatch):
    if request.param == PYTHON:
        monkeypatch.setattr(read_engines, "native_is_here", lambda: False)
        return IOChoice.THREADS
    if request.param is IOChoice.URING and not kernel_permits_rings():
        pytest.skip(SKIP)
    if request.param is IOChoice.THREADS and not native_is_here():
        pytest.skip(f"the native library is not built: {HOW_TO_BUILD}")
    return request.param


@pytest.fixture(scope="module")
def content():
    """The bytes of a file, uint8."""
    return random_pages()
