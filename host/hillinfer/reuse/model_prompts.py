# SPDX-License-Identifier: Apache-2.0
"""A store as one attached model uses it: every prompt of its caches is looked up and stored."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hillinfer.errors import ColdPoolError, SettingsError
from hillinfer.model_shape import ModelShape
from hillinfer.reuse.described_model import DescribedModel
from hillinfer.reuse.other_makers import OtherMakers
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.reuse.ways import NoRates, PassRates, RateSource
from hillinfer.schedule.drive_rates import DriveRates
from hillinfer.schedule.kept_windows import KeptWindows, WindowKey, single_passes
from hillinfer.schedule.windows import SlackTable
from hillinfer.secrecy.key_sources import key_source_around
from hillinfer.store.keys import Reuse
from hillinfer.store.pool_files import READERS, PoolFile
from hillinfer.store.store import Store
from hillinfer.values import choice, path

# --- Rates of this machine and model ---

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


# --- Prompts ---


class ModelPrompts:
    """The prompts of one model in a store, however they are divided into passes.

    Parameters
    ----------
    store
        Open, and closed by whoever opened it; or the directory of one, which is opened here: an
        encrypted one with the key that the environment names.
    model
        A causal language model of transformers; it is described anew for each prompt.
    reuse
        Where a stored prefix may end: `longest` or `exact`.
    salt
        Of a tenant; what others have stored is not found.
    made_by, divided_by
        As in `StoredPrompts`.
    rates
        By which what follows a stored prefix is read in the sooner way; None for those that this
        machine has of the store's drives and the model (`KnownRates`).
    accept
        Engines whose rows of the same model are taken, too, like `vllm`, and that may find what
        this one makes.

    Raises
    ------
    SettingsError
        Where one of them is of another kind.
    StoreError
        Where the directory holds no store, or one that cannot be used.
    SecrecyError
        Where it is encrypted and the environment names no key, or another one.
    """

    def __init__(
        self,
        store: Store | Path | str,
        model: Any,
        reuse: Reuse | str = Reuse.LONGEST,
        salt: bytes = b"",
        made_by: Mapping[str, object] | None = None,
        divided_by: Mapping[str, object] | None = None,
        rates: RateSource | None = None,
        accept: Sequence[str] = (),
    ) -> None:
        if not isinstance(salt, bytes):
            raise SettingsError(f"salt must be bytes, not {type(salt).__name__}")
        self._reuse = choice("reuse", Reuse, reuse)
        self._salt, self._made_by, self._divided_by = salt, made_by, divided_by
        self._rates = rates
        self._known: KnownRates | None = None
        self._model, self._described = model, DescribedModel(model)
        makers = OtherMakers.named(accept)
        # Last: nothing is to be open where this fails.
        self._opened = None if isinstance(store, Store) else _opened(store)
        self._store = store if isinstance(store, Store) else self._opened
        assert self._store is not None
        self._others = OtherMakers(self._store, model, makers)

    @property
    def cipher(self) -> str:
        """What the store is encrypted by, empty where it is not."""
        assert self._store is not None
        return self._store.places.cipher

    def divided(self, chunk_tokens: int | None) -> StoredPrompts:
        """Return the store as prompts use it that are read in such chunks; None: in one pass."""
        assert self._store is not None
        rates = self._rates
        if rates is None and self._reuse is not Reuse.EXACT:
            rates = self._of_machine()
        return StoredPrompts(
            self._store,
            self._model,
            self._salt,
            self._reuse,
            chunk_tokens,
            self._made_by,
            self._described.facts(),
            self._divided_by,
            rates,
            others=self._others,
        )

    def of_tenant(self, salt: bytes) -> ModelPrompts:
        """Return the same store and model for another tenant, whose prompts others do not find.

        It is open as long as this is, and shares what is known of the model and this machine.
        """
        if self._rates is None and self._reuse is not Reuse.EXACT:
            self._of_machine()
        twin = copy.copy(self)
        twin._salt, twin._opened = salt, None
        return twin

    def close(self) -> None:
        """Close the store where it was opened here; harmless when done twice."""
        if self._known is not None:
            self._known.keep()
        if self._opened is not None:
            self._opened.close()

    def note_step(self, before: int, seconds: float) -> None:
        """Learn what a pass of one token behind so many took."""
        if self._known is not None:
            self._known.observe(before, seconds)

    def _of_machine(self) -> KnownRates:
        """Return the rates of this machine; what was learned of them is kept by the way."""
        if self._known is None:
            assert self._store is not None
            shape = ModelShape.from_config(self._model.config, self._model.dtype)
            self._known = KnownRates(self._store.files, shape, self._model.device.type)
        self._known.keep()
        return self._known


def _opened(directory: Path | str) -> Store:
    """Open the store of a directory, with the key that the environment names."""
    return Store(path("store", directory), key=key_source_around(os.environ))
