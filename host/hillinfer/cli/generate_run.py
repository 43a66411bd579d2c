# SPDX-License-Identifier: Apache-2.0
"""One run of `hillinfer generate`, from the prompt to the report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import torch
from rich.console import Console

import hillinfer
from hillinfer.answering import Answering, AnswerOptions, Progress
from hillinfer.byte_size import format_bytes
from hillinfer.cli.comparison import compare_with_ordinary
from hillinfer.cli.console import error_console, setup_warnings_shown
from hillinfer.cli.ending import OutputError
from hillinfer.cli.generate_request import STOCK, Asking, GenerateRequest
from hillinfer.cli.panics import panics_unsaid
from hillinfer.cli.preflight import CheckedRun, check_run
from hillinfer.cli.progress import answering_view, reading_view
from hillinfer.cli.question_source import typed_questions
from hillinfer.cli.report_facts import machine_facts, model_facts, settings_facts, version_facts
from hillinfer.cli.run_record import RunRecord
from hillinfer.cli.session_run import make_prompt, open_cache, save_cache
from hillinfer.generation import Generation
from hillinfer.hf.cache import HillInferCache
from hillinfer.hf.projections.projection_attachment import ProjectionAttachment
from hillinfer.hf.projections.table import make_projections
from hillinfer.machine.memory_peak import peak_rss_bytes, reset_peak_rss
from hillinfer.models.loader import LoadedModel, ModelOutline
from hillinfer.models.model_source import ModelSource, local_model
from hillinfer.native.library import native_library
from hillinfer.output_file import check_apart, check_outside, prepare_report
from hillinfer.prompt import QuestionPrompt
from hillinfer.run_report import Answer, RunReport, SessionFacts
from hillinfer.sessions.saved_session import SavedSession
from hillinfer.sessions.session_writer import prepare_target
from hillinfer.statistics import CacheStatistics


def run(request: GenerateRequest) -> None:
    """Check, load, read, answer and report.

    Raises
    ------
    HillInferError
        Whatever a user can act on, before weights are loaded where it can be known before.
    EndedRunError
        Where reading or answering ended in the middle, after the report was written.
    """
    console = error_console()
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    # Before anything is fetched or read.
    native_library()
    _check_places(request)
    way = make_projections(request.projections)
    with ExitStack() as opened:
        saved = opened.enter_context(SavedSession(request.session)) if request.session else None
        source = ModelSource.locate(request.model, console.print)
        with panics_unsaid():
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
        _generate(request, checked, loaded, prompt, saved, console)


def _check_places(request: GenerateRequest) -> None:
    """Refuse places for files that cannot be written, are another file's, or change an input."""
    settings = request.settings
    outputs = (
        ("--report", request.report, "the report"),
        ("--pool-timeline", settings.pool_timeline, "the pool timeline"),
        ("--trace", settings.trace, "the trace"),
    )
    check_apart(
        (
            ("--prompt-file", request.prompt_file),
            ("--xclbin", settings.xclbin),
            *((option, file) for option, file, _ in outputs),
            ("--save-session", request.save_session),
        )
    )
    check_outside(
        (
            *((option, file) for option, file, _ in outputs),
            ("--save-session", request.save_session),
        ),
        (
            ("--save-session", request.save_session),
            ("--session", request.session),
            ("--model", local_model(request.model)),
        ),
    )
    for option, file, what in outputs:
        if file is not None:
            prepare_report(file, option, what)
    if request.save_session is not None:
        prepare_target(request.save_session)


def _generate(
    request: GenerateRequest,
    checked: CheckedRun,
    loaded: LoadedModel,
    prompt: QuestionPrompt,
    saved: SavedSession | None,
    console: Console,
) -> None:
    """Read, answer, compare and report, whatever ends it."""
    options = _answer_options(request, loaded)
    loading_peak = peak_rss_bytes()
    reset_peak_rss()
    with setup_warnings_shown(), ExitStack() as attached:
        attachment = attached.enter_context(hillinfer.attach(loaded.model, checked.settings))
        cache, session = open_cache(attachment, request, checked, saved, loaded.tokenizer)
        generation = Generation(loaded.model, cache, request.chunk_tokens)
        answering = Answering(generation, loaded.tokenizer, prompt, options)
        blank = _blank_report(request, checked, loaded, session, cache.statistics(), loading_peak)
        record = RunRecord(request, answering, blank, loaded.shape.token_bytes)
        # The outer part keeps what comes between two others: another Ctrl-C.
        with record.part():
            with record.part():
                _read_and_answer(request, checked, prompt, answering, record, cache, console)
            with record.part():
                record.statistics = cache.statistics()
            with record.part():
                generation.close()
            attached.close()
    with record.part():
        generating_peak = peak_rss_bytes()
        record.peak_rss_bytes = max(loading_peak, generating_peak)
        if request.compare is not None and record.goes_on:
            console.print("running the same prompts with the ordinary cache")
            record.comparison = compare_with_ordinary(
                loaded,
                prompt,
                checked.document_ids,
                record.report(),
                options,
                request.chunk_tokens,
                generating_peak,
            )
    record.finish(console)


def _read_and_answer(
    request: GenerateRequest,
    checked: CheckedRun,
    prompt: QuestionPrompt,
    answering: Answering,
    record: RunRecord,
    cache: HillInferCache,
    console: Console,
) -> None:
    """Read the document, save it where that is wanted, and answer."""
    unread = checked.document_ids[checked.reused_tokens :]
    with reading_view(console).stage("prefill", len(unread)) as advance:
        answering.read(unread, advance)
    if record.session is not None and request.save_session is not None:
        record.session = save_cache(
            cache, request, prompt, answering.tokenizer, record.session, console
        )
    if not request.only_saves:
        _answer(request, checked, prompt, answering, console)


def _blank_report(
    request: GenerateRequest,
    checked: CheckedRun,
    loaded: LoadedModel,
    session: SessionFacts | None,
    statistics: CacheStatistics,
    peak_bytes: int,
) -> RunReport:
    """Return the report of a run that did nothing yet; at its end the drive may be gone."""
    return RunReport(
        model=model_facts(loaded, loaded.shape),
        settings=settings_facts(request, checked),
        sampling=request.sampling.as_json(),
        versions=version_facts(),
        machine=machine_facts(checked.settings.cold_dir),
        document_tokens=0,
        document_seconds=0.0,
        answers=(),
        statistics=statistics,
        peak_rss_bytes=peak_bytes,
        session=session,
    )


def _answer(
    request: GenerateRequest,
    checked: CheckedRun,
    prompt: QuestionPrompt,
    answering: Answering,
    console: Console,
) -> None:
    """Answer whatever was asked, the text on standard output; raise what ends it."""
    if request.asking is Asking.INTERACTIVE:
        questions = _fitting(typed_questions(console), checked, prompt, console)
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
            answer_next(advance)
            if not isinstance(answering.broke, OutputError):
                _show_text("\n")
        if answering.broke is not None:
            raise answering.broke


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
