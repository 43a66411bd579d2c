# SPDX-License-Identifier: Apache-2.0
"""A share of codes that follows what is wanted, replayed: what the product could do, and does not.

Those codes and rows that would go next are watched. Whatever earns more gets memory of the other.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from hillinfer.kv.hot_pool import SLOT_BYTES
from hillinfer.shadow.values import CHUNK_SLOTS
from hillinfer.trace.recorder import LayerStep
from hillinfer_bench.replay.code_split import (
    CodedTrace,
    ReadReplay,
    SharedMemory,
    Split,
    planned_reads,
)

# Steps between two decisions, and by how much one kind must earn more than the other.
WATCHED_STEPS = 8
_FACTOR = 1.3
# Of its hits a quarter fades at every step, as with the default pool policy.
_FADING = 0.75


class Follows(StrEnum):
    """What a watched code or row earns when it is wanted."""

    HITS = "hits"
    """The mean time that a cold one of its kind has taken so far."""
    READS = "reads"
    """What the step's planned reads of the layer would grow by without it."""


class FollowingReplay(ReadReplay):
    """Moves 64 codes of each layer to or from codes every 8 steps, by what watched ones earned.

    Watched are the 64 codes of each layer that are worth least, and as many bytes of its rows that
    are. Cold codes come of their file.

    Parameters
    ----------
    trace, row_bytes, code_bytes
        As for `ReadReplay`.
    memory
        Codes and rows share it.
    share
        Of codes, at the beginning.
    follows
        What earns.

    Attributes
    ----------
    code_slots
        Of a layer, now.
    """

    def __init__(
        self,
        trace: CodedTrace,
        memory: SharedMemory,
        share: float,
        follows: Follows,
        row_bytes: int,
        code_bytes: int,
    ) -> None:
        self._memory, self._follows = memory, follows
        self._most_rows = memory.split(0.0).hot_rows
        self.code_slots = memory.split(share).codes
        split = Split(self._most_rows, self.code_slots)
        super().__init__(trace, split, row_bytes, code_bytes)
        layers, tokens = len(trace.exact), trace.selected.prefix + trace.selected.steps
        self._hits = np.zeros((layers, tokens))
        none = np.zeros(0, np.int64)
        self._watched = [(none, none)] * layers
        self._wanted: tuple[int, NDArray[np.int64], NDArray[np.int64]] = (0, none, none)
        self._earned = [0.0, 0.0]
        # Of codes and of rows: milliseconds of all that were cold, and how many.
        self._spent, self._cold = [0.0, 0.0], [0, 0]
        self._steps = 0
        self._resize()

    def _begin_step(self) -> None:
        super()._begin_step()
        if not all(self._decoded):
            return
        self._steps += 1
        self._hits *= _FADING
        if self._steps % WATCHED_STEPS == 0:
            self._decide()

    def _read(self, layer: int, positions: NDArray[np.int64]) -> LayerStep:
        tail, step = self._sequence.tail_start(layer), self._decoded[layer]
        selected = self._selected.layers[layer][step].astype(np.int64)
        coded = np.setdiff1d(selected, positions, assume_unique=True)
        exact = self._sequence.rows(positions[positions < tail])
        self._wanted = layer, self._sequence.rows(coded[coded < tail]), exact
        self._hits[layer, exact] += 1
        return super()._read(layer, positions)

    def _bring(self, layer: int, rows: NDArray[np.int64]) -> None:
        super()._bring(layer, rows)
        _, wanted, _ = self._wanted
        self._earn(0, rows, np.intersect1d(self._watched[layer][0], wanted), self._code_bytes)

    def _want(self, rows: NDArray[np.int64]) -> None:
        super()._want(rows)
        layer, _, exact = self._wanted
        self._earn(1, rows, np.intersect1d(self._watched[layer][1], exact), self._row_bytes)

    def _earn(
        self, kind: int, cold: NDArray[np.int64], watched: NDArray[np.int64], size: int
    ) -> None:
        # What has given way since it was watched is among the cold ones.
        watched = np.setdiff1d(watched, cold)
        planned = planned_reads(cold, size)
        self._spent[kind] += planned.milliseconds
        self._cold[kind] += len(cold)
        if self._follows is Follows.HITS:
            each = self._spent[kind] / self._cold[kind] if self._cold[kind] else 0.0
            self._earned[kind] += each * len(watched)
        elif len(watched):
            more = planned_reads(np.append(cold, watched), size)
            self._earned[kind] += more.milliseconds - planned.milliseconds

    def _decide(self) -> None:
        """Give 64 codes of each layer's memory to what earned more, and watch others."""
        codes, rows = self._earned
        most = self._memory.split(1.0).codes
        if codes > _FACTOR * rows:
            self.code_slots = min(self.code_slots + CHUNK_SLOTS, most)
        elif rows > _FACTOR * codes:
            self.code_slots = max(self.code_slots - CHUNK_SLOTS, 0)
        self._resize()
        self._earned = [0.0, 0.0]
        self._watched = [self._coldest(layer) for layer in range(len(self._codes))]

    def _resize(self) -> None:
        """Let codes have their slots, and rows what is left."""
        memory = self._memory
        rows = memory.row_slots(self.code_slots)
        aside = (self._most_rows - rows) * len(self._codes)
        self._pools.set_aside(aside * (self._rows.shape[1] + SLOT_BYTES))
        self._pools.redistribute(np.zeros(len(self._codes), np.int64))
        for one in self._codes:
            one.resize(self.code_slots)

    def _coldest(self, layer: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the row numbers of codes and of rows of a layer that are worth least."""
        codes, pool = self._codes[layer], self._pools.layers[layer]
        kept = codes.columns.rows[codes.columns.rows >= 0].astype(np.int64)
        by_worth = np.argsort(codes.worth(kept), kind="stable")
        all_rows = np.arange(self._sequence.tail_start(layer))
        hot = all_rows[pool.slots(all_rows) >= 0]
        by_hits = np.argsort(self._hits[layer, hot], kind="stable")
        as_many = CHUNK_SLOTS * self._memory.slot_bytes // self._memory.row_slot_bytes
        return kept[by_worth[:CHUNK_SLOTS]], hot[by_hits[:as_many]]
