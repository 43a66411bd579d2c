# SPDX-License-Identifier: Apache-2.0
"""A trace for each request, for OpenTelemetry; none where it is not set up."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hillinfer.errors import SettingsError
from hillinfer.serve.jobs import Job

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
