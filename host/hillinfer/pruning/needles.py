# SPDX-License-Identifier: Apache-2.0
"""Documents in which two numbers are hidden, and the questions for them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pydoc_data import topics
from typing import Any

from hillinfer.generate.prompt import DocumentPrompt
from hillinfer.pruning.schedule import BLOCK_TOKENS

_NAMES = ("Marlow", "Quince", "Tamsin", "Ferris", "Odette", "Bryony", "Caspar", "Delphine")
# Tokens around a document that a needle keeps away from.
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
    numbers = [draw.randint(1000, 9999) for _ in names]
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
    """Return the blocks that a number lies in, which no other one of the document is."""
    digits = tokenizer(str(number), add_special_tokens=False)["input_ids"]
    places = [at for at in range(len(ids)) if ids[at : at + len(digits)] == digits]
    first = places[0] if places else 0
    return range(first // BLOCK_TOKENS, (first + len(digits) - 1) // BLOCK_TOKENS + 1)


def _question(
    tokenizer: Any, prompt: DocumentPrompt, name: str, number: int, blocks: range
) -> Question:
    asked = prompt.question_ids(f"What is the secret number of {name}?")
    before = tokenizer(f"The secret number of {name} is ", add_special_tokens=False)["input_ids"]
    digits = tokenizer(str(number), add_special_tokens=False)["input_ids"]
    places = list(range(len(before), len(before) + len(digits)))
    return Question(asked, [*before, *digits], places, blocks)
