# SPDX-License-Identifier: Apache-2.0
"""A run's report: its facts, its view for people, and writing it however the run ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hillinfer.cli.ending import EndedRunError, OutputError, held_signals
from hillinfer.cli.generate import GenerateRequest
from hillinfer.cli.preflight import CheckedRun
from hillinfer.doctor.finding import python_version, run_packages
from hillinfer.drive.directories import filesystem_of, prepared_cold_dir
from hillinfer.errors import BrokenRunError, Failure
from hillinfer.generate.answering import Answering
from hillinfer.generate.run_report import Answer, Comparison, RunReport, SessionFacts, StoreFacts
from hillinfer.model_shape import ModelShape
from hillinfer.models.loader import LoadedModel
from hillinfer.statistics import CacheStatistics
from hillinfer.system.machine import MemoryFacts, ProcessorFacts
from hillinfer.values import format_bytes

# --- Facts of a run ---


def model_facts(loaded: LoadedModel, shape: ModelShape) -> dict[str, Any]:
    """Return name, commit, family, number type and shape."""
    return {
        "name": loaded.name,
        "commit": loaded.commit,
        "model_type": loaded.config.model_type,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "stored_type": shape.stored_type.value,
        "layers": shape.layers,
        "query_heads": shape.query_heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_positions": shape.max_positions,
    }


def settings_facts(request: GenerateRequest, checked: CheckedRun) -> dict[str, Any]:
    """Return every setting that a repetition of the run needs."""
    settings = checked.settings
    return {
        "alpha": settings.importance_rate,
        "rule": settings.rule.value,
        "scope": settings.scope.value,
        "query": settings.query.value,
        "shadow": settings.key_mode.value,
        "kept_sinks": settings.kept_sinks,
        "kept_recent": settings.kept_recent,
        "max_selected": settings.max_selected,
        "exact": settings.exact_share,
        "exact_floor": settings.exact_floor,
        "dram_budget_bytes": settings.dram_budget.byte_count,
        "pool_policy": settings.pool_policy,
        "pool_sizes": settings.pool_sizes.value,
        "device": settings.device,
        "beta": "auto" if settings.beta is None else settings.beta,
        "beta_model": settings.beta_model.value,
        "xclbin": str(settings.xclbin) if settings.xclbin else None,
        "pynq_python": str(settings.pynq_python) if settings.pynq_python else None,
        "block_rows": settings.block_rows,
        "prefetch_blocks": settings.prefetch_blocks,
        "block_tokens": settings.block_tokens,
        "encrypt_cold_pool": settings.encrypt_cold_pool.value,
        "io": settings.io.value,
        "io_threads": settings.io_threads,
        "prefill_chunk": request.chunk_tokens,
        "question_reading": request.question_reading.value,
        "prompt_style": request.prompt_style.value,
        "special_tokens": request.special_tokens.value,
        "max_new_tokens": request.max_new_tokens,
        "projections": request.projections,
        "prune": request.prune.schedule if request.prune else None,
        "threads": torch.get_num_threads(),
    }


def version_facts() -> dict[str, str]:
    """Return the versions of the interpreter and of everything generation stands on."""
    packages = {one.name: one.version for one in run_packages() if one.version is not None}
    return {"python": python_version(), **packages}


def machine_facts(cold_dir: Path | None) -> dict[str, Any]:
    """Return what speed depends on."""
    processor, memory = ProcessorFacts.read(), MemoryFacts.read()
    return {
        "processor": processor.name,
        "cores": processor.cores,
        "memory_bytes": memory.total_bytes,
        "memory_limit_bytes": memory.limit_bytes,
        "cold_filesystem": filesystem_of(prepared_cold_dir(cold_dir)),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }


# --- The view for people ---


def show_report(report: RunReport, console: Console) -> None:
    """Print the report as one table, and a second one side by side where there is a comparison."""
    table = Table(title="HillInfer report", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in report_lines(report):
        table.add_row(name, value)
    console.print(table)
    if report.comparison is not None:
        console.print(_comparison_table(report))


def _coded_lines(statistics: CacheStatistics) -> list[tuple[str, str]]:
    """Say how many selected tokens came as codes, where any did."""
    coded = statistics.coded_tokens
    if not coded:
        return []
    share, found = coded / statistics.selected_tokens, 1 - statistics.coded_arrivals / coded
    return [("  coded", f"{share:.1%} of selected tokens; codes of {found:.1%} of them were hot")]


def report_lines(report: RunReport) -> list[tuple[str, str]]:
    """Return the report as pairs of a name and what is to be said."""
    statistics = report.statistics
    decode = report.decode_counts
    settings = report.settings
    steps = max(1, sum(answer.decode_steps for answer in report.answers))
    budget_share = statistics.dram_budget_bytes / max(1, statistics.kv_bytes)
    lines = [
        (
            "model",
            f"{report.model['name']} ({report.model['model_type']}, {report.model['dtype']})",
        ),
        (
            "selection",
            f"alpha {settings['alpha']}, {settings['rule']}, {settings['scope']}, shadow "
            f"{settings['shadow']}, device {settings['device']}",
        ),
        ("tokens", f"{report.prompt_tokens} prompt, {report.new_tokens} new"),
        (
            "prefill",
            f"{report.prefill_seconds:.1f} s, {report.prefill_tokens_per_second:.1f} tokens/s",
        ),
        *pruned_lines(report),
        *_completed_lines(report),
        *first_token_lines(report),
        ("decode", f"{report.decode_tokens_per_second:.2f} tokens/s"),
        ("KV cache", f"{format_bytes(statistics.kv_bytes)} of rows"),
        (
            "DRAM",
            f"peak {format_bytes(statistics.dram_peak_bytes)} of a budget of "
            f"{format_bytes(statistics.dram_budget_bytes)} ({budget_share:.0%} of the KV cache)",
        ),
        (
            "  at the peak",
            f"hot rows {format_bytes(statistics.hot_bytes)}, shadow "
            f"{format_bytes(statistics.shadow_bytes)}, staging "
            f"{format_bytes(statistics.staging_bytes)}, other "
            f"{format_bytes(statistics.other_bytes)}",
        ),
        ("process", f"peak {format_bytes(report.peak_rss_bytes)} resident, weights included"),
        (
            "selected",
            f"{statistics.selected_share:.1%} of the context per step; "
            f"{statistics.hot_hit_rate:.1%} of selected rows were hot",
        ),
        *_coded_lines(statistics),
        ("hot pools", _pools_text(report)),
        (
            "drive",
            f"{format_bytes(statistics.cold_write_bytes)} written, "
            f"{format_bytes(statistics.cold_read_bytes)} read for "
            f"{format_bytes(statistics.cold_useful_bytes)} asked for",
        ),
        (
            "  reads",
            f"{statistics.cold_reads}, {statistics.io_mode} I/O by {statistics.io_engine}, "
            f"waited {statistics.drive_wait_seconds:.1f} s",
        ),
        (
            "  schedule",
            f"passes waited {statistics.bubble_seconds:.2f} s for rows; "
            f"{statistics.deferred_writes} writes put off, "
            f"{format_bytes(statistics.slack_write_bytes)} written in slack",
        ),
        (
            "  per new token",
            f"{format_bytes(decode['cold_read_bytes'] / steps)} read for "
            f"{format_bytes(decode['cold_useful_bytes'] / steps)} asked for, waited "
            f"{decode['drive_wait_seconds'] / steps * 1e3:.1f} ms",
        ),
    ]
    if report.session is not None and report.session.path is not None:
        lines.append(
            (
                "session",
                f"{report.session.reused_tokens} tokens of {report.session.path} reused, opened in "
                f"{report.session.open_seconds:.1f} s",
            )
        )
    if report.store is not None:
        lines.append(("store", store_line(report.store)))
    if statistics.kernel_launches or statistics.device_lost:
        share = statistics.device_scored_tokens / max(statistics.scored_tokens, 1)
        told = [
            f"{statistics.kernel_launches} launches scored {statistics.device_scored_tokens} "
            f"tokens, {share:.1%} of all"
        ]
        if statistics.make_shadow_launches:
            told.append(f"{statistics.make_shadow_launches} made shadows of rows")
        if statistics.shared_launches:
            told.append(f"{statistics.shared_launches} for several queries at once")
        if statistics.device_lost:
            told.append("then it was LOST and the host went on")
        lines.append(("device", "; ".join(told)))
    if report.machine["gpu"]:
        lines.append(
            (
                "GPU",
                f"{format_bytes(statistics.host_to_device_bytes)} to it, "
                f"{format_bytes(statistics.device_to_host_bytes)} from it, through "
                f"{format_bytes(statistics.gpu_staging_bytes)} of {statistics.gpu_staging} memory",
            )
        )
    if statistics.fp16_overflows:
        lines.append(
            ("FP16", f"{statistics.fp16_overflows} values were too large and became the largest")
        )
    return lines


def pruned_lines(report: RunReport) -> list[tuple[str, str]]:
    """Return what deeper layers did not see of the first prompt that lost anything."""
    read = next((answer.pruned for answer in report.answers if answer.pruned), None)
    if read is None:
        return []
    tokens = read["tokens"]
    stages = " and ".join(f"{seconds:.1f} s" for seconds in read["band_seconds"])
    spared = 1 - 1 / read["flop_limit"]
    saw = ", ".join(
        f"{tokens[layer]} from layer {layer} on"
        for layer in range(1, len(tokens))
        if tokens[layer] < tokens[layer - 1]
    )
    stored = f", of which a store or a session had {read['brought']}" * bool(read["brought"])
    return [
        (
            "pruned",
            f"{read['schedule']}: layers saw {tokens[0]} tokens{stored}, {saw}; choosing took "
            f"{read['choosing_seconds']:.2f} s and these stages {stages}; {spared:.0%} of the "
            f"FLOPs were saved, which allows {read['flop_limit']:.2f} times the speed",
        )
    ]


def _completed_lines(report: RunReport) -> list[tuple[str, str]]:
    told = report.completion
    if told is None:
        return []
    done, tokens = told["done"], told["tokens"]
    of = "all" if done == tokens else f"{done} of"
    took = f"which took {told['seconds']:.1f} s"
    return [("read whole", f"{of} {tokens} tokens in every layer, {took}")]


def _completion_of(answering: Answering) -> dict[str, Any] | None:
    completed = answering.completed
    # Where nothing was left out nothing took time.
    return None if completed is None or not completed.seconds else asdict(completed)


def _pools_text(report: RunReport) -> str:
    statistics, settings = report.statistics, report.settings
    rates = statistics.layer_hit_rates
    lowest, highest = rates.index(min(rates)), rates.index(max(rates))
    return (
        f"{settings['pool_policy']}, sizes {settings['pool_sizes']}; "
        f"{statistics.promoted_rows} rows promoted, {statistics.demoted_rows} demoted; hit rate "
        f"{rates[lowest]:.1%} in layer {lowest} to {rates[highest]:.1%} in layer {highest}"
    )


def _comparison_table(report: RunReport) -> Table:
    other = report.comparison
    assert other is not None
    table = Table(title="Side by side", title_justify="left")
    for heading in ("", "HillInfer", "ordinary cache"):
        table.add_column(heading)
    table.add_row("prefill", f"{report.prefill_seconds:.1f} s", f"{other.prefill_seconds:.1f} s")
    table.add_row(
        "decode",
        f"{report.decode_tokens_per_second:.2f} tokens/s",
        f"{other.decode_tokens_per_second:.2f} tokens/s",
    )
    table.add_row(
        "cache in memory",
        format_bytes(report.statistics.dram_peak_bytes),
        format_bytes(other.kv_bytes),
    )
    table.add_row(
        "peak resident while generating",
        format_bytes(other.hillinfer_peak_rss_bytes),
        format_bytes(other.peak_rss_bytes),
    )
    for number, (answer, text) in enumerate(zip(report.answers, other.texts, strict=True), start=1):
        table.add_row(
            f"answer {number}: first {other.equal_tokens[number - 1]} of "
            f"{len(answer.token_ids)} tokens equal",
            answer.text.strip(),
            text.strip(),
        )
    return table


# --- Writing it ---

# Freed before the end, so that there is memory to tell that memory ran out.
_RESERVE_BYTES = 4 << 20


def first_token_lines(report: RunReport) -> list[tuple[str, str]]:
    """Return what is to be said of the time to the first token; nothing where none came."""
    parts = report.first_token
    if parts is None:
        return []
    told = [f"{seconds:.2f} {name.removesuffix('_seconds')}" for name, seconds in parts.items()]
    return [("first token", f"{sum(parts.values()):.2f} s: {', '.join(told)}")]


def store_line(told: StoreFacts) -> str:
    """Return what a store did for a prompt, for people."""
    parts = [f"{told.directory}: {told.found_tokens} of {told.prompt_tokens} tokens found"]
    if told.found_tokens:
        seconds = told.find_seconds + told.read_seconds
        parts.append(f"opened in {seconds:.2f} s with {format_bytes(told.read_bytes)} read")
        if told.is_of_another:
            parts.append(f"made by {told.made_by}")
        parts += [
            f"{one.tokens} tokens behind {one.before} {one.way} ({one.reason})"
            for one in told.passes
        ]
    if told.stored_tokens:
        parts.append(f"{told.stored_tokens} stored in {told.store_seconds:.2f} s")
    if told.refused_chunks:
        parts.append(f"{told.refused_chunks} chunks not admitted, or too much was written today")
    if told.not_accepted:
        parts.append(f"other engines' rows are not taken: {told.not_accepted}")
    if told.failure:
        parts.append(f"not used: {told.failure}")
    return "; ".join(parts)


class RunRecord:
    """Collects what a run did, part by part; a part that fails ends it at `finish`, with all told.

    `answering` has the document's part and the answers, finished or not; `blank` is the report of a
    run that did nothing yet; `token_bytes` are those of one token's rows in all layers. What the
    run finds out is set here: `session`, `statistics` and `comparison` as in `RunReport`, None
    where nothing is known, and `peak_rss_bytes`, to be raised as it grows.
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
        contexts = [_rows_per_layer(answer, read) + answer.decode_steps for answer in answers]
        statistics = self.statistics or blank.statistics
        return replace(
            blank,
            document_tokens=read,
            document_seconds=answering.document_seconds,
            answers=answers,
            # Forks are closed by now, so the cache no longer holds the longest context.
            statistics=replace(
                statistics, kv_bytes=round(max(contexts, default=read) * self._token_bytes)
            ),
            peak_rss_bytes=self.peak_rss_bytes,
            comparison=self.comparison,
            failure=None if self._broke is None else Failure.of(self._broke),
            session=self.session,
            store=getattr(answering.generation.cache, "read_from_store", None) or blank.store,
            completion=_completion_of(answering),
        )

    def finish(self, console: Console) -> None:
        """Write and show the report; then end the command where something broke.

        Raises EndedRunError where something did, the report itself too.
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


def _rows_per_layer(answer: Answer, read: int) -> float:
    """Return the rows of an answer's prompt, as a mean over layers, behind so many tokens read."""
    if answer.pruned is None:
        return read + answer.question_tokens
    tokens = answer.pruned["tokens"]
    return float(sum(tokens)) / len(tokens)
