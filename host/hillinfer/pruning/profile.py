# SPDX-License-Identifier: Apache-2.0
"""Measures from which layer on a model ranks a prompt's blocks well, and derives a schedule.

Numbers are hidden in documents and asked for. At each layer it is known which blocks hold the
number, so how many of the best blocks must stay for it to stay is known, too, from one dense read.
Schedules that the curve allows are then tried, because a block that stays is not an answer yet.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from statistics import mean
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from hillinfer.errors import SettingsError
from hillinfer.generate.prompt import DocumentPrompt
from hillinfer.hf.hooks import predictor_of
from hillinfer.model_shape import ModelShape
from hillinfer.pruning.passes import LaterTurns
from hillinfer.pruning.rankers import Deciding, Ranker
from hillinfer.pruning.reading import Pruning
from hillinfer.pruning.schedule import BLOCK_TOKENS, RANKER_NAMES, Cut, Schedule
from hillinfer.pruning.stages import layer_work
from hillinfer.sessions.fingerprint import weights_digest
from hillinfer.settings import QuerySource
from hillinfer.system.files import user_cache_dir, write_whole

# --- Documents in which two numbers are hidden ---

_NAMES = ("Marlow", "Quince", "Tamsin", "Ferris", "Odette", "Bryony", "Caspar", "Delphine")
# More tokens than any tokenizer makes of four digits and what they stick to.
_MOST_TOKENS = 12
# The share of a document at either end that a needle keeps away from.
_MARGIN = 0.1


@dataclass(frozen=True)
class Question:
    """What is asked about one of the two.

    Parameters
    ----------
    ids
        Of the question, behind the document.
    answer_ids
        Of a whole answer, which is forced.
    digits
        Places of the number's tokens in the answer.
    blocks
        Of the document, that hold the number.
    """

    ids: list[int]
    answer_ids: list[int]
    digits: list[int]
    blocks: range


@dataclass(frozen=True)
class NeedleDocument:
    """One text with two needles.

    Parameters
    ----------
    ids
        Of the document, with what the chat template puts before it.
    questions
        One for each needle, in the order in which they are asked.
    """

    ids: list[int]
    questions: tuple[Question, Question]


def needle_document(tokenizer: Any, tokens: int, seed: int) -> NeedleDocument:
    """Return a document of about so many tokens, the same for the same seed.

    The text around is Python's own help, which every machine has.

    Parameters
    ----------
    tokenizer
        Of the model.
    tokens
        Of the document.
    seed
        Chooses text, places, names and numbers.
    """
    draw = random.Random(seed)
    names = draw.sample(_NAMES, 2)
    lines = [
        line.strip()
        for name in sorted(topics.topics)
        for line in topics.topics[name].split("\n\n")
        if 40 < len(line.strip()) < 600
    ]
    start = draw.randrange(len(lines))
    filling: list[str] = []
    size = 0
    while size < tokens:
        line = " ".join(lines[(start + len(filling)) % len(lines)].split())
        filling.append(line)
        size += len(tokenizer(line)["input_ids"]) + 1
    text = "\n".join(filling)
    numbers = draw.sample([one for one in range(1000, 10_000) if str(one) not in text], 2)
    for name, number in zip(names, numbers, strict=True):
        share = draw.uniform(_MARGIN, 1 - _MARGIN)
        filling.insert(round(share * len(filling)), f"The secret number of {name} is {number}.")
    text = "\n".join(filling) + "\n"
    prompt = DocumentPrompt(tokenizer, text)
    ids = prompt.document_ids()
    first, second = (
        _question(tokenizer, prompt, name, number, _blocks_of(tokenizer, ids, number))
        for name, number in zip(names, numbers, strict=True)
    )
    return NeedleDocument(ids, (first, second))


def _blocks_of(tokenizer: Any, ids: list[int], number: int) -> range:
    """Return the blocks that a number lies in; it is in the text once.

    Raises SettingsError where the tokens do not spell it.
    """
    text = str(number)
    starts = [at for at in range(len(ids)) if text in tokenizer.decode(ids[at : at + _MOST_TOKENS])]
    if not starts:
        raise SettingsError(
            f"the tokenizer spells {text} with other tokens than it reads: no needles can be "
            "hidden for it"
        )
    first = starts[-1]
    last = next(
        end
        for end in range(first, first + _MOST_TOKENS)
        if text in tokenizer.decode(ids[first : end + 1])
    )
    return range(first // BLOCK_TOKENS, last // BLOCK_TOKENS + 1)


def _question(
    tokenizer: Any, prompt: DocumentPrompt, name: str, number: int, blocks: range
) -> Question:
    asked = prompt.question_ids(f"What is the secret number of {name}?")
    before = tokenizer(f"The secret number of {name} is ", add_special_tokens=False)["input_ids"]
    digits = tokenizer(str(number), add_special_tokens=False)["input_ids"]
    places = list(range(len(before), len(before) + len(digits)))
    return Question(asked, [*before, *digits], places, blocks)


# --- The profile ---

CHUNK_TOKENS = 1024
# Shares that are tried, and by how much the curve must lie below one.
_SHARES, _MARGIN = (0.25, 0.5), 0.8
# Of documents: so many may need more blocks than are kept where a schedule is tried at all.
_QUANTILE = 0.9

# Model, cache, question, and logits behind the prompt: as `answer` takes them.
Answered = Callable[[Any, Any, Question, torch.Tensor | None], tuple[bool, float]]


@dataclass(frozen=True)
class Answers:
    """Answers about needles, of one way to read.

    Parameters
    ----------
    schedule
        None where all of it is read.
    right, questions
        Questions of which every digit was the most probable one, and all.
    nll
        Mean negative log-likelihood of a digit, in nats.
    flop_limit
        How much faster reading may get, mean; 1 where all of it is read.
    """

    schedule: str | None
    right: int
    questions: int
    nll: float
    flop_limit: float


@dataclass(frozen=True)
class PruneProfile:
    """What was found of one model.

    Parameters
    ----------
    least_shares
        Of each layer that may decide, from 0 on: the share of blocks that must stay so that the
        needle does, in nine of ten questions.
    tried
        Reading all of it, and every schedule that the curve allows, fastest first.
    schedule
        The fastest that answers as many questions as a whole read, or one fewer, about as surely;
        None where there is none, or where a whole read answers fewer than half.
    """

    least_shares: list[float]
    tried: list[Answers]
    schedule: str | None


def make_profile(
    model: Any,
    documents: Sequence[NeedleDocument],
    ranker: Ranker,
    say: Callable[[str], None],
    answered: Answered | None = None,
) -> PruneProfile:
    """Read documents with needles, whole and in stages.

    Parameters
    ----------
    model
        Of transformers, unmodified.
    documents
        Of the length that matters.
    ranker
        Chooses blocks.
    say
        Takes a line of progress.
    answered
        Says of a prompt that was read how it is answered; `answer` where it is None.

    Raises
    ------
    SettingsError
        Where documents have too few blocks to tell anything, or more tokens than the model has
        positions.
    """
    if min(len(one.ids) for one in documents) < 8 * BLOCK_TOKENS:
        raise SettingsError(
            f"documents of fewer than {8 * BLOCK_TOKENS} tokens have too few blocks to choose among"
        )
    longest = max(
        len(one.ids) + len(asked.ids) + len(asked.answer_ids)
        for one in documents
        for asked in one.questions
    )
    positions = ModelShape.from_config(model.config, model.dtype).max_positions
    if longest > positions:
        raise SettingsError(
            f"a document with its question and answer has {longest} tokens, and the model "
            f"{positions} positions: lower --tokens"
        )
    answered = answered or answer
    shares: list[list[float]] = []
    whole: list[tuple[bool, float]] = []
    for number, document in enumerate(documents, 1):
        for question in document.questions:
            cache = DynamicCache(config=model.config)
            shares.append(_least_shares(model, cache, document, question, ranker))
            whole.append(answered(model, cache, question, None))
        say(f"{number} of {len(documents)} documents read whole")
    curve = np.quantile(np.array(shares), _QUANTILE, axis=0).tolist()
    full = Answers(None, sum(one[0] for one in whole), len(whole), mean(o[1] for o in whole), 1.0)
    tried, chosen = [full], None
    for schedule in candidates(curve, model, len(documents[0].ids)):
        found = _tried(model, documents, schedule, ranker, answered)
        tried.append(found)
        say(
            f"{schedule}: {found.right} of {found.questions} right (whole {full.right}), NLL "
            f"{found.nll:.2f} ({full.nll:.2f}), FLOPs allow {found.flop_limit:.2f}"
        )
        # One question fewer, and 0.3 nats. Who finds no needle anyway says nothing of schedules.
        knows = 2 * full.right >= full.questions
        if knows and found.right >= full.right - 1 and found.nll <= full.nll + 0.3:
            chosen = str(schedule)
            break
    return PruneProfile(curve, tried, chosen)


def candidates(curve: Sequence[float], model: Any, tokens: int) -> list[Schedule]:
    """Return schedules of one cut that a curve allows, the fastest first.

    Parameters
    ----------
    curve
        `PruneProfile.least_shares`.
    model
        Whose layers these are.
    tokens
        Of a prompt, for which of two is faster.
    """
    found = []
    for share in _SHARES:
        for layer in range(1, len(curve)):
            if curve[layer - 1] <= share * _MARGIN:
                found.append(Schedule((Cut(layer, share=share),)))
                # A later cut with the same share would only cost more.
                break
    work, layers = layer_work(model.get_decoder()), len(curve)
    return sorted(found, key=lambda one: work.limit(one, tokens, layers), reverse=True)


@torch.no_grad()
def _least_shares(
    model: Any, cache: Any, document: NeedleDocument, question: Question, ranker: Ranker
) -> list[float]:
    """Read a prompt whole; return for each layer which share of blocks keeps the needle."""
    decoder = model.get_decoder()
    read(model, cache, document.ids)
    window = ranker.window(len(question.ids))
    asked = torch.tensor([question.ids])
    out = model(asked, past_key_values=cache, logits_to_keep=1, output_hidden_states=True)
    tokens = len(document.ids) + len(question.ids)
    predictor = predictor_of(model.config.model_type, QuerySource.PREDICTED)
    assert predictor is not None
    places = torch.arange(tokens)[-len(question.ids) :][-window:].unsqueeze(0)
    found = []
    for number, layer in enumerate(decoder.layers):
        entering = out.hidden_states[number][:, -window:]
        rotary = getattr(decoder, "rotary_emb", None)
        turned = None if rotary is None else rotary(entering, position_ids=places)
        queries = predictor.predict(layer, entering, turned)[0]
        keys = cache.layers[number].keys[0]
        scores = ranker.scores(Deciding(keys, queries, predictor.scaling(layer), seed=tokens))
        worst = scores[list(question.blocks)].min()
        found.append(float((scores >= worst).sum()) / len(scores))
    return found


@torch.no_grad()
def _tried(
    model: Any,
    documents: Sequence[NeedleDocument],
    schedule: Schedule,
    ranker: Ranker,
    answered: Answered,
) -> Answers:
    answers, limits = [], []
    with Pruning(model, schedule, ranker, LaterTurns.KEEP, CHUNK_TOKENS) as pruning:
        for document in documents:
            for question in document.questions:
                cache = DynamicCache(config=model.config)
                with pruning.prompt(len(document.ids) + len(question.ids), len(question.ids)):
                    read(model, cache, document.ids)
                    last = read(model, cache, question.ids)
                answers.append(answered(model, cache, question, last))
                told = pruning.read_of(cache)
                limits.append(1.0 if told is None else told.flop_limit)
    right = sum(one[0] for one in answers)
    return Answers(
        str(schedule), right, len(answers), mean(one[1] for one in answers), mean(limits)
    )


@torch.no_grad()
def answer(
    model: Any, cache: Any, question: Question, last: torch.Tensor | None
) -> tuple[bool, float]:
    """Force an answer behind a prompt; return whether its digits were expected, and their NLL.

    Parameters
    ----------
    model, cache
        What has read the prompt.
    question
        What was asked.
    last
        Logits behind the prompt's last token; None where the answer's first token is no digit.
    """
    logits = [last]
    # One at a time, as answers come: several at once would be a prompt of their own.
    logits += [read(model, cache, [token]) for token in question.answer_ids]
    of_digits = [one for place in question.digits if (one := logits[place]) is not None]
    chosen = torch.stack(of_digits).log_softmax(-1)
    wanted = torch.tensor([question.answer_ids[place] for place in question.digits])
    right = bool((chosen.argmax(-1) == wanted).all())
    return right, float(-chosen[range(len(wanted)), wanted].mean())


@torch.no_grad()
def read(model: Any, cache: Any, ids: Sequence[int]) -> torch.Tensor:
    """Read tokens in chunks and return the logits behind the last one, float32 (vocabulary,)."""
    for start in range(0, len(ids), CHUNK_TOKENS):
        part = torch.tensor([ids[start : start + CHUNK_TOKENS]])
        out = model(part, past_key_values=cache, logits_to_keep=1)
    logits: torch.Tensor = out.logits[0, -1].float()
    return logits


# --- evidence that is kept ---

_MOST_BYTES = 1 << 20


def keep_evidence(model: Any, told: Mapping[str, Any]) -> Path:
    """Keep what was found of a model for `found_schedule`, in the user's cache directory.

    What was found of it before stays where it names a schedule, and this none, by another ranker.

    Parameters
    ----------
    model
        Whose weights it holds for.
    told
        `PruneProfile` and what it was measured with, `ranker` among it, as JSON has it.

    Raises
    ------
    OSError, SettingsError
        Where it cannot be written.
    """
    file, known = _evidence_file(model), found_schedule(model)
    if told["schedule"] is None and known is not None and known[1] != told["ranker"]:
        return file
    write_whole(file, json.dumps(dict(told), indent=1).encode())
    return file


def found_schedule(model: Any) -> tuple[str, str] | None:
    """Return the schedule that a model was found to keep its answers with, and its ranker.

    None where none was found, or nobody measured.

    Parameters
    ----------
    model
        Its weights are hashed.
    """
    try:
        file = _evidence_file(model)
        if file.stat().st_size > _MOST_BYTES:
            return None
        told = json.loads(file.read_text(encoding="utf-8"))
        schedule, ranker = told["schedule"], told["ranker"]
        if not isinstance(schedule, str):
            return None
        return str(Schedule.parse(schedule)), RANKER_NAMES[RANKER_NAMES.index(ranker)]
    except NotImplementedError:
        # Weights that were taken apart for other projections.
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError, SettingsError):
        return None


def _evidence_file(model: Any) -> Path:
    return user_cache_dir("schedules") / f"{weights_digest(model)}.json"
