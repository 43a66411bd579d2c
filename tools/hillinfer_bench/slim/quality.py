# SPDX-License-Identifier: Apache-2.0
"""Answers about needles, of prompts that were read whole and in stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import DynamicCache

import hillinfer
from hillinfer.errors import SettingsError
from hillinfer.pruning.passes import PrunedRead
from hillinfer.pruning.profile import NeedleDocument, Question, answer, read
from hillinfer.pruning.rankers import check_weights, make_ranker
from hillinfer.pruning.reading import Pruning
from hillinfer.pruning.schedule import BLOCK_TOKENS, Schedule
from hillinfer.pruning.stages import layer_work
from hillinfer.settings import QuerySource

FULL = "full"
# Of the context's rows, in DRAM, where questions are answered from the drive.
QUARTER = "25%"
# Selected while decoding, where a cache is HillInfer's own.
ALPHA = 0.1


class Held(StrEnum):
    """What becomes of a document that was read, before it is asked about."""

    ORDINARY = "ordinary"
    """It lies in transformers' own cache, and deeper layers have what the question chose."""
    ENTERING = "entering"
    """The same, and a second question computes those blocks alone that deeper layers have not."""
    COMPLETED = "completed"
    """The same, but all of it goes through the deeper layers before anybody asks."""
    DRIVE = "drive"
    """It lies in HillInfer's cache, and each question chooses on a fork of its own."""


_NAMED = (Held.ENTERING, Held.COMPLETED, Held.DRIVE)


@dataclass(frozen=True)
class Way:
    """How prompts are read.

    Parameters
    ----------
    schedule
        As `hillinfer.prune` takes it; `full` for reading all of it.
    ranker
        As `hillinfer.prune` takes it; empty where all of it is read.
    held
        Where a document lies, and what happens to it before a question.
    """

    schedule: str
    ranker: str = ""
    held: Held = Held.ORDINARY

    @classmethod
    def parse(cls, text: str) -> Way:
        """Return what a text says: `full` or a schedule, a ranker perhaps, and where it is held.

        A space stands between them; `entering`, `completed` or `drive` is last.

        Raises
        ------
        SettingsError
            Where it says nothing of the kind.
        """
        words, held = text.split(" "), Held.ORDINARY
        if words[-1] in _NAMED:
            held = Held(words.pop())
        schedule, ranker = words[0] if words else "", " ".join(words[1:])
        if schedule == FULL:
            if ranker or held in (Held.COMPLETED, Held.ENTERING):
                raise SettingsError(
                    f"--ways {text!r}: what is read whole is neither chosen from "
                    "nor completed; write full, or full drive"
                )
            return cls(FULL, held=held)
        check_weights(Schedule.parse(schedule), make_ranker(ranker or "weights"))
        return cls(schedule, ranker or "weights", held)

    @property
    def name(self) -> str:
        """As tables call it."""
        place = "" if self.held is Held.ORDINARY else self.held.value
        return " ".join(one for one in (self.schedule, self.ranker, place) if one)


@contextmanager
def opened(
    model: Any,
    way: Way,
    tokens: int,
    dram_budget: str,
    later: str,
    decoding: str = "keep",
    query: QuerySource = QuerySource.AUTO,
) -> Iterator[tuple[Any, Pruning | None]]:
    """Give an empty cache of the kind that a way names, and what reads into it in stages.

    Parameters
    ----------
    model
        Of transformers, unmodified.
    way
        How prompts are read; None is given for the pruning where all of it is.
    tokens
        That the cache will hold.
    dram_budget
        Of HillInfer's own cache, as `hillinfer.attach` takes it.
    later, decoding
        As `hillinfer.prune` takes them.
    query
        As `hillinfer.attach` takes it.
    """
    with ExitStack() as stack:
        cache: Any = None
        if way.held is Held.DRIVE:
            place = stack.enter_context(TemporaryDirectory(prefix="hillinfer-slim-"))
            made = hillinfer.attach(
                model, cold_dir=place, alpha=ALPHA, dram_budget=dram_budget, query=query
            )
            cache = stack.enter_context(made).new_cache(expected_tokens=tokens)
            stack.callback(cache.close)
        pruning = None
        if way.schedule != FULL:
            own = hillinfer.prune(
                model, way.schedule, ranker=way.ranker, later=later, decoding=decoding
            )
            pruning = stack.enter_context(own)
        yield DynamicCache(config=model.config) if cache is None else cache, pruning


