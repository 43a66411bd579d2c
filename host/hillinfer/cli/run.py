# SPDX-License-Identifier: Apache-2.0
"""One run of `hillinfer generate`, from the prompt to the report."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console

from hillinfer.cli.console import (
    ShownProgress,
    error_console,
    panics_unsaid,
    setup_warnings_shown,
    show_text,
)
from hillinfer.cli.ending import OutputError
from hillinfer.cli.generate import PLAIN, Asking, GenerateRequest
from hillinfer.cli.preflight import CheckedRun, Surroundings, check_run
from hillinfer.cli.prune import Completing, complete_document
from hillinfer.cli.questions import fitting, typed_questions, worked_between
from hillinfer.cli.report import (
    RunRecord,
    machine_facts,
    model_facts,
    settings_facts,
    version_facts,
)
from hillinfer.cli.store import opened_store
from hillinfer.engine.runtime import Runtime
from hillinfer.errors import HillInferError, SessionError, SetupWarning, without_python_names
from hillinfer.generate.answering import Answering, AnswerOptions, Generation
from hillinfer.generate.prompt import DocumentPrompt, PromptForm, PromptStyle, QuestionPrompt
from hillinfer.generate.run_report import (
    Answer,
    Comparison,
    RunReport,
    SessionFacts,
    StoreFacts,
    decode_rate,
)
from hillinfer.generate.stages import AnswerProgress
from hillinfer.hf.attach import Attachment
from hillinfer.hf.cache import HillInferCache
from hillinfer.models.loader import LoadedModel, ModelOutline
from hillinfer.models.needs import ordinary_token_bytes
from hillinfer.models.sources import local_model
from hillinfer.projections.attachment import ProjectionAttachment
from hillinfer.projections.ways import make_projections
from hillinfer.reuse.model_prompts import ModelPrompts
from hillinfer.secrecy.cold_pages import with_store
from hillinfer.sessions.opening import SavedSession
from hillinfer.sessions.writing import prepare_target
from hillinfer.settings import Settings
from hillinfer.store.store import Store
from hillinfer.system.files import check_apart, check_outside, prepare_report
from hillinfer.system.machine import peak_rss_bytes, reset_peak_rss
from hillinfer.values import format_bytes

# --- The ordinary cache, for `--compare full` ---


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

    Parameters are as in the run; `report` is that of the run with HillInfer, and
    `hillinfer_peak_rss_bytes` the peak of the process while it generated.
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
        answering.ask_last(last.question, _unshown),
    )
    if answering.broke is not None:
        raise answering.broke
    longest = len(document_ids) + max(
        (answer.question_tokens + answer.decode_steps for answer in answers), default=0
    )
    pairs = list(zip(report.answers, answers, strict=True))
    return Comparison(
        prefill_seconds=seconds + sum(answer.question_seconds for answer in answers),
        decode_tokens_per_second=decode_rate(answers),
        kv_bytes=longest * ordinary_token_bytes(loaded.shape, loaded.model.dtype.itemsize),
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


# --- Sessions ---


def make_prompt(
    request: GenerateRequest, tokenizer: Any, saved: SavedSession | None
) -> QuestionPrompt:
    """Return the prompt of the document, or that of questions about a session's.

    Raises SessionError where the session's document was made a prompt in another style, or nobody
    knows how, and PromptError as `DocumentPrompt` says.
    """
    form = saved.manifest.prompt_form if saved else None
    style = request.prompt_style
    if request.document is not None:
        plain = style is PromptStyle.AUTO and form is PromptForm.PLAIN
        return DocumentPrompt(
            tokenizer,
            request.document,
            PromptStyle.PLAIN if plain else style,
            request.special_tokens,
        )
    assert saved is not None
    if form is None:
        raise SessionError(
            f"the session {saved.directory} was saved from Python, or is an export of a store, and "
            "does not say how its document became a prompt: go on with load_session in Python, or "
            "give the document too, --prompt-file"
        )
    if style is PromptStyle.PLAIN and form is PromptForm.CHAT:
        raise SessionError(
            f"the session {saved.directory} does not fit: prompt style is {form} in the session "
            f"and {style} here; leave --prompt-style out"
        )
    return QuestionPrompt(tokenizer, form, request.special_tokens)


def open_cache(
    attachment: Attachment,
    request: GenerateRequest,
    checked: CheckedRun,
    saved: SavedSession | None,
    tokenizer: Any,
) -> tuple[HillInferCache, SessionFacts | None]:
    """Return the cache to read into, with what a session brings, and what there is to report.

    Raises SessionError where the session was saved with other weights, and as
    `Attachment.new_cache` says.
    """
    started = time.perf_counter()
    if saved is not None and checked.reused_tokens:
        cache = attachment.resume(saved, checked.reused_tokens, checked.context_tokens, tokenizer)
    else:
        cache = attachment.new_cache(expected_tokens=checked.context_tokens)
    if request.session is None and request.save_session is None:
        return cache, None
    return cache, SessionFacts(
        path=str(request.session) if request.session else None,
        reused_tokens=checked.reused_tokens,
        open_seconds=checked.session_seconds + time.perf_counter() - started if saved else 0.0,
        saved_path=str(request.save_session) if request.save_session else None,
    )


def save_cache(
    cache: HillInferCache,
    request: GenerateRequest,
    prompt: QuestionPrompt,
    tokenizer: Any,
    facts: SessionFacts,
    console: Console,
) -> SessionFacts:
    """Save what was read and return what there is to report, an error too: answers still come."""
    assert request.save_session is not None
    started = time.perf_counter()
    try:
        saved = cache.save_session(
            request.save_session, tokenizer, request.chunk_tokens, prompt.form
        )
    except HillInferError as error:
        console.print(f"hillinfer: warning: {without_python_names(str(error))}")
        return replace(facts, save_seconds=time.perf_counter() - started, save_error=str(error))
    facts = replace(
        facts,
        saved_bytes=saved.byte_count,
        copied_row_bytes=saved.copied_row_bytes,
        save_seconds=time.perf_counter() - started,
    )
    console.print(
        f"session saved: {request.save_session} ({cache.get_seq_length()} tokens, "
        f"{format_bytes(saved.byte_count)}, {facts.save_seconds:.1f} s)"
    )
    return facts


# --- One run ---


def run(request: GenerateRequest, surroundings: Surroundings | None = None) -> RunReport:
    """Check, load, read, answer and report; return the report.

    `surroundings` are what the run reaches outside of itself, this machine's where None. Raises
    HillInferError for whatever a user can act on, before weights are loaded where it can be known
    before, and EndedRunError where reading or answering ended in the middle, after the report was
    written.
    """
    console, around = error_console(), surroundings or Surroundings()
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    _check_places(request)
    way = make_projections(request.projections)
    with ExitStack() as opened:
        saved = (
            opened.enter_context(SavedSession(request.session, around.calls))
            if request.session
            else None
        )
        store, unused = opened_store(request.store, around.calls, console)
        if store is not None:
            opened.enter_context(store)
            with warnings.catch_warnings():
                # The attachment says it, where warnings are shown.
                warnings.simplefilter("ignore", SetupWarning)
                own = with_store(request.settings, store.places.cipher)
            request = replace(request, settings=own)
        source = around.locate(request.model, console.print)
        with panics_unsaid():
            outline = ModelOutline.read(source, request.number_type)
            prompt = make_prompt(request, outline.tokenizer, saved)
        checked = check_run(request, outline, prompt, saved, console.print, around)
        loaded = outline.load()
        # Never taken off: a comparison runs with the same packed ones.
        projections = ProjectionAttachment(loaded.model, way)
        if request.projections not in PLAIN:
            console.print(
                f"projections: {request.projections}, {format_bytes(projections.held_bytes)} of "
                "packed weights more than the model's own"
            )
        steps = projections.steps
        return _generate(
            request, checked, loaded, steps, prompt, saved, store, unused, console, around
        )


def _prompts(
    request: GenerateRequest, settings: Settings, loaded: LoadedModel, store: Store | None
) -> ModelPrompts | None:
    """Return the store that the request names, as the model uses it."""
    use = request.store
    if use is None or store is None:
        return None
    made_by = {} if request.projections in PLAIN else {"projections": request.projections}
    rounding = {"block_rows": settings.block_rows}
    return ModelPrompts(
        *(store, loaded.model, use.reuse, use.salt, made_by, rounding), accept=use.accept
    )


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
    steps: AbstractContextManager[object],
    prompt: QuestionPrompt,
    saved: SavedSession | None,
    store: Store | None,
    unused: StoreFacts | None,
    console: Console,
    around: Surroundings,
) -> RunReport:
    """Read, answer, compare and report, whatever ends it."""
    options = AnswerOptions(
        sampling=request.sampling,
        max_new_tokens=request.max_new_tokens,
        stop_ids=loaded.stop_ids,
        question_reading=request.question_reading,
    )
    loading_peak = peak_rss_bytes()
    reset_peak_rss()
    with setup_warnings_shown(), ExitStack() as attached:
        attachment = attached.enter_context(
            Attachment(
                loaded.model,
                checked.settings,
                around.calls,
                open_runtime=partial(Runtime, devices=around.devices),
                prompts=_prompts(request, checked.settings, loaded, store),
            )
        )
        cache, session = open_cache(attachment, request, checked, saved, loaded.tokenizer)
        generation = Generation(loaded.model, cache, request.chunk_tokens, steps)
        stages = None
        if request.prune is not None:
            stages = request.prune.begin(loaded.model, request.chunk_tokens, console.print)
        if stages is not None:
            attached.enter_context(stages)
        answering = Answering(generation, loaded.tokenizer, prompt, options, stages)
        # Of a run that did nothing yet; at its end the drive may be gone.
        blank = RunReport(
            model=model_facts(loaded, loaded.shape),
            settings=settings_facts(request, checked),
            sampling=request.sampling.as_json(),
            versions=version_facts(),
            machine=machine_facts(checked.settings.cold_dir),
            document_tokens=0,
            document_seconds=0.0,
            answers=(),
            statistics=cache.statistics(),
            peak_rss_bytes=loading_peak,
            session=session,
            store=unused,
        )
        record = RunRecord(request, answering, blank, loaded.shape.token_bytes)
        # The outer part keeps what comes between two others: another Ctrl-C.
        with record.part():
            with record.part():
                _read_and_answer(request, checked, prompt, answering, record, cache, console)
            with record.part():
                # Where failures of the store are none of a miss, here they come out.
                cache.await_stored()
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
    return record.report()


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
    with ShownProgress(console, reads=len(unread)) as shown:
        answering.read(unread, shown, int(request.asks))
    if answering.waiting is not None:
        console.print(f"layers from {answering.waiting[0]} on read it with each question")
    if request.completes:
        # Whoever waits for an answer has it before the rest is read; what ends it costs no rest.
        with record.part():
            if not request.only_reads:
                _answer(request, checked, prompt, answering, console)
        if not record.goes_on:
            console.print("the rest of the document is read, to be kept; another interrupt ends it")
        complete_document(answering, console)
    if record.session is not None and request.save_session is not None:
        record.session = save_cache(
            cache, request, prompt, answering.tokenizer, record.session, console
        )
    if not request.completes and not request.only_reads:
        _answer(request, checked, prompt, answering, console)


def _answer(
    request: GenerateRequest,
    checked: CheckedRun,
    prompt: QuestionPrompt,
    answering: Answering,
    console: Console,
) -> None:
    """Answer whatever was asked, the text on standard output; raise what ends it."""
    if request.asking is Asking.INTERACTIVE:
        typed = typed_questions(console)
        if request.prune is not None:
            typed = worked_between(typed, Completing(answering, console))
        questions = fitting(
            typed, lambda one: len(prompt.question_ids(one)), checked.question_tokens, console
        )
        asked: Iterator[Callable[[AnswerProgress], Answer]] = (
            partial(answering.ask, question, show_text) for question in questions
        )
    else:
        *others, last = request.questions or (None,)
        each = [partial(answering.ask, one, show_text) for one in others]
        # On the document's own cache, where nothing else needs it any more.
        ask_last = answering.ask if request.completes else answering.ask_last
        each.append(partial(ask_last, last, show_text))
        asked = iter(each)
    for number, answer_next in enumerate(asked):
        if len(request.questions) > 1:
            console.print(f"question: {request.questions[number]}")
        with ShownProgress(console, decodes=request.max_new_tokens) as shown:
            answer_next(shown)
            if not isinstance(answering.broke, OutputError):
                show_text("\n")
        if answering.broke is not None:
            raise answering.broke
