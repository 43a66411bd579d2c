# SPDX-License-Identifier: Apache-2.0
"""Measures forms of a stored document on this machine: what each loses, and how long it takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hillinfer.catalogue.records import (
    SHORT_ANSWER,
    CatalogueError,
    KnownDocument,
    MeasuredForm,
    RestingTimes,
)
from hillinfer.errors import HillInferError, SettingsError
from hillinfer.forms.form import DocumentStates, Form, OpenedForm
from hillinfer.forms.probes import (
    FormQuality,
    Probe,
    ProbeKind,
    ProbePass,
    ProbeSizes,
    Probing,
    recall_probes,
)
from hillinfer.forms.whole import HeldForm, stored_states
from hillinfer.generate.answering import Generation
from hillinfer.generate.tokens import Sampling
from hillinfer.model_shape import ModelShape
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.store.keys import Namespace

_ANSWER_TOKENS = 32
# A step is timed so often, and the least counts: what else the machine does only adds to it.
_STEPS = 2
# A pass of a few tokens takes so many times what they take in a long one.
_SHORT_PASS = 2.0
# Of less than so many tokens a document has shorter probes: the last tokens of what is given.
_SHORT_DOCUMENT = 1024
_SHORT_PROBE = ProbeSizes(8, SHORT_ANSWER)
# Until a form is timed: making and asking one takes so many times what asking all rows takes.
_MAKING = 1.5
# Of a prompt that nobody timed: tokens that are read to see how long all would take.
_TIMED_TOKENS = 512

# Of wishes by which a profile costs no more than half of what reading the document took: beside
# what probes read, forms are made and steps are timed.
_LEAST, _ALLOWANCE = 0.9, 0.2
# Most probes, and forms that are to have all of them at least.
_MOST_PROBES, _READ_WHOLE = 4, 2
# In tokens of a prompt that are read in the same time: what all rows with a probe and timed steps
# take, and what each form takes that is made, opened and asked. Of a small model, where a pass of
# a few tokens takes as long as reading all weights does.
_HELD_TOKENS, _FORM_TOKENS = 130, 200
# What is measured first is what tells most: few bytes, and little lost.
_USUAL = ("mixed4", "int8", "int4")


def usual_form_names(tokens: int) -> tuple[str, ...]:
    """Return the forms that measuring reaches in half of what reading a document takes.

    All rows are always among them, and one of fewer bytes however short the document is. Of less
    than some 700 tokens that costs more than half.

    Parameters
    ----------
    tokens
        Of the document.
    """
    count = int((tokens / 2 - _HELD_TOKENS) / _FORM_TOKENS)
    return "held", *_USUAL[: max(1, count)]


class MeasuringEndedError(HillInferError):
    """Somebody waits for what measuring keeps; nothing was measured."""


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
    least
        Where a first probe says that a form surely has less, by the upper end of its interval, no
        other is read with it.
    allowance
        Most tokens of probes that forms are chosen by, as a share of the document's, read with all
        forms together. One probe is read with each whatever it says.
    drawn
        Probes that somebody drew of the document already, to choose by in place of others.
    most_sizes
        Tokens that are read of each probe that forms are chosen by: the last ones of what is given,
        and the first ones of the answer. None: all.
    seconds
        Most that measuring may take. Forms that would take it beyond are not measured, nor more
        probes read: all rows are always known.
    """

    chosen_by: int = 4
    judged_by: int = 0
    instruction: tuple[int, ...] = ()
    questions: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    sizes: ProbeSizes = field(default_factory=ProbeSizes)
    least: float = 0.0
    allowance: float = math.inf
    drawn: tuple[Probe, ...] = ()
    most_sizes: ProbeSizes | None = None
    seconds: float = math.inf

    def shortened(self, probe: Probe) -> Probe:
        """Return what is read of a probe."""
        most = self.most_sizes
        if most is None:
            return probe
        return replace(probe, given=probe.given[-most.given :], answer=probe.answer[: most.answer])

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        if self.chosen_by < 0 or self.judged_by < 0:
            raise SettingsError(
                f"probes={self.chosen_by}, judge={self.judged_by}: give 0 or more of each"
            )
        if not self.chosen_by and not self.questions:
            raise SettingsError("probes=0 and no question: nothing would be measured; give one")
        if not 0 <= self.least <= 1 or not self.allowance > 0:
            raise SettingsError(
                f"least={self.least}, allowance={self.allowance}: give a quality from 0 to 1, and "
                "a share above 0"
            )


