# SPDX-License-Identifier: Apache-2.0
"""All ways of reading a drive, as fixtures for tests of the drive and of the store."""

import os
from contextlib import contextmanager

import pytest
from engine_cases import SKIP, kernel_permits_rings
from read_cases import random_pages
from twins.python_reads import ThreadEngine

from hillinfer.drive import engine_table as read_engines
from hillinfer.settings import IOChoice

PYTHON = "threads of Python"


@pytest.fixture
def threads_of_python(monkeypatch):
    """The twin reads: otherwise the native library does, and `preadv` what that did not bring."""
    monkeypatch.setattr(
        read_engines, "NativeThreadEngine", lambda threads, calls: ThreadEngine(threads)
    )


@pytest.fixture(params=[IOChoice.URING, IOChoice.THREADS, PYTHON])
def engine_choice(request):
    if request.param == PYTHON:
        request.getfixturevalue("threads_of_python")
        return IOChoice.THREADS
    if request.param is IOChoice.URING and not kernel_permits_rings():
        pytest.skip(SKIP)
    return request.param


@contextmanager
def in_the_place_of(file, path, flags):
    """Let what is at a path be reached where a cold file is open, as by its own descriptor."""
    real, other = os.dup(file.descriptor), os.open(path, flags)
    try:
        os.dup2(other, file.descriptor)
        yield
    finally:
        os.dup2(real, file.descriptor)
        os.close(real)
        os.close(other)


@pytest.fixture(scope="module")
def content():
    """The bytes of a file, uint8."""
    return random_pages()
