# SPDX-License-Identifier: Apache-2.0
"""What is free on this machine now."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hillinfer.machine.drive import DriveFacts
from hillinfer.machine.gpu import visible_gpus
from hillinfer.machine.memory import MemoryFacts


@dataclass(frozen=True)
class Capacity:
    """What is free now, in bytes.

    Parameters
    ----------
    memory_bytes
        Host memory, limits of control groups included.
    drive_bytes
        Room for the cold pool.
    gpu_bytes
        Device memory; None where the model runs on the host.
    """

    memory_bytes: int
    drive_bytes: int
    gpu_bytes: int | None = None

    @classmethod
    def measure(cls, drive: DriveFacts, device: str, root: Path = Path("/")) -> Capacity:
        """Look at this machine now.

        Parameters
        ----------
        drive
            What the cold directory stands on.
        device
            `cpu` or `cuda`, where the model will run.
        root
            Where `/proc` and `/sys` lie.
        """
        gpus = visible_gpus() if device == "cuda" else None
        return cls(
            memory_bytes=MemoryFacts.read(root).available_bytes,
            drive_bytes=drive.free_bytes,
            gpu_bytes=gpus[0].free_bytes if gpus else None,
        )
