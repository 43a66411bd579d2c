# SPDX-License-Identifier: Apache-2.0
"""What a rival is made with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hillinfer.errors import SettingsError
from hillinfer.model_shape import ModelShape
from hillinfer.storage.read_engines import IOChoice


@dataclass(frozen=True)
class RivalSetup:
    """The same for every rival of a comparison.

    Parameters
    ----------
    shape
        The model's.
    batch
        Sequences, numbered from 0.
    context
        Tokens expected in each at the end, prompt and answer; more are refused.
    budget_bytes
        M0: everything that a rival holds in DRAM, but for `full-memory`, which has no bound.
    alpha
        Importance rate: the fraction of the current length that is selected, in (0, 1].
    cold_dir
        An existing directory on the drive.
    io
        How rows are read.
    block_rows
        Rows that torch scores, and without the native library attends to, at a time.
    ahead_rows
        Rows that may be read before their layer attends, as many as HillInfer's landing area has.
    threads
        Reads in flight without io_uring.
    kept_sinks, kept_recent
        Tokens that are always selected: the first and the most recent ones.
    selections
        For benchmarks on random weights: which positions a rival that selects attends to, int64
        ascending, by layer, row and length. It ranks as ever and then takes these in place of its
        own. None where it selects by itself.

    Raises
    ------
    SettingsError
        Where a value is outside what it allows.
    """

    shape: ModelShape
    batch: int
    context: int
    budget_bytes: int
    alpha: float
    cold_dir: Path
    io: IOChoice = IOChoice.AUTO
    block_rows: int = 1024
    ahead_rows: int = 4 * 512
    threads: int = 16
    kept_sinks: int = 4
    kept_recent: int = 32
    selections: Callable[[int, int, int], NDArray[np.int64]] | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "context", "block_rows", "threads", "kept_recent"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}={getattr(self, name)}: at least 1 is needed")
        for name in ("kept_sinks", "budget_bytes", "ahead_rows"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name}={getattr(self, name)} must be 0 or more")
        if not 0.0 < self.alpha <= 1.0:
            raise SettingsError(
                f"alpha={self.alpha} is outside (0, 1]; 0.1 selects a tenth of the tokens"
            )

    @property
    def kept_tokens(self) -> int:
        """Tokens that are always selected."""
        return self.kept_sinks + self.kept_recent

    @property
    def units(self) -> int:
        """Layers times sequences."""
        return self.shape.layers * self.batch
