# SPDX-License-Identifier: Apache-2.0
"""A model toward large stores: copies of a trace with other blocks, and the size of an index."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hillinfer_bench.traces.chain_store import block_keys
from hillinfer_bench.traces.request_trace import BLOCK_TOKENS, Request, RequestTrace
from hillinfer_bench.traces.table import Case, aligned, replay

CHUNK_TOKENS = 1024
"""Tokens of a chunk of the store: what its index has a row for."""
# Extent of a chunk of Llama-3.1-8B: rows, shadow and headers.
_EXTENT_BYTES = 144.4e6
# Of a chunk's rows in the index, itself and 16 prefixes, as `index_scale` measured.
_INDEX_BYTES = 1760
# Copies begin within this time of each other, so that they run beside each other.
_SPREAD_SECONDS = 60.0
_GOLDEN = 0.6180339887498949


def copies(trace: RequestTrace, count: int) -> RequestTrace:
    """Return a trace of so many copies beside each other, which have no block in common.

    Copy i begins at the i-th point of a sequence that fills a minute evenly.
    """
    streams = (_shifted(trace, copy) for copy in range(count))
    merged = tuple(heapq.merge(*streams, key=lambda request: request.time))
    return RequestTrace(f"{trace.name} × {count}", merged, trace.distinct * count)


def _shifted(trace: RequestTrace, copy: int) -> Iterator[Request]:
    late, first = _SPREAD_SECONDS * (copy * _GOLDEN % 1.0), copy * trace.distinct
    for request in trace.requests:
        blocks = tuple(block + first for block in request.blocks)
        yield replace(request, time=request.time + late, blocks=blocks)


@dataclass(frozen=True)
class ScaleRow:
    """What one store did on so many copies of a trace.

    Parameters
    ----------
    copies
        Of the trace; the capacity grows with them.
    tokens, seconds, written
        As in `Replayed`; `written` over the copies.
    blocks_per_second
        Blocks that one core looked up, ranked, admitted and evicted, in CPU time: a rate of this
        machine.
    """

    trace: str
    copies: int
    capacity: int
    requests: int
    tokens: float
    seconds: float
    written: float
    blocks_per_second: float


def scale_rows(trace: RequestTrace, case: Case, counts: Sequence[int]) -> list[ScaleRow]:
    """Replay a case on growing numbers of copies."""
    rows = []
    for count in counts:
        larger = copies(trace, count)
        store = case.store(larger, block_keys(larger.distinct))
        began = time.process_time()
        done = replay(larger, store)
        spent = max(time.process_time() - began, 1e-9)
        blocks = sum(len(request.blocks) for request in larger.requests)
        rows.append(
            ScaleRow(
                trace.name,
                count,
                store.capacity,
                len(larger.requests),
                done.tokens,
                done.seconds,
                done.written / count,
                blocks / spent,
            )
        )
    return rows


@dataclass(frozen=True)
class Scaled:
    """A store of many bytes, reckoned from the largest replay.

    Parameters
    ----------
    store_bytes
        Its size, for chunks of Llama-3.1-8B.
    chunks, index_bytes
        Chunks that it holds, and their rows in the index.
    requests
        A day's requests that a trace would have made over a store so large at this capacity's
        share, if all ran beside each other.
    policy_core_seconds
        CPU time of ranking and admission for 10 million requests, by chunks.
    """

    store_bytes: float
    chunks: int
    index_bytes: int
    requests_per_day: float
    policy_core_seconds: float


_REQUESTS = 10_000_000


def scaled(trace: RequestTrace, row: ScaleRow, store_bytes: float = 1e15) -> Scaled:
    """Return what a store of so many bytes would hold and be asked for."""
    chunks = int(store_bytes / _EXTENT_BYTES)
    chunk_blocks = CHUNK_TOKENS // BLOCK_TOKENS
    times = chunks * chunk_blocks / (row.capacity / row.copies)
    span = max(trace.requests[-1].time - trace.requests[0].time, 1.0)
    blocks = sum(len(request.blocks) for request in trace.requests) / len(trace.requests)
    return Scaled(
        store_bytes,
        chunks,
        chunks * _INDEX_BYTES,
        times * len(trace.requests) * 86_400 / span,
        _REQUESTS * blocks / chunk_blocks / row.blocks_per_second,
    )


def scale_text(rows: Sequence[ScaleRow], told: Sequence[Scaled]) -> str:
    """Return the replays as a Markdown table, and what is reckoned from them as lines."""
    lines = [("trace", "copies", "requests", "blocks held", "seconds", "tokens", "written a copy")]
    lines += [
        (
            row.trace,
            f"{row.copies}",
            f"{row.requests}",
            f"{row.capacity}",
            f"{row.seconds:.4f}",
            f"{row.tokens:.4f}",
            f"{row.written:.0f}",
        )
        for row in rows
    ]
    reckoned = [
        f"modelled: {one.store_bytes / 1e15:g} PB hold {one.chunks / 1e6:.1f} M chunks of "
        f"Llama-3.1-8B, {one.index_bytes / 1e9:.1f} GB of index at {_INDEX_BYTES} bytes a chunk; "
        f"{one.requests_per_day / 1e6:.0f} M requests a day at this share; ranking and admitting "
        f"10 M requests takes {one.policy_core_seconds / 3600:.2f} hours of one core"
        for one in told
    ]
    return "\n".join([aligned(lines), "", *reckoned])
