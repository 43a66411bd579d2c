# SPDX-License-Identifier: Apache-2.0
"""Looks up stored prefixes: of the model's own rows, and of another engine's where accepted.

Another engine is known to compute with the same model by the files that both loaded it from. So the
model in memory is compared with its files first, weight by weight, and its modules with those that
its config makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from safetensors import safe_open

from hillinfer.errors import SettingsError
from hillinfer.model_shape import ModelShape
from hillinfer.reuse.described_model import told_of_modules
from hillinfer.store.keys import Namespace, Reuse
from hillinfer.store.pool_files import StoreError
from hillinfer.store.prefix import StoredPrefix
from hillinfer.store.store import Store
from hillinfer.store_namespaces import (
    UNTOLD,
    Accepted,
    RowKind,
    UnlikeRowsError,
    accepted,
    is_of,
    note_maker,
    weight_files,
)
from hillinfer.store_rules import Maker
from hillinfer.values import choice

# What loading leaves on modules.
_LEFT_BY_LOADING = "_is_hf_initialized"


class OtherMakers:
    """Engines whose rows a model's prompts may take from a store, as far as they are its own.

    Parameters
    ----------
    store
        Open.
    model
        A causal language model of transformers.
    makers
        Who they are; with none, nothing of others is looked at.
    """

    def __init__(self, store: Store, model: Any, makers: Sequence[Maker] = ()) -> None:
        self._store, self._model, self._makers = store, model, tuple(makers)
        self._kinds: dict[tuple[object, ...], RowKind | str] = {}

    @staticmethod
    def named(accept: Sequence[str]) -> list[Maker]:
        """Return the makers of some names.

        Raises
        ------
        SettingsError
            Where nobody else who makes rows is called so.
        """
        makers = [choice("accept", Maker, one) for one in accept]
        if Maker.HILLINFER in makers:
            raise SettingsError("hillinfer finds its own rows anyway: accept takes vllm")
        return makers

    @property
    def is_asked(self) -> bool:
        """Whether the user takes rows of others."""
        return bool(self._makers)

    def of(self, namespace: Namespace, facts: dict[str, object]) -> Accepted:
        """Return what others have of the same model, and let them find what it makes.

        Parameters
        ----------
        namespace
            Of what the model makes itself.
        facts
            What that is made of: what is not in the model's files is refused.
        """
        if not self._makers:
            return Accepted()
        kind = self._kind(facts)
        if isinstance(kind, str):
            return Accepted(refused=kind)
        database = self._store.database
        try:
            note_maker(database, Maker.HILLINFER, kind, namespace)
            found = [accepted(database, maker, kind, namespace) for maker in self._makers]
        except StoreError as error:
            return Accepted(refused=str(error))
        spaces = tuple(space for own in found for space in own.namespaces)
        return Accepted(spaces, "; ".join(own.refused for own in found if own.refused))

    # --- inside ----------------------------------------------------------------------------

    def _kind(self, facts: dict[str, object]) -> RowKind | str:
        """Return which rows a model makes, or why they are no other's; the files are read once."""
        if facts.get("made_by"):
            return "an adapter or a way to compute linear layers changes this model's rows"
        key = facts.get("weights"), facts.get("modules"), facts.get("config"), facts.get("rotary")
        if key not in self._kinds:
            try:
                self._kinds[key] = kind_of_model(self._model)
            except (UnlikeRowsError, OSError) as error:
                self._kinds[key] = str(error)
        return self._kinds[key]


def kind_of_model(model: Any) -> RowKind:
    """Return the kind of the rows that a model makes.

    Raises
    ------
    UnlikeRowsError
        Where it is not, to the bit, what its directory holds in the type that it computes in.
    """
    directory = Path(str(model.config._name_or_path))
    shape = ModelShape.from_config(model.config, model.dtype)
    kind = RowKind.of(directory, model.config.to_dict(), shape.stored_type.value)
    _check_config(model, directory)
    _check_modules(model)
    _check_weights(model, directory)
    return kind


def _check_config(model: Any, directory: Path) -> None:
    """Compare what the config's file leaves out, too."""
    held = model.config.to_dict()
    for name, value in type(model.config).from_pretrained(directory).to_dict().items():
        if name not in UNTOLD and held.get(name) != value:
            raise UnlikeRowsError(f"'{name}' is {held.get(name)} in memory and {value} by its file")


