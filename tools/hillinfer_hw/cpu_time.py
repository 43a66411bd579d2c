# SPDX-License-Identifier: Apache-2.0
"""CPU time of this process and the programs it started."""

from __future__ import annotations

import resource
import time


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the programs it waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
