# SPDX-License-Identifier: Apache-2.0
"""Plays a workload to the documents of a server: its engine, its one budget, its forms."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

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
from hillinfer_bench.evicpress.played import DECODED, Played

# Buffers that suit a budget of some megabytes.
_BLOCK_ROWS = 64


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
        self._known: dict[tuple[int, str, int], float] = {}

    def play(self, alpha: float) -> Played:
        """Play the whole workload, from empty memory on.

        Parameters
        ----------
        alpha
            Seconds that quality 1 is worth.

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
        played = Played()
        settings = Settings().changed(
            cold_dir=self._place,
            dram_budget=str(self._harness.budget),
            shadow="int4",
            block_rows=_BLOCK_ROWS,
        )
        rules = ServerRules(parallel=1, chunk_tokens=CHUNK)
        documents = StoreOfServer(self._store, documents=DocumentRules(alpha=alpha))
        with ExitStack() as opened:
            served = opened.enter_context(served_model(self._loaded, settings, rules, documents))
            for asked in self._harness.workload.requests:
                self._ask(served, asked.document, played)
                began = time.perf_counter()
                played.moves += len(served.rest(lambda: False))
                played.moving_seconds += time.perf_counter() - began
            served.count()
            if served.statistics is not None:
                played.dram_peak = served.statistics.dram_peak_bytes
                played.read_bytes = served.statistics.cold_read_bytes
        return played

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

    def _ask(self, served: ServedModel, number: int, played: Played) -> None:
        stored = self._harness.stored[number]
        turn = self._harness.turn(number, played)
        question = stored.questions[turn]
        ids: Sequence[int] = [*stored.document.ids, *question.given]
        began = time.perf_counter()
        begun = served.begin(b"", ids, len(ids) + len(question.answer))
        for _ in begun.reading(ids):
            pass
        played.first_tokens.append(time.perf_counter() - began)
        form = begun.form or "rows"
        known = (number, form, turn)
        most = DECODED if known in self._known else len(question.answer)
        seconds, logits = decoded(begun.generation, question, most)
        begun.generation.close()
        if known not in self._known:
            self._known[known] = self._harness.probing(number, turn).compared([logits]).mean
        played.token_seconds.append(seconds)
        played.agreements.append(self._known[known])
        played.documents.append(number)
        played.forms.append(form)
