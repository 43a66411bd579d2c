# SPDX-License-Identifier: Apache-2.0
"""A file's bytes, and what an engine brings of them, for the tests of read engines."""

import numpy as np

from hillinfer.drive.files import PAGE_BYTES, aligned_buffer

PAGES = 300


def random_pages():
    """Return the bytes of a file of `PAGES` pages."""
    data = aligned_buffer(PAGES * PAGE_BYTES)
    data[:] = np.random.default_rng(3).integers(0, 256, len(data), np.uint8)
    return data


def brought(engine, file, reads):
    """Return what an engine reads into a buffer of no other bytes than it is asked for."""
    buffer = aligned_buffer(int(reads.byte_counts.sum()))
    buffer[:] = 0xA5
    engine.read(file, buffer, reads)
    return buffer[: int(reads.byte_counts.sum())]
