# SPDX-License-Identifier: Apache-2.0
"""Documents in which two numbers are hidden, and the questions for them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pydoc_data import topics
from typing import Any

from hillinfer.errors import SettingsError
from hillinfer.generate.prompt import DocumentPrompt
from hillinfer.pruning.schedule import BLOCK_TOKENS

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
