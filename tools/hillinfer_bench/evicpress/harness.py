# SPDX-License-Identifier: Apache-2.0
"""Plays a workload to one rival: real openings, real reads, real layers; only arrivals are told."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from hillinfer.catalogue.measuring import (
    MeasuredDocument,
    ProbeWishes,
    measure_document,
    usual_wishes,
)
from hillinfer.forms.filed import DriveForm, FormFile
from hillinfer.forms.form import DocumentStates, MadeForm, OpenedForm
from hillinfer.forms.probes import Probe, Probing, recall_probes
from hillinfer.forms.table import make_form
from hillinfer.forms.whole import StoredRowsForm, stored_states
from hillinfer.generate.answering import Generation
from hillinfer.placement.options import ON_DRIVE, Context, FirstTokenUtility, Option, Tier
from hillinfer.placement.placing import Placing
from hillinfer.placement.policies import MergedHulls
from hillinfer.placement.stock import Change, Stock
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer_bench.evicpress.notes import Notes, packed_profile, unpacked_profile
from hillinfer_bench.evicpress.played import DECODED, Played
from hillinfer_bench.evicpress.rivals import CODES, DROPPED, USUAL, Rival
from hillinfer_bench.evicpress.workload import AskedDocument, Workload
from hillinfer_bench.placement.optimum import optimum

# By number of the document: the form's name, and the form.
_Made = dict[int, tuple[str, MadeForm]]
CHUNK = 512
"""Tokens of a forward pass that reads a text."""


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
    """Documents in a store, measured, and played to rivals one after the other.

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
        self._model, self._prompts, self.workload = model, prompts, workload
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
        usual = usual_wishes(len(ids), len(USUAL) - 1, wishes.instruction)
        usual = replace(usual, drawn=tuple(chosen_by[: usual.chosen_by]))
        seconds = self._notes.part(f"prefill {number}", lambda: self._read(ids), float, float)
        if self._prompts.stored_key(ids) is None:
            # Whoever read it was killed before it was on the drive.
            self._read(ids)
        # Which answers are right is looked up once they are asked for.
        asked = replace(wishes, judged_by=0)
        profiles = []
        for name, names, own in (
            ("whole", ("held", *CODES, *DROPPED), asked),
            ("usual", USUAL, usual),
        ):
            forms = [make_form(one) for one in names]
            profiles.append(
                self._notes.part(
                    f"{name} profile {number}",
                    lambda forms=forms, own=own: measure_document(  # type: ignore[misc]
                        self._model, self._prompts, ids, forms, own, seconds
                    ),
                    packed_profile,
                    unpacked_profile,
                )
            )
        self.stored.append(StoredDocument(document, profiles[0], profiles[1], tuple(questions)))
        return self.stored[-1]

    # --- one rival -------------------------------------------------------------------------

    def play(self, rival: Rival) -> Played:
        """Play the whole workload to a rival, from empty memory on."""
        played = Played()
        made: _Made = {}
        packed = (Tier("drive", self.all_bytes),) if rival.uses_drive else ()
        tiers = (Tier("dram", self.budget), *packed, Tier("rest"))
        utility = FirstTokenUtility(rival.alpha)
        placing = None
        if rival.policy is not None:
            placing = Placing(tiers, rival.policy(), utility, rival.uses())
        elif rival.knows_uses:
            self._follow(self._best(rival, Stock(tiers), utility), made, played)
        for asked in self.workload.requests:
            number, name = asked.document, str(asked.document)
            self._ask(number, rival.rest, made.get(number), played)
            if placing is None:
                continue
            if name in placing.stock.contexts:
                changes = placing.used(name, asked.time)
            else:
                changes = placing.put(name, self._options(number, rival), asked.time)
            self._follow(changes, made, played)
        for _, form in made.values():
            form.close()
        return played

    def play_all_held(self) -> tuple[Played, Played]:
        """Play with room for all, once by our policy and once by nobody, request by request.

        Both have all rows of every document in memory from the start; who goes first alternates.
        """
        ours, nobody = Played(), Played()
        placing = Placing((Tier("dram", 2 * self.all_bytes), Tier("rest")), *_managing())
        rival = Rival("all", ("held",))
        made: _Made = {}
        for number in range(len(self.stored)):
            self._follow(placing.put(str(number), self._options(number, rival), 0.0), made, ours)
        for turn, asked in enumerate(self.workload.requests):
            number = asked.document
            for played in (ours, nobody) if turn % 2 else (nobody, ours):
                began = time.perf_counter()
                if played is ours:
                    self._follow(placing.used(str(number), asked.time), made, ours)
                managing = time.perf_counter() - began
                self._ask(number, rival.rest, made[number], played)
                played.first_tokens[-1] += managing
        return ours, nobody

    def probing(self, number: int, turn: int) -> Probing:
        """Return a question with the answer of all rows, which is read once."""
        if (number, turn) not in self._probings:
            states = self.states(number)
            question = self.stored[number].questions[turn]
            self._probings[number, turn] = Probing(self._model, states, [question])
        return self._probings[number, turn]

    def states(self, number: int) -> DocumentStates:
        """Return the rows of a document, from the store."""
        return stored_states(self._prompts, list(self.stored[number].document.ids))

    def agreement(self, number: int, name: str, turn: int) -> float:
        """Return what a question's answer keeps behind a form; the same whenever it is asked."""
        # It is the same form wherever it lies.
        name = name.removeprefix(ON_DRIVE)
        if name in ("rows", "text", "held"):
            return 1.0
        if (number, name, turn) not in self._agreed:
            form = make_form(name)
            opened = form.make(self._model, self.states(number)).open()
            for one in range(len(self.stored[number].questions)):
                quality = self.probing(number, one).quality(form, opened)
                self._agreed[number, name, one] = quality.mean
        return self._agreed[number, name, turn]

    def turn(self, number: int, played: Played) -> int:
        """Return which of its questions is asked about a document next."""
        return played.documents.count(number) % len(self.stored[number].questions)

    # --- inside ----------------------------------------------------------------------------

    def _read(self, ids: list[int]) -> float:
        cache = DynamicCache()
        began = time.perf_counter()
        Generation(self._model, cache, CHUNK).read(ids)
        seconds = time.perf_counter() - began
        self._prompts.keep(cache, ids, seconds)
        return seconds

    def _best(self, rival: Rival, stock: Stock, utility: FirstTokenUtility) -> list[Change]:
        """Return the changes that make the best static placement, by all uses that will come."""
        uses = Counter(one.document for one in self.workload.requests)
        for number in range(len(self.stored)):
            options = tuple(self._options(number, rival))
            values = tuple(utility.value(one) for one in options)
            stock.put(Context(str(number), options, values, float(uses[number])))
        return stock.arrange(optimum(stock).plan)

    def _options(self, number: int, rival: Rival) -> list[Option]:
        stored = self.stored[number]
        measured = stored.usual if rival.is_usual else stored.whole
        rest = getattr(measured.resting, rival.rest)
        options = [Option(rival.rest, "rest", 0, 1.0, rest, measured.resting.token)]
        for one in measured.forms:
            if one.form not in rival.forms:
                continue
            first = one.opening_seconds
            options.append(Option(one.form, "dram", one.byte_count, one.lower, first))
            if rival.uses_drive:
                # What is packed comes at the rate that stored rows come at.
                first += measured.resting.rows * one.byte_count / self._row_bytes(number)
                options.append(Option(one.form, "drive", one.byte_count, one.lower, first))
        return options

    def _row_bytes(self, number: int) -> int:
        return self._prompts.shape.token_bytes * len(self.stored[number].document.ids)

    def _follow(self, changes: Sequence[Change], made: _Made, played: Played) -> None:
        """Make the forms that changes name, between requests."""
        began = time.perf_counter()
        for change in changes:
            number = int(change.context)
            old = made.pop(number, None)
            if old is not None:
                old[1].close()
            if change.after is None or change.after.tier == "rest":
                continue
            form = make_form(change.after.form)
            if change.after.tier == "drive":
                form = DriveForm(form, self.file)
            made[number] = (form.name, form.make(self._model, self.states(number)))
            played.moves += 1
            in_memory = [one for name, one in made.values() if not name.startswith(ON_DRIVE)]
            held = sum(one.byte_count for one in in_memory)
            played.dram_peak = max(played.dram_peak, held)
        played.moving_seconds += time.perf_counter() - began

    def _ask(
        self, number: int, rest: str, made: tuple[str, MadeForm] | None, played: Played
    ) -> None:
        """Open a document, read a question behind it and decode some tokens, all timed."""
        stored = self.stored[number]
        form = rest if made is None else made[0]
        turn = self.turn(number, played)
        question = stored.questions[turn]
        began = time.perf_counter()
        opened = self._opened(stored, rest) if made is None else made[1].open()
        generation = Generation(self._model, opened.cache, CHUNK)
        generation.read([*opened.unread, *question.given])
        played.first_tokens.append(time.perf_counter() - began)
        played.token_seconds.append(decoded(generation, question)[0])
        if form == "rows":
            played.read_bytes += self._row_bytes(number)
        elif made is not None and form.startswith(ON_DRIVE):
            played.read_bytes += made[1].byte_count
        played.documents.append(number)
        played.forms.append(form)
        played.agreements.append(self.agreement(number, form, turn))

    def _opened(self, stored: StoredDocument, rest: str) -> OpenedForm:
        states = DocumentStates(stored.document.ids, ())
        resting = make_form("text") if rest == "text" else StoredRowsForm(self._prompts)
        return resting.make(self._model, states).open()


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


def _managing() -> tuple[Any, ...]:
    """Return policy and utility of ours, as `Placing` takes them."""
    return MergedHulls(), FirstTokenUtility(1.0)
