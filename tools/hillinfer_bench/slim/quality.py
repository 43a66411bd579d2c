# SPDX-License-Identifier: Apache-2.0
"""Answers about needles, of prompts that were read whole and in stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch
from transformers import DynamicCache

import hillinfer
from hillinfer.pruning.needles import NeedleDocument, Question
from hillinfer.pruning.passes import PrunedRead
from hillinfer.pruning.profile import answer, read
from hillinfer.pruning.rankers import check_weights, make_ranker
from hillinfer.pruning.reading import Pruning
from hillinfer.pruning.schedule import BLOCK_TOKENS, Schedule

FULL = "full"


@dataclass(frozen=True)
class Way:
    """How prompts are read.

    Parameters
    ----------
    schedule
        As `hillinfer.prune` takes it; `full` for reading all of it.
    ranker
        As `hillinfer.prune` takes it; empty where all of it is read.
    """

    schedule: str
    ranker: str = ""

    @classmethod
    def parse(cls, text: str) -> Way:
        """Return what a text says: `full`, a schedule, or a schedule, a space and a ranker.

        Raises
        ------
        SettingsError
            Where it says neither.
        """
        if text == FULL:
            return cls(FULL)
        schedule, _, ranker = text.partition(" ")
        check_weights(Schedule.parse(schedule), make_ranker(ranker or "weights"))
        return cls(schedule, ranker or "weights")

    @property
    def name(self) -> str:
        """As tables call it."""
        return f"{self.schedule} {self.ranker}".strip()


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
    second_right, second_nll
        Of a second question about the same document, chosen anew; None where it was not asked.
    second_share
        Time of reading a second question over that of reading all of it; None as above.
    """

    way: str
    tokens: int
    documents: int
    right: int
    nll: float
    flop_limit: float
    kept_share: float
    second_right: int | None = None
    second_nll: float | None = None
    second_share: float | None = None


@dataclass(frozen=True)
class _Answered:
    right: bool
    nll: float
    seconds: float


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
        first, second, lost = [], [], []
        for document in documents:
            with ExitStack() as stack:
                pruning = None
                if way.schedule != FULL:
                    made = hillinfer.prune(model, way.schedule, ranker=way.ranker, later="anew")
                    pruning = stack.enter_context(made)
                answered, own = _asked(model, document, pruning)
            first.append(answered[0])
            second.append(answered[1])
            lost.append(own)
        if way.schedule == FULL:
            whole_seconds = median(one.seconds for one in first)
        rows.append(
            QualityRow(
                way.name,
                round(median(len(one.ids) for one in documents)),
                len(documents),
                sum(one.right for one in first),
                mean(one.nll for one in first),
                mean(1.0 if one is None else one.flop_limit for one in lost),
                mean(_kept_share(one) for one in lost),
                sum(one.right for one in second),
                mean(one.nll for one in second),
                None
                if way.schedule == FULL
                else median(one.seconds for one in second) / whole_seconds,
            )
        )
        say(row_text(rows[-1]))
    return rows


def row_text(row: QualityRow) -> str:
    """Return a row for reading."""
    share = "" if row.second_share is None else f", in {row.second_share:.1%} of a whole read"
    return (
        f"{row.way:<28} {row.tokens:>6} tokens: {row.right:>3} of {row.documents} right, NLL "
        f"{row.nll:.2f}; a second question: {row.second_right} right, {row.second_nll:.2f}{share}; "
        f"{row.kept_share:.1%} of blocks kept, FLOPs allow {row.flop_limit:.2f}"
    )


def _kept_share(read: PrunedRead | None) -> float:
    return 1.0 if read is None else len(read.kept[-1]) / -(-read.tokens[0] // BLOCK_TOKENS)


@torch.no_grad()
def _asked(
    model: Any, document: NeedleDocument, pruning: Pruning | None
) -> tuple[list[_Answered], PrunedRead | None]:
    """Return the answers to both questions, and what the first one's prompt lost."""
    cache, answers, lost = DynamicCache(config=model.config), [], None
    for number, question in enumerate(document.questions):
        if number:
            # The question before, its answer, and whatever of them lies in deeper layers.
            _leave(cache, len(document.ids))
        answers.append(_answer(model, cache, document, question, pruning))
        if pruning is not None and not number:
            lost = pruning.read_of(cache)
    return answers, lost


def _answer(
    model: Any,
    cache: DynamicCache,
    document: NeedleDocument,
    question: Question,
    pruning: Pruning | None,
) -> _Answered:
    held = cache.get_seq_length()
    ids = [*document.ids, *question.ids]
    began = time.process_time()
    with ExitStack() as told:
        if pruning is not None:
            told.enter_context(pruning.prompt(len(ids), len(question.ids)))
        last = read(model, cache, ids[held:])
    seconds = time.process_time() - began
    return _Answered(*answer(model, cache, question, last), seconds)


def _leave(cache: DynamicCache, tokens: int) -> None:
    for layer in cache.layers:
        if layer.is_initialized and layer.keys.shape[2] > tokens:
            layer.keys, layer.values = layer.keys[:, :, :tokens], layer.values[:, :, :tokens]
