# SPDX-License-Identifier: Apache-2.0
"""Log lines of a server, and a trace for each request; none with a prompt, an answer or a key."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TextIO

from hillinfer.errors import Failure, SettingsError
from hillinfer.serve.jobs import Job

# --- Log lines, one JSON object each ---

_MOST_DETAIL = 8000


class Log:
    """Writes lines.

    Parameters
    ----------
    write
        Takes each line without its end; standard error where None.
    """

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self._write = write or _to(sys.stderr)

    def line(self, event: str, facts: Mapping[str, object], level: str = "info") -> None:
        """Write what happened; facts that are None are left out."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        told = {name: value for name, value in facts.items() if value is not None}
        # A log that takes no more costs no answer.
        with suppress(OSError, ValueError):
            self._write(json.dumps({"time": now, "level": level, "event": event, **told}))

    def failure(self, event: str, error: BaseException, facts: Mapping[str, object]) -> None:
        """Write what failed; where it was not foreseen, its kind and where it came from."""
        failure = Failure.of(error)
        said, detail = failure.message, None
        if failure.detail is not None:
            # Words that are neither ours nor the system's may quote a prompt.
            said = said if isinstance(error, OSError | MemoryError) else type(error).__name__
            detail = "".join(traceback.format_tb(error.__traceback__))[-_MOST_DETAIL:]
        self.line(event, {"error": said, "detail": detail, **facts}, "error")


def _to(stream: TextIO) -> Callable[[str], object]:
    def write(line: str) -> None:
        stream.write(line + "\n")
        stream.flush()

    return write


class LogHandler(logging.Handler):
    """Gives what a library logs to a log.

    Parameters
    ----------
    log
        Takes it.
    """

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        # What libraries say of a request may hold parts of it; of errors the kind is enough.
        kind = record.exc_info[0] if record.exc_info else None
        said = record.getMessage() if kind is None else kind.__name__
        told = {"logger": record.name, "message": said}
        self._log.line("library", told, record.levelname.lower())


# --- Traces, for OpenTelemetry; none where it is not set up ---

# Where spans go, as OpenTelemetry's own programs are told.
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Spans:
    """Makes spans of requests that have ended; any thread may use it.

    A request's span has one for its time in the queue, one for reading its prompt and one for its
    answers. It belongs to the trace that the client named. No span has a text of the request.

    Parameters
    ----------
    provider
        A `TracerProvider` of OpenTelemetry; None for no traces.
    """

    def __init__(self, provider: Any | None) -> None:
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("hillinfer")

    @classmethod
    def of_variables(cls, variables: Mapping[str, str]) -> Spans:
        """Return what sends spans where OpenTelemetry's variables say.

        Raises
        ------
        SettingsError
            Where they say so and what sends is not installed.
        """
        if not any(variables.get(name) for name in ENDPOINTS):
            return cls(None)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise SettingsError(
                f"{error.name} is not installed, and {ENDPOINTS[1]} asks for traces: "
                "pip install 'hillinfer[otel]', or unset it"
            ) from error
        # OTEL_SERVICE_NAME names it otherwise.
        own = {"service.name": variables.get("OTEL_SERVICE_NAME") or "hillinfer"}
        with suppress(PackageNotFoundError):
            own["service.version"] = version("hillinfer")
        provider = TracerProvider(resource=Resource.create(own))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def note(self, job: Job, error: BaseException | None) -> None:
        """Make the spans of a request that has ended; one that reads ahead has none."""
        if self._tracer is None or job.is_background or job.ended is None:
            return
        # Whatever fails in this costs no answer.
        with suppress(Exception):
            self._make(job, error)

    def close(self) -> None:
        """Send what is left."""
        if self._provider is not None:
            with suppress(Exception):
                self._provider.shutdown()

    def _make(self, job: Job, error: BaseException | None) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        assert self._tracer is not None
        assert job.ended is not None
        offset = time.time_ns() - time.monotonic_ns()

        def at(moment: float) -> int:
            return offset + int(moment * 1e9)

        above = None
        if job.trace_parent is not None:
            named = {"traceparent": job.trace_parent}
            above = TraceContextTextMapPropagator().extract(named)
        span = self._tracer.start_span(
            job.endpoint,
            context=above,
            kind=SpanKind.SERVER,
            start_time=at(job.arrived),
            attributes=_facts(job),
        )
        if error is not None:
            # Its kind alone: its words may name places on this machine.
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        within = set_span_in_context(span)
        begun = job.ended if job.begun is None else job.begun
        read = job.ended if job.first_token is None else job.first_token
        for name, start, end in (
            ("queue", job.arrived, begun),
            ("read", begun, read),
            ("answer", read, job.ended),
        ):
            if end > start:
                part = self._tracer.start_span(name, context=within, start_time=at(start))
                part.end(at(end))
        span.end(at(job.ended))


def _facts(job: Job) -> dict[str, Any]:
    """Return what a span says, by the names of OpenTelemetry's conventions where it has some."""
    facts: dict[str, Any] = {
        "gen_ai.operation.name": "chat" if job.endpoint == "chat" else "text_completion",
        "gen_ai.response.finish_reasons": [job.finish or ""],
        "hillinfer.work": job.number,
    }
    if job.usage is not None:
        facts |= {
            "gen_ai.usage.input_tokens": job.usage.prompt_tokens,
            "gen_ai.usage.output_tokens": job.usage.answer_tokens,
            "gen_ai.usage.cache_read.input_tokens": job.usage.cached_tokens,
            "hillinfer.hot_hit_rate": job.usage.hot_hit_rate,
            "hillinfer.drive_read_bytes": job.usage.drive_read_bytes,
            "hillinfer.drive_wait_seconds": job.usage.drive_wait_seconds,
        }
    return facts
