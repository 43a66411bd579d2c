# SPDX-License-Identifier: Apache-2.0
"""Accuracy of every way to attend, question by question, and its table."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from hillinfer_bench.study.tasks import Question, Scores
from hillinfer_bench.study.ways import StudyWay

Answers = dict[str, dict[str, Any]]
"""By a question's name: its task and group, processor seconds, and the scores of each way."""


def answer_questions(
    model: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    ways: Sequence[StudyWay],
    known: Answers,
    minutes: float,
    keep: Callable[[Answers], None],
    say: Callable[[str], None],
) -> Answers:
    """Ask what is not known yet of any way, and keep what is known after every question.

    Parameters
    ----------
    model, tokenizer
        Of transformers, unmodified.
    questions
        In their order.
    ways
        The full cache first.
    known
        Answers of an earlier run.
    minutes
        After so much time no further question is begun.
    keep
        Takes all answers so far.
    say
        Takes a line of progress.

    Returns
    -------
    The answers to these questions, and what was known before.
    """
    answers = dict(known)
    began = time.monotonic()
    for number, question in enumerate(questions, 1):
        before = answers.get(question.name, {"cpu_seconds": 0.0, "scores": {}})
        left = [way for way in ways if way.title not in before["scores"]]
        if not left:
            continue
        if time.monotonic() - began > 60 * minutes:
            unasked = sum(not _is_known(answers, one, ways) for one in questions)
            say(f"{minutes:g} minutes are over: {unasked} of {len(questions)} are left")
            break
        # Others are compared with the full cache, so it answers along.
        asked = left if ways[0] in left else [ways[0], *left]
        seconds = time.process_time()
        scores = question.scores(model, tokenizer, asked)
        seconds = time.process_time() - seconds
        found = before["scores"] | {
            way.title: one for way, one in zip(asked, scores, strict=True) if way in left
        }
        answers[question.name] = {
            "task": question.task,
            "group": question.group,
            "cpu_seconds": before["cpu_seconds"] + seconds,
            "scores": found,
        }
        keep(answers)
        say(f"{number} of {len(questions)}: {question.name}, {seconds:.1f} s of a processor")
    return answers


def _is_known(answers: Answers, question: Question, ways: Sequence[StudyWay]) -> bool:
    told = answers.get(question.name, {"scores": {}})["scores"]
    return all(way.title in told for way in ways)


@dataclass(frozen=True)
class Cell:
    """One way in one group of a task.

    Parameters
    ----------
    questions
        How many were answered.
    means
        Of each score.
    """

    questions: int
    means: Scores

    @classmethod
    def of(cls, scores: Sequence[Mapping[str, float]]) -> Cell:
        """Return the means of some scores, at least one."""
        return cls(len(scores), {name: fmean(one[name] for one in scores) for name in scores[0]})


def cells(answers: Answers, by: Callable[[Mapping[str, Any]], str]) -> dict[str, dict[str, Cell]]:
    """Return the cells of each column, by the title of the way.

    Parameters
    ----------
    answers
        Of any questions.
    by
        Says from an answer to which column it belongs; empty for none.
    """
    columns: dict[str, dict[str, list[Scores]]] = {}
    for told in answers.values():
        column = by(told)
        if column:
            for title, one in told["scores"].items():
                columns.setdefault(column, {}).setdefault(title, []).append(one)
    return {
        column: {title: Cell.of(scores) for title, scores in rows.items()}
        for column, rows in columns.items()
    }


def by_length(told: Mapping[str, Any]) -> str:
    """Put needles of all depths together."""
    group = str(told["group"])
    return f"{told['task']}, {group.partition(',')[0]}"


def by_depth(told: Mapping[str, Any]) -> str:
    """Have needles alone, by their length and the third that they lie in."""
    return f"needle, {told['group']}" if told["task"] == "needle" else ""


_COLUMNS: Mapping[str, Callable[[Scores], str]] = {
    "text": lambda one: f"{math.exp(one['nll']):.2f}, {one['kl']:.4f}, {one['agreement']:.3f}",
    "lines": lambda one: f"{one['right']:.2f}, {one['nll']:.2f}",
    "needle": lambda one: f"{one['right']:.2f}, {one['nll']:.2f}",
    "choice": lambda one: f"{one['right']:.2f}, {one['nll']:.2f}",
    "summary": lambda one: f"{one['rouge']:.3f}, {one['rouge_to_full']:.2f}",
}
TOLD = {
    "text": "perplexity, KL, agreement",
    "lines": "right, NLL of a digit",
    "needle": "right, NLL of a digit",
    "choice": "right, NLL of a token",
    "summary": "ROUGE-L, to the full cache's own",
}


def accuracy_table(
    answers: Answers, ways: Sequence[StudyWay], by: Callable[[Mapping[str, Any]], str] = by_length
) -> str:
    """Return a table as Markdown: a row for each way, a column for each group.

    Parameters
    ----------
    answers
        Of `answer_questions`.
    ways
        In the order of the rows.
    by
        As of `cells`.
    """
    found = cells(answers, by)
    columns = sorted(found, key=lambda name: (list(TOLD).index(_task(name)), len(name), name))
    heads = [f"{one} (n = {_count(found[one])}): {TOLD[_task(one)]}" for one in columns]
    lines = [
        "| " + " | ".join(["way", "rows", "ranking", *heads]) + " |",
        "|---|---:|---:|" + "---|" * len(heads),
    ]
    for way in ways:
        told = [
            _COLUMNS[_task(one)](found[one][way.title].means) if way.title in found[one] else ""
            for one in columns
        ]
        bytes_read = [f"{way.rows:.1%}", f"{way.ranking:.1%}"]
        lines.append("| " + " | ".join([way.title, *bytes_read, *told]) + " |")
    return "\n".join(lines)


def _task(column: str) -> str:
    return column.partition(",")[0]


def _count(rows: Mapping[str, Cell]) -> int:
    return max(one.questions for one in rows.values())
