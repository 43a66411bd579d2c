# SPDX-License-Identifier: Apache-2.0
"""Documents of the study: stored and measured once, with questions and answers' agreement."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from hillinfer.catalogue.measuring import (
    MeasuredDocument,
    ProbeWishes,
    measure_document,
    usual_form_names,
    usual_wishes,
)
from hillinfer.catalogue.records import MeasuredText, expected_forms
from hillinfer.forms.filed import FormFile
from hillinfer.forms.form import DocumentStates, OpenedForm
from hillinfer.forms.probes import Probe, Probing, recall_probes
from hillinfer.forms.table import make_form
from hillinfer.forms.whole import StoredRowsForm, stored_states
from hillinfer.generate.answering import Generation
from hillinfer.placement.options import ON_DRIVE, Option
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer_bench.evicpress.notes import Notes, packed_profile, unpacked_profile
from hillinfer_bench.evicpress.played import DECODED, Played
from hillinfer_bench.evicpress.rivals import CODES, DROPPED, Rival
from hillinfer_bench.evicpress.workload import AskedDocument, Workload

CHUNK = 512
"""Tokens of a forward pass that reads a text."""
MEASURED = ("held", *CODES, *DROPPED)
"""Forms of a whole profile."""


@dataclass(frozen=True)
class StoredDocument:
    """A document that was read, stored and measured once, for all rivals.

    Parameters
    ----------
    document
        Itself.
    whole
        Every form by every probe, as the paper measures.
    usual
        The forms of `hillinfer documents put`, within half of a prefill.
    questions
        Probes of other places, which are what is asked for.
    """

    document: AskedDocument
    whole: MeasuredDocument
    usual: MeasuredDocument
    questions: tuple[Probe, ...]


class Harness:
    """Documents in a store, measured, with questions of other places.

    Parameters
    ----------
    model
        Of transformers.
    prompts
        The store, as that model uses it.
    workload
        Who asks for what.
    budget_part
        Share of all rows' bytes that forms may take in memory. On the drive they may take as much
        as all rows.
    notes
        What was found before.

    Attributes
    ----------
    model, prompts, workload
        As they were given.
    all_bytes, budget
        Bytes of all rows, and those that forms may take in memory.
    stored
        Documents, in the order of their numbers.
    file
        On the drive, for whatever is packed there.
    """

    def __init__(
        self,
        model: Any,
        prompts: StoredPrompts,
        workload: Workload,
        budget_part: float,
        notes: Notes,
    ) -> None:
        self.model, self.prompts, self.workload = model, prompts, workload
        self._notes = notes
        self._probings: dict[tuple[int, int], Probing] = {}
        self._agreed: dict[tuple[int, str, int], float] = {}
        self.file = FormFile(notes.folder)
        held = make_form("held")
        self.stored: list[StoredDocument] = []
        self.all_bytes = sum(
            held.byte_count(prompts.shape, len(one.ids)) for one in workload.documents
        )
        self.budget = int(budget_part * self.all_bytes)

    # --- before anybody is compared --------------------------------------------------------

    def store(self, wishes: ProbeWishes) -> StoredDocument:
        """Read, store and measure the next document, twice: all of it, and as much as is usual."""
        number = len(self.stored)
        document = self.workload.documents[number]
        ids = list(document.ids)
        # Of one draw, so that no token is in both.
        counts = (wishes.chosen_by, wishes.judged_by)
        chosen_by, questions = recall_probes(
            ids, counts, wishes.seed, wishes.instruction, wishes.sizes
        )
        names = usual_form_names(len(ids))
        seconds = self._notes.part(f"prefill {number}", lambda: self._read(ids), float, float)
        usual = usual_wishes(len(ids), len(names) - 1, wishes.instruction, prefill_seconds=seconds)
        usual = replace(usual, drawn=tuple(chosen_by[: usual.chosen_by]))
        if self.prompts.stored_key(ids) is None:
            # Whoever read it was killed before it was on the drive.
            self._read(ids)
        # Which answers are right is looked up once they are asked for.
        asked = replace(wishes, judged_by=0)
        profiles = []
        for name, measured, own in (("whole", MEASURED, asked), ("usual", names, usual)):
            forms = [make_form(one) for one in measured]
            profiles.append(
                self._notes.part(
                    f"{name} profile {number}",
                    lambda forms=forms, own=own: measure_document(  # type: ignore[misc]
                        self.model, self.prompts, ids, forms, own, seconds
                    ),
                    packed_profile,
                    unpacked_profile,
                )
            )
        self.stored.append(StoredDocument(document, profiles[0], profiles[1], tuple(questions)))
        return self.stored[-1]

    # --- what answers keep -----------------------------------------------------------------

    def probing(self, number: int, turn: int) -> Probing:
        """Return a question with the answer of all rows, which is read once."""
        if (number, turn) not in self._probings:
            states = self.states(number)
            question = self.stored[number].questions[turn]
            self._probings[number, turn] = Probing(self.model, states, [question])
        return self._probings[number, turn]

    def states(self, number: int) -> DocumentStates:
        """Return the rows of a document, from the store."""
        return stored_states(self.prompts, list(self.stored[number].document.ids))

    def agreement(self, number: int, name: str, turn: int) -> float:
        """Return what a question's answer keeps behind a form; the same whenever it is asked."""
        # It is the same form wherever it lies.
        name = name.removeprefix(ON_DRIVE)
        if name in ("rows", "text", "held"):
            return 1.0
        if (number, name, turn) not in self._agreed:
            form = make_form(name)
            opened = form.make(self.model, self.states(number)).open()
            for one in range(len(self.stored[number].questions)):
                quality = self.probing(number, one).quality(form, opened)
                self._agreed[number, name, one] = quality.mean
        return self._agreed[number, name, turn]

    def asked(self, played: Played) -> Iterator[tuple[int, str, int]]:
        """Return which document, form and question each answer was of that a rival has given."""
        turns: Counter[int] = Counter()
        for number, form in zip(played.documents, played.forms, strict=True):
            yield number, form, turns[number] % len(self.stored[number].questions)
            turns[number] += 1

    def turn(self, number: int, played: Played) -> int:
        """Return which of its questions is asked about a document next."""
        return played.documents.count(number) % len(self.stored[number].questions)

    # --- what may be chosen ----------------------------------------------------------------

    @property
    def numbers(self) -> range:
        """Numbers of the documents that were stored."""
        return range(len(self.stored))

    def row_bytes(self, number: int) -> int:
        """Return the bytes of a document's rows."""
        return self.prompts.shape.token_bytes * len(self.stored[number].document.ids)

    def options(self, number: int, rival: Rival) -> list[Option]:
        """Return what a document may lie as, as a rival knows it."""
        return self._options(number, self.profile(number, rival), rival)

    def profile(self, number: int, rival: Rival) -> MeasuredDocument:
        """Return what a rival knows of a document's forms: ours, what others let expect, too."""
        if not rival.is_usual:
            return self.stored[number].whole
        own, *others = (
            MeasuredText(len(one.document.ids), one.usual.forms, one.usual.resting.token)
            for one in (self.stored[number], *self.stored[:number], *self.stored[number + 1 :])
        )
        return replace(self.stored[number].usual, forms=expected_forms(own, others))

    def known_options(self, number: int, rest: str) -> list[Option]:
        """Return every form on every tier, by the whole profile: what any of them is worth."""
        every = Rival("every form", MEASURED, rest=rest, uses_drive=True)
        return self._options(number, self.stored[number].whole, every)

    def resting(self, number: int, rest: str) -> OpenedForm:
        """Open a document where it rests, as `rows` or `text`."""
        states = DocumentStates(self.stored[number].document.ids, ())
        form = make_form("text") if rest == "text" else StoredRowsForm(self.prompts)
        return form.make(self.model, states).open()

    # --- inside ----------------------------------------------------------------------------

    def _options(self, number: int, measured: MeasuredDocument, rival: Rival) -> list[Option]:
        resting = measured.resting
        rests = getattr(resting, rival.rest)
        options = [Option(rival.rest, "rest", 0, 1.0, rests, resting.token)]
        for one in measured.forms:
            if one.form not in rival.forms:
                continue
            first = one.opening_seconds
            options.append(Option(one.form, "dram", one.byte_count, one.lower, first))
            if rival.uses_drive:
                # What is packed comes at the rate that stored rows come at.
                first += resting.rows * one.byte_count / self.row_bytes(number)
                options.append(Option(one.form, "drive", one.byte_count, one.lower, first))
        return options

    def _read(self, ids: list[int]) -> float:
        cache = DynamicCache()
        began = time.perf_counter()
        Generation(self.model, cache, CHUNK).read(ids)
        seconds = time.perf_counter() - began
        self.prompts.keep(cache, ids, seconds)
        return seconds


def decoded(
    generation: Generation, question: Probe, most: int = DECODED
) -> tuple[float, torch.Tensor]:
    """Decode a question's answer; return seconds a token, and the logits at its tokens.

    Parameters
    ----------
    generation
        That has read what is given.
    question
        With the answer.
    most
        Tokens to decode; the first ones are timed.
    """
    logits = [generation.logits]
    began = time.perf_counter()
    for token in question.answer[:DECODED]:
        generation.step(token)
        logits.append(generation.logits)
    seconds = (time.perf_counter() - began) / DECODED
    for token in question.answer[DECODED : min(most, len(question.answer) - 1)]:
        generation.step(token)
        logits.append(generation.logits)
    return seconds, torch.stack(logits[: len(question.answer)])
