# SPDX-License-Identifier: Apache-2.0
"""Whether memory and drive have room for a case."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hillinfer.bench.setting import BenchSetting
from hillinfer.bench.systems.system import System
from hillinfer.byte_size import format_bytes
from hillinfer.machine.memory import MemoryFacts

# What the rest of the process and the machine may want meanwhile.
SLACK_BYTES = 512 << 20


def why_no_room(setting: BenchSetting, systems: Sequence[System]) -> str | None:
    """Return why a case cannot be opened for all of these systems at once, or None."""
    needs = [system.needs(setting) for system in systems]
    memory = sum(one.memory for one in needs) + SLACK_BYTES
    available = MemoryFacts.read().available_bytes
    if memory > available:
        return f"needs {format_bytes(memory)} of memory, {format_bytes(available)} are free"
    drive = sum(one.drive for one in needs)
    room = os.statvfs(setting.cold_dir)
    free = room.f_bavail * room.f_frsize
    if drive > free:
        return f"needs {format_bytes(drive)} on the drive, {format_bytes(free)} are free"
    return None


def why_no_model(weight_bytes: int) -> str | None:
    """Return why a model's weights do not fit in memory, or None."""
    available = MemoryFacts.read().available_bytes
    if weight_bytes + SLACK_BYTES > available:
        return (
            f"weights need {format_bytes(weight_bytes)} of memory, {format_bytes(available)} are "
            "free"
        )
    return None
