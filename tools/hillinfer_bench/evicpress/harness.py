# SPDX-License-Identifier: Apache-2.0
"""Plays a workload to one rival: real openings, real reads, real layers; only arrivals are told."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from hillinfer.catalogue.measuring import MeasuredDocument, ProbeWishes, measure_document
from hillinfer.forms.form import DocumentStates, MadeForm, OpenedForm
from hillinfer.forms.probes import Probe, Probing, recall_probes
from hillinfer.forms.stored_rows import StoredRowsForm
from hillinfer.forms.stored_states import stored_states
from hillinfer.forms.table import make_form
from hillinfer.generate.answering import Generation
from hillinfer.placement.options import Context, FirstTokenUtility, Option, Tier
from hillinfer.placement.placing import Placing
from hillinfer.placement.stock import Change, Stock
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer_bench.evicpress.rates import rate_curve
from hillinfer_bench.evicpress.rivals import Rival
from hillinfer_bench.evicpress.workload import AskedDocument, Workload
from hillinfer_bench.placement.optimum import optimum

# By number of the document: the form's name, and the form.
_Made = dict[int, tuple[str, MadeForm]]
_DECODED = 4
_CHUNK = 512


@dataclass(frozen=True)
class StoredDocument:
    """A document that was read, stored and measured once, for all rivals.

    Parameters
    ----------
    document
        Itself.
    measured
        Its forms, by probes that rivals choose by.
    questions
        Probes of other places, which are what is asked for.
    """

    document: AskedDocument
    measured: MeasuredDocument
    questions: tuple[Probe, ...]


@dataclass
class Played:
    """What one rival did.

    Parameters
    ----------
    first_tokens, token_seconds
        Of each request, in seconds.
    agreements
        Of each request: the share of its answer's tokens that are those of all rows.
    documents, forms
        Of each request, which it asked for, and what that lay as.
    dram_peak, read_bytes
        Most bytes that forms took, and bytes of rows that came from the drive.
    moves, moving_seconds
        Forms that were made between requests, and what that took.
    """

    first_tokens: list[float] = field(default_factory=list)
    token_seconds: list[float] = field(default_factory=list)
    agreements: list[float] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    forms: list[str] = field(default_factory=list)
    dram_peak: int = 0
    read_bytes: int = 0
    moves: int = 0
    moving_seconds: float = 0.0

    def rate_curve(self, arrivals: Sequence[float]) -> list[tuple[float, float]]:
        """Return requests a second and the median first token then, computed; see `rate_curve`."""
        taken = [
            first + _DECODED * token
            for first, token in zip(self.first_tokens, self.token_seconds, strict=True)
        ]
        return rate_curve(arrivals, self.first_tokens, taken)

    def utility(self, alpha: float) -> float:
        """Return the sum of α · agreement − time to first token of all requests."""
        return sum(
            alpha * quality - seconds
            for quality, seconds in zip(self.agreements, self.first_tokens, strict=True)
        )

    def figures(self) -> dict[str, Any]:
        """Return what tables show, as JSON has it."""
        by_document: dict[int, list[float]] = {}
        for number, quality in zip(self.documents, self.agreements, strict=True):
            by_document.setdefault(number, []).append(quality)
        means = sorted(fmean(own) for own in by_document.values())
        worst = means[: max(1, len(means) // 10)]
        return {
            "first_token_p50": float(np.percentile(self.first_tokens, 50)),
            "first_token_p95": float(np.percentile(self.first_tokens, 95)),
            "token_p50": float(np.percentile(self.token_seconds, 50)),
            "agreement": fmean(self.agreements),
            "worst_tenth_agreement": fmean(worst),
            "dram_peak_bytes": self.dram_peak,
            "read_bytes": self.read_bytes,
            "moves": self.moves,
            "moving_seconds": self.moving_seconds,
            "forms": dict(Counter(self.forms)),
        }


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
        Share of all rows' bytes that forms may take in memory.
    """

    def __init__(
        self, model: Any, prompts: StoredPrompts, workload: Workload, budget_part: float
    ) -> None:
        self._model, self._prompts, self._workload = model, prompts, workload
        self._stored: list[StoredDocument] = []
        self._probings: dict[int, Probing] = {}
        self._agreed: dict[tuple[int, str], tuple[float, ...]] = {}
        held = make_form("held")
        self.all_bytes = sum(
            held.byte_count(prompts.shape, len(one.ids)) for one in workload.documents
        )
        self.budget = int(budget_part * self.all_bytes)

    # --- before anybody is compared --------------------------------------------------------

    def store(self, number: int, forms: Sequence[str], wishes: ProbeWishes) -> StoredDocument:
        """Read, store and measure the next document."""
        document = self._workload.documents[number]
        cache = DynamicCache()
        began = time.perf_counter()
        Generation(self._model, cache, _CHUNK).read(list(document.ids))
        seconds = time.perf_counter() - began
        self._prompts.keep(cache, list(document.ids), seconds)
        made = [make_form(name) for name in forms]
        measured = measure_document(
            self._model, self._prompts, list(document.ids), made, wishes, seconds
        )
        # Of the same draw, so that no token is in both.
        counts = (wishes.chosen_by, wishes.judged_by)
        _, questions = recall_probes(
            document.ids, counts, wishes.seed, wishes.instruction, wishes.sizes
        )
        self._stored.append(StoredDocument(document, measured, tuple(questions)))
        return self._stored[-1]

    # --- one rival -------------------------------------------------------------------------

    def play(self, rival: Rival) -> Played:
        """Play the whole workload to a rival, from empty memory on."""
        played = Played()
        made: _Made = {}
        tiers = (Tier("dram", self.budget), Tier("rest"))
        utility = FirstTokenUtility(rival.alpha)
        placing = None
        if rival.policy is not None:
            placing = Placing(tiers, rival.policy(), utility, rival.uses())
        elif rival.knows_uses:
            self._follow(self._best(rival, Stock(tiers), utility), made, played)
        for asked in self._workload.requests:
            number, name = asked.document, str(asked.document)
            self._ask(number, rival.rest, made.get(number), played)
            if placing is None:
                continue
            if name in placing.stock.contexts:
                changes = placing.used(name, asked.time)
            else:
                changes = placing.put(name, self._options(number, rival), asked.time)
            self._follow(changes, made, played)
        return played

    def _best(self, rival: Rival, stock: Stock, utility: FirstTokenUtility) -> list[Change]:
        """Return the changes that make the best static placement, by all uses that will come."""
        uses = Counter(one.document for one in self._workload.requests)
        for number in range(len(self._stored)):
            options = tuple(self._options(number, rival))
            values = tuple(utility.value(one) for one in options)
            stock.put(Context(str(number), options, values, float(uses[number])))
        return stock.arrange(optimum(stock).plan)

    def _options(self, number: int, rival: Rival) -> list[Option]:
        measured = self._stored[number].measured
        rest = getattr(measured.resting, rival.rest)
        options = [Option(rival.rest, "rest", 0, 1.0, rest, measured.resting.token)]
        return options + [
            Option(one.form, "dram", one.byte_count, one.lower, one.opening_seconds)
            for one in measured.forms
            if one.form in rival.forms
        ]

    def _follow(self, changes: Sequence[Change], made: _Made, played: Played) -> None:
        """Make the forms that changes name, between requests."""
        began = time.perf_counter()
        for change in changes:
            number = int(change.context)
            old = made.pop(number, None)
            if old is not None:
                old[1].close()
            if change.after is None or change.after.tier != "dram":
                continue
            ids = list(self._stored[number].document.ids)
            states = stored_states(self._prompts, ids)
            form = make_form(change.after.form)
            made[number] = (form.name, form.make(self._model, states))
            played.moves += 1
            held = sum(one.byte_count for _, one in made.values())
            played.dram_peak = max(played.dram_peak, held)
        played.moving_seconds += time.perf_counter() - began

    def _ask(
        self, number: int, rest: str, made: tuple[str, MadeForm] | None, played: Played
    ) -> None:
        """Open a document, read a question behind it and decode some tokens, all timed."""
        stored = self._stored[number]
        form = rest if made is None else made[0]
        turn = played.documents.count(number) % len(stored.questions)
        question = stored.questions[turn]
        began = time.perf_counter()
        opened = self._opened(stored, rest) if made is None else made[1].open()
        generation = Generation(self._model, opened.cache, _CHUNK)
        generation.read([*opened.unread, *question.given])
        played.first_tokens.append(time.perf_counter() - began)
        began = time.perf_counter()
        for token in question.answer[:_DECODED]:
            generation.step(token)
        played.token_seconds.append((time.perf_counter() - began) / _DECODED)
        if form == "rows":
            ids = stored.document.ids
            played.read_bytes += self._prompts.shape.token_bytes * len(ids)
        played.documents.append(number)
        played.forms.append(form)
        played.agreements.append(self._agreements(number, form)[turn])

    def _opened(self, stored: StoredDocument, rest: str) -> OpenedForm:
        states = DocumentStates(stored.document.ids, ())
        resting = make_form("text") if rest == "text" else StoredRowsForm(self._prompts)
        return resting.make(self._model, states).open()

    def _agreements(self, number: int, form: str) -> tuple[float, ...]:
        """Return what each question's answer keeps behind a form; the same whenever it is asked."""
        stored = self._stored[number]
        if form in ("rows", "text", "held"):
            return (1.0,) * len(stored.questions)
        key = (number, form)
        if key not in self._agreed:
            states = stored_states(self._prompts, list(stored.document.ids))
            if number not in self._probings:
                self._probings[number] = Probing(self._model, states, stored.questions)
            way = make_form(form)
            with torch.no_grad():
                opened = way.make(self._model, states).open()
                self._agreed[key] = self._probings[number].quality(way, opened).agreements
        return self._agreed[key]
