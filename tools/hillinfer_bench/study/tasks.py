# SPDX-License-Identifier: Apache-2.0
"""Questions about local texts, each with its score of an answer."""

from __future__ import annotations

import builtins
import importlib
import json
import pydoc
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from hillinfer.errors import PromptError, SettingsError
from hillinfer.generate.prompt import DocumentPrompt, read_text
from hillinfer.pruning.profile import needle_document
from hillinfer.pruning.schedule import BLOCK_TOKENS
from hillinfer_bench.quality.table import measure
from hillinfer_bench.quality.texts import file_samples, standard_library_samples
from hillinfer_bench.study.reading import ReadPrompt
from hillinfer_bench.study.scoring import Expected, best_choice, rouge_l
from hillinfer_bench.study.ways import StudyWay

Scores = dict[str, float]
"""What is counted of one answer, by its name."""


class Question(ABC):
    """One prompt, and how answers to it are scored.

    Parameters
    ----------
    task, group, number
        Which task, which column of its table, and which of its questions; together its name.
    """

    def __init__(self, task: str, group: str, number: int) -> None:
        self.task = task
        self.group = group
        self.number = number

    @property
    def name(self) -> str:
        """Tells it from all others of a run."""
        return f"{self.task}, {self.group}, {self.number}"

    @abstractmethod
    def scores(self, model: Any, tokenizer: Any, ways: Sequence[StudyWay]) -> list[Scores]:
        """Return the scores of every way; the first one is the full cache.

        Parameters
        ----------
        model, tokenizer
            Of transformers, unmodified.
        ways
            How answers attend to the prompt, which itself is read densely.
        """


# --- Answers that are forced ---


class Recall(Question):
    """An answer is right where each of its scored tokens is the most probable one.

    Parameters
    ----------
    task, group, number
        See `Question`.
    prompt_ids, answer_ids
        Tokens of prompt and answer.
    places
        Numbers of the answer's tokens that are scored.
    """

    def __init__(
        self,
        task: str,
        group: str,
        number: int,
        prompt_ids: Sequence[int],
        answer_ids: Sequence[int],
        places: Sequence[int],
    ) -> None:
        super().__init__(task, group, number)
        self.prompt_ids, self._answer_ids, self._places = prompt_ids, answer_ids, places

    def scores(self, model: Any, tokenizer: Any, ways: Sequence[StudyWay]) -> list[Scores]:
        """Force the answer in every way; see `Question`."""
        prompt = ReadPrompt(model, self.prompt_ids)
        found = []
        for way in ways:
            logits = prompt.forced(way, self._answer_ids)
            expected = Expected.of(logits, self._answer_ids, self._places)
            found.append({"right": float(expected.right), "nll": expected.nll})
        return found


def needles(tokenizer: Any, tokens: int, documents: int) -> Iterator[Question]:
    """Yield questions for numbers that are hidden in Python's own help.

    The group says how long the document is and in which third of it the number lies.
    """
    thirds = ("first", "middle", "last")
    for seed in range(documents):
        document = needle_document(tokenizer, tokens, seed)
        for asked, question in enumerate(document.questions):
            depth = question.blocks.start * BLOCK_TOKENS / len(document.ids)
            yield Recall(
                "needle",
                f"{tokens} tokens, {thirds[min(2, int(3 * depth))]} third",
                2 * seed + asked,
                [*document.ids, *question.ids],
                question.answer_ids,
                question.digits,
            )


_LINE = re.compile(r"line (\S+): REGISTER_CONTENT is <(\d+)>")


def lines(tokenizer: Any, records: Sequence[str], kept: int) -> Iterator[Question]:
    """Yield LongEval's questions for the number of a line, of records that are cut short.

    Parameters
    ----------
    tokenizer
        Of the model.
    records
        Lines of LongEval's files, JSON.
    kept
        Lines of each record that stay: the one that is asked for, and others spread over it.
    """
    for number, record in enumerate(records):
        told = json.loads(record)
        head, _, text = told["prompt"].partition("\n\n")
        found = [match.group() for match in _LINE.finditer(text)]
        asked = told["correct_line"].strip()
        wanted = found.index(asked)
        step = len(found) / kept
        places = {int(step * place) for place in range(kept)}
        if wanted not in places:
            places = places - {min(places, key=lambda place: abs(place - wanted))} | {wanted}
        body = "\n".join(found[place] for place in sorted(places))
        prompt = DocumentPrompt(tokenizer, f"{head}\n\n{body}\n")
        match = _LINE.match(asked)
        assert match is not None
        name, value = match.groups()
        before = tokenizer(
            f"The <REGISTER_CONTENT> in line {name} is <", add_special_tokens=False
        ).input_ids
        digits = tokenizer(value, add_special_tokens=False).input_ids
        question = f"Tell me what is the <REGISTER_CONTENT> in line {name}? I need the number."
        yield Recall(
            "lines",
            f"{kept} lines",
            number,
            [*prompt.document_ids(), *prompt.question_ids(question)],
            [*before, *digits],
            range(len(before), len(before) + len(digits)),
        )


