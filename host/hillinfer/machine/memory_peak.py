# SPDX-License-Identifier: Apache-2.0
"""The most memory this process has held at once."""

from __future__ import annotations

import re
import resource
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def peak_rss_bytes() -> int:
    """Return the peak resident set in bytes since the start, or since the last reset."""
    try:
        peak = re.search(r"^VmHWM:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        peak = None
    if peak is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(peak.group(1)) * 1024


def reset_peak_rss() -> None:
    """Start the peak anew from what is held now, where the kernel allows it."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return
