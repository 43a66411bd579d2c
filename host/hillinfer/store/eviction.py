# SPDX-License-Identifier: Apache-2.0
"""Policies of eviction and admission for a store, and a limit of what is written to its drives.

Nothing here touches a drive or the index. What is learned can be saved as JSON of plain numbers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hillinfer.errors import SettingsError

# --- What a policy knows of a chunk ---


@dataclass(frozen=True)
class ChunkFacts:
    """What a policy may look at, of one chunk.

    Parameters
    ----------
    position
        Number of the chunk in its chain, 0 first.
    hits
        Times it was found since it was stored, this one included, faded (`hits_after`).
    turn
        Which turn of a conversation wrote it, 1 first; 0 unknown.
    cost
        Seconds to recompute it.
    last
        When it was last used before now, seconds; now where it is stored now.
    now
        Seconds.
    """

    position: int
    hits: float
    turn: int
    cost: float
    last: float
    now: float


HITS_HALF_LIFE = 3600.0
"""Seconds after which a hit counts for half."""


def hits_after(hits: float, idle: float) -> float:
    """Return the hits of a chunk that is found once more, `idle` seconds after it was last used."""
    return float(1 + hits * 0.5 ** (max(0.0, idle) / HITS_HALF_LIFE))


# --- Whether a conversation goes on ---

_MOST_TURN = 16
_FADES_AT = 1 << 16


class Turns:
    """Says which turn of a conversation a prompt is, and learns how many go on after each turn.

    A prompt that begins with all whole chunks of an earlier prompt is its next turn. The ends of
    the newest `most_ends` prompts are remembered whether or not their chunks are still stored: else
    a store that evicts too soon would learn that nobody comes back.
    """

    def __init__(self, most_ends: int = 1 << 14) -> None:
        self._most_ends = most_ends
        self._ends: dict[int, int] = {}
        self._seen = [0.0] * (_MOST_TURN + 1)
        self._continued = [0.0] * (_MOST_TURN + 1)

    def of(self, keys: Sequence[bytes]) -> int:
        """Return the turn, 1 first, of a prompt of these whole chunks, and learn from it."""
        if not keys:
            return 1
        turn = 1
        for key in reversed(keys):
            # An end is gone when it is continued: what many begin with is no conversation.
            before = self._ends.pop(_number(key), None)
            if before is not None:
                self._continued[min(before, _MOST_TURN)] += 1
                turn = before + 1
                break
        self._seen[min(turn, _MOST_TURN)] += 1
        end = _number(keys[-1])
        self._ends.pop(end, None)
        self._ends[end] = turn
        if len(self._ends) > self._most_ends:
            del self._ends[next(iter(self._ends))]
        if sum(self._seen) >= _FADES_AT:
            self._seen = [count / 2 for count in self._seen]
            self._continued = [count / 2 for count in self._continued]
        return turn

    def chance(self, turn: int) -> float:
        """Return the share of conversations that go on after a turn, above 0 and below 1.

        A turn that is unknown (0) counts as the first.
        """
        known = min(max(turn, 1), _MOST_TURN)
        return (self._continued[known] + 1) / (self._seen[known] + 2)

    def state(self) -> dict[str, Any]:
        """Return what was learned, for JSON."""
        return {
            "seen": list(self._seen),
            "continued": list(self._continued),
            "ends": [[end, turn] for end, turn in self._ends.items()],
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned; ValueError where it is none of these."""
        seen, continued = (_numbers(state, name, _MOST_TURN + 1) for name in ("seen", "continued"))
        ends = {int(end): int(turn) for end, turn in _rows(state, "ends", 2)}
        if any(two > one for one, two in zip(seen, continued, strict=True)):
            raise ValueError("more turns were continued than seen")
        self._seen, self._continued = seen, continued
        self._ends = dict(list(ends.items())[-self._most_ends :])


# --- Which chunk goes ---


