# SPDX-License-Identifier: Apache-2.0
"""Keeps documents of a catalogue ready: makes the forms they shall lie as, and opens them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hillinfer.catalogue.catalogue import Catalogue
from hillinfer.catalogue.measuring import check_namespace
from hillinfer.catalogue.planning import Plan, PlanRules, make_plan, options_of
from hillinfer.catalogue.records import (
    RESTING,
    ROWS,
    TEXT,
    CatalogueError,
    KnownDocument,
    check_stored,
    document_uses,
)
from hillinfer.errors import BudgetError, CacheUseError, ColdPoolError, SettingsError
from hillinfer.forms.form import DocumentStates, Form, MadeForm, OpenedForm
from hillinfer.forms.table import make_form
from hillinfer.forms.whole import StoredRowsForm, stored_states
from hillinfer.memory_budget import Accountant, Part
from hillinfer.model_shape import ModelShape
from hillinfer.placement.options import Option
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.store.store import Store
from hillinfer.store_namespaces import prefix_ids


@dataclass(frozen=True)
class OpenedDocument:
    """A document that a question can be read behind.

    Parameters
    ----------
    form
        Name of the form it was opened from: what it shall lie as, or its rest until that is made.
    ids
        Its token numbers.
    opened
        The cache, and what of the tokens is still to be read.
    """

    form: str
    ids: tuple[int, ...]
    opened: OpenedForm


@dataclass(frozen=True)
class ReadyDocument:
    """A document that a prompt begins with, and whose form is made.

    Parameters
    ----------
    key, form
        Its key, and the form's name.
    made
        What to open.
    stored_tokens
        How many of the prompt's first tokens the store has, of what was asked before too.
    """

    key: bytes
    form: str
    made: MadeForm
    stored_tokens: int


@dataclass(frozen=True)
class Move:
    """What became of one document's form.

    Parameters
    ----------
    name
        Of the document.
    form
        What it lies as now.
    is_made
        Whether that is what it shall lie as; else the budget had no room, or the store has not all
        of its rows.
    """

    name: str
    form: str
    is_made: bool


@dataclass
class _Kept:
    form: str
    ids: tuple[int, ...]
    made: MadeForm
    byte_count: int
    last_used: float
    # What of it this class counts; of a form that an engine holds, nothing.
    counted: int
    lies_in_engine: bool


class FormCache:
    """Holds made forms within a budget; any thread may open documents while forms move.

    A move has two phases. First forms that shall go are given up, and their bytes with them; their
    documents rest. Then each new form is made aside, counted before it is made, and put in place at
    one moment. So the budget is never passed, a document can be opened at any time, and a process
    that is killed in between leaves nothing behind: stored rows never change.

    Parameters
    ----------
    model
        Of transformers.
    prompts, store
        The store, as that model uses it, and itself; open as long as this is.
    catalogue
        Says what documents shall lie as.
    accountant
        Counts what forms take. Where it is that of an engine, forms and hot rows share its budget:
        forms take what is spare, and are given up when the engine is short, those first that were
        not used for longest.
    form_of
        Makes forms of names.
    clock
        Returns the time in seconds.
    """

    def __init__(
        self,
        model: Any,
        prompts: StoredPrompts,
        store: Store,
        catalogue: Catalogue,
        accountant: Accountant,
        form_of: Callable[[str], Form] = make_form,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._model, self._prompts = model, prompts
        self._store, self._catalogue = store, catalogue
        self._accountant, self._form_of, self._clock = accountant, form_of, clock
        self._shape = ModelShape.from_config(model.config, model.dtype)
        self._kept: dict[bytes, _Kept] = {}
        self._ids: dict[bytes, tuple[int, ...]] = {}
        # Held for moments alone, never while a form is made or the accountant is asked.
        self._lock = threading.RLock()
        self._moving = threading.Lock()
        accountant.on_shortage(self._make_room)

    # --- opening ---------------------------------------------------------------------------

    def open(self, name: str) -> OpenedDocument:
        """Open a document from its form where that is made, else from its rest; that is a use.

        Parameters
        ----------
        name
            As `Catalogue.find` takes it.

        Raises
        ------
        CatalogueError
            Where there is none, another model read it, or the store has its rows no more.
        """
        document = self._catalogue.find(name)
        check_namespace(document, self._prompts.namespace, document.model)
        ids = self.ids_of(document)
        with self._lock:
            kept = self._kept.get(document.key)
            if kept is not None:
                kept.last_used = self._clock()
        if kept is not None:
            try:
                opened = kept.made.open()
            except ColdPoolError:
                # Its drive failed, or it was given up at this moment: the document rests.
                self.give_up(document.key, kept.made)
            else:
                # What the store counts for all processes, it counts for this one too.
                self._prompts.stored_key(ids)
                return OpenedDocument(kept.form, ids, opened)
        # Neither looks at anything but the token numbers.
        states = DocumentStates(ids, ())
        rest = make_form(TEXT) if document.form == TEXT else StoredRowsForm(self._prompts)
        return OpenedDocument(rest.name, ids, rest.make(self._model, states).open())

    def made_for(self, ids: Sequence[int]) -> ReadyDocument | None:
        """Return the longest made form that a prompt begins with; that is a use.

        Parameters
        ----------
        ids
            Token numbers of the prompt, of which one at least comes behind the document.
        """
        with self._lock:
            fitting = [
                (len(one.ids), key)
                for key, one in self._kept.items()
                if len(one.ids) < len(ids) and one.ids == tuple(ids[: len(one.ids)])
            ]
            if not fitting:
                return None
            _, key = max(fitting)
            kept = self._kept[key]
            kept.last_used = self._clock()
        stored = self._prompts.stored_key(ids)
        return ReadyDocument(key, kept.form, kept.made, 0 if stored is None else stored[1])

    def resting_for(self, ids: Sequence[int]) -> ReadyDocument | None:
        """Return the longest document that a prompt begins with, to be read from its stored rows.

        Only documents that `settle` has seen are known. That is a use.

        Parameters
        ----------
        ids
            As in `made_for`.
        """
        with self._lock:
            fitting = [
                (len(own), key)
                for key, own in self._ids.items()
                if key not in self._kept and len(own) < len(ids) and own == tuple(ids[: len(own)])
            ]
        if not fitting:
            return None
        tokens, key = max(fitting)
        stored = self._prompts.stored_key(ids)
        if stored is None or stored[1] < tokens:
            return None
        made = StoredRowsForm(self._prompts).make(
            self._model, DocumentStates(tuple(ids[:tokens]), ())
        )
        return ReadyDocument(key, ROWS, made, stored[1])

    def ids_of(self, document: KnownDocument) -> tuple[int, ...]:
        """Return a document's token numbers.

        Raises
        ------
        CatalogueError
            Where the store has its rows no more.
        """
        with self._lock:
            known = self._ids.get(document.key)
        if known is None:
            uses = document_uses(self._store.database, [document.key], self._clock())
            check_stored(document, uses)
            known = tuple(prefix_ids(self._store, document.key))
            with self._lock:
                self._ids[document.key] = known
        return known

    @property
    def held(self) -> dict[str, int]:
        """Bytes in memory of the forms that are made, by the names of their documents."""
        with self._lock:
            return {key.hex()[:12]: one.byte_count for key, one in self._kept.items()}

    # --- moving ----------------------------------------------------------------------------

    def plan(
        self,
        rules: PlanRules,
        options: Callable[[KnownDocument], Sequence[Option]] = options_of,
    ) -> Plan:
        """Plan anew by what the store counted, and have the catalogue say so; nothing moves yet.

        Parameters as in `make_plan`.
        """
        documents = [
            one
            for one in self._catalogue.documents()
            if one.namespace == self._prompts.namespace.digest
        ]
        # What was found in the last second is not written yet.
        self._store.room.write_touched()
        keys = [one.key for one in documents]
        uses = document_uses(self._store.database, keys, self._clock())
        made = make_plan(documents, uses, rules, options)
        if made.changes:
            self._catalogue.set_forms([(one.document.key, one.after) for one in made.changes])
        return made

    def settle(self, is_over: Callable[[], bool] = lambda: False) -> list[Move]:
        """Bring forms to what the catalogue says, and return what became of each that moved.

        Parameters
        ----------
        is_over
            Asked between documents; what is left then stays as it is.
        """
        with self._moving:
            wanted = {
                one.key: one
                for one in self._catalogue.documents()
                if one.namespace == self._prompts.namespace.digest
            }
            self._give_up(wanted)
            self._look_at(wanted)
            moves = []
            for key, document in wanted.items():
                with self._lock:
                    is_there = key in self._kept
                if document.form in RESTING or is_there:
                    continue
                if is_over():
                    break
                moves.append(self._move(document))
            return moves

    def give_up_for(self, fits: Callable[[Sequence[MadeForm]], bool]) -> bool:
        """Give up what an engine holds, as few forms as there must go; False where none helps.

        Parameters
        ----------
        fits
            Says whether there is room once these are given up, which grow by one: those first that
            were not used for longest.
        """
        with self._lock:
            own = [(key, one.made) for key, one in self._kept.items() if one.lies_in_engine]
            own.sort(key=lambda pair: self._kept[pair[0]].last_used)
        for count in range(1, len(own) + 1):
            if fits([made for _, made in own[:count]]):
                for key, made in own[:count]:
                    self.give_up(key, made)
                return True
        return False

    def give_up(self, key: bytes, made: MadeForm) -> None:
        """Give up a document's form, where it is still this one; the document rests."""
        with self._lock:
            if key in self._kept and self._kept[key].made is made:
                self._drop(key)

    def close(self) -> None:
        """Give all forms up; what was opened from them stays."""
        with self._moving, self._lock:
            for key in list(self._kept):
                self._drop(key)

    # --- inside ----------------------------------------------------------------------------

    def _give_up(self, wanted: dict[bytes, KnownDocument]) -> None:
        """Give up forms of documents that are gone, or shall lie as something else."""
        with self._lock:
            for key, kept in list(self._kept.items()):
                if key not in wanted or wanted[key].form != kept.form:
                    self._drop(key)

    def _look_at(self, wanted: dict[bytes, KnownDocument]) -> None:
        """Know the token numbers of what rests, and of nothing that is gone."""
        with self._lock:
            for key in [key for key in self._ids if key not in wanted]:
                del self._ids[key]
        for document in wanted.values():
            if document.form != TEXT:
                # Of what the store gave up there are none.
                with suppress(CatalogueError):
                    self.ids_of(document)

    def _move(self, document: KnownDocument) -> Move:
        """Make one form aside, and put it in place; its bytes are counted before.

        Of a document whose rows the store gave up none is made, and the others' are nevertheless.
        """
        resting = Move(document.name, ROWS, is_made=False)
        try:
            form, ids = self._form_of(document.form), self.ids_of(document)
        except (CatalogueError, SettingsError):
            # Gone since, or what another process made of it has a name that is unknown here.
            return resting
        size = 0 if form.lies_on_drive else form.byte_count(self._shape, len(ids))
        counted = 0 if form.lies_in_engine else size
        if not self._accountant.take_spare(Part.OTHER, counted):
            return resting
        try:
            made = self._made(form, ids)
        except BaseException:
            self._accountant.give(Part.OTHER, counted)
            raise
        if made is None:
            self._accountant.give(Part.OTHER, counted)
            return resting
        with self._lock:
            now, in_engine = self._clock(), form.lies_in_engine
            kept = _Kept(document.form, ids, made, size, now, counted, in_engine)
            self._kept[document.key] = kept
        return Move(document.name, document.form, is_made=True)

    def _made(self, form: Form, ids: tuple[int, ...]) -> MadeForm | None:
        """Return a form of all of a document; None where the store has not all of it.

        Nor is there one of an engine that has no room beside what is open in it, or of a drive that
        refuses.
        """
        try:
            states = DocumentStates(ids, ())
            if form.reads_states:
                states = stored_states(self._prompts, ids)
            return form.make(self._model, states) if states.tokens == len(ids) else None
        except (CacheUseError, BudgetError, ColdPoolError):
            return None

    def _make_room(self) -> None:
        """Give up forms for whoever is short, those first that were not used for longest."""
        with self._lock:
            # What an engine holds of others cannot go in the middle of what it does for one.
            own = [key for key, one in self._kept.items() if one.counted]
            for key in sorted(own, key=lambda key: self._kept[key].last_used):
                if not self._accountant.short_bytes:
                    return
                self._drop(key)

    def _drop(self, key: bytes) -> None:
        kept = self._kept.pop(key)
        kept.made.close()
        self._accountant.give(Part.OTHER, kept.counted)