def _check_modules(model: Any) -> None:
    """Compare modules with those that the config makes; these have no memory but for positions."""
    with torch.device("meta"):
        made = type(model)(model.config).eval()
    own, other = (told_of_modules(one, _LEFT_BY_LOADING) for one in (model, made))
    for told, wanted in zip_longest(own, other):
        if told != wanted:
            name = (told or wanted)[0] or "the model"
            raise UnlikeRowsError(f"'{name}' is not what the model's config makes")
    for name, module in model.named_modules():
        if module._non_persistent_buffers_set:
            fresh = type(module)(module.config)
            for one in sorted(module._non_persistent_buffers_set):
                if not torch.equal(getattr(module, one).cpu(), getattr(fresh, one)):
                    raise UnlikeRowsError(f"'{name}.{one}' is not what the model's config makes")


def _check_weights(model: Any, directory: Path) -> None:
    held = model.state_dict()
    places = set()
    for file in weight_files(directory):
        if file.suffix != ".safetensors":
            raise UnlikeRowsError(f"{file} is no safetensors file, which weights are compared with")
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - it is no dictionary
                own = held.get(name)
                if own is None or not torch.equal(
                    own.cpu(), weights.get_tensor(name).to(own.dtype)
                ):
                    raise UnlikeRowsError(f"'{name}' is not in memory what {file} has")
                places.add(own.data_ptr())
    # Tied weights stand in a file once.
    left = sorted(name for name, own in held.items() if own.data_ptr() not in places)
    if left:
        raise UnlikeRowsError(f"no file of {directory} has '{left[0]}', which the model has")


class FoundPrompts:
    """Looks prompts of one model up.

    Parameters
    ----------
    store, namespace, salt
        Where, and whose.
    others
        Whose rows are taken, too.
    reuse
        Where a prefix may end.
    facts
        As of `OtherMakers.of`.

    Raises
    ------
    SettingsError
        Where bits are to be those of an unbroken run, which no other engine has.

    Attributes
    ----------
    accepted
        What is looked at beside the model's own rows, and why not more.
    """

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        salt: bytes,
        others: OtherMakers | None,
        reuse: Reuse,
        facts: dict[str, object],
    ) -> None:
        self._store, self._namespace, self._salt = store, namespace, salt
        if others is not None and others.is_asked and reuse is Reuse.EXACT:
            raise SettingsError(
                "exact gives the bits of an unbroken run, which rows of another engine do not "
                "have: accept none, or take reuse 'longest'"
            )
        self.accepted = Accepted() if others is None else others.of(namespace, facts)
        # Caches in memory with rows of others, which are not stored as the model's own.
        self._of_others: WeakSet[Any] = WeakSet()

    def find(self, ids: Sequence[int]) -> StoredPrefix | None:
        """Return the longest stored prefix, of whoever has it."""
        return self._store.find(self._namespace, ids, self._salt, self.accepted.namespaces)

    def find_leased(self, ids: Sequence[int], leased: ExitStack) -> StoredPrefix | None:
        """Return the longest stored prefix, which is let go with others at the latest."""
        found = self.find(ids)
        return None if found is None else leased.enter_context(found)

    def own(self, ids: Sequence[int]) -> StoredPrefix | None:
        """Return the longest one of the model's own rows."""
        return self._store.find(self._namespace, ids, self._salt)

    def maker(self, found: StoredPrefix | None) -> str:
        """Return who made the rows of a prefix; empty where there is none."""
        if found is None:
            return ""
        return Maker.HILLINFER if is_of(found, self._namespace) else Maker.VLLM

    def is_own(self, found: StoredPrefix | None) -> bool:
        """Whether what goes on from a prefix may be stored as the model's own."""
        return found is None or is_of(found, self._namespace)

    def note(self, cache: Any, found: StoredPrefix) -> None:
        """Remember a cache in memory that gets a prefix, where those are rows of another engine."""
        if not self.is_own(found):
            self._of_others.add(cache)

    def has_own(self, cache: Any) -> bool:
        """Whether all rows of a cache in memory were made by the model, as far as is known."""
        return cache not in self._of_others