class EvictionPolicy:
    """Ranks chunks; the one of least worth among leaves that nobody leases or pins goes first.

    This one is LRU. Subclasses override the one method.

    Parameters
    ----------
    turns
        What is known of conversations; for policies that ask.
    """

    def __init__(self, turns: Turns | None = None) -> None:
        self.turns = Turns() if turns is None else turns

    def worth(self, facts: ChunkFacts, age: float) -> float:
        """Return what a chunk is worth, a number that is kept until it is asked for again.

        Asked when a chunk is stored and on every hit.

        Parameters
        ----------
        facts
            What is known of it.
        age
            The largest worth of any chunk that was evicted so far, 0 at first (GDSF's A): what is
            worth `age` plus something outlives what is used as rarely but brings less. It must
            never go back.
        """
        return facts.now


class MostHits(EvictionPolicy):
    """LFU: keeps what was found most often; hits fade."""

    def worth(self, facts: ChunkFacts, age: float) -> float:
        """Return the hits."""
        return facts.hits


class HitsTimesCost(EvictionPolicy):
    """GDSF: keeps what was found often and takes long to recompute; the rest ages."""

    def worth(self, facts: ChunkFacts, age: float) -> float:
        """Return the seconds that its hits saved, from the present age on."""
        return age + (1 + facts.hits) * facts.cost


class SecondsSaved(EvictionPolicy):
    """Keeps what will save most seconds: cost, hits and whether conversations go on after its turn.

    Hits count by their root: in full, they hold what was asked for often once over what is now.
    """

    def worth(self, facts: ChunkFacts, age: float) -> float:
        """Return the seconds that are likely to be saved, from the present age on."""
        return age + math.sqrt(1 + facts.hits) * facts.cost * self.turns.chance(facts.turn)


DEFAULT_EVICTION = "saved"
EVICTION_POLICIES: Mapping[str, Callable[[Turns | None], EvictionPolicy]] = MappingProxyType(
    {
        DEFAULT_EVICTION: SecondsSaved,
        "gdsf": HitsTimesCost,
        "lru": EvictionPolicy,
        "lfu": MostHits,
    }
)


def make_eviction_policy(name: str, turns: Turns | None = None) -> EvictionPolicy:
    """Return the policy of a name, or raise SettingsError naming those there are."""
    if name not in EVICTION_POLICIES:
        raise SettingsError(
            f"eviction={name!r} is unknown: choose one of {', '.join(EVICTION_POLICIES)}"
        )
    return EVICTION_POLICIES[name](turns)


# --- How much may be written ---

_HOUR = 3600
_HOURS = 24
# From this share of the cap on, what is written is chosen with care.
_PRESSED = 0.75


class WriteBudget:
    """Counts the bytes written within the last 24 hours, by the hour, against a cap.

    Parameters
    ----------
    most_bytes
        Of any 24 hours; None for no cap.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        if most_bytes is not None and most_bytes < 0:
            raise SettingsError(f"max_writes_per_day={most_bytes} is below 0")
        self._most = most_bytes
        self._hours: dict[int, int] = {}

    def written(self, now: float) -> int:
        """Return the bytes of the last 24 hours; the oldest hour counts until it is over."""
        hour = int(now // _HOUR)
        for old in [one for one in self._hours if one < hour - _HOURS]:
            del self._hours[old]
        return sum(self._hours.values())

    def allows(self, size: int, now: float) -> bool:
        """Say whether `size` bytes more stay within the cap."""
        return self._most is None or self.written(now) + size <= self._most

    def pressed(self, now: float) -> bool:
        """Say whether the cap is near, so that only what comes a second time should be written."""
        return self._most is not None and self.written(now) >= _PRESSED * self._most

    def wrote(self, size: int, now: float) -> None:
        """Count bytes that were written."""
        hour = int(now // _HOUR)
        self._hours[hour] = self._hours.get(hour, 0) + size

    def state(self) -> dict[str, Any]:
        """Return hours since the epoch and their bytes, for JSON."""
        return {"hours": [[hour, size] for hour, size in self._hours.items()]}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned; ValueError where it is none of these."""
        hours = {int(hour): int(size) for hour, size in _rows(state, "hours", 2)}
        if any(size < 0 for size in hours.values()):
            raise ValueError("an hour has less than no bytes")
        self._hours = hours


# --- Which chunk comes in ---


