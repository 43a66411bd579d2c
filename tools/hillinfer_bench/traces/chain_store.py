# SPDX-License-Identifier: Apache-2.0
"""A store of blocks in chains, replayed: leaves go first, the one of least worth before others."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from hillinfer.store.eviction import (
    Admission,
    ChunkFacts,
    EvictionPolicy,
    Turns,
    hits_after,
)
from hillinfer_bench.traces.request_trace import BLOCK_TOKENS, Request, block_cost

NONE = -1
Leaves = list[tuple[float, int, int]]


@dataclass(frozen=True)
class Served:
    """What a store did for one request, in blocks."""

    found: int
    written: int


class ChainStore:
    """Holds a bounded number of blocks, each only while the block before it is held.

    Subclasses say what a block is worth, and may refuse blocks.

    Parameters
    ----------
    capacity
        Blocks it holds.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.age = 0.0
        """Largest worth of any block evicted so far."""
        self._worth: dict[int, float] = {}
        self._parent: dict[int, int] = {}
        self._children: dict[int, int] = {}
        self._position: dict[int, int] = {}
        # Entries of blocks that were used or evicted since are stale; those of leaves are not.
        self._leaves: Leaves = []

    def __len__(self) -> int:
        """Return the blocks that are held."""
        return len(self._worth)

    def __contains__(self, block: int) -> bool:
        """Say whether a block is held."""
        return block in self._worth

    def serve(self, number: int, request: Request) -> Served:
        """Find the longest beginning that is held, and store what follows as far as may be.

        Parameters
        ----------
        number
            Of the request in its trace.
        request
            Its blocks.
        """
        blocks = request.blocks
        found = self._found(blocks)
        self.begin(number, request, found)
        for position in range(found):
            block = blocks[position]
            self._worth[block] = self.worth_of_hit(block, position)
        last = found - 1
        stored = self._store(blocks, found)
        if stored:
            last += stored
        if last >= 0 and not self._children[blocks[last]]:
            self._push(blocks[last])
        return Served(found, stored)

    # --- What subclasses say ---

    def begin(self, number: int, request: Request, found: int) -> None:
        """Take notice of a request of which `found` blocks are held."""

    def worth_of_hit(self, block: int, position: int) -> float:
        """Return what a block is worth that was found."""
        raise NotImplementedError

    def worth_of_new(self, block: int, position: int) -> float:
        """Return what a block is worth that is stored."""
        raise NotImplementedError

    def admits(self, position: int) -> bool:
        """Say whether the request's missing block at a position may be stored."""
        return True

    def gives_way(self, worth: float, to: float) -> bool:
        """Say whether a block of one worth may be evicted for a new one of another."""
        return True

    def stored(self, block: int) -> None:
        """Take notice of a block that is held from now on."""

    def evicted(self, block: int) -> None:
        """Take notice of a block that is not held any more."""

    # --- How chains are kept ---

    def _found(self, blocks: tuple[int, ...]) -> int:
        for count, block in enumerate(blocks):
            if block not in self._worth:
                return count
        return len(blocks)

    def _store(self, blocks: tuple[int, ...], found: int) -> int:
        """Store missing blocks first to last until one cannot be, and return how many were."""
        own: frozenset[int] | None = None
        for position in range(found, len(blocks)):
            if not self.admits(position):
                return position - found
            block = blocks[position]
            if len(self._worth) >= self.capacity:
                # What the request itself uses is leased.
                own = frozenset(blocks) if own is None else own
                victim = self._victim(own, self.worth_of_new(block, position))
                if victim == NONE:
                    return position - found
                self._forget(victim)
            parent = blocks[position - 1] if position else NONE
            self._worth[block] = self.worth_of_new(block, position)
            self.stored(block)
            self._parent[block], self._position[block] = parent, position
            self._children[block] = 0
            if position:
                self._children[parent] += 1
        return len(blocks) - found

    def _heap(self, block: int) -> Leaves:
        """Return where a block waits for its eviction while it is a leaf."""
        return self._leaves

    def _push(self, block: int) -> None:
        # Among equals the deepest goes first.
        heapq.heappush(self._heap(block), (self._worth[block], -self._position[block], block))

    def _victim(self, own: frozenset[int], worth: float) -> int:
        """Return a leaf that gives way to a block of this worth, `NONE` where there is none."""
        return self._least(self._leaves, own, worth)

    def _least(self, leaves: Leaves, own: frozenset[int], worth: float) -> int:
        kept: Leaves = []
        victim = NONE
        while leaves:
            entry = heapq.heappop(leaves)
            least, _, block = entry
            if self._worth.get(block) != least or self._children[block]:
                continue
            if block in own:
                kept.append(entry)
                continue
            if not self.gives_way(least, worth):
                kept.append(entry)
                break
            victim = block
            break
        for entry in kept:
            heapq.heappush(leaves, entry)
        return victim

    def _forget(self, block: int) -> None:
        self.evicted(block)
        self.age = max(self.age, self._worth.pop(block))
        parent = self._parent.pop(block)
        del self._children[block], self._position[block]
        if parent != NONE:
            self._children[parent] -= 1
            if not self._children[parent]:
                self._push(parent)


@dataclass
class _Used:
    hits: float
    last: float
    turn: int


class PolicyStore(ChainStore):
    """Evicts and admits by the classes of the product.

    Parameters
    ----------
    capacity
        Blocks it holds.
    policy, admission
        Of the product; both learn from this replay alone.
    keys
        Of all blocks by number, as `block_keys` makes them.
    """

    def __init__(
        self,
        capacity: int,
        policy: EvictionPolicy,
        admission: Admission,
        keys: Sequence[bytes],
    ) -> None:
        super().__init__(capacity)
        self._keys = keys
        self._policy, self._admission = policy, admission
        self._turns: Turns = policy.turns
        self._used: dict[int, _Used] = {}
        self._now, self._turn = 0.0, 0
        self._admitted: list[bool] = []

    def begin(self, number: int, request: Request, found: int) -> None:
        """Tell which turn it is, and ask the admission about every block."""
        keys = [self._keys[block] for block in request.blocks]
        self._now = request.time
        self._turn = self._turns.of(keys[: request.tokens // BLOCK_TOKENS])
        self._admitted = [
            self._admission.admits(key, self._turn, position, block_cost(position), self._now)
            for position, key in enumerate(keys)
        ]

    def admits(self, position: int) -> bool:
        """Say what the admission said."""
        return self._admitted[position]

    def worth_of_hit(self, block: int, position: int) -> float:
        """Return what the policy says of a block with one hit more."""
        used = self._used[block]
        last = used.last
        used.hits, used.last = hits_after(used.hits, self._now - last), self._now
        cost = block_cost(position)
        facts = ChunkFacts(position, used.hits, used.turn, cost, last, self._now)
        return self._policy.worth(facts, self.age)

    def worth_of_new(self, block: int, position: int) -> float:
        """Return what the policy says of a block without hits."""
        cost = block_cost(position)
        facts = ChunkFacts(position, 0.0, self._turn, cost, self._now, self._now)
        return self._policy.worth(facts, self.age)

    def stored(self, block: int) -> None:
        """Begin to count its hits."""
        self._used[block] = _Used(0.0, self._now, self._turn)

    def evicted(self, block: int) -> None:
        """Forget its hits."""
        del self._used[block]


def block_keys(count: int) -> list[bytes]:
    """Return 8 bytes for each of so many blocks, as even as hashes of their tokens."""
    return [
        hashlib.blake2b(block.to_bytes(8, "little"), digest_size=8).digest()
        for block in range(count)
    ]
