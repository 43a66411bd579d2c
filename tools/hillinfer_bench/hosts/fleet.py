# SPDX-License-Identifier: Apache-2.0
"""A model of a fleet: traces of requests over hosts that have a store each, fail and come back.

Nothing here is measured but the requests. Stores are replayed by the product's own policies; times
follow from rates that `Machines` says, one prompt of a host after the other.
"""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from hillinfer.store.eviction import (
    DEFAULT_ADMISSION,
    DEFAULT_EVICTION,
    Turns,
    WriteBudget,
    make_admission,
    make_eviction_policy,
)
from hillinfer_bench.traces.chain_store import PolicyStore
from hillinfer_bench.traces.request_trace import BLOCK_TOKENS, Request, RequestTrace, block_cost

# As the router has it.
LEAST_SHARE = 0.25
# Places of a host on the ring of roots.
_POINTS = 64
DAY_SECONDS = 86_400.0
# Of what may be written, as the product has it.
_PRESSED = 0.75


class Routing(StrEnum):
    """Where requests go."""

    ROUND_ROBIN = "round-robin"
    """To one host after the other."""
    ROOT = "root"
    """To the host that the root of their chain falls to, by consistent hashing: no directory."""
    PREFIX = "prefix"
    """To who holds most of them, as a directory says, unless it is much busier than another."""
    TRANSFER = "prefix, transfer"
    """The same; who gets a request without its rows brings them from who holds them."""


class Failures(StrEnum):
    """What a host has when it comes back."""

    NONE = "none"
    """No host fails."""
    KEPT = "store kept"
    """Its store, as it was."""
    LOST = "store lost"
    """An empty store, as with rows in memory, or a drive that died."""


@dataclass(frozen=True)
class Machines:
    """What a host is said to do: assumptions, none of them measured here.

    Parameters
    ----------
    block_bytes
        Of a trace's block, 512 tokens: Llama-3.1-8B with its shadows and headers.
    tokens_per_second
        Of reading a prompt, before attention counts.
    read_bytes_per_second, network_bytes_per_second
        Of the drives, and between two hosts.
    most_wait_seconds
        That a holder may be busier than the idlest host and get the request all the same.
    up_seconds, down_seconds
        Mean time from one failure of a host to the next, and how long it is away.
    drive_bytes, writes_per_day
        Of a host's drives, and how many times their size may be written a day for five years.
    """

    block_bytes: float = 72.2e6
    tokens_per_second: float = 20_000.0
    read_bytes_per_second: float = 12e9
    network_bytes_per_second: float = 5e9
    most_wait_seconds: float = 2.0
    up_seconds: float = 1800.0
    down_seconds: float = 120.0
    drive_bytes: float = 7.68e12
    writes_per_day: float = 1.0

    def compute_seconds(self, first: int, stop: int) -> float:
        """Return the time to compute blocks of a prompt."""
        cost = sum(block_cost(position) for position in range(first, stop))
        return cost * BLOCK_TOKENS / self.tokens_per_second


@dataclass(frozen=True)
class FleetCase:
    """One fleet.

    Parameters
    ----------
    routing, failures
        Of it.
    hosts
        How many.
    share
        What all stores together hold, over the distinct blocks of the requests.
    is_capped
        Whether stores keep to the writes that drives take for five years.
    """

    routing: Routing
    failures: Failures
    hosts: int
    share: float
    is_capped: bool = False


@dataclass(frozen=True)
class FleetRow:
    """What a fleet did.

    Parameters
    ----------
    trace, routing, failures, is_capped, hosts, requests
        Which one.
    span
        Seconds from the trace's beginning to its last request.
    tokens
        Share of the prompts' tokens that were not computed.
    first_p50, first_p95
        Modelled seconds to the first token.
    moved_bytes
        Between hosts, a second of the whole fleet.
    held_blocks
        Most that all stores held at once; a directory has eight entries for each.
    written_bytes
        A host's drives a day.
    busiest
        Requests of the busiest host over the mean.
    failed
        Times that a host failed.
    """

    trace: str
    routing: str
    failures: str
    is_capped: bool
    hosts: int
    requests: int
    span: float
    tokens: float
    first_p50: float
    first_p95: float
    moved_bytes: float
    held_blocks: int
    written_bytes: float
    busiest: float
    failed: int