class Admission:
    """Says which chunks are stored; this one admits all.

    Whoever looks a prompt up asks about every chunk of it, first to last, whether it is stored or
    not: what is found teaches as much as what is missing. A chunk behind one that is neither
    stored nor admitted is not stored either.
    """

    def admits(self, key: bytes, turn: int, position: int, cost: float, now: float) -> bool:
        """Say whether a chunk is worth writing; of no meaning where it is stored.

        Parameters
        ----------
        key
            Of the chunk: a hash, at least 8 bytes.
        turn, position, cost, now
            As in `ChunkFacts`.
        """
        return True

    def state(self) -> dict[str, Any]:
        """Return what was learned, for JSON."""
        return {}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned; ValueError where it is none of these."""


class SeenOnce(Admission):
    """Admits a chunk when it is asked for a second time: less is written, first repeats are lost.

    Parameters
    ----------
    chunks
        Keys remembered at least; at most twice as many.
    """

    def __init__(self, chunks: int) -> None:
        self._most = max(chunks, 1)
        self._new: dict[int, None] = {}
        self._old: dict[int, None] = {}

    def admits(self, key: bytes, turn: int, position: int, cost: float, now: float) -> bool:
        """Say whether the key was seen before, and remember it."""
        number = _number(key)
        seen = number in self._new or number in self._old
        self._new[number] = None
        if len(self._new) > self._most:
            self._new, self._old = {number: None}, self._new
        return seen

    def state(self) -> dict[str, Any]:
        """Return the keys that are remembered, oldest first, for JSON."""
        return {"keys": [*(key for key in self._old if key not in self._new), *self._new]}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned; ValueError where it is none of these."""
        keys = [int(key) for key in _numbers(state, "keys")]
        self._old = dict.fromkeys(keys[: -self._most])
        self._new = dict.fromkeys(keys[-self._most :])


class GhostStore:
    """Keys of the chunks that a store under another admission would hold, and what it would save.

    It holds a sample of keys, each for itself. Whole chains would be closer to the store, but where
    all prompts begin alike, a sample of chains is all of them or none.

    Parameters
    ----------
    chunks
        How many keys it holds.
    policy
        Which one goes.
    """

    def __init__(self, chunks: int, policy: EvictionPolicy) -> None:
        self._most = max(chunks, 1)
        self._policy = policy
        self._held: dict[int, tuple[float, float, float]] = {}
        self._heap: list[tuple[float, int]] = []
        self._age = 0.0
        self.saved = 0.0
        """Seconds of recomputing that its hits saved; whoever compares lets it fade."""

    def finds(self, number: int, facts: ChunkFacts) -> bool:
        """Say whether it holds a key, and count the hit."""
        held = self._held.get(number)
        if held is None:
            return False
        _, hits, last = held
        self.saved += facts.cost
        again = hits_after(hits, facts.now - last)
        found = ChunkFacts(facts.position, again, facts.turn, facts.cost, last, facts.now)
        self._hold(number, found)
        return True

    def store(self, number: int, facts: ChunkFacts) -> None:
        """Hold a key that it did not, and evict one where it is full."""
        while len(self._held) >= self._most:
            worth, other = heapq.heappop(self._heap)
            if other in self._held and self._held[other][0] == worth:
                del self._held[other]
                self._age = max(self._age, worth)
        self._hold(number, facts)

    def _hold(self, number: int, facts: ChunkFacts) -> None:
        worth = self._policy.worth(facts, self._age)
        self._held[number] = (worth, facts.hits, facts.now)
        heapq.heappush(self._heap, (worth, number))
        if len(self._heap) > 8 * self._most + 64:
            self._heap = [(kept[0], number) for number, kept in self._held.items()]
            heapq.heapify(self._heap)


_LEAST_GHOST = 1024
_MOST_SAMPLED = 64
# What ghosts saved counts for half after so many of the keys that they hold were asked for.
_GHOST_FADES = 16
# Seconds saved by admitting what is seen again over those by admitting all. Selecting writes a
# half to a quarter, so it stays until it is clearly worse.
_AGAIN_BETTER, _ALL_BETTER = 1.03, 0.85


