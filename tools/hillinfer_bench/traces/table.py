# SPDX-License-Identifier: Apache-2.0
"""The traces table: every way to evict and admit on a trace at a capacity, and the goals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from hillinfer.store.eviction import (
    DEFAULT_ADMISSION,
    DEFAULT_EVICTION,
    EVICTION_POLICIES,
    Turns,
    WriteBudget,
    make_admission,
    make_eviction_policy,
)
from hillinfer_bench.traces.chain_store import ChainStore, PolicyStore, block_keys
from hillinfer_bench.traces.request_trace import RequestTrace, block_cost
from hillinfer_bench.traces.rivals import ArcStore, BeladyStore, FifoStore, FullStore

# --- One replay ---


@dataclass(frozen=True)
class Replayed:
    """What a store did over a whole trace.

    Parameters
    ----------
    tokens
        Share of the prompts' tokens that were found.
    seconds
        Share of the time to compute all prompts that finding them saved (`block_cost`).
    written
        Blocks that were stored, again and again where they were evicted between.
    """

    tokens: float
    seconds: float
    written: int


def replay(trace: RequestTrace, store: ChainStore) -> Replayed:
    """Let a store serve a trace."""
    longest = max((len(request.blocks) for request in trace.requests), default=0)
    costs = [0.0, *accumulate(map(block_cost, range(longest)))]
    found = saved = cost = 0.0
    written = 0
    for number, request in enumerate(trace.requests):
        served = store.serve(number, request)
        found += request.tokens_of(served.found)
        saved += costs[served.found]
        cost += costs[len(request.blocks)]
        written += served.written
    return Replayed(found / max(trace.tokens, 1), saved / max(cost, 1), written)


# --- What is replayed ---

LRU, BELADY = "lru", "belady"
ALWAYS, SEEN_ONCE = "always", "seen-once"
RIVALS: Mapping[str, Callable[[int, RequestTrace], ChainStore]] = MappingProxyType(
    {
        "fifo": lambda capacity, trace: FifoStore(capacity),
        "arc": lambda capacity, trace: ArcStore(capacity),
        "none": lambda capacity, trace: FullStore(capacity),
        BELADY: lambda capacity, trace: BeladyStore(capacity, trace.requests),
    }
)


@dataclass(frozen=True)
class Case:
    """One store and one capacity.

    Parameters
    ----------
    eviction
        A policy of the product, or one of `RIVALS`.
    admission
        One of the product; rivals have their own.
    share
        Capacity over the trace's distinct blocks.
    """

    eviction: str
    admission: str
    share: float

    def store(self, trace: RequestTrace, keys: Sequence[bytes]) -> ChainStore:
        """Return an empty store for a trace."""
        capacity = max(1, int(self.share * trace.distinct))
        if self.eviction in RIVALS:
            return RIVALS[self.eviction](capacity, trace)
        policy = make_eviction_policy(self.eviction, Turns())
        admission = make_admission(self.admission, capacity, policy, WriteBudget())
        return PolicyStore(capacity, policy, admission, keys)


def cases(share: float) -> Iterator[Case]:
    """Yield what is compared at one capacity, the product's default last."""
    for name in RIVALS:
        yield Case(name, ALWAYS, share)
    for name in reversed(tuple(EVICTION_POLICIES)):
        yield Case(name, ALWAYS, share)
    yield Case(LRU, SEEN_ONCE, share)
    yield Case(DEFAULT_EVICTION, SEEN_ONCE, share)
    yield Case(DEFAULT_EVICTION, DEFAULT_ADMISSION, share)


@dataclass(frozen=True)
class TraceRow:
    """How one store did on one trace at one capacity; see `Case` and `Replayed`."""

    trace: str
    share: float
    capacity: int
    eviction: str
    admission: str
    tokens: float
    seconds: float
    written: int


def trace_row(trace: RequestTrace, case: Case) -> TraceRow:
    """Replay one case."""
    store = case.store(trace, block_keys(trace.distinct))
    done = replay(trace, store)
    return TraceRow(
        trace.name,
        case.share,
        store.capacity,
        case.eviction,
        case.admission,
        done.tokens,
        done.seconds,
        done.written,
    )


# --- What it shows ---


@dataclass(frozen=True)
class Verdict:
    """What the default did beside others at one capacity, in points of seconds saved.

    Parameters
    ----------
    over_lru
        The default policy that admits all, over LRU that admits all.
    product_over_lru
        The default policy with the default admission, over the same.
    under_better
        The default admission under the better of the two fixed ones, with the default policy.
    """

    trace: str
    share: float
    over_lru: float
    product_over_lru: float
    under_better: float


def verdicts(rows: Sequence[TraceRow]) -> list[Verdict]:
    """Return a verdict for each trace and capacity, in first order."""
    found: dict[tuple[str, float], dict[tuple[str, str], float]] = {}
    for row in rows:
        own = found.setdefault((row.trace, row.share), {})
        own[row.eviction, row.admission] = 100 * row.seconds
    told = []
    for (trace, share), own in found.items():
        lru, always = own[LRU, ALWAYS], own[DEFAULT_EVICTION, ALWAYS]
        product = own[DEFAULT_EVICTION, DEFAULT_ADMISSION]
        better = max(always, own[DEFAULT_EVICTION, SEEN_ONCE])
        told.append(Verdict(trace, share, always - lru, product - lru, better - product))
    return told


def judged_rows(traces: Sequence[RequestTrace], shares: Sequence[float]) -> list[TraceRow]:
    """Replay what verdicts need, and what a store that knew the future or forgot nothing does."""
    wanted = {(name, ALWAYS) for name in (LRU, DEFAULT_EVICTION, BELADY, "arc", "none")}
    wanted |= {(DEFAULT_EVICTION, SEEN_ONCE), (DEFAULT_EVICTION, DEFAULT_ADMISSION)}
    return [
        trace_row(trace, case)
        for trace in traces
        for share in shares
        for case in cases(share)
        if (case.eviction, case.admission) in wanted
    ]


def table_text(rows: Sequence[TraceRow]) -> str:
    """Return the rows as a Markdown table with its columns aligned, a column for each capacity."""
    shares = sorted({row.share for row in rows})
    lines = [("trace", "evicts", "admits", *(f"{share:.0%}" for share in shares))]
    found: dict[tuple[str, str, str], dict[float, str]] = {}
    for row in rows:
        own = found.setdefault((row.trace, row.eviction, row.admission), {})
        own[row.share] = f"{row.seconds:.3f} ({row.tokens:.3f}, {row.written})"
    lines += [(*key, *(own.get(share, "") for share in shares)) for key, own in found.items()]
    return aligned(lines)


def verdict_text(told: Sequence[Verdict]) -> str:
    """Return the verdicts as a Markdown table."""
    lines = [("trace", "capacity", "policy over LRU", "product over LRU", "under better admission")]
    lines += [
        (
            one.trace,
            f"{one.share:.0%}",
            f"{one.over_lru:+.2f}",
            f"{one.product_over_lru:+.2f}",
            f"{one.under_better:+.2f}",
        )
        for one in told
    ]
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table of which the first line is the head."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * width for width in widths]
    head, *others = (
        [text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in lines
    )
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *others))
