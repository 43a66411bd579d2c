# SPDX-License-Identifier: Apache-2.0
"""Caches of one engine that take steps together, beside one after another and the loop's floor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch

from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.hf.attach import Attachment
from hillinfer.hf.cache import HillInferCache
from hillinfer.statistics import CacheStatistics
from hillinfer.values import ByteSize
from hillinfer_bench.decode.measuring import (
    Bed,
    Rates,
    blank_row,
    predicted_layers,
    turns,
    with_figures,
)
from hillinfer_bench.decode.rates import RateSource
from hillinfer_bench.decode.room import (
    FreeRoom,
    resident_bytes,
    return_freed_memory,
    why_left_out,
)
from hillinfer_bench.report.rows import BenchRow, MachineRates
from hillinfer_bench.systems.case import Case
from hillinfer_bench.systems.hillinfer_system import counted_by
from hillinfer_bench.systems.kv_source import KVSource
from hillinfer_bench.systems.system import Counted
from hillinfer_bench.systems.table import (
    ALONE,
    FLOOR,
    HILLINFER,
    JOINED,
    dynamic_cache,
    make_system,
)

# In which steps are taken, in turns.
_WAYS = (JOINED, ALONE, FLOOR)


def joined_tokens(case: Case) -> int:
    """Return the tokens of each cache at the end: it takes all steps in both ways of its own."""
    return case.context + 2 * case.all_steps


def joined_steps(case: Case) -> int:
    """Return the steps that are taken in all ways."""
    return len(_WAYS) * case.all_steps


def measure_joined(
    bed: Bed,
    rates: RateSource,
    advance: Callable[[int], None] = lambda done: None,
    free: FreeRoom | None = None,
) -> list[BenchRow]:
    """Fill as many caches as the batch, let them decode in turns, return a row for each way.

    A step of either way brings a token to every cache: together in one forward pass of the joined
    caches, or one cache after another, each by itself. All of them share one engine and one M0.
    Beside them stands the floor of steps together: a batch with next to nothing to attend to.

    Parameters
    ----------
    bed
        Model, context and settings; not attached. A source of one sequence fills every cache, in
        rows of its own.
    rates
        For the limits, sampled between turns.
    advance
        Called with the steps that were taken.
    free
        What there may be taken; None for what is free now.
    """
    setting, case = bed.setting, bed.setting.case
    dtype = str(setting.model.dtype).removeprefix("torch.")
    blank = [blank_row(case, name, dtype, setting.shape.layers, bed.all_layers) for name in _WAYS]
    # They share one budget, as the sequences of one cache do.
    system = make_system(HILLINFER)
    reason = why_left_out(setting, [system], free or FreeRoom.read(setting.cold_dir))
    if reason:
        return [replace(row, skipped=reason[HILLINFER]) for row in blank]
    settings = case.settings().changed(
        dram_budget=ByteSize(byte_count=setting.budget_bytes), cold_dir=setting.cold_dir
    )
    return_freed_memory()
    before = resident_bytes()
    samples: list[MachineRates] = []
    with ExitStack() as opened:
        hill = opened.enter_context(Attachment(setting.model, settings))
        caches = _filled(hill, bed, opened)
        ways = _take_turns(hill, caches, bed, advance, lambda: samples.append(rates.sample()))
        used = caches[0].engine.runtime.settings
        predicted = predicted_layers(caches[0], setting)
        held = resident_bytes() - before
    limits = Rates(rates.start.best_of(samples), MachineRates.middle_of(samples))
    spec = kernel_spec(setting.shape, used)
    rows = []
    for row, way, passes in zip(blank, ways, (1, len(caches), 1), strict=True):
        row = replace(row, budget_bytes=setting.budget_bytes, rss_bytes=held)
        if row.system == FLOOR:
            rows.append(
                with_figures(row, Counted(0, 0, 0, 0), way.seconds, bed.weight_bytes, limits)
            )
            continue
        made = replace(
            row,
            chosen=f"{len(caches)} caches, shadow {used.key_mode.value}, {used.query.value} query",
            shadow_used=used.key_mode.value,
            predicted_layers=predicted,
        )
        counted = way.counted(lambda one: counted_by(one, setting.shape, spec))
        rows.append(with_figures(made, counted, way.seconds, passes * bed.weight_bytes, limits))
    return rows


@dataclass
class _Way:
    """What was done in one of the ways.

    Parameters
    ----------
    seconds
        Of each measured step of all caches.
    spans
        Statistics of the engine before and after each measured turn.
    """

    seconds: list[float] = field(default_factory=list)
    spans: list[tuple[CacheStatistics, CacheStatistics]] = field(default_factory=list)

    def counted(self, of: Callable[[CacheStatistics], Counted]) -> Counted:
        """Return the totals of all measured turns."""
        parts = [of(after.minus(before)) for before, after in self.spans]
        hot, cold = (
            sum(getattr(after.minus(before), name) for before, after in self.spans)
            for name in ("hot_rows_read", "cold_rows_read")
        )
        last = parts[-1]
        return Counted(
            sum(one.drive_read_bytes for one in parts),
            sum(one.drive_write_bytes for one in parts),
            sum(one.dram_read_bytes for one in parts),
            last.held_bytes,
            hot / (hot + cold) if hot + cold else 1.0,
            last.io_mode,
            sum(one.drive_reads for one in parts),
        )


def _filled(hill: Attachment, bed: Bed, opened: ExitStack) -> list[HillInferCache]:
    """Return the caches, each with the context in rows of its own."""
    case = bed.setting.case
    caches = []
    for _ in range(case.batch):
        caches.append(hill.new_cache(joined_tokens(case)))
        opened.callback(caches[-1].close)
    for chunk in bed.source.chunks():
        for number, cache in enumerate(caches):
            own = slice(row := number % len(chunk.ids), row + 1)
            cache.fill(
                chunk.ids[own],
                [keys[own] for keys in chunk.keys],
                [values[own] for values in chunk.values],
            )
    return caches


@torch.no_grad()
def _take_turns(
    hill: Attachment,
    caches: Sequence[HillInferCache],
    bed: Bed,
    advance: Callable[[int], None],
    between: Callable[[], None],
) -> list[_Way]:
    """Take steps of all ways in turns, and return what was done in each."""
    model, case = bed.setting.model, bed.setting.case
    ways = [_Way() for _ in _WAYS]
    nearly_empty = dynamic_cache(bed.setting)
    taken = brought = 0

    def together(ids: torch.Tensor) -> None:
        model(**hill.join(caches).inputs(ids), use_cache=True, logits_to_keep=1)

    def alone(ids: torch.Tensor) -> None:
        for cache, own in zip(caches, ids[:, None], strict=True):
            model(input_ids=own, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def floor(ids: torch.Tensor) -> None:
        model(input_ids=ids, past_key_values=nearly_empty, use_cache=True, logits_to_keep=1)

    for turn in turns(len(ways), case.all_steps, case.turn, case.warm_up):
        way, step_of = ways[turn.system], (together, alone, floor)[turn.system]
        measured = turn.first >= case.warm_up
        between()
        before = _statistics(hill)
        for step in range(turn.first, turn.end):
            ids = _ids(bed.source, brought, len(caches))
            started = time.perf_counter()
            step_of(ids)
            if step + 1 == turn.end:
                # What a turn leaves running is waited for in its last step.
                after = _statistics(hill)
            passed = time.perf_counter() - started
            if measured:
                way.seconds.append(passed)
            taken += 1
            # The caches have no token of the floor's.
            brought += _WAYS[turn.system] != FLOOR
        if measured:
            way.spans.append((before, after))
        advance(taken)
    between()
    return ways


def _ids(source: KVSource, step: int, caches: int) -> torch.Tensor:
    """Return the tokens of a step, (caches, 1)."""
    ids = source.step_ids(step)
    return ids if len(ids) == caches else ids.expand(caches, -1)


def _statistics(hill: Attachment) -> CacheStatistics:
    found = hill.statistics()
    assert found is not None
    return found
