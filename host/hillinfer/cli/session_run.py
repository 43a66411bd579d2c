# SPDX-License-Identifier: Apache-2.0
"""What `hillinfer generate` does with sessions: use one, save one."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from rich.console import Console

from hillinfer.byte_size import format_bytes
from hillinfer.cli.generate_request import GenerateRequest
from hillinfer.cli.preflight import CheckedRun
from hillinfer.errors import HillInferError
from hillinfer.hf.attach import Attachment
from hillinfer.hf.cache import HillInferCache
from hillinfer.option_names import without_python_names
from hillinfer.prompt import DocumentPrompt, PromptForm, PromptStyle, QuestionPrompt
from hillinfer.run_report import SessionFacts
from hillinfer.sessions.errors import SessionError
from hillinfer.sessions.saved_session import SavedSession


def make_prompt(
    request: GenerateRequest, tokenizer: Any, saved: SavedSession | None
) -> QuestionPrompt:
    """Return the prompt of the document, or that of questions about a session's.

    Raises
    ------
    SessionError
        Where the session's document was made a prompt in another style, or nobody knows how.
    PromptError
        As `DocumentPrompt` says.
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
            f"the session {saved.directory} was saved from Python and does not say how its "
            "document became a prompt: go on with load_session in Python, or give the document "
            "too, --prompt-file"
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

    Raises
    ------
    SessionError
        Where the session was saved with other weights.
    HillInferError
        As `Attachment.new_cache` says.
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
