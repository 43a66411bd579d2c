# SPDX-License-Identifier: Apache-2.0
"""Rates that this machine has for one model's stored prefixes: kept, measured, learned."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

import torch

from hillinfer.errors import ColdPoolError, SettingsError
from hillinfer.model_shape import ModelShape
from hillinfer.reuse.ways import NoRates, PassRates
from hillinfer.schedule.drive_rates import DriveRates
from hillinfer.schedule.kept_windows import KeptWindows, WindowKey, single_passes
from hillinfer.schedule.slack_table import SlackTable
from hillinfer.store.pool_files import READERS, PoolFile

# Reads of several of a store's objects, joined.
_READ_BYTES = 4 << 20
# What is read singly attends to a selection and is not stored: for less that is not worth it.
_LEAST_SAVING_SECONDS = 0.1
# No drive that somebody keeps a store on gives less; where that decides, none is measured.
_SLOWEST_DRIVE = 20e6


class KnownRates:
    """Rates of a store's drives, and what a single token of a model takes behind a prefix.

    Both are kept beside compute windows (`KeptWindows`). A drive that nobody measured is measured
    when its rate first decides, which takes about a second. What single tokens take is learned from
    those that caches decode. Any thread may use it.

    Parameters
    ----------
    files
        Of the store, one per drive.
    shape
        Of the model.
    device
        What the model computes on, as torch names its kind.
    """

    def __init__(self, files: Sequence[PoolFile], shape: ModelShape, device: str) -> None:
        self._files: tuple[PoolFile, ...] = ()
        self._layers = shape.layers
        self._kept: KeptWindows | None = None
        self._singly = SlackTable()
        self._is_new = False
        self._drives: list[DriveRates] | None = None
        self._failure = ""
        self._measuring = threading.Lock()
        with suppress(SettingsError, OSError):
            self._kept = KeptWindows.of_user()
            # Several files of one drive are one.
            drives = {one.path.parent.stat().st_dev: one for one in files}
            self._files = tuple(drives.values())
            passes = single_passes(files[0].path.parent, device)
            self._key = WindowKey.of(torch.get_num_threads(), passes, shape)
            self._singly = self._kept.table(self._key) or self._singly

    def at(self, before: int, prefix_bytes: int, tokens: int) -> PassRates | NoRates:
        """Return what holds for so many tokens behind so many others with rows of so many bytes."""
        layer = self._singly.window(1, before)
        if layer is None:
            return NoRates(f"no token was timed behind about {before} others yet")
        step = layer * self._layers
        with self._measuring:
            drives = self._kept_drives()
            sooner = tokens * step + _LEAST_SAVING_SECONDS
            if drives is None and prefix_bytes / _SLOWEST_DRIVE < sooner:
                source = f"even of a drive of {_SLOWEST_DRIVE / 1e6:.0f} MB/s"
                return PassRates(_SLOWEST_DRIVE, step, _LEAST_SAVING_SECONDS, source)
            drives = drives or self._measured_drives()
        if drives is None:
            return NoRates(f"the drive cannot be measured: {self._failure}")
        # Chunks alternate over drives, so the slowest one is waited for.
        rate = len(drives) * min(one.read(_READ_BYTES) for one in drives)
        return PassRates(
            rate, step, _LEAST_SAVING_SECONDS, f"of drives of {rate / 1e6:.0f} MB/s in all"
        )

    def observe(self, before: int, seconds: float) -> None:
        """Learn what a pass of one token behind so many took."""
        self._singly.observe(1, before, seconds / self._layers)
        self._is_new = True

    def keep(self) -> None:
        """Keep what was learned, where anything was."""
        if self._is_new and self._kept is not None:
            self._is_new = False
            self._kept.keep(self._key, self._singly)

    # --- inside ----------------------------------------------------------------------------

    def _kept_drives(self) -> list[DriveRates] | None:
        """Return rates of all drives where they are known."""
        if self._drives is None and self._kept is not None and not self._failure:
            with suppress(OSError):
                found = [self._kept.drive(one.path.parent) for one in self._files]
                known = [one for one in found if one is not None]
                self._drives = known if known and len(known) == len(found) else None
        return self._drives

    def _measured_drives(self) -> list[DriveRates] | None:
        """Return rates of all drives, of which those that nobody knows are measured."""
        if self._kept is None or not self._files:
            self._failure = "no directory of the store, or none for caches, can be looked at"
        if self._kept is None or self._failure:
            return None
        try:
            found = []
            for file in self._files:
                directory = file.path.parent
                found.append(self._kept.drive(directory) or self._kept.measure_drive(directory))
                self._kept.follow(directory, file.turns, READERS)
        except (OSError, ColdPoolError) as error:
            self._failure = str(error)
            return None
        self._drives = found
        return found
