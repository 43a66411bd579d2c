# SPDX-License-Identifier: Apache-2.0
"""Keeps forms of a store's documents open beside an engine, within its one budget."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hillinfer.catalogue.catalogue import FILE, Catalogue
from hillinfer.catalogue.checks import OnlineChecks, ServedAnswer
from hillinfer.catalogue.form_cache import FormCache, Move, ReadyDocument
from hillinfer.catalogue.planning import (
    DRAM,
    REST,
    DocumentRules,
    PlanRules,
    drive_options,
    options_of,
)
from hillinfer.catalogue.records import (
    ROWS,
    CatalogueError,
    KnownDocument,
    document_uses,
    with_expected_forms,
)
from hillinfer.errors import CacheUseError, ColdPoolError, HillInferError, HillInferWarning
from hillinfer.forms.filed import DriveForm, FormFile
from hillinfer.forms.form import Form, MadeForm
from hillinfer.forms.shadowed import LeadForm, MadeShadows, ShadowedForm
from hillinfer.forms.table import make_form
from hillinfer.forms.whole import states_bytes
from hillinfer.generate.answering import Generation
from hillinfer.hf.attach import Attachment
from hillinfer.memory_budget import Accountant, Loan, Part
from hillinfer.model_shape import ModelShape
from hillinfer.placement.options import Option, packed_form
from hillinfer.reuse.model_prompts import ModelPrompts
from hillinfer.store.store import Store

# Of a budget in bytes; the other half is for what answers need.
_PART = 0.5
# What follows a document that rests and is read into an ordinary cache has no more.
_QUESTION_TOKENS = 128
# Share of a document's rows that leads, beside its shadows.
_LEAD = 0.1


@dataclass(frozen=True)
class OpenedPrefix:
    """A prompt whose first tokens came from a form.

    Parameters
    ----------
    key, form
        Of the document, and the form's name.
    tokens
        How many came.
    generation
        What goes on behind them.
    """

    key: bytes
    form: str
    tokens: int
    generation: Generation


class PlacedDocuments:
    """Makes and opens forms of a store's documents, while nobody waits for an answer.

    Documents are those of the store's catalogue, once it has one. To what was measured of them
    come the engine's own forms, of documents that stay open in it: their answers are those of
    documents that rest, and sooner. A form that opens into an ordinary cache takes part where the
    budget has room for both, and what it opens into is counted while an answer needs it.

    Used by the thread that owns the model.

    Parameters
    ----------
    attachment
        With an engine that is open as long as this is.
    prompts, store
        The store, as the attached model uses it, and itself; looked at once documents were put.
    accountant
        That engine's.
    rules
        How documents are placed.
    chunk_tokens
        Tokens of a forward pass that reads what follows a document.
    """

    def __init__(
        self,
        attachment: Attachment,
        prompts: ModelPrompts,
        store: Store,
        accountant: Accountant,
        rules: DocumentRules,
        chunk_tokens: int,
    ) -> None:
        self._attachment, self._model = attachment, attachment.model
        self._prompts, self._store = prompts, store
        self._accountant, self._rules, self._chunk_tokens = accountant, rules, chunk_tokens
        self._shape = ModelShape.from_config(self._model.config, self._model.dtype)
        self._engine_forms: dict[str, Form] = {}
        self._checks: OnlineChecks | None = None
        self._catalogue: Catalogue | None = None
        self._form_cache: FormCache | None = None
        self._files: dict[int, FormFile] = {}
        self.failure = ""

    # --- while nobody waits ----------------------------------------------------------------

    def settle(self, is_over: Callable[[], bool]) -> list[Move]:
        """Plan by what the store counted until now, and make forms until all are or `is_over()`.

        What fails costs answers time alone; it is told in `failure`.
        """
        self.failure = ""
        try:
            form_cache = self._opened()
            if form_cache is None:
                return []
            rules = PlanRules(
                self._budget(),
                self._rules.alpha,
                self._rules.floor,
                drive_budget=self._drive_budget,
                drives=len(self._drives),
            )
            self._check(form_cache, is_over)
            if is_over():
                return []
            form_cache.plan(rules, self._options)
            return form_cache.settle(is_over)
        except Exception as error:
            # Nobody asked for it: answers come from where documents rest.
            self.failure = str(error) if isinstance(error, HillInferError) else repr(error)
            return []

    @property
    def held(self) -> dict[str, int]:
        """Bytes of the forms that are made, by the names of their documents."""
        return {} if self._form_cache is None else self._form_cache.held

    @property
    def accountant(self) -> Accountant:
        """Counts what forms take, and what they open into, beside the engine."""
        return self._accountant

    @property
    def to_compare(self) -> int:
        """How many documents have answers that are still to be compared with all rows."""
        return 0 if self._checks is None else len(self._checks.waiting)

    # --- answers ---------------------------------------------------------------------------

    def open(self, ids: Sequence[int], tokens: int, sequences: int) -> OpenedPrefix | None:
        """Open the form of the longest document that a prompt begins with; None where none is made.

        Parameters
        ----------
        ids
            Token numbers of the prompt.
        tokens, sequences
            Most that prompt and answer will have, and of how many answers.

        Raises
        ------
        BudgetError
            Where the engine has no room for them.
        """
        if self._form_cache is None:
            return None
        found = self._form_cache.made_for(ids) or self._resting_for(ids)
        if found is None:
            return None
        made = found.made
        if found.stored_tokens - made.tokens > self._chunk_tokens:
            # A conversation that went on: the store has more of it than would be read again.
            return None
        form = None if found.form == ROWS else self._form_of(found.form)
        if form is not None and form.lies_in_engine:
            cache = made.open_for(tokens, sequences).cache
            own = Generation(self._model, cache, self._chunk_tokens)
            return OpenedPrefix(found.key, found.form, made.tokens, own)
        size = self._opened_bytes(tokens) * sequences
        if form is not None and form.lies_on_drive:
            # What is packed comes into memory before it is opened.
            size += made.byte_count
        loan = self._attachment.lend(size)
        if loan is None:
            return None
        try:
            opened = made.open()
        except CacheUseError:
            # The store gave its rows up since it was asked.
            loan.give_back()
            return None
        except ColdPoolError as error:
            # The engine reads the rows, or computes them.
            loan.give_back()
            self._form_cache.give_up(found.key, made)
            warnings.warn(
                f"a document is read from its rows: {error}", HillInferWarning, stacklevel=2
            )
            return None
        except BaseException:
            loan.give_back()
            raise
        generation = CountedGeneration(self._model, opened.cache, self._chunk_tokens, loan)
        held = made.tokens - len(opened.unread)
        return OpenedPrefix(found.key, found.form, held, generation)

    def note(self, key: bytes, answer: ServedAnswer) -> None:
        """Remember an answer from a form, to be compared with all rows while nobody waits."""
        if self._checks is None or answer.form == ROWS:
            return
        if not self._form_of(answer.form).lies_in_engine:
            self._checks.note(key, answer)

    def give_up_for(self, tokens: int, sequences: int) -> bool:
        """Give up documents that are open in the engine, as few as let so much begin.

        False where even all of them would not, and none is given up: what answers that are under
        way hold comes back by itself.

        Parameters
        ----------
        tokens, sequences
            As in `open`.
        """

        def fits(forms: Sequence[MadeForm]) -> bool:
            open_there = [one.cache for one in forms if isinstance(one, MadeShadows)]
            return self._attachment.has_room(tokens, sequences, open_there)

        return self._form_cache is not None and self._form_cache.give_up_for(fits)

    def close(self) -> None:
        """Give all forms up; harmless when done twice."""
        form_cache, self._form_cache = self._form_cache, None
        catalogue, self._catalogue = self._catalogue, None
        if form_cache is not None:
            form_cache.close()
        if catalogue is not None:
            catalogue.close()
        while self._files:
            self._files.popitem()[1].close()

    # --- inside ----------------------------------------------------------------------------

    def _opened(self) -> FormCache | None:
        """Return the form cache, once somebody has put a document; None before."""
        if self._form_cache is None and (self._store.places.directory / FILE).exists():
            self._catalogue = Catalogue(self._store.places)
            prompts = self._prompts.divided(self._chunk_tokens)
            own = (
                ShadowedForm(self._attachment, prompts),
                LeadForm(self._attachment, prompts, _LEAD),
            )
            self._engine_forms = {one.name: one for one in own}
            self._checks = OnlineChecks(self._model, prompts, self._chunk_tokens)
            self._form_cache = FormCache(
                self._model,
                prompts,
                self._store,
                self._catalogue,
                self._accountant,
                self._form_of,
            )
        return self._form_cache

    def _resting_for(self, ids: Sequence[int]) -> ReadyDocument | None:
        """Return a document that rests, where an ordinary cache answers sooner than the engine.

        That is a short question, and nobody else's beside it: in the engine several answers share
        each step, and what is read is stored.
        """
        if self._accountant.lent_bytes:
            return None
        assert self._form_cache is not None
        found = self._form_cache.resting_for(ids)
        if found is None or len(ids) - found.made.tokens > _QUESTION_TOKENS:
            return None
        return found

    def _check(self, form_cache: FormCache, is_over: Callable[[], bool]) -> None:
        """Compare answers with all rows, and measure anew what lost more than its profile says.

        Both need all rows in memory, which are counted; where there is no room nothing is compared.
        """
        assert self._checks is not None
        assert self._catalogue is not None
        known = {one.key: one for one in with_expected_forms(self._catalogue.documents())}
        for key in self._checks.waiting:
            if is_over():
                return
            document = known.get(key)
            if document is None:
                # Somebody removed it since it was asked about.
                self._checks.forget(key)
                continue
            try:
                ids = form_cache.ids_of(document)
            except CatalogueError:
                self._checks.forget(key)
                continue
            # Beside all rows, one form as it opens, and room for what is asked.
            size = 3 * self._opened_bytes(document.tokens)
            if not self._accountant.take_spare(Part.OTHER, size):
                continue
            try:
                while self._checks.compare(document, ids, is_over) is not None:
                    pass
                if not is_over() and self._checks.slipped(document):
                    renewed = self._checks.renewed(document, ids, is_over)
                    if renewed is not None:
                        self._catalogue.put(renewed)
            finally:
                self._accountant.give(Part.OTHER, size)

    def _form_of(self, name: str) -> Form:
        own = self._engine_forms.get(name)
        if own is not None:
            return own
        packed = packed_form(name)
        if packed is None or not self._drive_budget or packed[1] > len(self._drives):
            return make_form(name)
        form, drive = packed
        if drive not in self._files:
            self._files[drive] = FormFile(self._drives[drive - 1])
        return DriveForm(make_form(form), self._files[drive], drive)

    @property
    def _drives(self) -> list[Path]:
        """Return a directory on each drive of the store."""
        return [path.parent for path, _ in self._store.places.files]

    @property
    def _drive_budget(self) -> int:
        # What an encrypted store holds is nowhere else in the clear.
        return 0 if self._store.places.cipher else self._rules.drive_budget

    def _budget(self) -> int:
        """Return the bytes that forms may take: of a budget that is a share, that of documents."""
        if self._rules.dram_budget is not None:
            return self._rules.dram_budget
        size = self._attachment.settings.dram_budget
        if size.share is None:
            return int(_PART * size.resolve(0))
        assert self._catalogue is not None
        documents = self._catalogue.documents()
        uses = document_uses(self._store.database, [one.key for one in documents], 0.0)
        stored = sum(one.tokens for one in documents if one.key in uses)
        return size.resolve(stored * self._shape.token_bytes)

    def _options(self, document: KnownDocument) -> list[Option]:
        """Return what a document may lie as here: its rest, what there is room for, the engine's.

        Where there is no room, an answer selects behind the engine's forms as where the document
        rests: their quality is the same.
        """
        assert self._form_cache is not None
        assert document.resting is not None
        room = self._accountant.bytes_for_hot_rows + sum(self._form_cache.held.values())
        opened = self._opened_bytes(document.tokens)
        chosen = document.form if document.is_pinned else None
        every = options_of(document)
        if self._drive_budget:
            rows = self._shape.token_bytes * document.tokens
            every += drive_options(document, rows, len(self._drives))
        options = [
            one
            for one in every
            if one.tier == REST or one.form == chosen or one.byte_count + opened <= room
        ]
        resting, all_bytes = document.resting, self._shape.token_bytes * document.tokens
        for form in self._engine_forms.values():
            if opened <= room and form.name != chosen:
                # An ordinary cache answers sooner than what selects.
                continue
            size = form.byte_count(self._shape, document.tokens)
            # What lies in memory is not read again when the document is opened.
            first = resting.rows * max(0.0, 1 - size / all_bytes)
            options.append(Option(form.name, DRAM, size, 1.0, first, resting.token))
        return options

    def _opened_bytes(self, tokens: int) -> int:
        """Return the bytes of an ordinary cache of so many tokens, in the model's own type."""
        number: int = self._model.dtype.itemsize
        return states_bytes(self._shape, tokens) * number // 2


class CountedGeneration(Generation):
    """A generation in an ordinary cache, whose bytes are counted until it is closed.

    Parameters
    ----------
    model, cache, chunk_tokens
        As in `Generation`.
    loan
        Of the bytes, which are counted already.
    """

    def __init__(self, model: Any, cache: Any, chunk_tokens: int, loan: Loan) -> None:
        super().__init__(model, cache, chunk_tokens)
        self._loan = loan

    def close(self) -> None:
        """Let the cache go; harmless when done twice."""
        self._loan.give_back()
        self.cache = None
