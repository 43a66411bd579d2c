# SPDX-License-Identifier: Apache-2.0
"""What a case takes of memory and drive, and whether there is room for it."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hillinfer.models.loader import ModelOutline
from hillinfer.system.machine import MemoryFacts
from hillinfer.values import format_bytes
from hillinfer_bench.systems.case import BenchSetting, Case, case_setting
from hillinfer_bench.systems.shapes import SHAPES
from hillinfer_bench.systems.system import System
from hillinfer_bench.systems.table import HILLINFER, JOINED, make_system

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


# What the rest of the process and the machine may want meanwhile.
SLACK_BYTES = 512 << 20


@dataclass(frozen=True)
class FreeRoom:
    """What is free, in bytes.

    Parameters
    ----------
    memory, drive
        Of this machine's memory, and of the file system that rows go to.
    """

    memory: int
    drive: int

    @classmethod
    def read(cls, cold_dir: Path) -> FreeRoom:
        """Return what is free now, on the drive of an existing directory."""
        room = os.statvfs(cold_dir)
        return cls(MemoryFacts.read().available_bytes, room.f_bavail * room.f_frsize)


def why_left_out(
    setting: BenchSetting, systems: Sequence[System], free: FreeRoom
) -> dict[str, str]:
    """Return why systems have no room beside the others, by their names.

    Of those that hold all KV in memory the largest are left out first, until the rest fits. Where
    it never does, none can be measured.

    Parameters
    ----------
    setting
        What they are opened with.
    systems
        Are open at once.
    free
        What there is for them.
    """
    left: dict[str, str] = {}
    staying = list(systems)
    while (shortage := _shortage(setting, staying, free)) is not None:
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


def _shortage(
    setting: BenchSetting, systems: Sequence[System], free: FreeRoom
) -> tuple[str, str] | None:
    """Return which field of `Needs` is too large for these systems at once, and why."""
    needs = [system.needs(setting) for system in systems]
    for scarce, wanted, there, where in (
        ("memory", sum(one.memory for one in needs) + SLACK_BYTES, free.memory, "of memory"),
        ("drive", sum(one.drive for one in needs), free.drive, "on the drive"),
    ):
        if wanted > there:
            return (
                scarce,
                f"needs {format_bytes(wanted)} {where}, {format_bytes(there)} are free",
            )
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


@dataclass(frozen=True)
class PlanNeeds:
    """The most that any case takes, computed from what its systems say of themselves.

    Parameters
    ----------
    memory, drive
        Bytes; all systems of a case at once, and in memory the weights and some slack.
    memory_case, drive_case
        Names of the cases that take so much.
    """

    memory: int
    memory_case: str
    drive: int
    drive_case: str

    @classmethod
    def of(
        cls,
        cases: Sequence[Case],
        real_model: str,
        outline: ModelOutline,
        dtype: torch.dtype,
        cold_dir: Path,
    ) -> PlanNeeds:
        """Return the needs of at least one case.

        Parameters
        ----------
        cases
            Of the plan.
        real_model, outline
            Name and outline of the model with real weights, which stays for its selections.
        dtype
            Of models with random weights.
        cold_dir
            Existing directory on the drive.
        """
        each = [(case, *_needs(case, real_model, outline, dtype, cold_dir)) for case in cases]
        memory_case, memory, _ = max(each, key=lambda one: one[1])
        drive_case, _, drive = max(each, key=lambda one: one[2])
        return cls(memory, memory_case.name, drive, drive_case.name)

    def text(self) -> str:
        """Return the needs in one line."""
        return (
            f"the largest cases need {format_bytes(self.memory)} of memory with weights "
            f"({self.memory_case}) and {format_bytes(self.drive)} on the drive "
            f"({self.drive_case}), computed; what has no room is left out"
        )


def _needs(
    case: Case, real_model: str, outline: ModelOutline, dtype: torch.dtype, cold_dir: Path
) -> tuple[int, int]:
    """Return bytes of memory and of the drive."""
    real = case.model == real_model
    setting = case_setting(
        case,
        _OnlyType(outline.dtype if real else dtype),
        outline.shape if real else None,
        case.context + case.all_steps,
        cold_dir,
    )
    # Joined caches share one budget, as the sequences of one cache do.
    names = [HILLINFER if name == JOINED else name for name in case.systems]
    needs = [make_system(name).needs(setting) for name in names]
    memory = sum(one.memory for one in needs)
    if not real:
        shape = SHAPES[case.model]
        weights = shape.layer_weights * shape.layers * dtype.itemsize
        # As much again while they are made, when no system is open yet.
        memory = weights + max(memory, weights)
    return memory + outline.weight_bytes + SLACK_BYTES, sum(one.drive for one in needs)


@dataclass(frozen=True)
class _OnlyType:
    """Stands for a model that is not there yet."""

    dtype: torch.dtype
