# SPDX-License-Identifier: Apache-2.0
"""A store as one attached model uses it: every prompt of its caches is looked up and stored."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hillinfer.errors import SettingsError
from hillinfer.model_shape import ModelShape
from hillinfer.reuse.described_model import DescribedModel
from hillinfer.reuse.known_rates import KnownRates
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.reuse.ways import RateSource
from hillinfer.secrecy.key_sources import key_source_around
from hillinfer.store.keys import Reuse
from hillinfer.store.store import Store
from hillinfer.values import choice, path


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
    ) -> None:
        if not isinstance(salt, bytes):
            raise SettingsError(f"salt must be bytes, not {type(salt).__name__}")
        self._reuse = choice("reuse", Reuse, reuse)
        self._salt, self._made_by, self._divided_by = salt, made_by, divided_by
        self._rates = rates
        self._known: KnownRates | None = None
        self._model, self._described = model, DescribedModel(model)
        # Last: nothing is to be open where this fails.
        self._opened = None if isinstance(store, Store) else _opened(store)
        self._store = store if isinstance(store, Store) else self._opened

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
