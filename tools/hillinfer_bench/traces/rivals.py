# SPDX-License-Identifier: Apache-2.0
"""Stores by other rules, to be compared with: FIFO, ARC, the Tutti paper's none, Belady's bound."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from hillinfer_bench.traces.chain_store import NONE, ChainStore, Leaves
from hillinfer_bench.traces.request_trace import Request


class ClockStore(ChainStore):
    """A block is worth the number of blocks that were used before it."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._ticks = 0

    def worth_of_hit(self, block: int, position: int) -> float:
        """Return the number of uses so far."""
        self._ticks += 1
        return float(self._ticks)

    def worth_of_new(self, block: int, position: int) -> float:
        """Return the number of uses so far."""
        self._ticks += 1
        return float(self._ticks)


class FifoStore(ClockStore):
    """Evicts what was stored first, as far as chains allow."""

    def worth_of_hit(self, block: int, position: int) -> float:
        """Return what it was worth before."""
        return self._worth[block]


class FullStore(ClockStore):
    """Never evicts: what finds no room is not stored, as the Tutti paper leaves it."""

    def gives_way(self, worth: float, to: float) -> bool:
        """Refuse."""
        return False


class BeladyStore(ChainStore):
    """Keeps what is used soonest, and does not store what is used later than all it holds.

    No rule finds more blocks. Of seconds saved it is no proven bound: blocks differ in cost.

    Parameters
    ----------
    capacity
        Blocks it holds.
    requests
        All that will come, in order.
    """

    def __init__(self, capacity: int, requests: Sequence[Request]) -> None:
        super().__init__(capacity)
        self._next_uses = next_uses(requests)
        self._number = 0

    def begin(self, number: int, request: Request, found: int) -> None:
        """Remember where in the future we are."""
        self._number = number

    def worth_of_hit(self, block: int, position: int) -> float:
        """Return how soon it is used again."""
        return -float(self._next_uses[self._number][position])

    def worth_of_new(self, block: int, position: int) -> float:
        """Return how soon it is used again."""
        return -float(self._next_uses[self._number][position])

    def admits(self, position: int) -> bool:
        """Refuse what is never used again."""
        return self._next_uses[self._number][position] < len(self._next_uses)

    def gives_way(self, worth: float, to: float) -> bool:
        """Say whether the new one is used sooner."""
        return worth < to


def next_uses(requests: Sequence[Request]) -> list[list[int]]:
    """Return per request and block the request that uses it next, their number where none does."""
    upcoming: dict[int, int] = {}
    found: list[list[int]] = []
    for number in reversed(range(len(requests))):
        blocks = requests[number].blocks
        found.append([upcoming.get(block, len(requests)) for block in blocks])
        upcoming.update(dict.fromkeys(blocks, number))
    return found[::-1]


class ArcStore(ClockStore):
    """ARC (Megiddo and Modha, 2003): divides room between what was used once and what was again.

    Blocks used once and blocks used again are two lists by recency. Of what either evicted, keys
    are remembered, and a hit among them gives its list more room. Where the list that should give
    way has no leaf, the other one does.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._again: set[int] = set()
        self._again_leaves: Leaves = []
        self._once_ghosts: OrderedDict[int, None] = OrderedDict()
        self._again_ghosts: OrderedDict[int, None] = OrderedDict()
        self._once_room = 0.0

    def begin(self, number: int, request: Request, found: int) -> None:
        """Move what is found to the blocks used again, and adapt to what is missed."""
        self._again.update(request.blocks[:found])
        for block in request.blocks[found:]:
            once, again = len(self._once_ghosts), len(self._again_ghosts)
            if block in self._once_ghosts:
                self._once_room = min(self.capacity, self._once_room + max(1, again / once))
            elif block in self._again_ghosts:
                self._once_room = max(0.0, self._once_room - max(1, once / again))

    def stored(self, block: int) -> None:
        """Count a block that either list remembers as used again."""
        if block in self._once_ghosts or block in self._again_ghosts:
            self._once_ghosts.pop(block, None)
            self._again_ghosts.pop(block, None)
            self._again.add(block)

    def evicted(self, block: int) -> None:
        """Remember its key in the list that it was in."""
        if block in self._again:
            self._again.discard(block)
            self._again_ghosts[block] = None
        else:
            self._once_ghosts[block] = None
        once = len(self) - 1 - len(self._again)
        if len(self._once_ghosts) + once > self.capacity and self._once_ghosts:
            self._once_ghosts.popitem(last=False)
        elif len(self._once_ghosts) + len(self._again_ghosts) > self.capacity:
            (self._again_ghosts or self._once_ghosts).popitem(last=False)

    def _heap(self, block: int) -> Leaves:
        return self._again_leaves if block in self._again else self._leaves

    def _victim(self, own: frozenset[int], worth: float) -> int:
        once = len(self) - len(self._again)
        heaps = [self._leaves, self._again_leaves]
        if once < max(1.0, self._once_room):
            heaps.reverse()
        for leaves in heaps:
            victim = self._least(leaves, own, worth)
            if victim != NONE:
                return victim
        return NONE
