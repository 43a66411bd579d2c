# SPDX-License-Identifier: Apache-2.0
"""What a run did and took, as one frozen record that becomes `run.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hillinfer.errors import Failure, Finish, SessionError
from hillinfer.statistics import CacheStatistics, Counters
from hillinfer.store_rules import Maker
from hillinfer.system.files import cannot_write, write_whole


@dataclass(frozen=True)
class Answer:
    """One answer.

    Parameters
    ----------
    question
        None where the document itself was the prompt.
    text, token_ids
        What was generated, the stop token included in the ids.
    question_tokens
        Tokens read after the document.
    question_seconds, decode_seconds
        Time for reading them, and for the forward passes of all new tokens but the first, which
        comes out of reading.
    finish
        Why it ended.
    decode_counts
        What the cache counted in those forward passes, by the names of `Counters`; empty for a
        cache that does not count.
    error
        What failed in the middle, None where nothing did.
    pruned
        What deeper layers did not see of the prompt, None where they saw all of it; by the names of
        `pruning.passes.PrunedRead`.
    """

    question: str | None
    text: str
    token_ids: tuple[int, ...]
    question_tokens: int
    question_seconds: float
    decode_seconds: float
    finish: Finish
    decode_counts: Mapping[str, float]
    error: str | None = None
    pruned: Mapping[str, Any] | None = None

    @property
    def decode_steps(self) -> int:
        """Forward passes of a single new token."""
        return max(0, len(self.token_ids) - 1)


@dataclass(frozen=True)
class Comparison:
    """The same prompts with transformers' ordinary cache, HillInfer taken off.

    Parameters
    ----------
    prefill_seconds, decode_tokens_per_second
        As in `RunReport`.
    kv_bytes
        Bytes of the ordinary cache at its largest, all in memory.
    peak_rss_bytes
        Peak of the process while it ran; what HillInfer's part left allocated counts too.
    hillinfer_peak_rss_bytes
        The same for HillInfer's part, model loaded before.
    texts
        Its answers.
    equal_tokens
        Per answer, how many tokens agree before the first that differs.
    equal_answers
        Answers that agree in every token.
    """

    prefill_seconds: float
    decode_tokens_per_second: float
    kv_bytes: int
    peak_rss_bytes: int
    hillinfer_peak_rss_bytes: int
    texts: tuple[str, ...]
    equal_tokens: tuple[int, ...]
    equal_answers: int


@dataclass(frozen=True)
class SessionFacts:
    """What a run had to do with sessions.

    Parameters
    ----------
    path
        Of the session used; None without one.
    reused_tokens
        Tokens of the document that were not read again.
    open_seconds
        Time to check that session, weights included, and to take it over.
    saved_path
        Of the session saved; None without one.
    saved_bytes, copied_row_bytes, save_seconds
        Size of its files, how much of that are rows written again, and the time that took.
    save_error
        Why it was not saved, None where it was or none was wanted.
    """

    path: str | None
    reused_tokens: int
    open_seconds: float
    saved_path: str | None
    saved_bytes: int = 0
    copied_row_bytes: int = 0
    save_seconds: float = 0.0
    save_error: str | None = None


@dataclass(frozen=True)
class PassWay:
    """How tokens behind a stored prefix were read, and why.

    `before` were in the cache before them. The way is `streamed`, all of them at once while the
    rows before them stream by, `opened in place`, token by token, or `one set`, all at once behind
    one selected set per layer; the reason is for people. Seconds are what each way was expected to
    take, None where nobody knew, or it was not asked about.
    """

    tokens: int
    before: int
    way: str
    reason: str
    streamed_seconds: float | None = None
    in_place_seconds: float | None = None
    one_set_seconds: float | None = None

    @property
    def is_read_singly(self) -> bool:
        """Whether the tokens are read one by one."""
        return self.way == "opened in place"

    @property
    def is_read_by_one_set(self) -> bool:
        """Whether they attend to one selected set per layer."""
        return self.way == "one set"


@dataclass(frozen=True)
class StoreFacts:
    """What a store brought for one prompt.

    Parameters
    ----------
    prompt_tokens, found_tokens
        Of the prompt, and how many of them came from the store.
    stored_tokens
        How many more can be found from now on.
    find_seconds, read_seconds, store_seconds
        Looking up, reading rows into the cache, and storing.
    read_bytes
        Bytes of rows that were read.
    failure
        What went wrong and became a miss; empty where nothing did.
    way
        How what follows the found tokens was read, as in `PassWay`; empty where none were found.
    passes
        Why so, and how questions behind it were read, in order.
    refused_chunks
        Chunks that were not stored because they were not admitted, or enough was written that day.
    directory
        Of the store.
    made_by
        Who made the found rows, like `hillinfer` or `vllm`; empty where none were found.
    not_accepted
        Why rows that another engine may have are not taken; empty where they are, or not asked for.
    """

    prompt_tokens: int
    found_tokens: int = 0
    stored_tokens: int = 0
    find_seconds: float = 0.0
    read_seconds: float = 0.0
    store_seconds: float = 0.0
    read_bytes: int = 0
    failure: str = ""
    way: str = ""
    refused_chunks: int = 0
    directory: str = ""
    passes: tuple[PassWay, ...] = ()
    made_by: str = ""
    not_accepted: str = ""

    @property
    def is_of_another(self) -> bool:
        """Whether found rows were made by another engine: what goes on from them is not stored."""
        return self.made_by not in ("", Maker.HILLINFER)

    @property
    def is_read_singly(self) -> bool:
        """Whether what follows the found tokens is read token by token."""
        return bool(self.passes) and self.passes[0].is_read_singly


def check_session(told: StoreFacts | None, directory: str | Path) -> None:
    """Refuse to save a session of rows that another engine made, which it could not say.

    `told` is what a store did for the session's prompt, None where none is named. Raises
    SessionError where another engine made them.
    """
    if told is not None and told.is_of_another:
        raise SessionError(
            f"cannot save the session {directory}: {told.made_by} made rows of its prompt, which "
            "a session does not say: read the prompt without accept (--store-accept)"
        )


@dataclass(frozen=True)
class RunReport:
    """One run of `hillinfer generate`.

    Parameters
    ----------
    model
        Name, type and shape of the model.
    settings, sampling
        As chosen, the DRAM budget in bytes.
    versions, machine
        What it ran on.
    document_tokens, document_seconds
        Tokens read once and the time that took.
    answers
        In the order asked.
    statistics
        Of the whole run.
    peak_rss_bytes
        Peak resident memory of the process, loading included, a comparison excluded.
    comparison
        None where none was asked for.
    failure
        What ended the run before its end, None where nothing did.
    session
        None where no session was used or saved.
    store
        None where no store was named, or the document was not read.
    completion
        Of a document that was read in stages and then whole while nobody waited: its tokens, how
        many of them every layer has, and the time that took; None where nobody began.
    """

    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    sampling: Mapping[str, Any]
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    document_tokens: int
    document_seconds: float
    answers: tuple[Answer, ...]
    statistics: CacheStatistics
    peak_rss_bytes: int
    comparison: Comparison | None = None
    failure: Failure | None = None
    session: SessionFacts | None = None
    store: StoreFacts | None = None
    completion: Mapping[str, Any] | None = None

    @property
    def error(self) -> str | None:
        """What failed in the middle, None where nothing did or a signal ended the run."""
        if self.failure is not None:
            return self.failure.message if self.failure.finish is Finish.FAILED else None
        return self.answers[-1].error if self.answers else None

    @property
    def finish(self) -> Finish | None:
        """Why the run ended: as its last answer did; None where nothing was asked."""
        if self.failure is not None:
            return self.failure.finish
        if self.error is not None:
            return Finish.FAILED
        return self.answers[-1].finish if self.answers else None

    @property
    def prompt_tokens(self) -> int:
        """Tokens read: the document once, and every question."""
        return self.document_tokens + sum(answer.question_tokens for answer in self.answers)

    @property
    def new_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def prefill_seconds(self) -> float:
        """Time for reading `prompt_tokens`."""
        return self.document_seconds + sum(answer.question_seconds for answer in self.answers)

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens over that time, those left out that a session or a store brought."""
        reused = self.session.reused_tokens if self.session else 0
        reused += self.store.found_tokens if self.store else 0
        return _rate(self.prompt_tokens - reused, self.prefill_seconds)

    @property
    def decode_tokens_per_second(self) -> float:
        """Forward passes of a single new token over the time they took; 0 without any."""
        return decode_rate(self.answers)

    @property
    def decode_counts(self) -> dict[str, float]:
        """What the cache counted in decode alone, over all answers."""
        return {
            field.name: sum(answer.decode_counts.get(field.name, 0) for answer in self.answers)
            for field in fields(Counters)
        }

    @property
    def first_token(self) -> dict[str, float] | None:
        """Where the time to the first token went, by what was done, in order; None without one.

        Loading the model and checking the request are not counted.
        """
        if not self.answers or not self.answers[0].token_ids:
            return None
        store = self.store or StoreFacts(0)
        brought = store.find_seconds + store.read_seconds + store.store_seconds
        parts = {
            "open_seconds": self.session.open_seconds if self.session else 0.0,
            "find_seconds": store.find_seconds,
            "read_seconds": store.read_seconds,
            "compute_seconds": max(0.0, self.document_seconds - brought),
            "store_seconds": store.store_seconds,
            "question_seconds": self.answers[0].question_seconds,
        }
        return {name: seconds for name, seconds in parts.items() if seconds}

    def as_json(self) -> dict[str, Any]:
        """Return the report as `run.json` holds it."""
        statistics = self.statistics
        return {
            "finish": self.finish,
            "error": self.error,
            "error_detail": self.failure.detail if self.failure else None,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "prefill_seconds": self.prefill_seconds,
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "first_token": self.first_token,
            "peak_rss_bytes": self.peak_rss_bytes,
            **asdict(statistics),
            "hot_hit_rate": statistics.hot_hit_rate,
            "selected_share": statistics.selected_share,
            "decode": self.decode_counts,
            "document_tokens": self.document_tokens,
            "document_seconds": self.document_seconds,
            "answers": [asdict(answer) for answer in self.answers],
            "comparison": asdict(self.comparison) if self.comparison else None,
            "session": asdict(self.session) if self.session else None,
            "store": asdict(self.store) if self.store else None,
            "completion": dict(self.completion) if self.completion else None,
            "model": dict(self.model),
            "settings": dict(self.settings),
            "sampling": dict(self.sampling),
            "versions": dict(self.versions),
            "machine": dict(self.machine),
        }

    def write(self, file: Path) -> None:
        """Write `run.json`, whole or not at all; ReportError where it cannot be written."""
        try:
            write_whole(file, json_bytes(self.as_json()))
        except OSError as error:
            raise cannot_write(file, error, "--report") from error


def json_bytes(record: Mapping[str, Any]) -> bytes:
    """Return a report as a file holds it: indented, UTF-8, with an end of line.

    Bytes of paths that are no text become the escapes that JSON has for them.
    """
    text = json.dumps(record, indent=2, ensure_ascii=False)
    return f"{text}\n".encode(errors="backslashreplace")


def decode_rate(answers: tuple[Answer, ...]) -> float:
    """Return single-token forward passes per second over all answers; 0 without any."""
    return _rate(
        sum(answer.decode_steps for answer in answers),
        sum(answer.decode_seconds for answer in answers),
    )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
