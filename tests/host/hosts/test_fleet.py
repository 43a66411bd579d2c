# SPDX-License-Identifier: Apache-2.0
"""The model of a fleet: what routings find, what failures cost, and that nothing is made up."""

import pytest

from hillinfer_bench.hosts import fleet
from hillinfer_bench.hosts.fleet import Failures, FleetCase, FleetReplay, Machines, Routing
from hillinfer_bench.hosts.fleet_table import cases, fleet_text, scaled_text
from hillinfer_bench.traces.chain_store import block_keys
from hillinfer_bench.traces.request_trace import BLOCK_TOKENS, Request, RequestTrace
from hillinfer_bench.traces.table import replay
from hillinfer_hosts import choice

MACHINES = Machines()


def trace_of(chains, times, gap=30.0):
    """Each chain of blocks asked for so many times, one chain after the other."""
    requests = [
        Request(gap * (turn * len(chains) + at), len(chain) * BLOCK_TOKENS, chain)
        for turn in range(times)
        for at, chain in enumerate(chains)
    ]
    return RequestTrace("made", tuple(requests), 1 + max(max(one) for one in chains))


# A common beginning, and five documents of four blocks behind it.
CHAINS = [(0, *range(1 + 4 * at, 5 + 4 * at)) for at in range(5)]
TRACE = trace_of(CHAINS, 6)


def ran(
    routing, trace=TRACE, hosts=2, share=1.0, failures=Failures.NONE, machines=MACHINES, **more
):
    case = FleetCase(routing, failures, hosts, share, **more)
    return FleetReplay(trace, case, machines, block_keys(trace.distinct)).run()


def test_one_host_does_what_one_store_does():
    case = next(iter(cases(1, 1.0)))
    keys = block_keys(TRACE.distinct)
    alone = replay(TRACE, FleetReplay(TRACE, case, MACHINES, keys).stores[0])
    row = FleetReplay(TRACE, case, MACHINES, keys).run()
    assert row.tokens == pytest.approx(alone.tokens)
    assert row.written_bytes > 0
    assert row.moved_bytes == 0


@pytest.mark.parametrize("routing", [Routing.ROOT, Routing.PREFIX, Routing.TRANSFER])
def test_who_knows_where_rows_are_finds_more_than_who_does_not(routing):
    # Stores that hold everything together, and half of it each.
    blind = ran(Routing.ROUND_ROBIN, share=1.0)
    assert ran(routing, share=1.0).tokens > blind.tokens + 0.1
    assert ran(routing).first_p50 <= blind.first_p50


def test_rows_move_only_where_that_was_asked_for():
    # Nobody waits for a busy holder.
    hurried = Machines(most_wait_seconds=0.0)
    crowd = trace_of(CHAINS[:1], 40, gap=0.001)
    moved = ran(Routing.TRANSFER, crowd, machines=hurried)
    assert moved.moved_bytes > 0
    assert ran(Routing.PREFIX, crowd, machines=hurried).moved_bytes == 0
    assert ran(Routing.TRANSFER, crowd, machines=Machines(most_wait_seconds=1e9)).moved_bytes == 0


def test_a_store_that_is_lost_finds_less_than_one_that_is_kept():
    frail = Machines(up_seconds=150.0, down_seconds=10.0)
    kept = ran(Routing.ROOT, failures=Failures.KEPT, machines=frail)
    lost = ran(Routing.ROOT, failures=Failures.LOST, machines=frail)
    whole = ran(Routing.ROOT, machines=frail)
    assert kept.failed == lost.failed > 0
    assert whole.failed == 0
    assert lost.tokens < kept.tokens <= whole.tokens
    # Whatever fails, all requests are answered.
    assert kept.requests == lost.requests == len(TRACE.requests)


def test_the_model_chooses_as_the_router_does():
    assert fleet.LEAST_SHARE == choice.LEAST_SHARE


def test_a_cap_holds():
    small = Machines(drive_bytes=MACHINES.block_bytes * 86_400 / 100)
    capped = ran(Routing.PREFIX, is_capped=True, machines=small)
    free = ran(Routing.PREFIX, machines=small)
    assert capped.written_bytes <= 1.1 * small.drive_bytes < free.written_bytes


def test_a_day_has_as_many_requests_as_the_trace_has_in_its_time():
    row = ran(Routing.ROUND_ROBIN)
    assert row.span == TRACE.requests[-1].time == 870.0
    # 30 requests in 870 seconds are 2,979 a day: two hosts for each so many.
    told = scaled_text(row, MACHINES, 50.0, 100 * 30 * 86_400 / 870)
    assert ": 200 hosts" in told
    slower = ran(Routing.ROUND_ROBIN, trace_of(CHAINS, 6, gap=60.0))
    assert ": 400 hosts" in scaled_text(slower, MACHINES, 50.0, 100 * 30 * 86_400 / 870)


def test_tables_have_a_line_for_each_row():
    rows = [ran(routing) for routing in Routing]
    text = fleet_text(rows, MACHINES, 50.0)
    assert len(text.splitlines()) == 2 + len(rows)
    assert "modelled" in scaled_text(rows[0], MACHINES, 50.0, 1e9)
    assert scaled_text(rows[0], MACHINES, 50.0, 2e9) != scaled_text(rows[0], MACHINES, 50.0, 1e9)
