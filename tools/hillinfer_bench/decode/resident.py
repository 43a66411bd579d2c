# SPDX-License-Identifier: Apache-2.0
"""What this process holds in memory now."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

_STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    """Return anonymous resident memory in bytes (RssAnon); 0 where the kernel does not say."""
    try:
        found = re.search(r"^RssAnon:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found.group(1)) * 1024 if found else 0


def return_freed_memory() -> None:
    """Give the system back what was freed, so that what is taken next shows as growth.

    Does nothing where the C library has no `malloc_trim`.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
