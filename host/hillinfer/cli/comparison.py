# SPDX-License-Identifier: Apache-2.0
"""The same prompts with transformers' ordinary cache, for `--compare full`."""

from __future__ import annotations

from hillinfer.answering import Answering, AnswerOptions
from hillinfer.generation import Generation
from hillinfer.machine.memory_peak import peak_rss_bytes, reset_peak_rss
from hillinfer.models.loader import LoadedModel
from hillinfer.prompt import QuestionPrompt
from hillinfer.run_report import Comparison, RunReport, decode_rate


def compare_with_ordinary(
    loaded: LoadedModel,
    prompt: QuestionPrompt,
    document_ids: list[int],
    report: RunReport,
    options: AnswerOptions,
    chunk_tokens: int,
    hillinfer_peak_rss_bytes: int,
) -> Comparison:
    """Answer everything again with `DynamicCache`, in the same chunks, on the detached model.

    Parameters
    ----------
    loaded, prompt, document_ids, options, chunk_tokens
        As in the run.
    report
        Of the run with HillInfer.
    hillinfer_peak_rss_bytes
        Peak of the process while that run generated.
    """
    from transformers import DynamicCache

    reset_peak_rss()
    cache = DynamicCache(config=loaded.config)
    answering = Answering(
        Generation(loaded.model, cache, chunk_tokens), loaded.tokenizer, prompt, options
    )
    seconds = answering.read(document_ids)
    *others, last = report.answers
    answers = (
        *(answering.ask(str(answer.question), _unshown) for answer in others),
        answering.go_on(_unshown)
        if last.question is None
        else answering.ask_last(last.question, _unshown),
    )
    if answering.broke is not None:
        raise answering.broke
    longest = len(document_ids) + max(
        (answer.question_tokens + answer.decode_steps for answer in answers), default=0
    )
    shape = loaded.shape
    states = 2 * shape.layers * shape.kv_heads * shape.head_dim * loaded.model.dtype.itemsize
    pairs = list(zip(report.answers, answers, strict=True))
    return Comparison(
        prefill_seconds=seconds + sum(answer.question_seconds for answer in answers),
        decode_tokens_per_second=decode_rate(answers),
        kv_bytes=longest * states,
        peak_rss_bytes=peak_rss_bytes(),
        hillinfer_peak_rss_bytes=hillinfer_peak_rss_bytes,
        texts=tuple(answer.text for answer in answers),
        equal_tokens=tuple(_agreeing(ours.token_ids, theirs.token_ids) for ours, theirs in pairs),
        equal_answers=sum(ours.token_ids == theirs.token_ids for ours, theirs in pairs),
    )


def _unshown(piece: str) -> None:
    """Keep the text for the report only."""


def _agreeing(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    for count, (own, other) in enumerate(zip(ours, theirs, strict=False)):
        if own != other:
            return count
    return min(len(ours), len(theirs))
