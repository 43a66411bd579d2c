# SPDX-License-Identifier: Apache-2.0
"""Descriptors that tests count, and take away."""

import resource
from contextlib import contextmanager
from pathlib import Path


def open_files():
    # Without the one of the listing itself.
    return {file for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}


@contextmanager
def free_descriptors(count):
    """So many more can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(file.name) for file in open_files()}
    free = (number for number in range(soft) if number not in taken)
    limit = next(number for index, number in enumerate(free) if index == count)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