class _Holders:
    """Which hosts hold a block, as a directory knows."""

    def __init__(self) -> None:
        self._hosts: dict[int, set[int]] = {}
        self.count = self.most = 0

    def add(self, block: int, host: int) -> None:
        self._hosts.setdefault(block, set()).add(host)
        self.count += 1
        self.most = max(self.most, self.count)

    def remove(self, block: int, host: int) -> None:
        own = self._hosts[block]
        own.discard(host)
        self.count -= 1
        if not own:
            del self._hosts[block]

    def longest(self, blocks: Sequence[int], alive: Sequence[bool]) -> tuple[int, list[int]]:
        """Return how many blocks are held at most by one host, and by which."""
        found: tuple[int, list[int]] = 0, []
        for count, block in enumerate(blocks, 1):
            own = [host for host in self._hosts.get(block, ()) if alive[host]]
            if not own:
                break
            found = count, own
        return found


class _SteadyWrites(WriteBudget):
    """The product's cap of a day's writes as it is in the long run: so much a second.

    Parameters
    ----------
    most_blocks
        A second; None for no cap.
    """

    def __init__(self, most_blocks: float | None) -> None:
        super().__init__()
        self._most_blocks = most_blocks
        self.blocks = 0

    def is_spent(self, now: float) -> bool:
        """Say whether nothing more may be written."""
        return self._most_blocks is not None and self.blocks >= self._most_blocks * now

    def pressed(self, now: float) -> bool:
        """Say whether the cap is near, so that only what comes a second time is written."""
        return self._most_blocks is not None and self.blocks >= _PRESSED * self._most_blocks * now


class _Store(PolicyStore):
    """A host's store that says what it holds."""

    def __init__(
        self,
        host: int,
        capacity: int,
        holders: _Holders,
        keys: Sequence[bytes],
        most_blocks: float | None,
    ) -> None:
        policy = make_eviction_policy(DEFAULT_EVICTION, Turns())
        self._writes = _SteadyWrites(most_blocks)
        admission = make_admission(DEFAULT_ADMISSION, capacity, policy, self._writes)
        super().__init__(capacity, policy, admission, keys)
        self._host, self._holders = host, holders

    def admits(self, position: int) -> bool:
        """Say whether a block may be stored, as far as the drives last."""
        return not self._writes.is_spent(self._now) and super().admits(position)

    def stored(self, block: int) -> None:
        self._writes.blocks += 1
        super().stored(block)
        self._holders.add(block, self._host)

    def evicted(self, block: int) -> None:
        super().evicted(block)
        self._holders.remove(block, self._host)

    def leave(self) -> None:
        """Take what it holds from the directory."""
        for block in self._worth:
            self._holders.remove(block, self._host)


@dataclass
class _Counts:
    """What is counted of a replay."""

    found: float = 0.0
    moved_blocks: int = 0
    written: int = 0
    first: list[float] = field(default_factory=list)


