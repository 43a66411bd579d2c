# SPDX-License-Identifier: Apache-2.0
"""Exact rows and codes of values that share one memory, replayed at several shares of codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import round_up
from hillinfer.drive.landing import JOIN_GAP_BYTES, MAX_READ_BYTES
from hillinfer.engine.budget_plan import BudgetPlan, kernel_spec
from hillinfer.generate.run_report import json_bytes
from hillinfer.kv.hot_pool import SLOT_BYTES
from hillinfer.kv.pool_policies import make_pool_policy
from hillinfer.memory_budget import TABLE_GROWTH_ROWS
from hillinfer.model_shape import ModelShape
from hillinfer.settings import PoolSizes, Settings
from hillinfer.shadow.coming_codes import record_bytes
from hillinfer.shadow.values import CHUNK_SLOTS, CODE_SHARE, CodePool, slot_bytes
from hillinfer.system.files import cannot_write, write_whole
from hillinfer.trace.recorder import LayerStep
from hillinfer.values import ByteSize
from hillinfer_bench.replay.pool_replay import PoolReplay
from hillinfer_bench.replay.selection_trace import SelectionTrace, Sets
from hillinfer_model.kernel_spec import GROUP_TOKENS

SHARES = (0.0, 0.25, 0.5, 0.75, 0.8, CODE_SHARE, 0.9, 0.95, 1.0)


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


@dataclass(frozen=True)
class Reads:
    """Reads and the bytes that they bring."""

    reads: float = 0
    byte_count: float = 0

    def __add__(self, other: Reads) -> Reads:
        return Reads(self.reads + other.reads, self.byte_count + other.byte_count)

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
        changed = settings.changed(dram_budget=ByteSize.parse(budget))
        plan = BudgetPlan.for_context(shape, changed, tokens)
        plan.check()
        return cls(shape, changed, tokens, plan.hot_bytes - plan.kept_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a token's codes in one layer."""
        return slot_bytes(kernel_spec(self.shape, self.settings))

    @property
    def all_codes(self) -> int:
        """Slots of a layer when the codes of all tokens are kept."""
        return round_up(self.tokens, TABLE_GROWTH_ROWS)

    def split(self, share: float) -> Split:
        """Return the slots when codes take this share, at most all that there are."""
        layers = self.shape.layers
        wanted = int(self.byte_count * share) // (layers * self.slot_bytes)
        codes = min(wanted, self.all_codes) // CHUNK_SLOTS * CHUNK_SLOTS
        rest = self.byte_count - codes * layers * self.slot_bytes
        kept = min(self.settings.kept_tokens, self.tokens)
        return Split(kept + rest // (layers * (self.shape.row_bytes + SLOT_BYTES)), codes)


# --- The sweep ---


@dataclass(frozen=True)
class SplitRow:
    """One trace at one budget and one share; rows are means over steps, of all layers.

    Parameters
    ----------
    text, alpha, exact, budget
        Of the trace and the settings.
    share
        Share of codes in the memory that both have.
    code_slots, hot_slots
        Of a layer.
    drive_rows, exact_misses, code_misses
        Per step; see `SplitReplayed`.
    filed, unfiled
        Per step: reads where coded tokens without codes come from the file of codes, and where
        they come as rows.
    code_hits_per_mebibyte, exact_hits_per_mebibyte
        What one more MiB of codes brings per step, and what one MiB less of rows loses, from the
        share before to this one; None for the first, or where codes take no more memory.
    """

    text: str
    alpha: float
    exact: float
    budget: str
    share: float
    code_slots: int
    hot_slots: int
    drive_rows: float
    exact_misses: float
    code_misses: float
    filed: Reads
    unfiled: Reads
    code_hits_per_mebibyte: float | None = None
    exact_hits_per_mebibyte: float | None = None


def split_rows(
    trace: CodedTrace,
    shape: ModelShape,
    budgets: Sequence[str],
    shares: Sequence[float] = SHARES,
) -> list[SplitRow]:
    """Return a row for each budget and share, shares ascending."""
    selected = trace.selected
    settings, steps = selected.settings, selected.steps
    sizes = shape.row_bytes, record_bytes(kernel_spec(shape, settings))
    rows: list[SplitRow] = []
    for budget in budgets:
        memory = SharedMemory.of_budget(shape, settings, selected.prefix + steps, budget)
        before: SplitRow | None = None
        for share in sorted(shares):
            split = memory.split(share)
            found = (replay := ReadReplay(trace, split, *sizes)).replayed()
            row = SplitRow(
                selected.text,
                settings.importance_rate,
                settings.exact_share,
                budget,
                share,
                split.codes,
                split.hot_rows,
                found.drive_rows / steps,
                found.exact_misses / steps,
                found.code_misses / steps,
                (replay.exact + replay.codes).each(steps),
                (replay.exact + replay.rows).each(steps),
            )
            rows.append(row if before is None else _with_margins(before, row, memory))
            before = row
    return rows


def _with_margins(before: SplitRow, row: SplitRow, memory: SharedMemory) -> SplitRow:
    slots = row.code_slots - before.code_slots
    if not slots:
        return row
    mebibytes = slots * memory.shape.layers * memory.slot_bytes / 2**20
    return replace(
        row,
        code_hits_per_mebibyte=(before.code_misses - row.code_misses) / mebibytes,
        exact_hits_per_mebibyte=(row.exact_misses - before.exact_misses) / mebibytes,
    )


def write_splits(file: Path, rows: Sequence[SplitRow], facts: dict[str, Any]) -> None:
    """Write every row and the circumstances as JSON.

    Raises
    ------
    ReportError
        Where the file cannot be written.
    """
    record = {"label": "measured", **facts, "rows": [asdict(row) for row in rows]}
    try:
        write_whole(file, json_bytes(record))
    except OSError as error:
        raise cannot_write(file, error, "--out") from error


def splits_text(rows: Sequence[SplitRow]) -> str:
    """Return the rows as a Markdown table."""
    heads = (
        "text", "α", "M0", "codes' share", "slots: codes, rows", "drive rows a step",
        "exact", "coded", "reads, MiB: codes of a file", "reads, MiB: all as rows",
        "code hits per MiB", "exact hits per MiB",
    )  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        margins = row.code_hits_per_mebibyte, row.exact_hits_per_mebibyte
        cells = (
            row.text,
            f"{row.alpha:g}",
            row.budget,
            f"{row.share:g}",
            f"{row.code_slots}, {row.hot_slots}",
            f"{row.drive_rows:.0f}",
            f"{row.exact_misses:.0f}",
            f"{row.code_misses:.0f}",
            *(f"{one.reads:.0f}, {one.byte_count / 2**20:.1f}" for one in (row.filed, row.unfiled)),
            *("" if one is None else f"{one:.1f}" for one in margins),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
