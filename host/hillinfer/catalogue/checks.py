# SPDX-License-Identifier: Apache-2.0
"""Online quality checks: answers that users got are compared with answers from all rows.

A profile says what a form loses by probes. Where users ask for something else, answers say that
quality slipped, and forms are measured anew, by those questions too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch

from hillinfer.catalogue.measuring import (
    MeasuringEndedError,
    measure_document,
    usual_wishes,
)
from hillinfer.catalogue.records import KnownDocument
from hillinfer.forms.form import DocumentStates
from hillinfer.forms.table import make_form
from hillinfer.forms.whole import StoredRowsForm
from hillinfer.generate.answering import Generation
from hillinfer.reuse.stored_prompts import StoredPrompts

# Answers that are remembered of a document, and questions that it is measured anew by.
_REMEMBERED = 20
_QUESTIONS = 4
# So many compared answers say something, where they agree by so much less than was measured.
_LEAST_ANSWERS = 3
_SLIP = 0.1
# Tokens of an answer whose logits are in memory at once.
_COMPARED_TOKENS = 64


@dataclass(frozen=True)
class ServedAnswer:
    """An answer that a user got, of which each token was the most probable one.

    Parameters
    ----------
    form
        Name of the form that it came from.
    question, answer
        Token numbers behind the document.
    """

    form: str
    question: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass
class _Known:
    waiting: deque[ServedAnswer] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    questions: deque[tuple[int, ...]] = field(default_factory=lambda: deque(maxlen=_QUESTIONS))
    agreements: dict[str, deque[float]] = field(default_factory=dict)


class OnlineChecks:
    """Remembers answers, compares them, and says which documents are to be measured anew.

    Parameters
    ----------
    model
        Of transformers.
    prompts
        The store, as that model uses it.
    chunk_tokens
        Tokens of a forward pass that reads a question; `is_over` is asked before each.
    """

    def __init__(self, model: Any, prompts: StoredPrompts, chunk_tokens: int = 1024) -> None:
        self._model, self._prompts, self._chunk_tokens = model, prompts, chunk_tokens
        self._known: dict[bytes, _Known] = {}

    def note(self, key: bytes, answer: ServedAnswer) -> None:
        """Remember an answer about a document, to be compared later."""
        if answer.answer and answer.question:
            known = self._known.setdefault(key, _Known())
            known.waiting.append(answer)
            known.questions.append(answer.question)

    def forget(self, key: bytes) -> None:
        """Compare no answers about a document any more, because it is gone."""
        self._known.pop(key, None)

    @property
    def waiting(self) -> list[bytes]:
        """Keys of documents with answers that were not compared yet."""
        return [key for key, known in self._known.items() if known.waiting]

    def compare(
        self,
        document: KnownDocument,
        ids: Sequence[int],
        is_over: Callable[[], bool] = lambda: False,
    ) -> float | None:
        """Read the next answer of a document over all rows; return how much of it they say too.

        None where nothing waits, or `is_over()`: the answer waits on then.
        """
        known = self._known.get(document.key)
        if known is None or not known.waiting:
            return None
        # One that cannot be read is not read again for ever.
        served = known.waiting.popleft()
        found = self._agreement(ids, served, is_over)
        if found is None:
            known.waiting.appendleft(served)
            return None
        own = known.agreements.setdefault(served.form, deque(maxlen=_REMEMBERED))
        own.append(found)
        return found

    def slipped(self, document: KnownDocument) -> list[str]:
        """Return the forms whose answers agree less than their profile says."""
        known = self._known.get(document.key)
        if known is None:
            return []
        return [
            measured.form
            for measured in document.measured
            if len(own := known.agreements.get(measured.form, ())) >= _LEAST_ANSWERS
            and fmean(own) < measured.lower - _SLIP
        ]

    def renewed(
        self,
        document: KnownDocument,
        ids: Sequence[int],
        is_over: Callable[[], bool] = lambda: False,
    ) -> KnownDocument | None:
        """Measure a document's forms anew, by its last questions too; what was compared is over.

        None where `is_over()` ended it: everything is as before then.

        Parameters
        ----------
        document
            Of the catalogue.
        ids
            Its token numbers.
        is_over
            Asked before each forward pass.
        """
        known = self._known.get(document.key, _Known())
        wishes = usual_wishes(len(ids), len(document.measured) - 1)
        wishes = replace(wishes, questions=tuple(dict.fromkeys(known.questions)))
        forms = [make_form(one.form) for one in document.measured]
        text = 0.0 if document.resting is None else document.resting.text
        # Where it fails, what was compared is over too.
        compared, known.agreements = known.agreements, {}
        try:
            found = measure_document(
                self._model, self._prompts, ids, forms, wishes, text, is_over=is_over
            )
        except MeasuringEndedError:
            known.agreements = compared
            return None
        judged = {one.form: one.judged for one in document.measured}
        forms_now = tuple(replace(one, judged=judged[one.form]) for one in found.forms)
        return replace(document, resting=found.resting, measured=forms_now)

    # --- inside ----------------------------------------------------------------------------

    def _agreement(
        self, ids: Sequence[int], served: ServedAnswer, is_over: Callable[[], bool]
    ) -> float | None:
        """Return the share of an answer's tokens that are the most probable ones of all rows."""
        if is_over():
            return None
        form = StoredRowsForm(self._prompts)
        opened = form.make(self._model, DocumentStates(tuple(ids), ())).open()
        generation = Generation(self._model, opened.cache, self._chunk_tokens)
        for _ in generation.reading([*opened.unread, *served.question]):
            if is_over():
                return None
        said = [int(generation.logits.argmax())]
        for start in range(0, len(served.answer) - 1, _COMPARED_TOKENS):
            if is_over():
                return None
            part = served.answer[start : min(start + _COMPARED_TOKENS, len(served.answer) - 1)]
            with torch.no_grad():
                output = self._model(
                    input_ids=torch.tensor([part], device=self._model.device),
                    past_key_values=opened.cache,
                    use_cache=True,
                    logits_to_keep=len(part),
                )
            said += output.logits[0].argmax(-1).tolist()
        return fmean(own == other for own, other in zip(said, served.answer, strict=True))
