# SPDX-License-Identifier: Apache-2.0
"""What a run owes once its model is loaded: the report, the text and the line, however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from hillinfer.answering import Answering
from hillinfer.cli.ending import EndedRunError, OutputError, held_signals
from hillinfer.cli.generate_request import GenerateRequest
from hillinfer.cli.report_view import show_report
from hillinfer.errors import BrokenRunError
from hillinfer.failure import Failure
from hillinfer.run_report import Comparison, RunReport, SessionFacts
from hillinfer.statistics import CacheStatistics

# Freed before the end, so that there is memory to tell that memory ran out.
_RESERVE_BYTES = 4 << 20


class RunRecord:
    """Collects what a run did, part by part; a part that fails ends it at `finish`, with all told.

    Parameters
    ----------
    request
        What was asked for.
    answering
        Has the document's part and the answers, finished or not.
    blank
        The report of a run that did nothing yet, with what it is and where it runs.
    token_bytes
        Bytes of one token's rows in all layers.

    Attributes
    ----------
    session, statistics, comparison
        As in `RunReport`, None where nothing is known.
    peak_rss_bytes
        Peak of resident memory, to be raised as it grows.
    """

    def __init__(
        self, request: GenerateRequest, answering: Answering, blank: RunReport, token_bytes: int
    ) -> None:
        self._request = request
        self._token_bytes = token_bytes
        self._answering = answering
        self._blank = blank
        self._broke: BaseException | None = None
        self._reserve = bytearray(_RESERVE_BYTES)
        self.session: SessionFacts | None = blank.session
        self.statistics: CacheStatistics | None = None
        self.comparison: Comparison | None = None
        self.peak_rss_bytes = blank.peak_rss_bytes

    @property
    def goes_on(self) -> bool:
        """Whether nothing has ended the run."""
        return self._broke is None

    @contextmanager
    def part(self) -> Iterator[None]:
        """Run a part; what it raises is kept, and what came first counts."""
        try:
            yield
        except BaseException as error:
            self._reserve.clear()
            self._broke = self._broke or error

    def report(self) -> RunReport:
        """Return the report of what was done so far."""
        answering, blank = self._answering, self._blank
        reused = 0 if self.session is None else self.session.reused_tokens
        read = reused + answering.document_tokens
        answers = answering.answers
        contexts = [read + answer.question_tokens + answer.decode_steps for answer in answers]
        statistics = self.statistics or blank.statistics
        return replace(
            blank,
            document_tokens=read,
            document_seconds=answering.document_seconds,
            answers=answers,
            # Forks are closed by now, so the cache no longer holds the longest context.
            statistics=replace(
                statistics, kv_bytes=max(contexts, default=read) * self._token_bytes
            ),
            peak_rss_bytes=self.peak_rss_bytes,
            comparison=self.comparison,
            failure=None if self._broke is None else Failure.of(self._broke),
            session=self.session,
        )

    def finish(self, console: Console) -> None:
        """Write and show the report; then end the command where something broke.

        Raises
        ------
        EndedRunError
            Where something did, the report itself too.
        """
        with held_signals():
            self._finish(console)

    def _finish(self, console: Console) -> None:
        written, and_then = self._request.report, ""
        with self.part():
            report = self.report()
            try:
                if written is not None:
                    report.write(written)
            except Exception as error:
                if self._broke is not None:
                    and_then = f"; and then: {Failure.of(error).message}"
                written = None
                raise
            finally:
                with suppress(OSError):
                    show_report(report, console)
            if written is not None:
                console.print(f"report: {written}")
        if self._broke is not None:
            raise EndedRunError(self._broke, and_then + self._where_the_text_is(written))
        if self.session is not None and self.session.save_error is not None:
            raise BrokenRunError(self.session.save_error)

    def _where_the_text_is(self, written: Path | None) -> str:
        """Say where the answers are, as the end of a line; nothing where there are none."""
        if not any(answer.text for answer in self._answering.answers):
            return ""
        if isinstance(self._broke, OutputError):
            if written is None:
                return "; --report keeps the text where standard output does not"
            return f"; the text so far is in {written}"
        also = "" if written is None else f" and in {written}"
        return f"; the text so far is on standard output{also}"
