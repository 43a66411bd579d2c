# SPDX-License-Identifier: Apache-2.0
"""Compute windows and drives' rates that outlive a run, in a small file beside other rates."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from hillinfer.drive.directories import filesystem_of
from hillinfer.drive.read_turns import ReadTurns
from hillinfer.errors import SetupWarning
from hillinfer.model_shape import ModelShape
from hillinfer.schedule.drive_rates import DriveMeasuring, DriveRates
from hillinfer.schedule.windows import SlackTable
from hillinfer.system.files import user_cache_dir, write_whole
from hillinfer.system.machine import ProcessorFacts

VERSION = 1
# Kinds of passes: attention of one reads rows from the drive itself.
DENSE_PASSES, PASSES_IN_MEMORY = "dense", "in memory"


def single_passes(directory: Path, device: str = "cpu") -> str:
    """Return the kind of passes of one token that gather what they select from a drive.

    Parameters
    ----------
    directory
        On the drive.
    device
        What the model computes on, as torch names its kind.
    """
    return f"single, {_drive(directory)}, {device}"


# Models and drives that one user tries; the oldest go first.
_MOST = 64
_MOST_BYTES = 1 << 20
_Kept = TypeVar("_Kept")


@dataclass(frozen=True)
class WindowKey:
    """What compute windows depend on.

    Parameters
    ----------
    processor, cores, threads
        Its name, cores this process may use and compute threads.
    passes
        Which passes: those of a cache in memory, of one on a drive, or of single tokens.
    layers, kv_heads, query_heads, head_dim
        What of a model's shape decides how long a layer takes.
    """

    processor: str
    cores: int
    threads: int
    passes: str
    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int

    @classmethod
    def of(cls, threads: int, passes: str, shape: ModelShape) -> WindowKey:
        """Look at this machine."""
        processor = ProcessorFacts.read()
        return cls(
            processor.name,
            processor.cores,
            threads,
            passes,
            shape.layers,
            shape.kv_heads,
            shape.query_heads,
            shape.head_dim,
        )


class KeptWindows:
    """Tables by what they depend on, and rates by drive, in an owner-only JSON file.

    Anything that cannot be read is measured or learned again; what cannot be written is told once.

    Parameters
    ----------
    file
        Made when something is first kept.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    @classmethod
    def of_user(cls) -> KeptWindows:
        """Return those in the user's cache directory."""
        return cls(user_cache_dir() / "windows.json")

    def table(self, key: WindowKey) -> SlackTable | None:
        """Return what is kept for a key, or None."""
        return self._found("tables", _digest(key), SlackTable.from_json)

    def keep(self, key: WindowKey, table: SlackTable) -> None:
        """Keep a table as it is now."""
        self._keep("tables", _digest(key), table.as_json())

    def drive(self, directory: Path) -> DriveRates | None:
        """Return the rates kept of the drive of a directory, or None."""
        return self._found("drives", _drive(directory), DriveRates.from_json)

    def follow(self, directory: Path, turns: ReadTurns, reads: int = 1) -> DriveRates | None:
        """Let the turns of a drive follow what is kept of it, and return that, or None.

        Parameters
        ----------
        directory
            On the drive.
        turns
            Its.
        reads
            Most turns of readers at a time.
        """
        rates = self.drive(directory)
        if rates is not None:
            turns.mixing = rates.mixing(reads)
        return rates

    def measure_drive(self, directory: Path) -> DriveRates:
        """Measure the drive of a directory, keep its rates and return them.

        Raises
        ------
        OSError, ColdPoolError
            Where the drive fails.
        """
        found = DriveMeasuring(directory).rates()
        self.keep_drive(directory, found)
        return found

    def keep_drive(self, directory: Path, rates: DriveRates) -> None:
        """Keep the rates of the drive of a directory."""
        self._keep("drives", _drive(directory), rates.as_json())

    # --- inside ----------------------------------------------------------------------------

    def _found(self, part: str, name: str, read: Callable[[dict[str, Any]], _Kept]) -> _Kept | None:
        record = self._content().get(part, {}).get(name)
        if record is None:
            return None
        try:
            return read(record)
        except (ValueError, KeyError, TypeError):
            return None

    def _content(self) -> dict[str, dict[str, Any]]:
        try:
            if self.file.stat().st_size > _MOST_BYTES:
                return {}
            content = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(content, dict) or content.get("version") != VERSION:
            return {}
        return {
            part: own for part in ("tables", "drives") if isinstance(own := content.get(part), dict)
        }

    def _keep(self, part: str, name: str, record: Mapping[str, Any]) -> None:
        content = self._content()
        own = content.setdefault(part, {})
        own.pop(name, None)
        own[name] = dict(record)
        content[part] = dict(list(own.items())[-_MOST:])
        try:
            write_whole(self.file, json.dumps({"version": VERSION, **content}).encode())
        except OSError as error:
            warnings.warn(
                f"compute windows cannot be kept in {self.file} ({error.strerror}): every run "
                "learns them anew; make room there, or set XDG_CACHE_HOME to a folder of yours",
                SetupWarning,
                stacklevel=3,
            )


def _drive(directory: Path) -> str:
    return f"{filesystem_of(directory)} {directory.stat().st_dev}"


def _digest(key: WindowKey) -> str:
    return hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()
