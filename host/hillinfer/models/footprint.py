# SPDX-License-Identifier: Apache-2.0
"""What one context takes of memory and drive."""

from __future__ import annotations

from dataclasses import dataclass

from hillinfer.byte_size import format_bytes
from hillinfer.models.capacity import Capacity


@dataclass(frozen=True)
class Shortage:
    """One thing that is too small.

    Parameters
    ----------
    need
        What is needed, what of it is free, in words.
    fix
        What helps beside a shorter context.
    """

    need: str
    fix: str


@dataclass(frozen=True)
class Footprint:
    """What one context takes, in bytes.

    Parameters
    ----------
    weight_bytes
        The most that weights take, while they are loaded.
    activation_bytes
        Estimate of the activations of one prefill chunk; the context's length does not matter.
    budget_bytes
        M0.
    ordinary_bytes
        The ordinary cache of a comparison, 0 without one.
    drive_bytes
        The cold pool: every row is written once.
    packed_bytes
        The most that packed projections take beside the weights, 0 without them.
    """

    weight_bytes: int
    activation_bytes: int
    budget_bytes: int
    ordinary_bytes: int
    drive_bytes: int
    packed_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        """Everything but the drive."""
        return self.on_gpu_bytes + self.budget_bytes

    @property
    def on_gpu_bytes(self) -> int:
        """What a GPU holds where the model runs on one: all but the budget."""
        return self.weight_bytes + self.packed_bytes + self.activation_bytes + self.ordinary_bytes

    def fits(self, capacity: Capacity) -> bool:
        """Whether memory, GPU and drive are large enough."""
        return not self.shortages(capacity)

    def shortages(self, capacity: Capacity) -> list[Shortage]:
        """Return what is too small."""
        parts = (
            f"weights {format_bytes(self.weight_bytes)}, activations "
            f"{format_bytes(self.activation_bytes)}"
        )
        if self.packed_bytes:
            parts += f", packed projections {format_bytes(self.packed_bytes)}"
        if self.ordinary_bytes:
            parts += f", ordinary cache {format_bytes(self.ordinary_bytes)}"
        budget = f"DRAM budget {format_bytes(self.budget_bytes)}"
        found = []
        if capacity.gpu_bytes is None:
            host_bytes, host_parts = self.memory_bytes, f"{parts}, {budget}"
        else:
            host_bytes, host_parts = self.budget_bytes, budget
            if self.on_gpu_bytes > capacity.gpu_bytes:
                found.append(
                    Shortage(
                        _need(self.on_gpu_bytes, f"of GPU memory ({parts})", capacity.gpu_bytes),
                        "load the weights with --dtype bfloat16",
                    )
                )
        if host_bytes > capacity.memory_bytes:
            found.append(
                Shortage(
                    _need(host_bytes, f"of memory ({host_parts})", capacity.memory_bytes),
                    "lower --dram-budget, or close other programs",
                )
            )
        if self.drive_bytes > capacity.drive_bytes:
            place = "on the drive of the cold directory"
            found.append(
                Shortage(
                    _need(self.drive_bytes, place, capacity.drive_bytes),
                    "free space there, or choose another drive with --cold-dir",
                )
            )
        return found


def _need(needed: int, what: str, free: int) -> str:
    return f"{format_bytes(needed)} {what} but {format_bytes(free)} is free"
