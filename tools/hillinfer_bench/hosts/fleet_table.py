# SPDX-License-Identifier: Apache-2.0
"""Fleets side by side: every routing over copies of traces, with hosts that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hillinfer_bench.hosts.fleet import (
    DAY_SECONDS,
    Failures,
    FleetCase,
    FleetReplay,
    FleetRow,
    Machines,
    Routing,
)
from hillinfer_bench.traces.chain_store import block_keys
from hillinfer_bench.traces.request_trace import BLOCK_TOKENS, RequestTrace
from hillinfer_bench.traces.scale import copies
from hillinfer_bench.traces.table import aligned
from hillinfer_model.kernel_spec import GROUP_TOKENS

HOSTS_PER_COPY = 4
"""Of a trace: as many as read its prompts in two thirds of the time, where nothing is found."""
_ENTRIES = BLOCK_TOKENS // GROUP_TOKENS


@dataclass(frozen=True)
class EntryCost:
    """What an entry of the embedded directory takes.

    Parameters
    ----------
    entries
        That were entered.
    bytes_each
        Of the database, over them.
    """

    entries: int
    bytes_each: float


def cases(hosts: int, share: float) -> Iterator[FleetCase]:
    """Yield what is compared: each routing, and the best one with hosts that fail."""
    for routing in Routing:
        yield FleetCase(routing, Failures.NONE, hosts, share)
    yield FleetCase(Routing.TRANSFER, Failures.NONE, hosts, share, is_capped=True)
    for failures in (Failures.KEPT, Failures.LOST):
        yield FleetCase(Routing.ROOT, failures, hosts, share)
        yield FleetCase(Routing.TRANSFER, failures, hosts, share)


def fleet_rows(
    traces: Sequence[RequestTrace],
    counts: Sequence[int],
    share: float,
    machines: Machines,
    done: Callable[[], None],
) -> list[FleetRow]:
    """Replay every case on so many copies of each trace.

    Parameters
    ----------
    traces, counts
        Of the requests.
    share
        As in `FleetCase`.
    machines
        Of the hosts.
    done
        Called behind each replay.
    """
    rows = []
    for trace in traces:
        for count in counts:
            larger = copies(trace, count)
            keys = block_keys(larger.distinct)
            for case in cases(HOSTS_PER_COPY * count, share):
                rows.append(FleetReplay(larger, case, machines, keys).run())
                done()
    return rows


def endurance_share(row: FleetRow, machines: Machines) -> float:
    """Return what a host writes a day over what its drives may take for five years."""
    return row.written_bytes / (machines.drive_bytes * machines.writes_per_day)


def fleet_text(rows: Sequence[FleetRow], machines: Machines, entry_bytes: float) -> str:
    """Return the rows as a Markdown table."""
    head = (
        *("trace", "hosts", "routing", "failures", "tokens found", "first token p50, p95 s"),
        *("GB/s between hosts", "directory", "written a host", "busiest"),
    )
    lines = [head]
    for row in rows:
        index = row.held_blocks * _ENTRIES * entry_bytes
        lines.append(
            (
                row.trace,
                f"{row.hosts}",
                row.routing + (", capped" if row.is_capped else ""),
                row.failures + (f", {row.failed}" if row.failed else ""),
                f"{row.tokens:.3f}",
                f"{row.first_p50:.2f}, {row.first_p95:.2f}",
                f"{row.moved_bytes / 1e9:.2f}",
                f"{index / 1e6:.1f} MB",
                f"{row.written_bytes / 1e12:.2f} TB/day, {endurance_share(row, machines):.2f} DWPD",
                f"{row.busiest:.2f}",
            )
        )
    return aligned(lines)


def scaled_text(row: FleetRow, machines: Machines, entry_bytes: float, requests: float) -> str:
    """Return what a fleet for so many requests a day takes, reckoned from its largest replay.

    Parameters
    ----------
    row
        Of the replay.
    machines
        Of the hosts.
    entry_bytes
        That a directory takes for an entry.
    requests
        A day.
    """
    per_day = row.requests * DAY_SECONDS / row.span
    times = requests / per_day
    hosts = row.hosts * times
    index = row.held_blocks * times * _ENTRIES * entry_bytes
    years = machines.drive_bytes * machines.writes_per_day / max(row.written_bytes, 1.0) * 5
    return (
        f"modelled: {requests / 1e9:g} G requests a day as in {row.trace}: {hosts:,.0f} hosts, "
        f"{row.tokens:.3f} of tokens found, {row.moved_bytes * times / 1e12:.2f} TB/s between "
        f"hosts, {index / 1e9:,.0f} GB of directory, drives last {years:.1f} years"
    )


def entry_cost(entries: int = 200_000) -> EntryCost:
    """Measure what an entry of the embedded directory takes, of hosts that hold much alike."""
    import hashlib

    from hillinfer_hosts.directory import Change, EmbeddedDirectory, Host

    keys = [hashlib.sha256(at.to_bytes(8, "little")).digest()[:16] for at in range(entries // 2)]
    directory = EmbeddedDirectory()
    try:
        for name in ("a", "b"):
            directory.announce(Host(name, name, session="1"), Change(keys, is_whole=True))
        return EntryCost(directory.count(), directory.byte_count() / directory.count())
    finally:
        directory.close()