@dataclass(frozen=True)
class QualityRow:
    """One way over all documents of one length.

    Parameters
    ----------
    way, tokens, documents
        Which, how long they are, and how many.
    right
        Questions of which every digit was the most probable one.
    nll
        Mean negative log-likelihood of a digit, in nats.
    flop_limit
        How much faster reading may get; 1 where all of it is read.
    kept_share
        Of a prompt's blocks, mean, behind the last cut; 1 where all of it is read.
    needles_kept
        Of all questions, the second ones too: those whose number's blocks every layer has.
    second_right, second_nll
        Of a second question about the same document, chosen anew; None where it was not asked.
    second_share, second_limit
        Time of reading a second question over that of reading all of it, and operations of the one
        over those of the other, mean; None as above.
    complete_seconds, complete_share
        Processor time until a document that was read in stages is whole, and that over the time of
        reading all of it; None where it is not completed.
    """

    way: str
    tokens: int
    documents: int
    right: int
    nll: float
    flop_limit: float
    kept_share: float
    needles_kept: int
    second_right: int | None = None
    second_nll: float | None = None
    second_share: float | None = None
    second_limit: float | None = None
    complete_seconds: float | None = None
    complete_share: float | None = None


@dataclass(frozen=True)
class _Answered:
    right: bool
    nll: float
    seconds: float
    has_needle: bool
    flop_share: float


@dataclass(frozen=True)
class _Asked:
    """Of one document: both answers, what the first one's prompt lost, and completing it."""

    answers: list[_Answered]
    lost: PrunedRead | None
    complete_seconds: float | None = None


def measure_quality(
    model: Any,
    documents: Sequence[NeedleDocument],
    ways: Sequence[Way],
    say: Callable[[str], None],
) -> list[QualityRow]:
    """Ask every document's questions in every way.

    Parameters
    ----------
    model
        Of transformers, unmodified.
    documents
        All of about one length.
    ways
        The first is reading all of it, beside which times of second questions stand.
    say
        Takes a line of progress.
    """
    rows: list[QualityRow] = []
    whole_seconds = 0.0
    for way in ways:
        asked = [_ASK[way.held](model, document, way) for document in documents]
        first, second = ([one.answers[number] for one in asked] for number in (0, 1))
        if way == Way(FULL):
            whole_seconds = median(one.seconds for one in first)
        completing = [one.complete_seconds for one in asked if one.complete_seconds is not None]
        seconds = median(completing) if completing else None
        rows.append(
            QualityRow(
                way.name,
                round(median(len(one.ids) for one in documents)),
                len(documents),
                sum(one.right for one in first),
                mean(one.nll for one in first),
                mean(1.0 if one.lost is None else one.lost.flop_limit for one in asked),
                mean(_kept_share(one.lost) for one in asked),
                sum(one.has_needle for one in (*first, *second)),
                sum(one.right for one in second),
                mean(one.nll for one in second),
                None if way == Way(FULL) else median(one.seconds for one in second) / whole_seconds,
                None if way == Way(FULL) else mean(one.flop_share for one in second),
                seconds,
                None if seconds is None else seconds / whole_seconds,
            )
        )
        say(row_text(rows[-1]))
    return rows


def row_text(row: QualityRow) -> str:
    """Return a row for reading."""
    share = ""
    if row.second_share is not None:
        share = f", in {row.second_share:.1%} of a whole read"
        share += f" (operations {row.second_limit:.1%})"
    whole = (
        ""
        if row.complete_seconds is None
        else f"; whole after {row.complete_seconds:.2f} s, {row.complete_share:.1%} of a whole read"
    )
    return (
        f"{row.way:<28} {row.tokens:>6} tokens: {row.right:>3} of {row.documents} right, NLL "
        f"{row.nll:.2f}; a second question: {row.second_right} right, {row.second_nll:.2f}{share}; "
        f"{row.kept_share:.1%} of blocks kept, {row.needles_kept} needles, FLOPs allow "
        f"{row.flop_limit:.2f}{whole}"
    )


