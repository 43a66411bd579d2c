# SPDX-License-Identifier: Apache-2.0
"""What the largest case of a plan takes, known before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hillinfer.byte_size import format_bytes
from hillinfer.machine.model_shapes import SHAPES
from hillinfer.models.loader import ModelOutline
from hillinfer_bench.decode.capacity import SLACK_BYTES
from hillinfer_bench.decode.case import Case
from hillinfer_bench.decode.case_setting import case_setting
from hillinfer_bench.systems.table import make_system


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
    needs = [make_system(name).needs(setting) for name in case.systems]
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
