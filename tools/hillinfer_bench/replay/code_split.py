# SPDX-License-Identifier: Apache-2.0
"""Exact rows and codes of values that share one memory, replayed: what is cold, and its reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import round_up
from hillinfer.drive.landing import JOIN_GAP_BYTES, MAX_READ_BYTES
from hillinfer.engine.budget_plan import BudgetPlan, kernel_spec
from hillinfer.kv.hot_pool import SLOT_BYTES
from hillinfer.kv.pool_policies import make_pool_policy
from hillinfer.memory_budget import TABLE_GROWTH_ROWS
from hillinfer.model_shape import ModelShape
from hillinfer.settings import PoolSizes, Settings
from hillinfer.shadow.values import CHUNK_SLOTS, CodePool, slot_bytes
from hillinfer.trace.recorder import LayerStep
from hillinfer.values import ByteSize
from hillinfer_bench.replay.pool_replay import PoolReplay
from hillinfer_bench.replay.selection_trace import SelectionTrace, Sets
from hillinfer_model.kernel_spec import GROUP_TOKENS


@dataclass(frozen=True)
class CodedTrace:
    """A trace whose sets are exact and coded tokens.

    Parameters
    ----------
    selected
        What each layer selected in each step, exact tokens among it.
    exact
        Per layer and step, int32 positions of exact tokens, ascending.
    """

    selected: SelectionTrace
    exact: tuple[Sets, ...]


@dataclass(frozen=True)
class Split:
    """Slots of every layer.

    Parameters
    ----------
    hot_rows
        Exact rows, beside the open group.
    codes
        Tokens with codes, a multiple of 64.
    """

    hot_rows: int
    codes: int


@dataclass(frozen=True)
class SplitReplayed:
    """Sums over layers and steps of one trace.

    Parameters
    ----------
    exact, coded
        Exact and coded tokens whose group has left the open one.
    exact_misses
        Exact tokens whose row was on the drive.
    code_misses
        Coded tokens without codes in DRAM.
    drive_rows
        Rows read: for exact tokens, and for coded ones without codes whose row was not hot.
    """

    exact: int
    coded: int
    exact_misses: int
    code_misses: int
    drive_rows: int


class SplitReplay(PoolReplay):
    """Plays exact tokens to the hot pools and coded ones to pools of codes, in a step's order.

    `CodePool` is the product's, with codes of one byte. As in `CodedStep`, codes are looked up and
    missing rows brought before exact rows, which may push hot ones out; arrived codes are offered
    last.

    Parameters
    ----------
    trace
        What is asked for.
    split
        Slots of both pools.
    """

    def __init__(self, trace: CodedTrace, split: Split) -> None:
        settings = trace.selected.settings
        exact = replace(trace.selected, layers=trace.exact, observed=((),) * len(trace.exact))
        policy = make_pool_policy(settings.pool_policy)
        super().__init__(exact, policy, split.hot_rows, PoolSizes.EQUAL)
        self._selected = trace.selected
        self._codes = [CodePool(1) for _ in trace.exact]
        rows = round_up(trace.selected.prefix + trace.selected.steps, GROUP_TOKENS)
        for one in self._codes:
            one.cover(rows)
            one.resize(split.codes)
        self._decoded = [0] * len(trace.exact)
        self._counts = dict.fromkeys(("exact", "coded", "exact_misses", "code_misses", "rows"), 0)

    def replayed(self) -> SplitReplayed:
        """Play everything and return what was found."""
        self.run()
        counts = self._counts
        return SplitReplayed(
            counts["exact"],
            counts["coded"],
            counts["exact_misses"],
            counts["code_misses"],
            counts["rows"],
        )

    def _begin_step(self) -> None:
        super()._begin_step()
        for one in self._codes:
            one.begin_step()

    def _append(self, layer: int, tokens: int) -> None:
        before = self._sequence.tail_start(layer)
        super()._append(layer, tokens)
        # Codes of a prompt are offered as its groups become full; of decoded tokens when wanted.
        if self._sequence.lengths[layer] <= self._selected.prefix:
            self._offer(layer, np.arange(before, self._sequence.tail_start(layer)))

    def _read(self, layer: int, positions: NDArray[np.int64]) -> LayerStep:
        step = self._decoded[layer]
        self._decoded[layer] += 1
        selected = self._selected.layers[layer][step].astype(np.int64)
        coded = np.setdiff1d(selected, positions, assume_unique=True)
        settled = coded[coded < self._sequence.tail_start(layer)]
        rows = self._sequence.rows(settled)
        codes = self._codes[layer]
        codes.want(rows)
        addresses, _ = codes.find(rows, np.zeros(len(rows), np.int64))
        missing = settled[addresses == 0]
        # A group that has just become full may be on its way into the pool.
        self._pools.settle(layer)
        cold = self._pools.layers[layer].slots(self._sequence.rows(missing)) < 0
        self._bring(layer, self._sequence.rows(missing[cold]))
        exact = self._sequence.rows(positions[positions < self._sequence.tail_start(layer)])
        self._want(exact[self._pools.layers[layer].slots(exact) < 0])
        entry = super()._read(layer, positions)
        self._offer(layer, missing)
        counts = self._counts
        counts["exact"] += int((positions < self._sequence.tail_start(layer)).sum())
        counts["coded"] += len(settled)
        counts["exact_misses"] += entry.cold_rows
        counts["code_misses"] += len(missing)
        counts["rows"] += entry.cold_rows + int(cold.sum())
        return entry

    def _bring(self, layer: int, rows: NDArray[np.int64]) -> None:
        """Take note of cold rows of coded tokens; here nobody does."""

    def _want(self, rows: NDArray[np.int64]) -> None:
        """Take note of cold rows of exact tokens of a layer; here nobody does."""

    def _offer(self, layer: int, positions: NDArray[np.int64]) -> None:
        if len(positions):
            rows = self._sequence.rows(positions)
            none = np.zeros((len(rows), 1), np.uint8)
            self._codes[layer].offer(rows, np.zeros(len(rows), np.int64), none)


# --- What the drive does for it ---

_SECTOR_BYTES = 512
# Least squares of scattered reads of several sizes, off by a tenth at most (docs/results/pools.md).
_READ_MILLISECONDS, _MEBIBYTE_MILLISECONDS = 0.0108, 0.95


@dataclass(frozen=True)
class Reads:
    """Reads and the bytes that they bring."""

    reads: float = 0
    byte_count: float = 0

    def __add__(self, other: Reads) -> Reads:
        return Reads(self.reads + other.reads, self.byte_count + other.byte_count)

    @property
    def milliseconds(self) -> float:
        """Modelled time of a drive: so much for each read, and for each MiB."""
        mebibytes = self.byte_count / 2**20
        return self.reads * _READ_MILLISECONDS + mebibytes * _MEBIBYTE_MILLISECONDS

    def each(self, steps: int) -> Reads:
        """Return the mean of so many steps."""
        return Reads(self.reads / steps, self.byte_count / steps)


def planned_reads(rows: NDArray[np.int64], size: int) -> Reads:
    """Return how the library reads records of one file, in whole sectors.

    Parameters
    ----------
    rows
        int64 record numbers, each once.
    size
        Bytes of a record.
    """
    if not len(rows):
        return Reads()
    own = np.sort(rows)
    starts = own * size // _SECTOR_BYTES * _SECTOR_BYTES
    ends = -(-(own + 1) * size // _SECTOR_BYTES) * _SECTOR_BYTES
    (first,) = np.nonzero(np.append(True, starts[1:] > ends[:-1] + JOIN_GAP_BYTES))
    counts = ends[np.append(first[1:], len(own)) - 1] - starts[first]
    return Reads(int((-(-counts // MAX_READ_BYTES)).sum()), int(counts.sum()))


class ReadReplay(SplitReplay):
    """Plans reads of what is cold, too: codes of a file, and rows in their place.

    Parameters
    ----------
    trace, split
        As for `SplitReplay`.
    row_bytes, code_bytes
        Of a row, and of a token's record in the file of codes.

    Attributes
    ----------
    exact, codes, rows
        Sums over layers and steps: rows of exact tokens, codes of coded ones, and their rows.
    """

    def __init__(self, trace: CodedTrace, split: Split, row_bytes: int, code_bytes: int) -> None:
        super().__init__(trace, split)
        self._row_bytes, self._code_bytes = row_bytes, code_bytes
        self.exact = self.codes = self.rows = Reads()

    def _bring(self, layer: int, rows: NDArray[np.int64]) -> None:
        self.codes += planned_reads(rows, self._code_bytes)
        self.rows += planned_reads(rows, self._row_bytes)

    def _want(self, rows: NDArray[np.int64]) -> None:
        self.exact += planned_reads(rows, self._row_bytes)


# --- How one memory is shared ---


def budget_parts(shape: ModelShape, settings: Settings, tokens: int, budget: str) -> str:
    """Return what a budget's parts are for a context, as the product plans it; see `of_budget`."""
    plan = _plan(shape, settings, tokens, budget)
    named = {
        "key shadow": plan.shadow_bytes,
        "buffers": plan.staging_bytes,
        "tables and statistics": plan.other_bytes,
        "tails and kept rows": plan.kept_bytes,
        "codes and other rows": plan.hot_bytes - plan.kept_bytes,
    }
    parts = ", ".join(f"{name} {size / 1e6:.2f}" for name, size in named.items())
    streamed = plan.streamed_shadow_bytes
    beside = f"; {streamed / 1e6:.2f} MB of key shadow on the drive" if streamed else ""
    whole = f"{plan.budget_bytes / 1e6:.2f} MB"
    alpha = settings.importance_rate
    return f"M0 {budget} of {tokens:,} tokens, {whole}, with α {alpha:g}: {parts}{beside}"