def made_records(count: int, lines_each: int) -> list[str]:
    """Return records of LongEval's form with made-up names, for where its files are not."""
    draw = random.Random(0)
    names = sorted({name.lower() for name in dir(builtins) if name.isalpha()} | {"cat", "mat"})
    records = []
    for _ in range(count):
        keys = [f"{draw.choice(names)}-{draw.choice(names)}-{place}" for place in range(lines_each)]
        texts = [f"line {key}: REGISTER_CONTENT is <{draw.randint(1, 50000)}>" for key in keys]
        head = (
            "Below is a record of lines I want you to remember. For each line index, memorize its "
            "corresponding <REGISTER_CONTENT>. Now the record start:"
        )
        told = {"prompt": f"{head}\n\n" + "\n".join(texts), "correct_line": draw.choice(texts)}
        records.append(json.dumps(told))
    return records


# --- Multiple choice ---


class Choice(Question):
    """The choice with the largest log-likelihood per byte is the answer.

    Parameters
    ----------
    task, group, number
        See `Question`.
    prompt_ids
        Tokens of the prompt.
    choices
        Texts that may follow it.
    right
        Number of the right one.
    """

    def __init__(
        self,
        task: str,
        group: str,
        number: int,
        prompt_ids: Sequence[int],
        choices: Sequence[str],
        right: int,
    ) -> None:
        super().__init__(task, group, number)
        self.prompt_ids, self._choices, self._right = prompt_ids, choices, right

    def scores(self, model: Any, tokenizer: Any, ways: Sequence[StudyWay]) -> list[Scores]:
        """Compare the choices in every way; see `Question`."""
        prompt = ReadPrompt(model, self.prompt_ids)
        coded = [tokenizer(one, add_special_tokens=False).input_ids for one in self._choices]
        sizes = [len(one.encode()) for one in self._choices]
        found = []
        for way in ways:
            expected = [Expected.of(prompt.forced(way, ids), ids, range(len(ids))) for ids in coded]
            chosen = best_choice([one.likelihood for one in expected], sizes)
            right = float(chosen == self._right)
            found.append({"right": right, "nll": expected[self._right].nll})
        return found


CHOICES = 4
_SENTENCE_WORDS = range(6, 14)


def continuations(
    tokenizer: Any, texts: Sequence[str], tokens: int, questions: int
) -> Iterator[Question]:
    """Yield questions for the sentence that follows a passage; the wrong ones stand elsewhere.

    Parameters
    ----------
    tokenizer
        Of the model.
    texts
        Books or others, of which each gives as many questions.
    tokens
        Of a passage.
    questions
        Of all texts.
    """
    draw = random.Random(0)
    for number in range(questions):
        text = " ".join(texts[number % len(texts)].split())
        sentences = re.split(r"(?<=[.!?]) (?=[A-Z])", text)
        fit = [
            place
            for place, one in enumerate(sentences)
            if len(one.split()) in _SENTENCE_WORDS and place > len(sentences) // 4
        ]
        if len(fit) < CHOICES:
            raise PromptError("a text has too few sentences to choose among: give a longer one")
        places = draw.sample(fit, CHOICES)
        right = draw.randrange(CHOICES)
        before = " ".join(sentences[: places[right]])[-8 * tokens :]
        ids = tokenizer(before, add_special_tokens=False).input_ids[-tokens:]
        choices = [f" {sentences[place]}" for place in places]
        yield Choice("choice", f"{tokens} tokens", number, ids, choices, right)


# --- Summaries ---


class Summary(Question):
    """What is written about a text is compared with its author's summary, by ROUGE-L.

    Parameters
    ----------
    task, group, number
        See `Question`.
    prompt_ids
        Tokens of the prompt.
    reference
        The author's summary.
    most
        Tokens that are written at most.
    """

    def __init__(
        self,
        task: str,
        group: str,
        number: int,
        prompt_ids: Sequence[int],
        reference: str,
        most: int,
    ) -> None:
        super().__init__(task, group, number)
        self.prompt_ids, self._reference, self._most = prompt_ids, reference, most

    def scores(self, model: Any, tokenizer: Any, ways: Sequence[StudyWay]) -> list[Scores]:
        """Write a summary in every way; see `Question`."""
        prompt = ReadPrompt(model, self.prompt_ids)
        written = [
            tokenizer.decode(prompt.generated(way, self._most, tokenizer.eos_token_id))
            for way in ways
        ]
        return [
            {"rouge": rouge_l(one, self._reference), "rouge_to_full": rouge_l(one, written[0])}
            for one in written
        ]


_MODULES = (
    *("argparse", "calendar", "configparser", "csv", "difflib", "fractions", "gzip", "imaplib"),
    *("json.encoder", "mailbox", "optparse", "pprint", "random", "shelve", "statistics", "tarfile"),
)


