# SPDX-License-Identifier: Apache-2.0
"""Documents of the tasks, made where they are asked for, and as the harness takes them.

The harness calls what makes tables with what `--metadata` says, and with arguments of the model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pydoc_data.topics import topics
from typing import Any

Document = dict[str, Any]
Splits = dict[str, list[Document]]

_ANIMALS = ("otter", "heron", "badger", "lynx", "marten", "osprey", "beaver", "stoat")
_COLOURS = ("amber", "cobalt", "crimson", "ivory", "olive", "violet", "silver", "scarlet")
_CHOICES = 4
_SENTENCE_WORDS = range(8, 20)


def needles(words: int = 600, questions: int = 8, **others: object) -> Splits:
    """Return texts that hide a number, and who asks for it.

    Parameters
    ----------
    words
        Of a text.
    questions
        How many; what is asked for lies deeper from one to the next.
    **others
        Of other tasks or of the harness.
    """
    documents = []
    for number in range(questions):
        draw = random.Random(number)
        text = _passage(draw, words)
        name = f"{draw.choice(_COLOURS)} {draw.choice(_ANIMALS)}"
        value = str(draw.randint(1_000_000, 9_999_999))
        place = int(len(text) * (number + 0.5) / questions)
        hidden = f"The number of the {name} is {value}."
        whole = " ".join([*text[:place], hidden, *text[place:]])
        documents.append({"text": whole, "name": name, "value": value})
    return {"test": documents}


def lines(lines_each: int = 40, questions: int = 8, **others: object) -> Splits:
    """Return records of LongEval's form with made-up names, and the line that is asked for.

    Parameters
    ----------
    lines_each
        Of a record.
    questions, **others
        As in `needles`.
    """
    documents = []
    for number in range(questions):
        draw = random.Random(number)
        names = [
            f"{draw.choice(_COLOURS)}-{draw.choice(_ANIMALS)}-{one}" for one in range(lines_each)
        ]
        values = [str(draw.randint(10_000, 99_999)) for _ in names]
        record = "\n".join(
            f"line {name}: REGISTER_CONTENT is <{value}>"
            for name, value in zip(names, values, strict=True)
        )
        asked = draw.randrange(lines_each)
        documents.append({"record": record, "name": names[asked], "value": values[asked]})
    return {"test": documents}


def choices(words: int = 300, questions: int = 8, **others: object) -> Splits:
    """Return passages and sentences, one of which follows; the wrong ones stand elsewhere.

    Parameters
    ----------
    words, questions, **others
        As in `needles`.
    """
    sentences = list(_sentences())
    documents = []
    for number in range(questions):
        draw = random.Random(number)
        place = draw.randrange(len(sentences) // 2)
        passage: list[str] = []
        while len(passage) < words:
            passage += sentences[place].split()
            place += 1
        wrong = draw.sample(sentences[place + 1 :], _CHOICES - 1)
        right = draw.randrange(_CHOICES)
        wrong.insert(right, sentences[place])
        documents.append({"passage": " ".join(passage), "choices": wrong, "right": right})
    return {"test": documents}


def pages(words: int = 300, questions: int = 2, **others: object) -> Splits:
    """Return texts whose every word is scored.

    Parameters
    ----------
    words, questions, **others
        As in `needles`.
    """
    passages = [" ".join(_passage(random.Random(one), words)) for one in range(questions)]
    return {"test": [{"page": text} for text in passages]}


def _tables(make: Callable[..., Splits]) -> Callable[..., dict[str, Any]]:
    """Return what makes tables of the library `datasets`, which the harness alone needs."""

    def tables(**options: Any) -> dict[str, Any]:
        from datasets import Dataset

        return {split: Dataset.from_list(found) for split, found in make(**options).items()}

    return tables


needle_tables = _tables(needles)
line_tables = _tables(lines)
choice_tables = _tables(choices)
page_tables = _tables(pages)


def page_results(document: Document, results: tuple[float]) -> dict[str, tuple[float, int]]:
    """Return the log-likelihood of a page beside how many words and bytes it has."""
    (found,) = results
    page = document["page"]
    words, size = len(page.split()), len(page.encode())
    return {
        "word_perplexity": (found, words),
        "byte_perplexity": (found, size),
        "bits_per_byte": (found, size),
    }


def _words() -> list[str]:
    return " ".join(topics[name] for name in sorted(topics)).split()


def _passage(draw: random.Random, words: int) -> list[str]:
    """Return words of Python's help that follow each other; it begins anew where they are few."""
    text = _words()
    start = draw.randrange(len(text))
    return [text[(start + one) % len(text)] for one in range(words)]


def _sentences() -> Iterator[str]:
    for one in " ".join(_words()).split(". "):
        if len(one.split()) in _SENTENCE_WORDS and one.isascii():
            yield f"{one.strip()}."
