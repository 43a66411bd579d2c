# SPDX-License-Identifier: Apache-2.0
"""One run of `hillinfer-bench traces`, from the traces to the tables and the report."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from hillinfer.generate.run_report import json_bytes
from hillinfer.store.eviction import DEFAULT_ADMISSION, DEFAULT_EVICTION
from hillinfer.system.files import cannot_write, check_apart, prepare_report, write_whole
from hillinfer_bench.replay.processes import spawned_processes
from hillinfer_bench.traces.index_rebuild import RebuildRow, measure_rebuild, rebuild_text
from hillinfer_bench.traces.index_scale import IndexRow, index_rows, index_text, reckoned_index
from hillinfer_bench.traces.request import TracesRequest
from hillinfer_bench.traces.request_trace import RequestTrace
from hillinfer_bench.traces.scale import ScaleRow, scale_rows, scale_text, scaled
from hillinfer_bench.traces.table import (
    Case,
    TraceRow,
    cases,
    table_text,
    trace_row,
    verdict_text,
    verdicts,
)

Stage = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]

LEGEND = (
    "share of recompute seconds saved (share of input tokens found, blocks written); capacities "
    "over distinct blocks; a block at depth d costs 1 + d/58.6"
)
# The share at which copies are replayed: a store that is short, but not tiny.
_SCALE_SHARE = 0.1
_MOST_REBUILT = 10_000


def run(request: TracesRequest, say: Callable[[str], None], stage: Stage) -> str:
    """Replay every case on every trace and return the tables.

    Parameters
    ----------
    request
        What to replay.
    say
        Called with one line where something was written.
    stage
        Shows progress: called with a name and a total in tokens, gives a function that takes the
        tokens done so far.

    Raises
    ------
    HillInferError
        Whatever a user can act on, before anything is replayed where it can be known before.
    """
    if request.out is not None:
        check_apart((("--out", request.out), *(("--trace", file) for file in request.files)))
        prepare_report(request.out, "--out")
    traces = request.traces()
    rows = _replayed(request, traces, stage)
    larger = _larger(request, traces, stage)
    filled, rebuilt = _filled(request, traces[0], stage)
    told = verdicts(rows)
    most = [row for row in larger if row.copies == request.copies]
    reckoned = [scaled(trace, row) for trace, row in zip(traces, most, strict=False)]
    if request.out is not None:
        record = {
            "label": "measured",
            "counting": LEGEND,
            "default": {"eviction": DEFAULT_EVICTION, "admission": DEFAULT_ADMISSION},
            "saved_seconds_over_lru": min(one.product_over_lru for one in told),
            "verdicts": [asdict(one) for one in told],
            "rows": [asdict(row) for row in rows],
            "scale": {
                "label": "modelled: copies of the traces",
                "rows": [asdict(row) for row in larger],
                "reckoned": [asdict(one) for one in reckoned],
            },
            "index": {
                "label": "measured: the product's index without a drive's bytes",
                "rows": [asdict(row) for row in filled],
                "reckoned": asdict(reckoned_index(filled)) if filled else None,
                "rebuilt": [
                    asdict(row) | {"seconds_per_terabyte": row.seconds_per_terabyte}
                    for row in rebuilt
                ],
            },
        }
        try:
            write_whole(request.out, json_bytes(record))
        except OSError as error:
            raise cannot_write(request.out, error, "--out") from error
        say(f"report: {request.out}")
    parts = [f"{LEGEND}\n", table_text(rows), "", verdict_text(told)]
    if larger:
        parts += ["", scale_text(larger, reckoned)]
    if filled:
        parts += ["", index_text(filled), *map(rebuild_text, rebuilt)]
    return "\n".join(parts)


def _replayed(
    request: TracesRequest, traces: Sequence[RequestTrace], stage: Stage
) -> list[TraceRow]:
    every = [case for share in request.shares for case in cases(share)]
    total = len(every) * sum(trace.tokens for trace in traces)
    rows: list[TraceRow] = []
    done = 0
    with (
        stage("replay", total) as advance,
        spawned_processes(request.processes) as workers,
    ):
        for trace in traces:
            for row in workers.map(partial(trace_row, trace), every):
                rows.append(row)
                done += trace.tokens
                advance(done)
    return rows


def _filled(
    request: TracesRequest, trace: RequestTrace, stage: Stage
) -> tuple[list[IndexRow], list[RebuildRow]]:
    if not request.index_chunks:
        return [], []
    total = request.index_chunks + request.index_chunks // 10
    with (
        stage("index", total) as advance,
        tempfile.TemporaryDirectory(prefix="hillinfer-index-", dir=_beside(request)) as folder,
    ):
        place = Path(folder) / "store"
        rows = index_rows(place, trace, request.index_chunks, advance)
        # As many as 1.5 TB of Llama-3.1-8B have: a gigabyte of sheets at most.
        return rows, [measure_rebuild(place, min(request.index_chunks, _MOST_REBUILT))]


def _beside(request: TracesRequest) -> Path | None:
    """Return the folder of the report: a drive, where temporary files may lie in memory."""
    return None if request.out is None else request.out.parent


def _larger(request: TracesRequest, traces: Sequence[RequestTrace], stage: Stage) -> list[ScaleRow]:
    if not request.copies:
        return []
    counts = sorted({1, max(request.copies // 4, 1), request.copies})
    case = Case(DEFAULT_EVICTION, DEFAULT_ADMISSION, _SCALE_SHARE)
    rows: list[ScaleRow] = []
    total = sum(counts) * sum(trace.tokens for trace in traces)
    done = 0
    with stage("copies", total) as advance:
        for trace in traces:
            rows += scale_rows(trace, case, counts)
            done += sum(counts) * trace.tokens
            advance(done)
    return rows