def usual_wishes(
    tokens: int,
    forms: int,
    instruction: Sequence[int] = (),
    judged_by: int = 0,
    seed: int = 0,
    prefill_seconds: float = math.inf,
) -> ProbeWishes:
    """Return wishes by which measuring costs at most half of what reading a document takes.

    Of a short document probes are fewer, and the lower ends of intervals lower. One is read with
    each form whatever that costs: for how many forms there is time, `usual_form_names` says.

    Parameters
    ----------
    tokens
        Of the document.
    forms
        How many are measured, beside all rows.
    instruction, judged_by, seed
        As in `ProbeWishes`.
    prefill_seconds
        What reading the document took, half of which is the most that measuring may take.
    """
    sizes = ProbeSizes()
    most = max(1, min(_MOST_PROBES, tokens // sizes.part - judged_by))
    look, other = len(instruction) + sizes.part - 1, sizes.part - 1

    def read(count: int) -> int:
        rest = len(instruction) + (count - 1) * other
        return (
            look + (count - 1) * other + forms * look + (count > 1) * min(_READ_WHOLE, forms) * rest
        )

    fitting = [count for count in range(1, most + 1) if read(count) <= _ALLOWANCE * tokens]
    return ProbeWishes(
        max(fitting, default=1),
        judged_by,
        tuple(instruction),
        seed=seed,
        least=_LEAST,
        allowance=_ALLOWANCE,
        most_sizes=_SHORT_PROBE if tokens < _SHORT_DOCUMENT else None,
        seconds=prefill_seconds / 2,
    )


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
        What measuring took, with reading the stored rows.
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
    is_over: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.perf_counter,
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
        To be measured; not `text`. Where probes are few for all, those named first get them.
    wishes
        By what.
    prefill_seconds
        What reading the text took once; 0 where nobody knows, and some of it is read again.
    on_progress
        Called with how many forms are done.
    is_over
        Asked before each forward pass whether somebody waits.
    clock
        Tells seconds.

    Raises
    ------
    CacheUseError
        Where the store does not have it.
    SettingsError
        Where the document is too short for so many probes, or for a form, or so long that the model
        has no positions for what is read behind it.
    MeasuringEndedError
        Where `is_over()` said so.
    """
    wanted = (wishes.chosen_by, wishes.judged_by)
    chosen_by, judged_by = recall_probes(ids, wanted, wishes.seed, wishes.instruction, wishes.sizes)
    chosen_by = [wishes.shortened(one) for one in wishes.drawn or chosen_by]
    _check_positions(model, len(ids), [*chosen_by, *judged_by], wishes.questions)
    _go_on(is_over)
    began = clock()
    left = _TimeLeft(wishes.seconds, clock)
    states = stored_states(prompts, ids)
    rows_seconds = clock() - began
    if states.tokens < len(ids):
        raise CatalogueError(
            f"the store has {states.tokens} of the document's {len(ids)} tokens: put it there again"
        )
    held, held_seconds = _opened(model, states, HeldForm(), clock)
    # What users ask comes first: of some forms it is all that is read.
    chosen_by = [*_asked(model, held, wishes.questions, is_over), *chosen_by]
    _go_on(is_over)
    # Behind as many tokens steps are alike; a form with fewer counts as no faster.
    step = _step_seconds(model, held, _STEPS if left.is_endless else 1, clock)
    read = [form for form in forms if not isinstance(form, HeldForm)]
    # All rows and a form are asked at least, which takes as long as so much of the text did.
    asking = prefill_seconds / len(ids) * _tokens(chosen_by)
    if not left.allows(2 * _SHORT_PASS * asking):
        read = []
    _go_on(is_over)
    looked = clock()
    looking = judging = None
    if read:
        probing = Probing(model, states, chosen_by, held)
        looking = _Looking(probing, chosen_by, wishes, len(ids), len(read), left)
    if read and judged_by:
        judging = Probing(model, states, judged_by, held)
    longest = _MAKING * (clock() - looked)
    measured: list[MeasuredForm] = []
    for done, form in enumerate(forms, 1):
        _go_on(is_over)
        opened, opening_seconds = held, held_seconds
        looked = clock()
        if not isinstance(form, HeldForm):
            if looking is None or not left.allows(longest):
                continue
            opened, opening_seconds = _opened(model, states, form, clock)
        quality = _flawless(chosen_by)
        if looking is not None:
            quality = looking.quality(form, opened, is_over)
        measured.append(
            MeasuredForm(
                form.name,
                form.byte_count(prompts.shape, states.tokens),
                quality.mean,
                quality.worst,
                1.0 if form.drops_nothing else quality.lower,
                quality.divergence,
                opening_seconds,
                step,
                None if judging is None else judging.quality(form, opened).mean,
            )
        )
        longest = max(longest, clock() - looked)
        on_progress(done)
    seconds = clock() - began
    text_seconds = prefill_seconds or _prefill_seconds(model, ids, clock)
    resting = RestingTimes(text_seconds, rows_seconds, step)
    return MeasuredDocument(resting, tuple(measured), seconds)


class _Looking:
    """Reads one probe with each form, and the others where they may change what is chosen.

    Parameters
    ----------
    probing, probes
        All of them, with the answers of all rows.
    wishes
        How much may be read.
    tokens
        Of the document, of which what may be read is a share.
    forms
        How many are to be looked at.
    left
        Until when.
    """

    def __init__(
        self,
        probing: Probing,
        probes: Sequence[Probe],
        wishes: ProbeWishes,
        tokens: int,
        forms: int,
        left: _TimeLeft,
    ) -> None:
        self._probing, self._wishes, self._ends = probing, wishes, left
        self._first = _tokens(probes[:1])
        self._others = _tokens(probes[1:]) if probes[1:] else 0
        looks = _tokens(probes) + forms * self._first
        self._left = wishes.allowance * tokens - looks

    def quality(self, form: Form, opened: OpenedForm, is_over: Callable[[], bool]) -> FormQuality:
        """Return what probes say of an opened form."""
        is_free = not self._wishes.least and self._left == math.inf
        if isinstance(form, HeldForm) or is_free or not self._others:
            return self._probing.quality(form, opened)
        began = self._ends.clock()
        first = self._probing.quality(form, opened, slice(0, 1))
        others = (self._ends.clock() - began) * self._others / self._first
        is_short = self._left < self._others or not self._ends.allows(others)
        if first.upper < self._wishes.least or is_short:
            return first
        _go_on(is_over)
        self._left -= self._others
        return first.joined(self._probing.quality(form, opened, slice(1, None)))


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


class _TimeLeft:
    """Says what there is still time for, of so many seconds from now on by a clock."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self.is_endless, self.clock = seconds == math.inf, clock
        self._ends = clock() + seconds

    def allows(self, seconds: float) -> bool:
        """Return whether so much more ends in time."""
        return self.clock() + seconds <= self._ends


def _check_positions(
    model: Any, tokens: int, probes: Sequence[Probe], questions: Sequence[Sequence[int]]
) -> None:
    """Refuse probes and answers to questions that would lie behind a model's last position."""
    read = [len(one.given) + len(one.answer) - 1 for one in probes]
    read += [len(one) + _ANSWER_TOKENS - 1 for one in questions]
    positions = ModelShape.from_config(model.config, model.dtype).max_positions
    if tokens + max(read) > positions:
        raise SettingsError(
            f"measuring reads {max(read)} tokens behind the document's {tokens}, and the model has "
            f"{positions} positions: ask shorter questions, or put a shorter text"
        )


def _flawless(probes: Sequence[Probe]) -> FormQuality:
    """Return what probes say of all rows, without reading any."""
    return FormQuality((1.0,) * len(probes), 0.0, sum(len(probe.answer) for probe in probes))


def _opened(
    model: Any, states: DocumentStates, form: Form, clock: Callable[[], float]
) -> tuple[OpenedForm, float]:
    """Return a form, opened, and how long opening took."""
    made = form.make(model, states)
    began = clock()
    opened = made.open()
    return opened, clock() - began


def _go_on(is_over: Callable[[], bool]) -> None:
    if is_over():
        raise MeasuringEndedError("measuring was ended, because somebody waits")


def _tokens(probes: Sequence[Probe]) -> int:
    return len(ProbePass.of(probes).ids)


def _step_seconds(model: Any, opened: OpenedForm, steps: int, clock: Callable[[], float]) -> float:
    """Return how long a decode step takes behind an opened form, which stays as it was."""
    taken = []
    for _ in range(steps):
        began = clock()
        with torch.no_grad():
            model(
                input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device),
                past_key_values=opened.cache,
                use_cache=True,
            )
        taken.append(clock() - began)
        opened.cache.crop(-1)
    return min(taken)


def _asked(
    model: Any,
    held: OpenedForm,
    questions: Sequence[Sequence[int]],
    is_over: Callable[[], bool],
) -> list[Probe]:
    """Return probes of questions, with the answers that all rows give."""
    probes = []
    for question in questions:
        _go_on(is_over)
        before = held.cache.get_seq_length()
        generation = Generation(model, held.cache)
        generation.read(question)
        answer = tuple(generation.decode(Sampling(), _ANSWER_TOKENS, frozenset()))
        probes.append(Probe(ProbeKind.QUESTION, tuple(question), answer))
        held.cache.crop(before - held.cache.get_seq_length())
    return probes


def _prefill_seconds(model: Any, ids: Sequence[int], clock: Callable[[], float]) -> float:
    """Return how long reading all tokens takes, by some of them."""
    part = ids[:_TIMED_TOKENS]
    began = clock()
    with torch.no_grad():
        model(input_ids=torch.tensor([list(part)], device=model.device), logits_to_keep=1)
    return (clock() - began) * len(ids) / len(part)
