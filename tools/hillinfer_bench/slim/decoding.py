# SPDX-License-Identifier: Apache-2.0
"""Answers about needles, and time of a token, by what bands have while tokens are decoded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

import torch

from hillinfer.errors import SettingsError
from hillinfer.hf.cache import HillInferCache
from hillinfer.model_shape import ModelShape
from hillinfer.pruning.block_policies import DecodedBlocks
from hillinfer.pruning.profile import NeedleDocument, Question, answer, read
from hillinfer.pruning.reading import Pruning
from hillinfer.pruning.schedule import Schedule
from hillinfer.settings import QuerySource
from hillinfer.statistics import CacheStatistics
from hillinfer_bench.slim.quality import ALPHA, FULL, QUARTER, Held, Way, opened

# The prompt's read, the paper's rule, and rows of a band that HillInfer selects at each token.
KEEP, SWAP, SELECT = "keep", "swap:0.9", f"alpha={ALPHA}"
# The same where most rows lie on the drive, and there with nothing read before it is wanted.
TIGHT, LATE = f"{SELECT} {QUARTER}", f"{SELECT} {QUARTER} late"
# The paper's rule over rows of the same cache: as large a share, in whole blocks.
BLOCKS = f"blocks:{ALPHA:.0%}"
BLOCKS_TIGHT = f"{BLOCKS} {QUARTER}"
# And of all blocks: what the read dropped runs through its band. For one cut alone.
ENTER = f"enter:{ALPHA:.0%}"
# Memory holds all rows, so time goes to computing alone.
_DRAM = "120%"
DECODED = (KEEP, SWAP, SELECT, BLOCKS, ENTER, TIGHT, BLOCKS_TIGHT, LATE)
# In HillInfer's cache.
_HELD = DECODED[2:]
# Of a free answer: what names the number comes first.
FREE_TOKENS = 24


@dataclass(frozen=True)
class DecodingRow:
    """One way to read and decode over all documents of one length.

    Parameters
    ----------
    way, decoding
        How prompts are read; `full`, `keep`, `swap:0.9`, `alpha=0.1`, `blocks:10%`, `enter:10%`, or
        one with the memory behind it.
    tokens, documents
        How long documents are, and how many.
    right, nll
        Questions of which every digit was the most probable one behind the right ones, and the mean
        negative log-likelihood of a digit, in nats.
    free_right
        Questions of which the number is in what the model said by itself.
    seconds, cpu_seconds
        Of a token of free answers, mean over all that were decoded: wall, and of all threads.
    swaps, computed, put_back
        Over the same tokens, mean: how often blocks moved at a cut, summed over cuts, so above 1
        where several cuts move some at one token; and blocks that were computed and put back. 0
        where none can.
    deciding_seconds, swapping_seconds
        Part of `seconds`, mean over the same tokens: ranking blocks, and moving and computing them.
    moved_bytes, read_bytes
        Of a token's rows that came to where attention reads them, mean over the same tokens: as
        stored in 16 bits, of blocks that entered or of selected rows that lay on the drive; and
        what reading these brought, with what lay between. 0 where nothing moves.
    waiting_seconds
        Part of `seconds`, mean over the same tokens: attention waited for reads of the drive.
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
    moved_bytes: float = 0.0
    read_bytes: float = 0.0
    waiting_seconds: float = 0.0


