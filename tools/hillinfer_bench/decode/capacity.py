# SPDX-License-Identifier: Apache-2.0
"""Whether memory and drive have room for a case."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hillinfer.byte_size import format_bytes
from hillinfer.machine.memory import MemoryFacts
from hillinfer_bench.decode.setting import BenchSetting
from hillinfer_bench.systems.system import System

# What the rest of the process and the machine may want meanwhile.
SLACK_BYTES = 512 << 20


def why_left_out(setting: BenchSetting, systems: Sequence[System]) -> dict[str, str]:
    """Return why systems have no room beside the others, by their names.

    Of those that hold all KV in memory the largest are left out first, until the rest fits. Where
    it never does, none can be measured.

    Parameters
    ----------
    setting
        What they are opened with.
    systems
        Are open at once.
    """
    left: dict[str, str] = {}
    staying = list(systems)
    while (shortage := _shortage(setting, staying)) is not None:
        scarce, reason = shortage
        asking = {
            system.name: wanted
            for system in staying
            if system.holds_all and (wanted := getattr(system.needs(setting), scarce))
        }
        if not asking:
            return left | {system.name: f"the case {reason}" for system in staying}
        largest = max(asking, key=lambda name: asking[name])
        left[largest] = (
            f"the case {reason}, so systems that hold all KV are left out, the largest first: this "
            f"one wants {format_bytes(asking[largest])}"
        )
        staying = [system for system in staying if system.name != largest]
    return left


def _shortage(setting: BenchSetting, systems: Sequence[System]) -> tuple[str, str] | None:
    """Return which field of `Needs` is too large for these systems at once, and why."""
    needs = [system.needs(setting) for system in systems]
    memory = sum(one.memory for one in needs) + SLACK_BYTES
    available = MemoryFacts.read().available_bytes
    if memory > available:
        reason = f"needs {format_bytes(memory)} of memory, {format_bytes(available)} are free"
        return "memory", reason
    drive = sum(one.drive for one in needs)
    room = os.statvfs(setting.cold_dir)
    free = room.f_bavail * room.f_frsize
    if drive > free:
        return "drive", f"needs {format_bytes(drive)} on the drive, {format_bytes(free)} are free"
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
