# SPDX-License-Identifier: Apache-2.0
"""Measures forms of a stored document on this machine: what each loses, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hillinfer.catalogue.records import (
    CatalogueError,
    KnownDocument,
    MeasuredForm,
    RestingTimes,
)
from hillinfer.errors import SettingsError
from hillinfer.forms.form import DocumentStates, Form, OpenedForm
from hillinfer.forms.probes import Probe, ProbeKind, ProbeSizes, Probing, recall_probes
from hillinfer.forms.stored_states import stored_states
from hillinfer.forms.whole import HeldForm
from hillinfer.generate.answering import Generation
from hillinfer.generate.tokens import Sampling
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.store.keys import Namespace

_ANSWER_TOKENS = 32
# A step is timed so often, and the least counts: what else the machine does only adds to it.
_STEPS = 3
# Of a prompt that nobody timed: tokens that are read to see how long all would take.
_TIMED_TOKENS = 512


@dataclass(frozen=True)
class ProbeWishes:
    """By what forms are measured.

    Parameters
    ----------
    chosen_by
        Probes of recall that forms are chosen by.
    judged_by
        Probes of other places, which only say how good the choice was; 0 for none.
    instruction
        Token numbers before the beginning of the part that is to be recalled.
    questions
        Token numbers of questions that users asked; they count among those that forms are chosen
        by.
    seed
        Of the places.
    sizes
        How long probes are.
    """

    chosen_by: int = 4
    judged_by: int = 0
    instruction: tuple[int, ...] = ()
    questions: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    sizes: ProbeSizes = field(default_factory=ProbeSizes)

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        if self.chosen_by < 0 or self.judged_by < 0:
            raise SettingsError(
                f"probes={self.chosen_by}, judge={self.judged_by}: give 0 or more of each"
            )
        if not self.chosen_by and not self.questions:
            raise SettingsError("probes=0 and no question: nothing would be measured; give one")


@dataclass(frozen=True)
class MeasuredDocument:
    """What measuring found.

    Parameters
    ----------
    resting
        How long it takes where it rests.
    forms
        One for each that was asked for, in that order.
    seconds
        What measuring took, beside reading the stored rows.
    """

    resting: RestingTimes
    forms: tuple[MeasuredForm, ...]
    seconds: float


def measure_document(
    model: Any,
    prompts: StoredPrompts,
    ids: Sequence[int],
    forms: Sequence[Form],
    wishes: ProbeWishes,
    prefill_seconds: float = 0.0,
    on_progress: Callable[[int], None] = lambda done: None,
) -> MeasuredDocument:
    """Measure forms of a document that a store has.

    All its rows are in memory meanwhile, and one form beside them. Times are of this machine as it
    is at that moment.

    Parameters
    ----------
    model
        Whose rows they are.
    prompts
        The store, as that model uses it.
    ids
        Token numbers of the document, whole groups of 64 that are stored.
    forms
        To be measured; not `text`.
    wishes
        By what.
    prefill_seconds
        What reading the text took once; 0 where nobody knows, and some of it is read again.
    on_progress
        Called with how many forms are done.

    Raises
    ------
    CacheUseError
        Where the store does not have it.
    SettingsError
        Where the document is too short for so many probes, or for a form.
    """
    wanted = (wishes.chosen_by, wishes.judged_by)
    chosen_by, judged_by = recall_probes(ids, wanted, wishes.seed, wishes.instruction, wishes.sizes)
    began = time.perf_counter()
    states = stored_states(prompts, ids)
    rows_seconds = time.perf_counter() - began
    if states.tokens < len(ids):
        raise CatalogueError(
            f"the store has {states.tokens} of the document's {len(ids)} tokens: put it there again"
        )
    held, held_seconds = _opened(model, states, HeldForm())
    steps = [_step_seconds(model, held)]
    began = time.perf_counter()
    chosen_by += _asked(model, held, wishes.questions)
    profiling = Probing(model, states, chosen_by)
    judging = Probing(model, states, judged_by) if judged_by else None
    measured: list[MeasuredForm] = []
    whole: set[str] = set()
    for done, form in enumerate(forms, 1):
        if isinstance(form, HeldForm):
            opened, opening_seconds = held, held_seconds
        else:
            opened, opening_seconds = _opened(model, states, form)
        quality = profiling.quality(form, opened)
        measured.append(
            MeasuredForm(
                form.name,
                form.byte_count(prompts.shape, states.tokens),
                quality.mean,
                quality.worst,
                1.0 if form.drops_nothing else quality.lower,
                quality.divergence,
                opening_seconds,
                _step_seconds(model, opened),
                None if judging is None else judging.quality(form, opened).mean,
            )
        )
        if _holds_all(opened, states.tokens):
            steps.append(measured[-1].token_seconds)
            whole.add(form.name)
        on_progress(done)
    # Steps behind as many tokens are alike: what differs is what else the machine did meanwhile.
    step = min(steps)
    measured = [
        replace(one, token_seconds=step if one.form in whole else min(step, one.token_seconds))
        for one in measured
    ]
    seconds = time.perf_counter() - began
    text_seconds = prefill_seconds or _prefill_seconds(model, ids)
    return MeasuredDocument(
        RestingTimes(text_seconds, rows_seconds, step), tuple(measured), seconds
    )


def check_namespace(document: KnownDocument, namespace: Namespace, model: str) -> None:
    """Refuse a model that did not read a document.

    Parameters
    ----------
    document
        Of the catalogue.
    namespace
        Of what the model stores.
    model
        Its name.

    Raises
    ------
    CatalogueError
        Where its rows are of other weights, another type or another way to compute.
    """
    if document.namespace != namespace.digest:
        changed = "has changed since" if model == document.model else f"is not {document.model}"
        raise CatalogueError(
            f"the rows of '{document.shown}' were made by {document.model} and do not fit: "
            f"{model} {changed}; give the --model and --dtype that read it, or put the document "
            "again with this one"
        )


# --- inside ---


def _opened(model: Any, states: DocumentStates, form: Form) -> tuple[OpenedForm, float]:
    """Return a form, opened, and how long opening took."""
    made = form.make(model, states)
    began = time.perf_counter()
    opened = made.open()
    return opened, time.perf_counter() - began


def _holds_all(opened: OpenedForm, tokens: int) -> bool:
    """Return whether an opened form has every token of the document, in whatever precision."""
    held: int = opened.cache.layers[0].keys.shape[-2]
    return held == tokens


def _step_seconds(model: Any, opened: OpenedForm) -> float:
    """Return how long a decode step takes behind an opened form, which stays as it was."""
    taken = []
    for _ in range(_STEPS):
        began = time.perf_counter()
        with torch.no_grad():
            model(
                input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device),
                past_key_values=opened.cache,
                use_cache=True,
            )
        taken.append(time.perf_counter() - began)
        opened.cache.crop(-1)
    return min(taken)


def _asked(model: Any, held: OpenedForm, questions: Sequence[Sequence[int]]) -> list[Probe]:
    """Return probes of questions, with the answers that all rows give."""
    probes = []
    for question in questions:
        before = held.cache.get_seq_length()
        generation = Generation(model, held.cache)
        generation.read(question)
        answer = tuple(generation.decode(Sampling(), _ANSWER_TOKENS, frozenset()))
        probes.append(Probe(ProbeKind.QUESTION, tuple(question), answer))
        held.cache.crop(before - held.cache.get_seq_length())
    return probes


def _prefill_seconds(model: Any, ids: Sequence[int]) -> float:
    """Return how long reading all tokens takes, by some of them."""
    part = ids[:_TIMED_TOKENS]
    began = time.perf_counter()
    with torch.no_grad():
        model(input_ids=torch.tensor([list(part)], device=model.device), logits_to_keep=1)
    return (time.perf_counter() - began) * len(ids) / len(part)
