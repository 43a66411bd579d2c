# SPDX-License-Identifier: Apache-2.0
"""What a compared system is to the benchmark."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any

from hillinfer.errors import HillInferError
from hillinfer_bench.systems.case import BenchSetting
from hillinfer_bench.systems.kv_source import Chunk, LastQueries


class BenchError(HillInferError):
    """Something cannot be measured here."""


@dataclass(frozen=True)
class Counted:
    """Running totals of one system in bytes, but for the last three.

    Parameters
    ----------
    drive_read_bytes, drive_write_bytes
        What went over the drive's wire.
    dram_read_bytes
        KV and shadow that decode steps had to read from memory, each byte once; counted from
        formulas, weights not included.
    held_bytes
        The most memory held at once, as the system counts it.
    hit_rate
        Share of selected rows that lay in DRAM; None for systems without pools.
    io_mode
        `direct` past the page cache; None for systems without a drive.
    drive_reads
        How many reads of the drive brought its bytes.
    """

    drive_read_bytes: int
    drive_write_bytes: int
    dram_read_bytes: int
    held_bytes: int
    hit_rate: float | None = None
    io_mode: str | None = None
    drive_reads: int = 0

    def since(self, earlier: Counted) -> Counted:
        """Return what was read and written since; what is no total stays."""
        totals = ("drive_read_bytes", "drive_write_bytes", "dram_read_bytes", "drive_reads")
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in totals:
            values[name] -= getattr(earlier, name)
        return Counted(**values)


class OpenSystem(ABC):
    """A system that holds the KV of one case.

    Attributes
    ----------
    cache
        What the model is given as `past_key_values`.
    """

    cache: Any

    @abstractmethod
    def fill(self, chunk: Chunk) -> None:
        """Take tokens of the context."""

    def observe(self, queries: LastQueries) -> None:  # noqa: B027
        """Look at the context's last queries, once all of it was taken; nothing, as a rule."""

    def settle(self) -> None:  # noqa: B027
        """Wait for what steps have left running; nothing, where not said otherwise."""

    @abstractmethod
    def counted(self) -> Counted:
        """Return totals so far."""

    def shadow_used(self) -> str | None:
        """Return the number format of the key shadow; None for systems without, as a rule."""
        return None

    def describe(self) -> str:
        """Return in a few words what the system chose for itself."""
        return ""

    @abstractmethod
    def close(self) -> None:
        """Give memory and the drive's space back."""


@dataclass(frozen=True)
class Needs:
    """What opening a system takes, in bytes.

    Parameters
    ----------
    memory, drive
        Most of each.
    """

    memory: int
    drive: int


class System(ABC):
    """One way to hold and attend to the KV of a context.

    Parameters
    ----------
    name
        In the table of systems.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def bounded(self) -> bool:
        """Whether the case's budget bounds what the system holds; not, as a rule."""
        return False

    @property
    def traced(self) -> bool:
        """Whether it writes its lanes where a trace is asked for; not, as a rule."""
        return False

    @property
    def codes(self) -> bool:
        """Whether it attends to some selected tokens' codes in place of rows; not, as a rule."""
        return False

    @property
    def holds_all(self) -> bool:
        """Whether it holds all KV of the context in memory, if only until the first step.

        Such a system is left out where memory has no room for it; not, as a rule.
        """
        return False

    @abstractmethod
    def needs(self, setting: BenchSetting) -> Needs:
        """Return what `open` takes."""

    @abstractmethod
    def open(self, setting: BenchSetting) -> OpenSystem:
        """Return the system, empty.

        Raises
        ------
        HillInferError
            Where it cannot work on this case; the row is then left out, with this reason.
        """