def _kept_share(read: PrunedRead | None) -> float:
    return 1.0 if read is None else len(read.kept[-1]) / -(-read.tokens[0] // BLOCK_TOKENS)


@torch.no_grad()
def _ordinary(model: Any, document: NeedleDocument, way: Way, later: str = "anew") -> _Asked:
    """Read the document with the first question, and the second one behind the document."""
    with opened(model, way, len(document.ids), QUARTER, later) as (cache, pruning):
        first, second = document.questions
        answers = [_answer(model, cache, document, first, pruning)]
        lost = None if pruning is None else pruning.read_of(cache)
        # The question before, its answer, and whatever of them lies in deeper layers.
        _leave(cache, len(document.ids))
        answers.append(_answer(model, cache, document, second, pruning))
        return _Asked(answers, lost)


@torch.no_grad()
def _completed(model: Any, document: NeedleDocument, way: Way) -> _Asked:
    """Let the document wait at the cut, read the rest while nobody asks, and ask then."""
    with opened(model, way, len(document.ids), QUARTER, "keep") as (cache, pruning):
        assert pruning is not None
        with pruning.prompt(len(document.ids) + 1):
            read(model, cache, document.ids)
        began = time.process_time()
        pruning.complete(cache)
        seconds = time.process_time() - began
        answers = []
        for question in document.questions:
            answers.append(_answer(model, cache, document, question, pruning))
            _leave(cache, len(document.ids))
        return _Asked(answers, pruning.read_of(cache), seconds)


@torch.no_grad()
def _on_drive(model: Any, document: NeedleDocument, way: Way) -> _Asked:
    """Let the document wait on the drive, and answer each question on a fork, as the command."""
    longest = max(len(one.ids) + len(one.answer_ids) for one in document.questions)
    tokens = len(document.ids) + longest
    with opened(model, way, tokens, QUARTER, "keep") as (cache, pruning):
        began = time.process_time()
        with nullcontext() if pruning is None else pruning.prompt(len(document.ids) + 1):
            read(model, cache, document.ids)
        seconds = time.process_time() - began
        answers: list[_Answered] = []
        lost = None
        for question in document.questions:
            fork = cache.fork()
            answers.append(_answer(model, fork, document, question, pruning))
            if pruning is not None and lost is None:
                lost = pruning.read_of(fork)
            fork.close()
        answers[0] = replace(answers[0], seconds=answers[0].seconds + seconds)
        return _Asked(answers, lost)


_ASK: dict[Held, Callable[..., _Asked]] = {
    Held.ORDINARY: _ordinary,
    Held.ENTERING: partial(_ordinary, later="enter"),
    Held.COMPLETED: _completed,
    Held.DRIVE: _on_drive,
}


def _answer(
    model: Any,
    cache: Any,
    document: NeedleDocument,
    question: Question,
    pruning: Pruning | None,
) -> _Answered:
    ids = [*document.ids, *question.ids]
    held = cache.get_seq_length()
    began = time.process_time()
    with nullcontext() if pruning is None else pruning.prompt(len(ids), len(question.ids)):
        last = read(model, cache, ids[held:])
    seconds = time.process_time() - began
    lost = None if pruning is None else pruning.read_of(cache)
    has_needle = lost is None or all(set(question.blocks) <= {*own.tolist()} for own in lost.kept)
    share = _flop_share(model, len(ids), held, lost)
    return _Answered(*answer(model, cache, question, last), seconds, has_needle, share)


def _flop_share(model: Any, tokens: int, held: int, read: PrunedRead | None) -> float:
    """Return operations of reading what a cache did not hold, over those of reading all of it."""
    decoder = model.get_decoder()
    work, layers = layer_work(decoder), len(decoder.layers)
    spent, new = 0.0, work.flops([tokens]) - work.flops([held])
    for count in [tokens] * layers if read is None else read.tokens:
        if count == tokens:
            spent += new
        elif read is None or read.entered is None:
            spent += work.flops([count])
        else:
            spent += work.entering(read.entered, count)
    return spent / work.flops([tokens] * layers)


def _leave(cache: DynamicCache, tokens: int) -> None:
    for layer in cache.layers:
        if layer.is_initialized and layer.keys.shape[2] > tokens:
            layer.keys, layer.values = layer.keys[:, :, :tokens], layer.values[:, :, :tokens]
