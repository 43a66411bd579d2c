# SPDX-License-Identifier: Apache-2.0
"""Which replica a request goes to: policies over how much of it each holds and how busy each is."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hillinfer.errors import HillInferError
from hillinfer.store.keys import CHUNK_GROUPS

# Requests that the host with the longest prefix may have more than the idlest one.
MOST_AHEAD = 4
# Of a prompt, what somebody must hold for it to count: else a beginning that all prompts have would
# send all of them to whoever read it first.
LEAST_SHARE = 0.25
# Prompts under way that are remembered, and for how long.
_MOST_EXPECTED, _EXPECTED_SECONDS = 65_536, 60.0


@dataclass(frozen=True)
class Candidate:
    """A replica that a request may go to.

    Parameters
    ----------
    name
        Of its host.
    share
        Of the prompt that it holds, or is about to.
    requests
        That it is answering for this router.
    """

    name: str
    share: float
    requests: int


class Policy(ABC):
    """Chooses a replica; any thread may ask."""

    uses_prefixes = False
    """Whether it looks at `share`: else prompts are not hashed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turn = 0

    @abstractmethod
    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return one of them; there is one at least."""

    def _idlest(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return one with the fewest requests, another one each time among equals."""
        least = min(one.requests for one in candidates)
        return self._next([one for one in candidates if one.requests == least])

    def _next(self, candidates: Sequence[Candidate]) -> Candidate:
        with self._lock:
            self._turn += 1
            return candidates[self._turn % len(candidates)]


class LongestPrefix(Policy):
    """To whom has read most of it, a quarter at least, unless others are much idler.

    Parameters
    ----------
    most_ahead
        Requests that who has read most may have more than the idlest.
    """

    uses_prefixes = True

    def __init__(self, most_ahead: int = MOST_AHEAD) -> None:
        super().__init__()
        self._most_ahead = most_ahead

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return the one with most of the prompt among those that are not too busy."""
        least = min(one.requests for one in candidates)
        free = [one for one in candidates if one.requests <= least + self._most_ahead]
        most = max(one.share for one in free)
        if most < LEAST_SHARE:
            return self._idlest(candidates)
        return self._idlest([one for one in free if one.share == most])


class LeastLoaded(Policy):
    """To the idlest, whatever it has read."""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return one with the fewest requests."""
        return self._idlest(candidates)


class RoundRobin(Policy):
    """To one after the other."""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return the next one by name."""
        return self._next(sorted(candidates, key=lambda one: one.name))


POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {"prefix": LongestPrefix, "least-loaded": LeastLoaded, "round-robin": RoundRobin}
)


def make_policy(name: str) -> Policy:
    """Return a policy by its name; HillInferError where there is none."""
    if name not in POLICIES:
        raise HillInferError(f"there is no policy '{name}': choose one of {', '.join(POLICIES)}")
    return POLICIES[name]()


class Expected:
    """Prompts that hosts are about to hold, because they were sent there a moment ago.

    Two requests with one beginning that come together are read by one host so, before its store has
    said anything.

    Parameters
    ----------
    clock
        Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._hosts: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def note(self, keys: Sequence[bytes], host: str) -> None:
        """Note that a prompt was sent to a host.

        Parameters
        ----------
        keys
            Of its prefixes that end with a full group, shortest first.
        host
            Its name.
        """
        now = self._clock()
        with self._lock:
            for key in _marks(keys):
                self._hosts[key] = host, now
                self._hosts.move_to_end(key)
            while len(self._hosts) > _MOST_EXPECTED:
                self._hosts.popitem(last=False)

    def longest(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Return how many groups of a prompt each host is about to hold, by its name."""
        since = self._clock() - _EXPECTED_SECONDS
        found: dict[str, int] = {}
        with self._lock:
            for groups, key in enumerate(keys, 1):
                host, noted = self._hosts.get(key, ("", 0.0))
                if host and noted >= since:
                    found[host] = groups
        return found

    def forget(self, host: str) -> None:
        """Expect nothing of a host any more."""
        with self._lock:
            gone = [key for key, (own, _) in self._hosts.items() if own == host]
            for key in gone:
                del self._hosts[key]


def _marks(keys: Sequence[bytes]) -> Iterable[bytes]:
    """Return the keys of a prompt that are noted: the first chunk's all, then ends of chunks."""
    yield from keys[:CHUNK_GROUPS]
    yield from keys[2 * CHUNK_GROUPS - 1 :: CHUNK_GROUPS]
    yield from keys[-1:]
