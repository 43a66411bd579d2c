# SPDX-License-Identifier: Apache-2.0
"""Plays a workload to rivals in turn: real openings, real reads, real layers.

A machine's speed drifts over minutes. So each request is answered by every rival before the next
one comes, in an order drawn anew, and what is compared was timed within seconds.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hillinfer.forms.filed import DriveForm
from hillinfer.forms.form import MadeForm
from hillinfer.forms.table import make_form
from hillinfer.generate.answering import Generation
from hillinfer.placement.options import ON_DRIVE, Context, FirstTokenUtility, Option, Tier, Utility
from hillinfer.placement.policies import MergedHulls
from hillinfer.placement.stock import Change, Stock
from hillinfer_bench.evicpress.harness import CHUNK, Harness, decoded
from hillinfer_bench.evicpress.played import Played
from hillinfer_bench.evicpress.rivals import Rival
from hillinfer_bench.evicpress.workload import Asked
from hillinfer_bench.placement.optimum import optimum
from hillinfer_bench.placement.placing import Placing


class Play(ABC):
    """One rival in the middle of a workload, from empty memory on.

    Parameters
    ----------
    harness
        Whose documents are asked for.

    Attributes
    ----------
    played
        What it did; what answers keep is looked up at the end.
    """

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self.played = Played()

    @abstractmethod
    def begin(self, now: float) -> None:
        """Take in the documents, which were stored and measured before anybody asks.

        Parameters
        ----------
        now
            Seconds, when the last of them was stored.
        """

    @abstractmethod
    def ask(self, asked: Asked) -> None:
        """Answer a request, timed."""

    @abstractmethod
    def settle(self, asked: Asked) -> None:
        """Move what is to be moved after a request, while nobody waits."""

    @abstractmethod
    def finish(self) -> None:
        """Look up what answers keep, and let memory go."""


def play_together(plays: Sequence[Play], requests: Sequence[Asked]) -> None:
    """Play a workload to several rivals, request by request.

    Parameters
    ----------
    plays
        That nobody has begun.
    requests
        In order of time.
    """
    for play in plays:
        play.begin(requests[0].time)
    for number, asked in enumerate(requests):
        order = np.random.default_rng(number).permutation(len(plays))
        for one in order:
            plays[one].ask(asked)
        for one in order:
            plays[one].settle(asked)
    for play in plays:
        play.finish()


class PlacedPlay(Play):
    """A rival that chooses forms and tiers of documents by a policy, or exactly, or rests.

    Parameters
    ----------
    harness
        As in `Play`.
    rival
        Itself.
    budget
        Bytes that forms may take in memory; None for the harness' own.
    """

    def __init__(self, harness: Harness, rival: Rival, budget: int | None = None) -> None:
        super().__init__(harness)
        self._rival = rival
        self._placing: Placing | None = None
        self._made: dict[int, tuple[str, MadeForm]] = {}
        self._lies: dict[int, Option] = {}
        packed = (Tier("drive", harness.all_bytes),) if rival.uses_drive else ()
        dram = Tier("dram", harness.budget if budget is None else budget)
        self._tiers = (dram, *packed, Tier("rest"))

    def begin(self, now: float) -> None:
        """Place all documents: a policy that looks ahead need not wait for somebody to ask."""
        self._placing = begun(
            self._rival,
            self._tiers,
            [self._harness.options(number, self._rival) for number in self._harness.numbers],
            Counter(one.document for one in self._harness.workload.requests),
            now,
            self._follow,
        )

    def ask(self, asked: Asked) -> None:
        """Open a document, read a question behind it and decode some tokens, all timed."""
        number, rest = asked.document, self._rival.rest
        made = self._made.get(number)
        form = rest if made is None else made[0]
        question = self._harness.stored[number].questions[self._harness.turn(number, self.played)]
        began = time.perf_counter()
        opened = self._harness.resting(number, rest) if made is None else made[1].open()
        generation = Generation(self._harness.model, opened.cache, CHUNK)
        generation.read([*opened.unread, *question.given])
        self.played.first_tokens.append(time.perf_counter() - began)
        self.played.token_seconds.append(decoded(generation, question)[0])
        if form == "rows":
            self.played.read_bytes += self._harness.row_bytes(number)
        elif made is not None and form.startswith(ON_DRIVE):
            self.played.read_bytes += made[1].byte_count
        self.played.documents.append(number)
        self.played.forms.append(form)
        self.played.expected.append(self._expected(number))

    def settle(self, asked: Asked) -> None:
        """Count the use, and follow the policy."""
        if self._placing is not None:
            self._follow(self._placing.used(str(asked.document), asked.time))

    def finish(self) -> None:
        """Look up what each answer kept, which is the same whenever it is asked."""
        for _, form in self._made.values():
            form.close()
        self._made.clear()
        self.played.agreements = [
            self._harness.agreement(*one) for one in self._harness.asked(self.played)
        ]

    def _expected(self, number: int) -> tuple[float, float]:
        """Return the quality and seconds that a full profile tells of what a document lies as."""
        option = self._lies.get(number)
        for one in self._harness.known_options(number, self._rival.rest):
            if one.tier == "rest" if option is None else one.place == option.place:
                return one.quality, one.first_token
        raise AssertionError("a full profile has every form")

    def _follow(self, changes: Sequence[Change]) -> None:
        """Make the forms that changes name."""
        began = time.perf_counter()
        for change in changes:
            number = int(change.context)
            old = self._made.pop(number, None)
            self._lies.pop(number, None)
            if old is not None:
                old[1].close()
            if change.after is None or change.after.tier == "rest":
                continue
            form = make_form(change.after.form)
            if change.after.tier == "drive":
                form = DriveForm(form, self._harness.file)
            states = self._harness.states(number)
            self._made[number] = (form.name, form.make(self._harness.model, states))
            self._lies[number] = change.after
            self.played.moves += 1
            in_memory = [one for name, one in self._made.values() if not name.startswith(ON_DRIVE)]
            held = sum(one.byte_count for one in in_memory)
            self.played.dram_peak = max(self.played.dram_peak, held)
        self.played.moving_seconds += time.perf_counter() - began


class AllFitsPlay(Play):
    """Room for all rows of every document: our policy manages them, and beside it nobody does.

    Who goes first alternates. What nobody's answers take is that of the layers alone, which is the
    limit of whatever places documents.

    Parameters
    ----------
    harness
        As in `Play`.

    Attributes
    ----------
    played, managed
        What was done with nobody, and with our policy, whose own time counts.
    """

    def __init__(self, harness: Harness) -> None:
        super().__init__(harness)
        rival = Rival("all held", ("held",), MergedHulls)
        self._ours = PlacedPlay(harness, rival, 2 * harness.all_bytes)
        self._nobody = PlacedPlay(harness, rival, 2 * harness.all_bytes)
        self.played, self.managed = self._nobody.played, self._ours.played

    def begin(self, now: float) -> None:
        """Hold all of them."""
        for one in (self._ours, self._nobody):
            one.begin(now)

    def ask(self, asked: Asked) -> None:
        """Have both answer."""
        is_first = len(self.managed.documents) % 2
        for one in (self._ours, self._nobody) if is_first else (self._nobody, self._ours):
            began = time.perf_counter()
            if one is self._ours:
                one.settle(asked)
            managing = time.perf_counter() - began
            one.ask(asked)
            one.played.first_tokens[-1] += managing

    def settle(self, asked: Asked) -> None:
        """Nothing is left to do: our policy counted the use before its answer, in its time."""

    def finish(self) -> None:
        """Let all of it go."""
        for one in (self._ours, self._nobody):
            one.finish()


def begun(
    rival: Rival,
    tiers: Sequence[Tier],
    options: Sequence[Sequence[Option]],
    uses: Counter[int],
    now: float,
    follow: Callable[[Sequence[Change]], Any],
) -> Placing | None:
    """Have a rival place documents that were just stored; return what goes on placing them.

    Parameters
    ----------
    rival
        Whose policy it is. One that knows all uses places once; None is returned then, and for one
        that chooses nothing.
    tiers
        Fastest first.
    options
        Of each document.
    uses
        How often each will be asked for, by its number; only who knows them looks.
    now
        Seconds, when the last one was stored; each a second after the one before.
    follow
        Makes changes.
    """
    utility = FirstTokenUtility(rival.alpha)
    if rival.knows_uses:
        follow(_best(Stock(tiers), utility, options, uses))
        return None
    if rival.policy is None:
        return None
    placing = Placing(tiers, rival.policy(), utility, rival.uses())
    for number, own in enumerate(options):
        follow(placing.put(str(number), own, now - len(options) + 1 + number))
    return placing


def _best(
    stock: Stock, utility: Utility, options: Sequence[Sequence[Option]], uses: Counter[int]
) -> list[Change]:
    """Return the changes that make the best static placement, by all uses that will come."""
    for number, own in enumerate(options):
        values = tuple(utility.value(one) for one in own)
        stock.put(Context(str(number), tuple(own), values, float(uses[number])))
    return stock.arrange(optimum(stock).plan)
