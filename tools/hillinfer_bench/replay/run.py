# SPDX-License-Identifier: Apache-2.0
"""One run of `hillinfer-bench pools`, from the model to the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from threading import Lock

from hillinfer.kv.pool_policies import POOL_POLICIES, make_pool_policy
from hillinfer.models.loader import LoadedModel, ModelOutline
from hillinfer.models.sources import ModelSource, local_model
from hillinfer.settings import Settings
from hillinfer.system.files import check_outside, prepare_report
from hillinfer.system.machine import ProcessorFacts
from hillinfer_bench.figures.canvas import require_matplotlib, save_figure
from hillinfer_bench.figures.pools_figure import pools_figure
from hillinfer_bench.quality.forced_reading import Prefix, compute_threads, selecting
from hillinfer_bench.quality.run import run_facts
from hillinfer_bench.quality.texts import TextSample
from hillinfer_bench.replay.code_recording import record_coded
from hillinfer_bench.replay.code_split import budget_parts
from hillinfer_bench.replay.code_sweep import SplitRow, split_rows, splits_text, write_splits
from hillinfer_bench.replay.processes import spawned_processes
from hillinfer_bench.replay.recording import record_selections
from hillinfer_bench.replay.request import PoolsRequest
from hillinfer_bench.replay.selection_trace import SelectionTrace
from hillinfer_bench.replay.table import PoolRow, pool_rows, table_text, write_report

Stage = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
_DEFAULT_TEXTS = 2


def run(request: PoolsRequest, say: Callable[[str], None], stage: Stage) -> str:
    """Record selections on every text, replay them with every policy and return the table.

    Parameters
    ----------
    request
        What to measure.
    say
        Called with one line before each step that takes time.
    stage
        Shows progress: called with a name and a total in tokens, gives a function that takes the
        tokens done so far.

    Raises
    ------
    HillInferError
        Whatever a user can act on, before weights are loaded where it can be known before.
    """
    check_outside((("--out", request.out),), (("--model", local_model(request.model)),))
    is_coded = request.exact < 1
    if request.out is not None:
        prepare_report(request.out, "--out")
        if not is_coded:
            require_matplotlib()
            prepare_report(request.out.with_suffix(".png"), "--out", "the picture")
    outline = ModelOutline.read(ModelSource.locate(request.model, say), request.number_type)
    samples = request.samples(outline.tokenizer, outline.shape.max_positions, _DEFAULT_TEXTS)
    if is_coded:
        # Refused before weights are loaded.
        parts = [
            budget_parts(outline.shape, settings, request.context, budget)
            for budget in request.budgets
            for settings in request.coded_settings()
        ]
    loaded = outline.load()
    threads = request.threads or ProcessorFacts.read().cores
    if is_coded:
        splits = _splits(loaded, samples, request, threads, stage)
        if request.out is not None:
            facts = run_facts(request, loaded, samples, threads)
            write_splits(request.out, splits, facts)
            say(f"report: {request.out}")
        return "\n".join([*parts, "", splits_text(splits)])
    traces = [
        trace for sample in samples for trace in _record(loaded, sample, request, threads, stage)
    ]
    rows = _replay(traces, threads, stage)
    if request.out is not None:
        facts = run_facts(request, loaded, samples, threads)
        write_report(request.out, rows, {**facts, "default_policy": Settings().pool_policy})
        picture = request.out.with_suffix(".png")
        save_figure(pools_figure(rows), picture)
        say(f"report: {request.out}, picture: {picture}")
    return table_text(rows)


def _splits(
    loaded: LoadedModel,
    samples: Sequence[TextSample],
    request: PoolsRequest,
    threads: int,
    stage: Stage,
) -> list[SplitRow]:
    """Record exact and coded tokens of every text and replay both pools."""
    start = request.context - request.last
    traces = []
    for sample in samples:
        ids = sample.token_ids[: request.context]
        settings = request.coded_settings()
        with stage(sample.name, len(settings) * request.last) as advance, compute_threads(threads):
            prefix = Prefix.read(loaded.model, ids[:start])
            with selecting(loaded.model):
                for done, one in enumerate(settings, start=1):
                    traces.append(record_coded(loaded.model, prefix, ids, one, sample.name))
                    advance(done * request.last)
    rows: list[SplitRow] = []
    with (
        stage("replay", len(traces) * request.last) as advance,
        spawned_processes(min(threads, len(traces))) as workers,
    ):
        shapes, budgets = [loaded.shape] * len(traces), [request.budgets] * len(traces)
        for done, own in enumerate(workers.map(split_rows, traces, shapes, budgets), start=1):
            rows += own
            advance(done * request.last)
    return rows


def _record(
    loaded: LoadedModel, sample: TextSample, request: PoolsRequest, threads: int, stage: Stage
) -> list[SelectionTrace]:
    all_settings = request.trace_settings()
    start = request.context - request.last
    queries = max(make_pool_policy(name).observed_queries for name in POOL_POLICIES)
    with compute_threads(threads):
        prefix = Prefix.read(loaded.model, sample.token_ids[:start])
    passes = len(all_settings) * loaded.shape.layers
    lock, done = Lock(), 0
    with (
        stage(sample.name, len(all_settings) * request.last) as advance,
        compute_threads(1),
        selecting(loaded.model),
        ThreadPoolExecutor(threads) as workers,
    ):

        def layer_done() -> None:
            nonlocal done
            with lock:
                done += 1
                advance(done * len(all_settings) * request.last // passes)

        def one(settings: Settings) -> SelectionTrace:
            return record_selections(
                loaded.model,
                prefix,
                sample.token_ids[: request.context],
                settings,
                sample.name,
                queries,
                layer_done,
            )

        return list(workers.map(one, all_settings))


def _replay(traces: list[SelectionTrace], processes: int, stage: Stage) -> list[PoolRow]:
    rows: list[PoolRow] = []
    # Replaying is small operations in one interpreter, which threads do not speed up.
    steps = sum(trace.steps for trace in traces)
    with (
        stage("replay", steps) as advance,
        spawned_processes(min(processes, len(traces))) as workers,
    ):
        done = 0
        for trace, own in zip(traces, workers.map(pool_rows, traces), strict=True):
            rows += own
            done += trace.steps
            advance(done)
    return rows
