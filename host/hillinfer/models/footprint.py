# SPDX-License-Identifier: Apache-2.0
"""What one context takes of memory and drive."""

from __future__ import annotations

from dataclasses import dataclass

from hillinfer.byte_size import format_bytes
from hillinfer.models.capacity import Capacity


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
    """

    weight_bytes: int
    activation_bytes: int
    budget_bytes: int
    ordinary_bytes: int
    drive_bytes: int

    @property
    def memory_bytes(self) -> int:
        """Everything but the drive."""
        return self.weight_bytes + self.activation_bytes + self.budget_bytes + self.ordinary_bytes

    @property
    def on_gpu_bytes(self) -> int:
        """What a GPU holds where the model runs on one."""
        return self.weight_bytes + self.activation_bytes + self.ordinary_bytes

    def fits(self, capacity: Capacity) -> bool:
        """Whether memory, GPU and drive are large enough."""
        return not self.shortages(capacity)

    def shortages(self, capacity: Capacity) -> list[str]:
        """Return what is too small, in words."""
        found = []
        parts = (
            f"weights {format_bytes(self.weight_bytes)}, activations "
            f"{format_bytes(self.activation_bytes)}"
        ) + (f", ordinary cache {format_bytes(self.ordinary_bytes)}" * bool(self.ordinary_bytes))
        if capacity.gpu_bytes is not None:
            if self.on_gpu_bytes > capacity.gpu_bytes:
                found.append(
                    f"{format_bytes(self.on_gpu_bytes)} of GPU memory ({parts}) but "
                    f"{format_bytes(capacity.gpu_bytes)} is free"
                )
            host, parts = self.budget_bytes, ""
        else:
            host, parts = self.memory_bytes, f"{parts}, "
        if host > capacity.memory_bytes:
            found.append(
                f"{format_bytes(host)} of memory ({parts}DRAM budget "
                f"{format_bytes(self.budget_bytes)}) but {format_bytes(capacity.memory_bytes)} "
                "is free"
            )
        if self.drive_bytes > capacity.drive_bytes:
            found.append(
                f"{format_bytes(self.drive_bytes)} on the cold directory's drive but "
                f"{format_bytes(capacity.drive_bytes)} is free"
            )
        return found
