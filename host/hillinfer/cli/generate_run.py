# SPDX-License-Identifier: Apache-2.0
"""One run of `hillinfer generate`, from the prompt to the report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
import typer
from rich.console import Console

import hillinfer
from hillinfer.answering import Answering, AnswerOptions, Progress
from hillinfer.byte_size import format_bytes
from hillinfer.cli.comparison import compare_with_ordinary
from hillinfer.cli.console import error_console, setup_warnings_shown
from hillinfer.cli.generate_request import STOCK, Asking, GenerateRequest
from hillinfer.cli.preflight import CheckedRun, check_run
from hillinfer.cli.progress import answering_view, reading_view
from hillinfer.cli.report_facts import machine_facts, model_facts, settings_facts, version_facts
from hillinfer.cli.report_view import show_report
from hillinfer.cli.session_run import make_prompt, open_cache, save_cache
from hillinfer.errors import BrokenRunError, HillInferError
from hillinfer.generation import Generation
from hillinfer.hf.projections.projection_attachment import ProjectionAttachment
from hillinfer.hf.projections.table import make_projections
from hillinfer.machine.memory_peak import peak_rss_bytes, reset_peak_rss
from hillinfer.models.loader import LoadedModel, ModelOutline
from hillinfer.models.model_source import ModelSource
from hillinfer.prompt import QuestionPrompt
from hillinfer.run_report import Answer, Finish, ReportError, RunReport, prepare_report
from hillinfer.sessions.saved_session import SavedSession
from hillinfer.sessions.session_writer import prepare_target
from hillinfer.statistics import CacheStatistics

EXIT_INTERRUPTED = 130
_END_WORDS = frozenset({"exit", "quit"})


def run(request: GenerateRequest) -> None:
    """Check, load, read, answer and report.

    Raises
    ------
    BrokenRunError
        Where reading or answering failed in the middle, after the report was written.
    HillInferError
        Whatever a user can act on, before weights are loaded where it can be known before.
    """
    console = error_console()
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    if request.report is not None:
        prepare_report(request.report, "--report")
    if request.settings.pool_timeline is not None:
        prepare_report(request.settings.pool_timeline, "--pool-timeline")
    if request.settings.trace is not None:
        prepare_report(request.settings.trace, "--trace")
    if request.save_session is not None:
        prepare_target(request.save_session)
    way = make_projections(request.projections)
    with ExitStack() as opened:
        saved = opened.enter_context(SavedSession(request.session)) if request.session else None
        source = ModelSource.locate(request.model, console.print)
        outline = ModelOutline.read(source, request.number_type)
        prompt = make_prompt(request, outline.tokenizer, saved)
        checked = check_run(request, outline, prompt, saved, console.print)
        loaded = outline.load()
        # Never taken off: a comparison runs with the same ones.
        projections = ProjectionAttachment(loaded.model, way)
        if request.projections != STOCK:
            console.print(
                f"projections: {request.projections}, {format_bytes(projections.held_bytes)} of "
                "packed weights more than the model's own"
            )
        options = _answer_options(request, loaded)
        with setup_warnings_shown():
            report, generating_peak = _answer_all(
                request, checked, loaded, prompt, saved, options, console
            )
    ended_early = report.finish in (Finish.INTERRUPTED, Finish.FAILED)
    if request.compare is not None and not ended_early:
        console.print("running the same prompts with the ordinary cache")
        comparison = compare_with_ordinary(
            loaded,
            prompt,
            checked.document_ids,
            report,
            options,
            request.chunk_tokens,
            generating_peak,
        )
        report = replace(report, comparison=comparison)
    show_report(report, console)
    try:
        if request.report is not None:
            report.write(request.report)
            console.print(f"report: {request.report}")
    except ReportError as error:
        if report.error is None:
            raise
        raise BrokenRunError(f"{report.error}; and then: {error}") from error
    if report.error is not None:
        raise BrokenRunError(report.error)
    if report.session is not None and report.session.save_error is not None:
        raise BrokenRunError(report.session.save_error)
    if report.finish is Finish.INTERRUPTED:
        raise typer.Exit(EXIT_INTERRUPTED)


def _answer_all(
    request: GenerateRequest,
    checked: CheckedRun,
    loaded: LoadedModel,
    prompt: QuestionPrompt,
    saved: SavedSession | None,
    options: AnswerOptions,
    console: Console,
) -> tuple[RunReport, int]:
    """Return the report and the peak of resident memory after loading."""
    loading_peak = peak_rss_bytes()
    reset_peak_rss()
    with hillinfer.attach(loaded.model, checked.settings) as attachment:
        cache, session = open_cache(attachment, request, checked, saved, loaded.tokenizer)
        generation = Generation(loaded.model, cache, request.chunk_tokens)
        try:
            answering = Answering(generation, loaded.tokenizer, prompt, options)
            answers: tuple[Answer, ...] = ()
            document_error: str | None = None
            try:
                unread = checked.document_ids[checked.reused_tokens :]
                with reading_view(console).stage("prefill", len(unread)) as advance:
                    answering.read(unread, advance)
            except HillInferError as error:
                document_error = str(error)
            else:
                if session is not None and request.save_session is not None:
                    session = save_cache(cache, request, prompt, loaded.tokenizer, session, console)
                if not request.only_saves:
                    answers = tuple(_answers(request, checked, prompt, answering, console))
            statistics: CacheStatistics = cache.statistics()
        finally:
            generation.close()
    generating_peak = peak_rss_bytes()
    read = checked.reused_tokens + answering.document_tokens
    contexts = [read + answer.question_tokens + answer.decode_steps for answer in answers]
    longest = max(contexts, default=read)
    shape = loaded.shape
    report = RunReport(
        model=model_facts(loaded, shape),
        settings=settings_facts(request, checked),
        sampling=request.sampling.as_json(),
        versions=version_facts(),
        machine=machine_facts(checked.settings.cold_dir),
        document_tokens=read,
        document_seconds=answering.document_seconds,
        answers=answers,
        # Forks are closed by now, so the cache no longer holds the longest context.
        statistics=replace(statistics, kv_bytes=longest * shape.token_bytes),
        peak_rss_bytes=max(loading_peak, generating_peak),
        document_error=document_error,
        session=session,
    )
    return report, generating_peak


def _answers(
    request: GenerateRequest,
    checked: CheckedRun,
    prompt: QuestionPrompt,
    answering: Answering,
    console: Console,
) -> Iterator[Answer]:
    """Answer whatever was asked, the text on standard output, until an interrupt or an error."""
    if request.asking is Asking.INTERACTIVE:
        questions = _fitting(_typed_questions(console), checked, prompt, console)
        asked: Iterator[Callable[[Progress], Answer]] = (
            partial(answering.ask, question, _show_text) for question in questions
        )
    elif request.questions:
        *others, last = request.questions
        asked = iter(
            [
                *(partial(answering.ask, question, _show_text) for question in others),
                partial(answering.ask_last, last, _show_text),
            ]
        )
    else:
        asked = iter([partial(answering.go_on, _show_text)])
    for number, answer_next in enumerate(asked):
        if len(request.questions) > 1:
            console.print(f"question: {request.questions[number]}")
        with answering_view(console).stage("decode", request.max_new_tokens) as advance:
            answer = answer_next(advance)
            _show_text("\n")
        yield answer
        if answer.finish in (Finish.INTERRUPTED, Finish.FAILED):
            return


def _fitting(
    questions: Iterator[str], checked: CheckedRun, prompt: QuestionPrompt, console: Console
) -> Iterator[str]:
    """Pass on the questions there is room for, and say which there is not."""
    for question in questions:
        count = len(prompt.question_ids(question))
        if count <= checked.question_tokens:
            yield question
        else:
            console.print(
                f"hillinfer: this question has {count} tokens and there is room for "
                f"{checked.question_tokens}: ask a shorter one"
            )


def _typed_questions(console: Console) -> Iterator[str]:
    """Yield a line each from standard input, until its end or one of the words for it."""
    while True:
        if sys.stdin.isatty():
            console.print("question (empty line to end): ", end="")
        line = sys.stdin.readline().strip()
        if not line or line in _END_WORDS:
            return
        yield line


def _show_text(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _answer_options(request: GenerateRequest, loaded: LoadedModel) -> AnswerOptions:
    return AnswerOptions(
        sampling=request.sampling,
        max_new_tokens=request.max_new_tokens,
        stop_ids=loaded.stop_ids,
        question_reading=request.question_reading,
    )