def decoding_way(text: str) -> Way:
    """Return how prompts are read whose answers are decoded in each way: `Way.parse`, but fewer.

    Parameters
    ----------
    text
        A schedule, and perhaps a ranker behind a space.

    Raises
    ------
    SettingsError
        Where it says nothing of the kind, or a whole read, or another place for documents.
    """
    first, *others = text.split(" ")
    if first == FULL:
        raise SettingsError(
            f"--decoding {text!r}: a whole read is decoded beside every schedule; write a schedule "
            "alone, such as 15:50%"
        )
    if others and others[-1] in (Held.ENTERING, Held.COMPLETED, Held.DRIVE):
        raise SettingsError(
            f"--decoding {text!r}: what is decoded decides where a document lies; write "
            f"{' '.join([first, *others[:-1]])!r}, without {others[-1]}"
        )
    return Way.parse(text)


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
        How prompts are read in stages, of `decoding_way`; reading all of them stands before these.
    say
        Takes a line of progress.
    """
    every = [(Way(FULL), FULL)]
    for way in ways:
        has_one_cut = len(Schedule.parse(way.schedule).cuts) == 1
        every += [(way, one) for one in DECODED if has_one_cut or one != ENTER]
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
        f"{row.swaps:.2f} swaps, {row.computed:.2f} computed, {row.put_back:.2f} put back; "
        f"{row.moved_bytes / 2**10:.0f} KiB moved, {row.read_bytes / 2**10:.0f} read, "
        f"{1000 * row.waiting_seconds:.1f} ms waiting"
    )


def says_number(tokenizer: Any, question: Question, ids: Sequence[int]) -> bool:
    """Return whether the number that a question asks for is in what was said.

    Parameters
    ----------
    tokenizer
        Of the model.
    question
        What was asked.
    ids
        Tokens of a free answer.
    """
    number = tokenizer.decode([question.answer_ids[place] for place in question.digits]).strip()
    return number in tokenizer.decode(list(ids))


@dataclass(frozen=True)
class _Asked:
    """Of one document: the forced answer, and the free one with its times and decoded tokens."""

    right: bool
    nll: float
    free_right: bool
    decoded: int
    seconds: float
    cpu_seconds: float
    told: DecodedBlocks | None
    moved_bytes: int
    read: CacheStatistics | None


def _row(
    way: Way, decoding: str, documents: Sequence[NeedleDocument], asked: Sequence[_Asked]
) -> DecodingRow:
    told = [one.told for one in asked if one.told is not None]
    drive = [one.read for one in asked if one.read is not None]
    steps = sum(one.steps for one in told) or 1
    # Over tokens, as what is said of swaps: the one is part of the other.
    decoded = sum(one.decoded for one in asked) or 1
    return DecodingRow(
        way.name,
        decoding,
        round(median(len(one.ids) for one in documents)),
        len(documents),
        sum(one.right for one in asked),
        mean(one.nll for one in asked),
        sum(one.free_right for one in asked),
        sum(one.seconds for one in asked) / decoded,
        sum(one.cpu_seconds for one in asked) / decoded,
        sum(sum(one.swaps) for one in told) / steps,
        sum(one.computed for one in told) / steps,
        sum(one.put_back for one in told) / steps,
        sum(one.deciding_seconds for one in told) / steps,
        sum(one.swapping_seconds for one in told) / steps,
        sum(one.moved_bytes for one in asked) / decoded,
        sum(one.cold_read_bytes for one in drive) / decoded,
        sum(one.drive_wait_seconds for one in drive) / decoded,
    )


@torch.no_grad()
def _asked(model: Any, tokenizer: Any, document: NeedleDocument, way: Way, decoding: str) -> _Asked:
    """Read a prompt for the forced answer, and once more for a free one."""
    question = document.questions[0]
    if decoding in _HELD:
        way = replace(way, held=Held.DRIVE)
    budget = _DRAM if decoding in (SELECT, BLOCKS, ENTER) else QUARTER
    query = QuerySource.TRUE if decoding == LATE else QuerySource.AUTO
    moves = {SWAP: SWAP, BLOCKS: BLOCKS, BLOCKS_TIGHT: BLOCKS, ENTER: ENTER}.get(decoding, KEEP)
    tokens = len(document.ids) + len(question.ids) + max(len(question.answer_ids), FREE_TOKENS)
    with opened(model, way, tokens, budget, "keep", moves, query) as (cache, pruning):
        last = _read(model, cache, document, question, pruning)
        right, nll = answer(model, cache, question, last)
    with opened(model, way, tokens, budget, "keep", moves, query) as (cache, pruning):
        last = _read(model, cache, document, question, pruning)
        before = _statistics(cache)
        ids, began = [int(last.argmax())], (time.perf_counter(), time.process_time())
        while len(ids) < FREE_TOKENS and ids[-1] != tokenizer.eos_token_id:
            ids.append(int(read(model, cache, ids[-1:]).argmax()))
        spent = time.perf_counter() - began[0], time.process_time() - began[1]
        told = None if pruning is None else pruning.decoding_of(cache)
        now = _statistics(cache)
        drive = None if now is None or before is None else now.minus(before)
    row_bytes = ModelShape.from_config(model.config, model.dtype).row_bytes
    moved = 0 if told is None else told.entered_rows * row_bytes
    if drive is not None:
        # What enters and is hot does not come.
        moved = drive.cold_useful_bytes
    free = says_number(tokenizer, question, ids)
    return _Asked(right, nll, free, len(ids) - 1, *spent, told, moved, drive)


def _statistics(cache: Any) -> CacheStatistics | None:
    return cache.statistics() if isinstance(cache, HillInferCache) else None


def _read(
    model: Any,
    cache: Any,
    document: NeedleDocument,
    question: Question,
    pruning: Pruning | None,
) -> torch.Tensor:
    """Read a prompt into a cache and return the logits behind it."""
    ids = [*document.ids, *question.ids]
    with nullcontext() if pruning is None else pruning.prompt(len(ids), len(question.ids)):
        return read(model, cache, ids)