class AdaptiveAdmission(Admission):
    """Admits all, or only what is seen a second time, as the better of two ghost stores does.

    Parameters
    ----------
    chunks
        What the store holds.
    policy
        By which it evicts.
    budget
        Of bytes written: near its cap only what is seen a second time is admitted.
    """

    def __init__(
        self, chunks: int, policy: EvictionPolicy, budget: WriteBudget | None = None
    ) -> None:
        # One key in so many: the ghosts of a small store would be too small to tell.
        self._sampled = min(max(chunks // _LEAST_GHOST, 1), _MOST_SAMPLED)
        held = max(chunks // self._sampled, 1)
        self._all, self._again = GhostStore(held, policy), GhostStore(held, policy)
        self._seen = _seen_once(chunks)
        self._fade = 0.5 ** (1 / (_GHOST_FADES * held))
        self._budget = budget or WriteBudget()
        self.selective = False
        """Whether only what is seen a second time is admitted now."""

    def admits(self, key: bytes, turn: int, position: int, cost: float, now: float) -> bool:
        """Say whether a chunk is worth writing, and let both ghosts have it."""
        seen = self._seen.admits(key, turn, position, cost, now)
        number = _number(key)
        if number % self._sampled == 0:
            stores = (self._all, self._again) if seen else (self._all,)
            self._learn(number, ChunkFacts(position, 0.0, turn, cost, now, now), stores)
        return seen or not (self.selective or self._budget.pressed(now))

    def _learn(self, number: int, facts: ChunkFacts, stores: Sequence[GhostStore]) -> None:
        for ghost in (self._all, self._again):
            ghost.saved *= self._fade
            if not ghost.finds(number, facts) and ghost in stores:
                ghost.store(number, facts)
        ratio = self._again.saved / max(self._all.saved, 1e-9)
        # Between the two nothing changes: what one rule stored is worth less under the other.
        if not _ALL_BETTER <= ratio <= _AGAIN_BETTER:
            self.selective = ratio > 1

    def state(self) -> dict[str, Any]:
        """Return what was learned, for JSON; ghosts begin empty and keep what they saved."""
        saved = [self._all.saved, self._again.saved]
        return {"selective": [int(self.selective)], "saved": saved, **self._seen.state()}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned; ValueError where it is none of these."""
        (selective,), saved = _numbers(state, "selective", 1), _numbers(state, "saved", 2)
        self._seen.resume(state)
        self.selective = bool(selective)
        self._all.saved, self._again.saved = saved


def _seen_once(chunks: int) -> SeenOnce:
    # Eight times what the store holds, and never more than some ten megabytes.
    return SeenOnce(min(8 * chunks, 1 << 17))


DEFAULT_ADMISSION = "adaptive"
_MakeAdmission = Callable[[int, EvictionPolicy, WriteBudget], Admission]
ADMISSIONS: Mapping[str, _MakeAdmission] = MappingProxyType(
    {
        DEFAULT_ADMISSION: AdaptiveAdmission,
        "always": lambda chunks, policy, budget: Admission(),
        "seen-once": lambda chunks, policy, budget: _seen_once(chunks),
    }
)


def make_admission(
    name: str, chunks: int, policy: EvictionPolicy, budget: WriteBudget
) -> Admission:
    """Return the admission of a name, or raise SettingsError naming those there are."""
    if name not in ADMISSIONS:
        raise SettingsError(f"admission={name!r} is unknown: choose one of {', '.join(ADMISSIONS)}")
    return ADMISSIONS[name](chunks, policy, budget)


# --- Keys and states as plain numbers ---


def _number(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


def _numbers(state: Mapping[str, Any], name: str, count: int | None = None) -> list[float]:
    found = state.get(name)
    if not isinstance(found, list) or not all(map(_is_number, found)):
        raise ValueError(f"{name} is no list of numbers")
    if count is not None and len(found) != count:
        raise ValueError(f"{name} has {len(found)} numbers in place of {count}")
    return found


def _rows(state: Mapping[str, Any], name: str, columns: int) -> list[list[float]]:
    found = state.get(name)
    if not isinstance(found, list):
        raise ValueError(f"{name} is no list")
    return [_numbers({name: row}, name, columns) for row in found]


def _is_number(value: Any) -> bool:
    # No infinity, and nothing that is none: comparing is exact where converting would overflow.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