def summaries(tokenizer: Any, tokens: int, questions: int, most: int) -> Iterator[Question]:
    """Yield questions for what a module of Python is for, of its help without the summary.

    Parameters
    ----------
    tokenizer
        Of the model.
    tokens
        Of the help.
    questions
        How many modules.
    most
        Tokens of an answer.
    """
    number = 0
    for name in _MODULES:
        module = importlib.import_module(name)
        documentation = pydoc.getdoc(module)
        reference = pydoc.splitdoc(documentation)[0]
        helped = pydoc.plain(pydoc.render_doc(module)).replace(reference, "")
        ids = tokenizer(helped, add_special_tokens=False).input_ids
        if number == questions:
            return
        if len(ids) < tokens or not reference:
            continue
        prompt = DocumentPrompt(tokenizer, tokenizer.decode(ids[:tokens]))
        question = f"Summarize in one short sentence what the module {name} is for."
        asked = [*prompt.document_ids(), *prompt.question_ids(question)]
        yield Summary("summary", f"{tokens} tokens", number, asked, reference, most)
        number += 1


# --- Perplexity ---


class Reading(Question):
    """How far a text's own last tokens are expected.

    Parameters
    ----------
    task, group, number
        See `Question`.
    ids
        Of the text.
    last
        Of them, those that are forced.
    """

    def __init__(self, task: str, group: str, number: int, ids: Sequence[int], last: int) -> None:
        super().__init__(task, group, number)
        self._ids, self._last = list(ids), last

    def scores(self, model: Any, tokenizer: Any, ways: Sequence[StudyWay]) -> list[Scores]:
        """Force the last tokens in every way; see `Question`."""
        prompt = ReadPrompt(model, self._ids[: -self._last])
        forced = self._ids[-self._last :]
        full: torch.Tensor | None = None
        found = []
        for way in ways:
            logits = prompt.forced(way, forced)
            full = logits if full is None else full
            told = measure(logits, full, forced)
            found.append(
                {
                    "nll": told.negative_log_likelihood,
                    "kl": told.kl_divergence,
                    "agreement": told.agreement,
                }
            )
        return found


def readings(tokenizer: Any, files: Sequence[Path], tokens: int, last: int) -> Iterator[Question]:
    """Yield the beginnings of files, of parts of the Python reference where there are none."""
    samples = (
        file_samples(tokenizer, files, tokens)
        if files
        else standard_library_samples(tokenizer, tokens, 2)
    )
    for number, sample in enumerate(samples):
        yield Reading("text", f"{tokens} tokens", number, sample.token_ids, last)


# --- All of them ---


@dataclass(frozen=True)
class TaskPlan:
    """How much is asked.

    Parameters
    ----------
    needle_tokens, needle_documents
        Lengths of documents with two numbers, and documents of each length.
    line_records, record_lines
        Records of lines, and lines of each.
    choice_tokens, choices
        Tokens of passages, and how many passages are to be continued.
    summary_tokens, summaries, summary_most
        Tokens of texts, how many are summarised, and tokens of a summary at most.
    text_tokens, text_last
        Tokens of texts that are read on, and those that are forced.
    texts, longeval
        Books, and a file of LongEval's; what Python has where there are none.
    """

    needle_tokens: tuple[int, ...] = (2000, 4000)
    needle_documents: int = 8
    line_records: int = 16
    record_lines: int = 40
    choice_tokens: int = 1500
    choices: int = 16
    summary_tokens: int = 1500
    summaries: int = 6
    summary_most: int = 24
    text_tokens: int = 3000
    text_last: int = 128
    texts: tuple[Path, ...] = ()
    longeval: Path | None = None

    def __post_init__(self) -> None:
        """Refuse records of no lines."""
        if self.record_lines < 1:
            raise SettingsError(f"--record-lines {self.record_lines} must be at least 1")

    def shortened(self, share: float) -> TaskPlan:
        """Return the plan with a share of the questions of each task, at least one.

        Raises
        ------
        SettingsError
            Where the share is none.
        """
        if not 0 < share <= 1:
            raise SettingsError(f"--share {share:g} must be above 0 and at most 1")
        fewer = {
            name: max(1, round(share * getattr(self, name)))
            for name in ("needle_documents", "line_records", "choices", "summaries")
        }
        return replace(self, **fewer)

    def questions(self, tokenizer: Any) -> Iterator[Question]:
        """Yield all questions, one of each kind in turn: wherever a run ends, it has of all.

        Raises
        ------
        PromptError
            Where a text cannot be read or is too short.
        """
        kinds = [
            readings(tokenizer, self.texts, self.text_tokens, self.text_last),
            lines(tokenizer, self._records(), self.record_lines),
            *(needles(tokenizer, one, self.needle_documents) for one in self.needle_tokens),
            continuations(tokenizer, self._books(), self.choice_tokens, self.choices),
            summaries(tokenizer, self.summary_tokens, self.summaries, self.summary_most),
        ]
        for turn in zip_longest(*kinds):
            yield from (one for one in turn if one is not None)

    def _records(self) -> list[str]:
        if self.longeval is None:
            return made_records(self.line_records, 5 * self.record_lines)
        text = read_text(self.longeval, "the records of lines", "--longeval")
        return text.splitlines()[: self.line_records]

    def _books(self) -> list[str]:
        if self.texts:
            return [read_text(one, "the text", "--texts") for one in self.texts]
        from pydoc_data.topics import topics

        return ["\n".join(topics[name] for name in sorted(topics))]
