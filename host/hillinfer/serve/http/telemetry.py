# SPDX-License-Identifier: Apache-2.0
"""What a server tells of itself: log lines, traces, figures; no prompt, no answer and no key."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TextIO

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from hillinfer.errors import Failure, SettingsError
from hillinfer.serve.documents import Documents
from hillinfer.serve.inference import Inference
from hillinfer.serve.jobs import Job
from hillinfer.serve.refusals import ApiError
from hillinfer.statistics import COUNTED, METRIC_PREFIX, CacheStatistics

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
        """Write what failed; where it was not foreseen, its kind and where it came from.

        Of what a client is told it is the code: the words may quote a prompt.
        """
        if isinstance(error, ApiError):
            self.line(event, {"error": error.code, "status": error.status, **facts}, "error")
            return
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


# --- Figures, as Prometheus reads them ---

CONTENT_TYPE = CONTENT_TYPE_LATEST
_COUNTED = frozenset(f"{METRIC_PREFIX}{name}" for name in COUNTED)
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Figures:
    """Counts requests, and tells what an engine and a store count; any thread may use it.

    Parameters
    ----------
    version
        Of the package.
    """

    def __init__(self, version: str) -> None:
        # Of this server alone: a process may have several.
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "hillinfer_requests",
            "Requests that ended.",
            ["endpoint", "finish_reason"],
            registry=self._registry,
        )
        self._queue = self._histogram("queue_seconds", "From arrival to the first work.", _SECONDS)
        self._first = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _SECONDS
        )
        self._each = self._histogram(
            "time_per_output_token_seconds", "Per token behind the first.", _TOKEN_SECONDS
        )
        self._whole = self._histogram(
            "request_duration_seconds", "From arrival to the end.", _SECONDS
        )
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self._cached = self._counter("cached_prompt_tokens", "Those that a store brought.")
        self._generated = self._counter("generated_tokens", "Tokens of answers.")
        self._version = version

    def show(self, inference: Inference, documents: Documents) -> None:
        """Tell of what one inference thread has, too, and of files."""
        self._registry.register(_Engine(inference, documents, self._version))

    def note(self, job: Job) -> None:
        """Count a request that has ended."""
        if job.is_background:
            return
        usage = job.usage
        self._requests.labels(job.endpoint, job.finish or "").inc()
        if usage is None or job.begun is None:
            return
        self._queue.observe(usage.queue_seconds)
        self._whole.observe(usage.seconds)
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        self._generated.inc(usage.answer_tokens)
        if usage.first_token_seconds is not None:
            self._first.observe(usage.first_token_seconds)
        if usage.tokens_per_second:
            self._each.observe(1 / usage.tokens_per_second)

    def text(self) -> bytes:
        """Return all of it."""
        return generate_latest(self._registry)

    def _counter(self, name: str, told: str) -> Counter:
        return Counter(f"hillinfer_{name}", told, registry=self._registry)

    def _histogram(self, name: str, told: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(f"hillinfer_{name}", told, buckets=bounds, registry=self._registry)


class _Engine(Collector):
    """What the engine and the store had counted when the last request ended."""

    def __init__(self, inference: Inference, documents: Documents, version: str) -> None:
        self._inference, self._documents, self._version = inference, documents, version

    def collect(self) -> Iterator[Metric]:
        """Return everything that is no request's."""
        inference = self._inference
        build = GaugeMetricFamily("hillinfer_build_info", "Version.", labels=["version"])
        build.add_metric([self._version], 1)
        yield build
        yield _gauge("requests_running", "Requests that are worked on.", inference.running)
        yield _gauge("requests_waiting", "Requests that wait.", inference.waiting)
        files = GaugeMetricFamily("hillinfer_documents", "Files of clients.", labels=["state"])
        for state, count in self._documents.count().items():
            files.add_metric([state], count)
        yield files
        try:
            served = inference.served
        except Exception:
            return
        counted = served.statistics
        if counted is not None:
            yield _gauge("dram_budget_bytes", "M0.", counted.dram_budget_bytes)
            parts = GaugeMetricFamily(
                "hillinfer_dram_bytes", "Memory of the budget at its peak.", labels=["part"]
            )
            for part in ("hot", "shadow", "staging", "other"):
                parts.add_metric([part], getattr(counted, f"{part}_bytes"))
            yield parts
            rows = CounterMetricFamily(
                "hillinfer_selected_rows", "Rows that decode steps wanted.", labels=["pool"]
            )
            rows.add_metric(["hot"], counted.hot_rows_read)
            rows.add_metric(["cold"], counted.cold_rows_read)
            yield rows
            yield from _selected(counted)
            read = CounterMetricFamily(
                "hillinfer_drive_read_bytes", "Read from the cold pool.", labels=["purpose"]
            )
            read.add_metric(["rows"], counted.cold_read_bytes)
            read.add_metric(["shadow"], counted.shadow_read_bytes)
            yield read
            for name, told, field in (
                ("drive_useful_bytes", "Of rows read, what was asked for.", "cold_useful_bytes"),
                ("drive_written_bytes", "Written to the cold pool.", "cold_write_bytes"),
                ("drive_written_code_bytes", "Of these, codes of values.", "code_write_bytes"),
                ("drive_wait_seconds", "Waited for the drive.", "drive_wait_seconds"),
            ):
                yield CounterMetricFamily(f"hillinfer_{name}", told, getattr(counted, field))
        placed = served.placed
        if placed is not None:
            held = placed.held
            told = "Documents of the store that are ready in memory."
            yield _gauge("placed_documents", told, len(held))
            yield _gauge("placed_document_bytes", "What their forms take.", sum(held.values()))
        if served.store is not None:
            for name, value in served.store.metrics().items():
                family = CounterMetricFamily if name in _COUNTED else GaugeMetricFamily
                yield family(name, "Of the store, see docs/store.md.", value)


def _selected(counted: CacheStatistics) -> Iterator[Metric]:
    """Return as what selected tokens came, and where codes of the coded ones were."""
    for name, told, label, parts in (
        (
            "selected_tokens",
            "Tokens that decode steps selected, summed over layers.",
            "form",
            {"rows": counted.selected_tokens - counted.coded_tokens, "codes": counted.coded_tokens},
        ),
        (
            "coded_tokens",
            "Of these, coded ones by what brought their codes.",
            "brought_by",
            {
                "memory": counted.coded_tokens - counted.coded_arrivals,
                "drive_codes": counted.coded_reads,
                "rows": counted.coded_arrivals - counted.coded_reads,
            },
        ),
    ):
        family = CounterMetricFamily(f"hillinfer_{name}", told, labels=[label])
        for part, count in parts.items():
            family.add_metric([part], count)
        yield family


def _gauge(name: str, told: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"hillinfer_{name}", told, value)
