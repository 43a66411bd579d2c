# SPDX-License-Identifier: Apache-2.0
"""What a server counts, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from hillinfer.serve.documents import Documents
from hillinfer.serve.inference import Inference
from hillinfer.serve.jobs import Job
from hillinfer.statistics import COUNTED, METRIC_PREFIX, CacheStatistics

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