def _plan(shape: ModelShape, settings: Settings, tokens: int, budget: str) -> BudgetPlan:
    changed = settings.changed(dram_budget=ByteSize.parse(budget))
    plan = BudgetPlan.for_context(shape, changed, tokens)
    plan.check()
    return plan


@dataclass(frozen=True)
class SharedMemory:
    """Bytes that hot rows and codes share, beyond the rows that are always hot.

    Parameters
    ----------
    shape, settings
        Of the model and the run.
    tokens
        Of the context at its end.
    byte_count
        What is shared.
    """

    shape: ModelShape
    settings: Settings
    tokens: int
    byte_count: int

    @classmethod
    def of_budget(
        cls, shape: ModelShape, settings: Settings, tokens: int, budget: str
    ) -> SharedMemory:
        """Return what a budget leaves for both, as the product plans it.

        Raises
        ------
        BudgetError
            Where the budget is too small for the context.
        """
        plan = _plan(shape, settings, tokens, budget)
        changed = settings.changed(dram_budget=ByteSize.parse(budget))
        return cls(shape, changed, tokens, plan.hot_bytes - plan.kept_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a token's codes in one layer."""
        return slot_bytes(kernel_spec(self.shape, self.settings))

    @property
    def all_codes(self) -> int:
        """Slots of a layer when the codes of all tokens are kept."""
        return round_up(self.tokens, TABLE_GROWTH_ROWS)

    @property
    def row_slot_bytes(self) -> int:
        """Bytes of a hot row in one layer."""
        return self.shape.row_bytes + SLOT_BYTES

    def row_slots(self, codes: int) -> int:
        """Return the hot rows of a layer beside so many codes."""
        layers = self.shape.layers
        rest = self.byte_count - codes * layers * self.slot_bytes
        kept = min(self.settings.kept_tokens, self.tokens)
        return kept + rest // (layers * self.row_slot_bytes)

    def split(self, share: float) -> Split:
        """Return the slots when codes take this share, at most all that there are."""
        wanted = int(self.byte_count * share) // (self.shape.layers * self.slot_bytes)
        codes = min(wanted, self.all_codes) // CHUNK_SLOTS * CHUNK_SLOTS
        return Split(self.row_slots(codes), codes)
