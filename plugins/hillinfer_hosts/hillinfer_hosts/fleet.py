# SPDX-License-Identifier: Apache-2.0
"""The hosts that a router knows: which are there, what each is doing, and what each holds."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest

from hillinfer.errors import HillInferError
from hillinfer_hosts.choice import Candidate, Expected, LeastLoaded, Policy
from hillinfer_hosts.directory import Directory, Host
from hillinfer_hosts.prompts import Chains

# A host that did not answer is not asked for so long, but where there is no other.
REST_SECONDS = 5.0
# Of all that hosts announce, the namespaces that a prompt is hashed for.
_MOST_NAMESPACES = 16


class Fleet:
    """Hosts of a directory, and replicas without a store that are named once; any thread.

    Parameters
    ----------
    directory
        Says which hosts are there and what each holds. Where it fails, nobody holds anything, and
        hosts are those of the last time.
    policy
        Chooses among them.
    replicas
        URLs of replicas without an agent.
    clock
        Returns the time in seconds.
    """

    def __init__(
        self,
        directory: Directory,
        policy: Policy,
        replicas: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self._directory, self._clock = directory, clock
        self._fixed = [Host(url, url) for url in replicas]
        self._last: list[Host] = []
        self._expected = Expected()
        # Its own turns: else who makes tokens would decide who answers.
        self._helpers = LeastLoaded()
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._resting: dict[str, float] = {}

    def hosts(self) -> list[Host]:
        """Return all hosts, those that rest too."""
        with suppress(HillInferError):
            self._last = self._directory.hosts()
        named = {one.replica for one in self._last}
        return [*self._last, *(one for one in self._fixed if one.replica not in named)]

    def namespaces(self, hosts: Sequence[Host]) -> list[bytes]:
        """Return the namespaces that some hosts have rows of, the latest ones."""
        # In turns: a host with many of them leaves room for those of others.
        turns = zip_longest(*(one.namespaces[::-1] for one in hosts))
        every = dict.fromkeys(digest for turn in turns for digest in turn if digest is not None)
        return list(every)[:_MOST_NAMESPACES]

    def held(self, chains: Chains) -> dict[str, int]:
        """Return how many groups of a prompt each host holds or is about to, by its name."""
        found = self._expected.longest(chains.own)
        for name, own in self.stored(chains).items():
            found[name] = max(found.get(name, 0), *own.values())
        return found

    def stored(self, chains: Chains) -> dict[str, dict[bytes, int]]:
        """Return how many groups of a prompt each host's store holds, by namespace."""
        found: dict[str, dict[bytes, int]] = {}
        try:
            for digest, keys in chains.keys.items():
                for name, groups in self._directory.longest(keys).items():
                    found.setdefault(name, {})[digest] = groups
        except HillInferError:
            return {}
        return found

    def choose(self, hosts: Sequence[Host], held: dict[str, int], groups: int) -> Host | None:
        """Return the host that a request goes to; None where there is none.

        Parameters
        ----------
        hosts
            That may get it.
        held, groups
            What each holds of its prompt, by its name, and how many groups that has.
        """
        shares = {name: own / max(1, groups) for name, own in held.items()}
        return self._chosen(self.policy, hosts, shares)

    def helper(self, hosts: Sequence[Host]) -> Host | None:
        """Return a host that may make the tokens of a prompt; None where there is none."""
        return self._chosen(self._helpers, hosts, {})

    def _chosen(
        self, policy: Policy, hosts: Sequence[Host], shares: dict[str, float]
    ) -> Host | None:
        now = self._clock()
        with self._lock:
            awake = [one for one in hosts if self._resting.get(one.name, now) <= now]
            every = [
                Candidate(one.name, shares.get(one.name, 0.0), self._requests[one.name])
                for one in awake or hosts
            ]
        if not every:
            return None
        chosen = policy.choose(every).name
        return next(one for one in hosts if one.name == chosen)

    def expect(self, chains: Chains, host: Host) -> None:
        """Note that a host is about to read a prompt."""
        self._expected.note(chains.own, host.name)

    @contextmanager
    def busy(self, host: Host) -> Iterator[None]:
        """Count a request of a host while it is answered."""
        with self._lock:
            self._requests[host.name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._requests[host.name] -= 1

    def rest(self, host: Host) -> None:
        """Leave a host alone for a while."""
        with self._lock:
            self._resting[host.name] = self._clock() + REST_SECONDS

    def lost(self, host: Host) -> None:
        """Forget what a host holds that does not answer, and leave it alone for a while."""
        self.rest(host)
        self._expected.forget(host.name)
        with suppress(HillInferError):
            self._directory.forget(host.name)
