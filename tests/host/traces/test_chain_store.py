# SPDX-License-Identifier: Apache-2.0
"""Stores of the replay: what they hold, beside slow stores that do the same by definition."""

import functools

import pytest
from request_traces import random_trace

from hillinfer.store.eviction import EVICTION_POLICIES
from hillinfer_bench.traces.chain_store import block_keys
from hillinfer_bench.traces.request_trace import Request, RequestTrace, block_cost
from hillinfer_bench.traces.scale import copies
from hillinfer_bench.traces.table import BELADY, LRU, RIVALS, Case, cases, replay, trace_row

TRACE = random_trace(requests=120)
SHARES = (0.03, 0.1, 0.3)
CHAINS = {request.blocks for request in TRACE.requests}
EVERY = [case for share in SHARES for case in cases(share)]


def store_of(case, trace=TRACE):
    return case.store(trace, block_keys(trace.distinct))


def asked(*prompts):
    """Return a trace of whole blocks."""
    requests = tuple(
        Request(float(number), 512 * len(blocks), blocks) for number, blocks in enumerate(prompts)
    )
    return RequestTrace("made", requests, 1 + max(block for blocks in prompts for block in blocks))


@pytest.mark.parametrize(
    "case", EVERY, ids=lambda case: f"{case.eviction}-{case.admission}-{case.share}"
)
def test_a_store_never_holds_too_much_nor_a_block_without_the_one_before(case):
    store = store_of(case)
    held = set()
    for number, request in enumerate(TRACE.requests):
        found = next(
            (n for n, b in enumerate(request.blocks) if b not in held), len(request.blocks)
        )
        served = store.serve(number, request)
        assert served.found == found
        held = {block for block in range(TRACE.distinct) if block in store}
        assert len(held) == len(store) <= store.capacity
        assert set(request.blocks[: served.found + served.written]) <= held
        for chain in CHAINS:
            inside = [block in held for block in chain]
            assert inside == sorted(inside, reverse=True)


def slow_lru(trace, capacity):
    """Return blocks found by LRU, leaves first, by looking at everything every time."""
    held, parents, found = {}, {}, []
    for number, request in enumerate(trace.requests):
        blocks = request.blocks
        count = next((n for n, b in enumerate(blocks) if b not in held), len(blocks))
        found.append(count)
        held.update(dict.fromkeys(blocks[:count], number))
        for position in range(count, len(blocks)):
            if len(held) >= capacity:
                inner = {parents[block] for block in held}
                leaves = [b for b in held if b not in inner and b not in blocks]
                if not leaves:
                    break
                depth = {b: n for r in trace.requests for n, b in enumerate(r.blocks)}
                del held[min(leaves, key=lambda b: (held[b], -depth[b], b))]
            parents[blocks[position]] = blocks[position - 1] if position else None
            held[blocks[position]] = number
    return found


@pytest.mark.parametrize("share", SHARES)
def test_lru_is_lru_by_its_definition(share):
    trace = random_trace(requests=80, seed=3)
    store = store_of(Case(LRU, "always", share), trace)
    found = [store.serve(number, request).found for number, request in enumerate(trace.requests)]
    assert found == slow_lru(trace, store.capacity)
    assert found != slow_lru(trace, store.capacity + 8)


def most_blocks(trace, capacity):
    """Return the most blocks that any store could find, by trying every way."""

    @functools.cache
    def best(number, held):
        if number == len(trace.requests):
            return 0
        blocks = trace.requests[number].blocks
        count = next((n for n, b in enumerate(blocks) if b not in held), len(blocks))
        follow = chains_within(held | set(blocks), capacity)
        return count + max(best(number + 1, kept) for kept in follow)

    parents = {
        b: p for r in trace.requests for p, b in zip((None, *r.blocks), r.blocks, strict=False)
    }

    def chains_within(blocks, most):
        found = {frozenset()}
        for _ in range(most):
            found |= {
                one | {block}
                for one in found
                for block in blocks - one
                if parents[block] is None or parents[block] in one
            }
        return found

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(4))
def test_belady_finds_as_many_blocks_as_any_way_could(seed):
    trace = random_trace(requests=7, seed=seed)
    short = tuple(Request(r.time, 512 * len(r.blocks[:3]), r.blocks[:3]) for r in trace.requests)
    trace = RequestTrace("short", short, trace.distinct)
    store = RIVALS[BELADY](3, trace)
    found = sum(store.serve(number, r).found for number, r in enumerate(trace.requests))
    assert found == most_blocks(trace, 3)
    assert found > most_blocks(trace, 1)


@pytest.mark.parametrize("share", SHARES)
def test_nobody_finds_more_blocks_than_belady(share):
    found = {}
    for case in cases(share):
        store = store_of(case)
        served = [store.serve(number, request) for number, request in enumerate(TRACE.requests)]
        found[case.eviction, case.admission] = sum(one.found for one in served)
    best = found.pop((BELADY, "always"))
    assert all(count <= best for count in found.values())
    # Where there is room for all that comes back, others find as much.
    assert best > max(found.values()) or share > SHARES[0]


def test_fifo_forgets_what_was_stored_first_and_lru_what_was_used_first():
    trace = asked((0,), (1,), (0,), (2,), (0,), (1,))
    row = {name: trace_row(trace, Case(name, "always", 2 / 3)).tokens for name in ("fifo", LRU)}
    assert row == {"fifo": 1 / 6, LRU: 2 / 6}


def test_none_stores_until_it_is_full_and_nothing_after():
    trace = asked((0, 1), (2, 3), (0, 1), (2, 3))
    done = replay(trace, RIVALS["none"](3, trace))
    assert done.written == 3
    assert done.tokens == 3 / 8


def test_arc_keeps_what_was_used_again_through_a_scan():
    scan = [(block,) for block in range(4, 30)]
    trace = asked((0,), (1,), (0,), (1,), *scan, (0,), (1,))
    share = 4 / trace.distinct
    assert trace_row(trace, Case("arc", "always", share)).tokens == 4 / len(trace.requests)
    assert trace_row(trace, Case(LRU, "always", share)).tokens == 2 / len(trace.requests)


def test_seconds_count_deep_blocks_for_more():
    trace = asked((0, 1, 2), (0, 1, 2), (3,))
    done = replay(trace, store_of(Case(LRU, "always", 1.0), trace))
    cost = sum(map(block_cost, range(3)))
    assert done.seconds == pytest.approx(cost / (2 * cost + 1))
    assert done.tokens == 3 / 7


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_a_replay_is_the_same_every_time(name):
    case = Case(name, "adaptive", 0.1)
    assert trace_row(TRACE, case) == trace_row(TRACE, case)
    assert trace_row(TRACE, case) != trace_row(random_trace(seed=1), case)


def test_copies_have_no_block_in_common_and_are_served_alike():
    larger = copies(TRACE, 4)
    assert len(larger.requests) == 4 * len(TRACE.requests)
    assert len({block for r in larger.requests for block in r.blocks}) == 4 * TRACE.distinct
    assert [r.time for r in larger.requests] == sorted(r.time for r in larger.requests)
    case = Case(LRU, "always", 0.1)
    one, four = (replay(trace, store_of(case, trace)) for trace in (TRACE, larger))
    assert four.tokens == pytest.approx(one.tokens, abs=0.05)
