# SPDX-License-Identifier: Apache-2.0
"""Answers about needles, and time of a token, by what bands have while tokens are decoded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import DynamicCache

import hillinfer
from hillinfer.pruning.decoding import DecodedBlocks
from hillinfer.pruning.needles import NeedleDocument, Question
from hillinfer.pruning.profile import answer, read
from hillinfer.pruning.reading import Pruning
from hillinfer_bench.slim.quality import FULL, Way

# The prompt's read, the paper's rule, and rows of a band that HillInfer selects at each token.
KEEP, SWAP, SELECT = "keep", "swap:0.9", "alpha=0.1"
_ALPHA = 0.1
# Of a free answer: what names the number comes first.
FREE_TOKENS = 24


@dataclass(frozen=True)
class DecodingRow:
    """One way to read and decode over all documents of one length.

    Parameters
    ----------
    way, decoding
        How prompts are read; `full`, `keep`, `swap:0.9` or `alpha=0.1`.
    tokens, documents
        How long documents are, and how many.
    right, nll
        Questions of which every digit was the most probable one behind the right ones, and the mean
        negative log-likelihood of a digit, in nats.
    free_right
        Questions of which the number is in what the model said by itself.
    seconds, cpu_seconds
        Of a token of a free answer: median over documents, wall and of all threads.
    swaps, computed, put_back
        For each token of free answers: steps at which blocks moved, and those that did; over all
        cuts. 0 where none can.
    deciding_seconds, swapping_seconds
        Of such a token, mean: ranking blocks, and moving and computing them.
    """

    way: str
    decoding: str
    tokens: int
    documents: int
    right: int
    nll: float
    free_right: int
    seconds: float
    cpu_seconds: float
    swaps: float = 0.0
    computed: float = 0.0
    put_back: float = 0.0
    deciding_seconds: float = 0.0
    swapping_seconds: float = 0.0


def measure_decoding(
    model: Any,
    tokenizer: Any,
    documents: Sequence[NeedleDocument],
    ways: Sequence[Way],
    say: Callable[[str], None],
) -> list[DecodingRow]:
    """Ask every document's first question, read in every way and decoded in every one.

    Parameters
    ----------
    model
        Of transformers, unmodified.
    tokenizer
        Its own.
    documents
        All of about one length.
    ways
        How prompts are read in stages; reading all of them stands before these.
    say
        Takes a line of progress.
    """
    every = [(Way(FULL), FULL), *((way, one) for way in ways for one in (KEEP, SWAP, SELECT))]
    rows = []
    for way, decoding in every:
        asked = [_asked(model, tokenizer, one, way, decoding) for one in documents]
        rows.append(_row(way, decoding, documents, asked))
        say(row_text(rows[-1]))
    return rows


def row_text(row: DecodingRow) -> str:
    """Return a row for reading."""
    return (
        f"{row.way:<34} {row.decoding:<10} {row.tokens:>6} tokens: {row.right:>3} of "
        f"{row.documents} right, NLL {row.nll:.2f}, by itself {row.free_right}; "
        f"{1000 * row.seconds:.0f} ms a token ({1000 * row.cpu_seconds:.0f} of CPU), "
        f"{1000 * row.deciding_seconds:.1f} ranking, {1000 * row.swapping_seconds:.1f} swapping; "
        f"{row.swaps:.2f} swaps, {row.computed:.2f} computed, {row.put_back:.2f} put back"
    )


@dataclass(frozen=True)
class _Asked:
    right: bool
    nll: float
    free_right: bool
    seconds: float
    cpu_seconds: float
    told: DecodedBlocks | None


def _row(
    way: Way, decoding: str, documents: Sequence[NeedleDocument], asked: Sequence[_Asked]
) -> DecodingRow:
    told = [one.told for one in asked if one.told is not None]
    steps = sum(one.steps for one in told) or 1
    return DecodingRow(
        way.name,
        decoding,
        round(median(len(one.ids) for one in documents)),
        len(documents),
        sum(one.right for one in asked),
        mean(one.nll for one in asked),
        sum(one.free_right for one in asked),
        median(one.seconds for one in asked),
        median(one.cpu_seconds for one in asked),
        sum(sum(one.swaps) for one in told) / steps,
        sum(one.computed for one in told) / steps,
        sum(one.put_back for one in told) / steps,
        sum(one.deciding_seconds for one in told) / steps,
        sum(one.swapping_seconds for one in told) / steps,
    )


@torch.no_grad()
def _asked(model: Any, tokenizer: Any, document: NeedleDocument, way: Way, decoding: str) -> _Asked:
    """Read a prompt for the forced answer, and once more for a free one."""
    question = document.questions[0]
    with ExitStack() as stack:
        attached = pruning = None
        if decoding == SELECT:
            place = stack.enter_context(TemporaryDirectory(prefix="hillinfer-slim-"))
            # Memory would hold all rows: time goes to computing alone.
            made = hillinfer.attach(model, cold_dir=place, alpha=_ALPHA, dram_budget="120%")
            attached = stack.enter_context(made)
        if way.schedule != FULL:
            moves = SWAP if decoding == SWAP else KEEP
            own = hillinfer.prune(model, way.schedule, ranker=way.ranker, decoding=moves)
            pruning = stack.enter_context(own)
        cache, last = _read(model, document, question, attached, pruning)
        right, nll = answer(model, cache, question, last)
        cache, last = _read(model, document, question, attached, pruning)
        ids, began = [int(last.argmax())], (time.perf_counter(), time.process_time())
        while len(ids) < FREE_TOKENS and ids[-1] != tokenizer.eos_token_id:
            ids.append(int(read(model, cache, ids[-1:]).argmax()))
        spent = time.perf_counter() - began[0], time.process_time() - began[1]
        decoded = max(1, len(ids) - 1)
        told = None if pruning is None else pruning.decoding_of(cache)
    number = tokenizer.decode([question.answer_ids[place] for place in question.digits]).strip()
    free = number in tokenizer.decode(ids)
    return _Asked(right, nll, free, spent[0] / decoded, spent[1] / decoded, told)


def _read(
    model: Any,
    document: NeedleDocument,
    question: Question,
    attached: Any,
    pruning: Pruning | None,
) -> tuple[Any, torch.Tensor]:
    """Return a cache that has read a prompt, and the logits behind it."""
    ids = [*document.ids, *question.ids]
    cache: Any = DynamicCache(config=model.config)
    if attached is not None:
        cache = attached.new_cache(expected_tokens=len(ids) + FREE_TOKENS)
    with ExitStack() as told:
        if pruning is not None:
            told.enter_context(pruning.prompt(len(ids), len(question.ids)))
        return cache, read(model, cache, ids)
