# SPDX-License-Identifier: Apache-2.0
"""Plays a workload to the documents of a server: its engine, its one budget, its forms."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from hillinfer.catalogue.catalogue import Catalogue
from hillinfer.catalogue.planning import DocumentRules
from hillinfer.catalogue.records import KnownDocument
from hillinfer.models.loader import LoadedModel
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.serve.rules import ServerRules
from hillinfer.serve.served_model import ServedModel, StoreOfServer, served_model
from hillinfer.settings import Settings
from hillinfer.store.store import Store
from hillinfer_bench.evicpress.harness import CHUNK, Harness, decoded
from hillinfer_bench.evicpress.played import DECODED, ENGINE, Played
from hillinfer_bench.evicpress.plays import PlacedPlay, Play, play_together
from hillinfer_bench.evicpress.rivals import Rival
from hillinfer_bench.evicpress.workload import Asked

# Buffers that suit a budget of some megabytes.
_BLOCK_ROWS = 64
# Room for answers, in ordinary caches of the longest document.
_ANSWERS = 2
# Forms whose answers select: a document that rests does so where its engine answers.
_SELECTING = (ENGINE, "shadow-int4", "lead-0.1")


class ServedDocuments:
    """The documents of a study, put into the catalogue of its store, as a server has them.

    A document rests as stored rows behind the engine there, and its answers select.

    Parameters
    ----------
    loaded
        The model.
    store
        Open.
    harness
        Whose documents are asked for.
    place
        Of the engine's files.
    """

    def __init__(self, loaded: LoadedModel, store: Store, harness: Harness, place: Path) -> None:
        self._loaded, self._store, self._harness = loaded, store, harness
        self._place = place

    @property
    def budget(self) -> int:
        """Bytes of the engine: those that all rivals' forms may take, and room for one answer.

        Other rivals open a form beside what their budget counts. A server counts that too.
        """
        number: int = self._loaded.model.dtype.itemsize
        longest = max(self._harness.row_bytes(one) for one in self._harness.numbers)
        return self._harness.budget + _ANSWERS * longest * number // 2

    def play(self, rival: Rival, beside: Rival) -> tuple[Played, Played]:
        """Play the whole workload to a server, and to another rival in turn with it.

        Parameters
        ----------
        rival
            The server; its α counts.
        beside
            What a server is compared with, in the same minutes.

        Raises
        ------
        BudgetError
            Where the budget holds no engine.
        """
        self._put()
        # Which answers are right is read before the model is attached.
        for number, stored in enumerate(self._harness.stored):
            for turn in range(len(stored.questions)):
                self._harness.probing(number, turn)
        settings = Settings().changed(
            cold_dir=self._place,
            dram_budget=str(self.budget),
            shadow="int4",
            block_rows=_BLOCK_ROWS,
        )
        rules = ServerRules(parallel=1, chunk_tokens=CHUNK)
        placed = DocumentRules(
            alpha=rival.alpha,
            dram_budget=self._harness.budget,
            drive_budget=self._harness.all_bytes,
        )
        documents = StoreOfServer(self._store, documents=placed)
        with ExitStack() as opened:
            served = opened.enter_context(served_model(self._loaded, settings, rules, documents))
            plays = [_ServedPlay(self._harness, served), PlacedPlay(self._harness, beside)]
            play_together(plays, self._harness.workload.requests)
        return plays[0].played, plays[1].played

    def _put(self) -> None:
        prompts = StoredPrompts(self._store, self._loaded.model)
        with Catalogue(self._store.places) as catalogue:
            for stored in self._harness.stored:
                ids = stored.document.ids
                found = prompts.stored_key(ids)
                assert found is not None, "it is in the store"
                key, tokens, _ = found
                digest = prompts.namespace.digest
                known = KnownDocument(key, "", self._loaded.name, digest, tokens, time.time())
                usual = stored.usual
                catalogue.put(replace(known, resting=usual.resting, measured=usual.forms))


class _ServedPlay(Play):
    def __init__(self, harness: Harness, served: ServedModel) -> None:
        super().__init__(harness)
        self._served = served
        self._answers: dict[tuple[int, str, int], torch.Tensor] = {}

    def begin(self, now: float) -> None:
        self._rest()

    def ask(self, asked: Asked) -> None:
        number = asked.document
        stored = self._harness.stored[number]
        turn = self._harness.turn(number, self.played)
        question = stored.questions[turn]
        ids: Sequence[int] = [*stored.document.ids, *question.given]
        began = time.perf_counter()
        begun = self._served.begin(b"", ids, len(ids) + len(question.answer))
        for _ in begun.reading(ids):
            pass
        self.played.first_tokens.append(time.perf_counter() - began)
        form = begun.form or ENGINE
        known = (number, form, turn)
        # What an ordinary cache answers is looked up; what selects is decoded to its end, once.
        is_new = form in _SELECTING and known not in self._answers
        most = len(question.answer) if is_new else DECODED
        seconds, logits = decoded(begun.generation, question, most)
        begun.generation.close()
        if is_new:
            self._answers[known] = logits
        self.played.token_seconds.append(seconds)
        self.played.documents.append(number)
        self.played.forms.append(form)

    def settle(self, asked: Asked) -> None:
        self._rest()

    def finish(self) -> None:
        for number, form, turn in self._harness.asked(self.played):
            logits = self._answers.get((number, form, turn))
            if logits is None:
                kept = self._harness.agreement(number, form, turn)
            else:
                kept = self._harness.probing(number, turn).compared([logits]).mean
            self.played.agreements.append(kept)
        self._served.count()
        if self._served.statistics is not None:
            self.played.dram_peak = self._served.statistics.dram_peak_bytes
            self.played.read_bytes = self._served.statistics.cold_read_bytes

    def _rest(self) -> None:
        began = time.perf_counter()
        self.played.moves += len(self._served.rest(lambda: False))
        self.played.moving_seconds += time.perf_counter() - began