class FleetReplay:
    """Sends a trace's requests to hosts.

    Parameters
    ----------
    trace, case, machines
        Of it.
    keys
        Of all blocks, as `block_keys` makes them.

    Attributes
    ----------
    stores
        Each host's.
    """

    def __init__(
        self, trace: RequestTrace, case: FleetCase, machines: Machines, keys: Sequence[bytes]
    ) -> None:
        self._trace, self._case, self._machines = trace, case, machines
        self._keys = keys
        self._capacity = max(1, int(case.share * trace.distinct / case.hosts))
        self._holders = _Holders()
        self.stores = [self._empty(host) for host in range(case.hosts)]
        self._free = [0.0] * case.hosts
        self._alive = [True] * case.hosts
        self._turn = 0
        self._answered: Counter[int] = Counter()
        ring = sorted(
            (_point(f"{host} {at}"), host) for host in range(case.hosts) for at in range(_POINTS)
        )
        self._ring = [at for at, _ in ring]
        self._owners = [host for _, host in ring]
        self._root_at = _root_depth(trace, case.hosts)

    def run(self) -> FleetRow:
        """Replay all requests."""
        counts, failed = _Counts(), 0
        events = self._failures()
        following = next(events, None)
        for number, request in enumerate(self._trace.requests):
            while following is not None and following[0] <= request.time:
                failed += self._changed(*following)
                following = next(events, None)
            self._serve(number, request, counts)
        case, span = self._case, max(self._trace.requests[-1].time, 1.0)
        mean = len(self._trace.requests) / case.hosts
        return FleetRow(
            self._trace.name,
            case.routing.value,
            case.failures.value,
            case.is_capped,
            case.hosts,
            len(self._trace.requests),
            span,
            counts.found / self._trace.tokens,
            float(np.percentile(counts.first, 50)),
            float(np.percentile(counts.first, 95)),
            counts.moved_blocks * self._machines.block_bytes / span,
            self._holders.most,
            counts.written * self._machines.block_bytes / case.hosts / span * DAY_SECONDS,
            max(self._answered.values()) / mean,
            failed,
        )

    # --- inside ----------------------------------------------------------------------------

    def _empty(self, host: int) -> _Store:
        machines, most = self._machines, None
        if self._case.is_capped:
            daily = machines.drive_bytes * machines.writes_per_day
            most = daily / machines.block_bytes / DAY_SECONDS
        return _Store(host, self._capacity, self._holders, self._keys, most)

    def _serve(self, number: int, request: Request, counts: _Counts) -> None:
        host, there = self._chosen(request)
        machines, blocks = self._machines, request.blocks
        served = self.stores[host].serve(number, request)
        moved = 0
        if self._case.routing is Routing.TRANSFER and there > served.found:
            moved = there - served.found
        come = served.found + moved
        seconds = machines.compute_seconds(come, len(blocks))
        came = served.found * machines.block_bytes / machines.read_bytes_per_second
        came += moved * machines.block_bytes / machines.network_bytes_per_second
        begins = max(request.time, self._free[host])
        self._free[host] = begins + seconds + came
        counts.found += request.tokens_of(come)
        counts.moved_blocks += moved
        counts.written += served.written
        counts.first.append(begins + seconds + came - request.time)
        self._answered[host] += 1

    def _chosen(self, request: Request) -> tuple[int, int]:
        """Return the host of a request, and how many of its blocks another one holds at most."""
        routing = self._case.routing
        if routing is Routing.ROUND_ROBIN:
            while True:
                self._turn = (self._turn + 1) % self._case.hosts
                if self._alive[self._turn]:
                    return self._turn, 0
        if routing is Routing.ROOT:
            root = request.blocks[min(self._root_at, len(request.blocks) - 1)]
            at = bisect(self._ring, _point(f"root {root}"))
            while not self._alive[self._owners[at % len(self._ring)]]:
                at += 1
            return self._owners[at % len(self._ring)], 0
        there, holders = self._holders.longest(request.blocks, self._alive)
        waits = [max(0.0, free - request.time) for free in self._free]
        awake = [host for host in range(self._case.hosts) if self._alive[host]]
        # Among equals the one that answered least: idle hosts share what is new.
        idlest = min(awake, key=lambda host: (waits[host], self._answered[host]))
        if there >= LEAST_SHARE * len(request.blocks):
            best = min(holders, key=waits.__getitem__)
            if waits[best] <= waits[idlest] + self._machines.most_wait_seconds:
                return best, there
        return idlest, there

    def _failures(self) -> Iterator[tuple[float, int, bool]]:
        """Yield when which host goes or comes back."""
        if self._case.failures is Failures.NONE or self._case.hosts < 2:
            return
        numbers, machines = np.random.default_rng(5), self._machines
        events: list[tuple[float, int, bool]] = []
        last = self._trace.requests[-1].time
        for host in range(self._case.hosts):
            at = float(numbers.exponential(machines.up_seconds))
            while at < last:
                events += [(at, host, False), (at + machines.down_seconds, host, True)]
                at += machines.down_seconds + float(numbers.exponential(machines.up_seconds))
        yield from sorted(events)

    def _changed(self, now: float, host: int, is_back: bool) -> int:  # noqa: FBT001 - of an event
        """Let a host go or come back; return how many went."""
        if is_back:
            self._alive[host], self._free[host] = True, now
            return 0
        if sum(self._alive) == 1:
            # The last one stays: a fleet without hosts answers nothing.
            return 0
        self._alive[host] = False
        if self._case.failures is Failures.LOST:
            self.stores[host].leave()
            self.stores[host] = self._empty(host)
        return 1


def _root_depth(trace: RequestTrace, hosts: int) -> int:
    """Return the first place whose blocks no more requests have in common than a host may get."""
    depth = 0
    while depth < 8:
        seen = Counter(one.blocks[min(depth, len(one.blocks) - 1)] for one in trace.requests)
        if seen.most_common(1)[0][1] * hosts <= len(trace.requests):
            return depth
        depth += 1
    return depth


def _point(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
