# SPDX-License-Identifier: Apache-2.0
"""One case, from open systems that decode in turns to rows of the report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hillinfer.errors import HillInferError
from hillinfer.hf.hooks import FIRST_PREDICTED, predictor_of
from hillinfer_bench.decode.rates import RateSource
from hillinfer_bench.decode.room import (
    FreeRoom,
    resident_bytes,
    return_freed_memory,
    why_left_out,
)
from hillinfer_bench.quality.table import measure
from hillinfer_bench.report.rows import BenchRow, Limit, MachineRates, Timing
from hillinfer_bench.systems.case import MODELLED, REAL, BenchSetting, Case
from hillinfer_bench.systems.kv_source import KVSource
from hillinfer_bench.systems.system import Counted, OpenSystem, System
from hillinfer_bench.systems.table import FLOOR, REFERENCES, make_system


@dataclass(frozen=True)
class Turn:
    """Steps of one system without another's in between.

    Parameters
    ----------
    system
        Number of the system.
    first, end
        Steps first <= step < end.
    """

    system: int
    first: int
    end: int


def turns(systems: int, steps: int, length: int, warm_up: int = 0) -> Iterator[Turn]:
    """Yield turns until every system has done all steps.

    Every round another system begins, so that none has always the same neighbour before it, and
    what else the machine does falls on all of them.

    Parameters
    ----------
    systems
        How many.
    steps
        Of each, warm-up included.
    length
        Steps of a turn.
    warm_up
        Steps of a first turn of each.
    """
    first, number = 0, 0
    while first < steps:
        end = min(steps, warm_up if first < warm_up else first + length)
        for place in range(systems):
            yield Turn((number + place) % systems, first, end)
        first, number = end, number + 1


@dataclass
class Steps:
    """What one system did.

    Parameters
    ----------
    seconds
        Of each measured step. What a turn leaves running is waited for in its last step.
    logits
        After each measured step, float32 (batch, vocabulary).
    counted
        Totals of the measured steps.
    grown_bytes
        By how much memory grew during its own turns.
    """

    seconds: list[float] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    counted: Counted | None = None
    grown_bytes: int = 0


@torch.no_grad()
def take_steps(
    model: Any,
    systems: Sequence[OpenSystem],
    source: KVSource,
    warm_up: int,
    steps: int,
    turn: int,
    advance: Callable[[int], None] = lambda done: None,
    between: Callable[[], object] = lambda: None,
) -> list[Steps]:
    """Let every system decode the same tokens and return what each did.

    Parameters
    ----------
    model
        The same for all.
    systems
        Filled with the source's context.
    source
        Gives each step's tokens.
    warm_up, steps, turn
        As in `Case`.
    advance
        Called with the steps that all systems together have done.
    between
        Called before each turn and after the last one.
    """
    taken = 0
    done = [Steps() for _ in systems]
    before: list[Counted | None] = [None] * len(systems)
    for own in turns(len(systems), warm_up + steps, turn, warm_up):
        system, result = systems[own.system], done[own.system]
        between()
        held = resident_bytes()
        if own.first == warm_up:
            before[own.system] = system.counted()
        for step in range(own.first, own.end):
            ids = source.step_ids(step)
            started = time.perf_counter()
            output = model(
                input_ids=ids, past_key_values=system.cache, use_cache=True, logits_to_keep=1
            )
            if step + 1 == own.end:
                system.settle()
            passed = time.perf_counter() - started
            if step >= warm_up:
                result.seconds.append(passed)
                result.logits.append(output.logits[:, -1].float().cpu())
        result.grown_bytes += resident_bytes() - held
        taken += own.end - own.first
        advance(taken)
    between()
    for system, result, earlier in zip(systems, done, before, strict=True):
        assert earlier is not None
        result.counted = system.counted().since(earlier)
    return done


def step_quality(
    logits: Sequence[torch.Tensor], full: Sequence[torch.Tensor] | None, next_ids: Sequence[int]
) -> tuple[float, float | None]:
    """Return the perplexity of the text and the agreement with the full cache.

    Parameters
    ----------
    logits
        After each measured step, (1, vocabulary).
    full
        Those of a full cache on the same steps; None where none was measured.
    next_ids
        The text's token after each step.
    """
    own = torch.cat(list(logits))
    against = own if full is None else torch.cat(list(full))
    measures = measure(own, against, next_ids)
    perplexity = math.exp(measures.negative_log_likelihood)
    return perplexity, None if full is None else measures.agreement


@dataclass(frozen=True)
class Bed:
    """What all systems of a case stand on.

    Parameters
    ----------
    setting
        What they are opened with.
    all_layers
        Layers of the whole model.
    weight_bytes
        Weights that each step reads.
    source
        KV and tokens.
    next_ids
        The text's token after each step, warm-up included; None for random weights.
    """

    setting: BenchSetting
    all_layers: int
    weight_bytes: int
    source: KVSource
    next_ids: Sequence[int] | None


def blank_row(case: Case, system: str, dtype: str, layers: int, all_layers: int) -> BenchRow:
    """Return a row with nothing measured yet."""
    return BenchRow(
        model=case.model,
        type=dtype,
        layers=layers,
        all_layers=all_layers,
        context=case.context,
        batch=case.batch,
        alpha=case.alpha,
        budget_share=case.budget_share,
        shadow=case.shadow,
        part=case.part,
        system=system,
        selection=REAL,
    )


def measure_case(
    bed: Bed,
    rates: RateSource,
    advance: Callable[[int], None] = lambda done: None,
    free: FreeRoom | None = None,
    make: Callable[[str], System] = make_system,
) -> list[BenchRow]:
    """Open every system, fill it, let all decode in turns and return a row each.

    Parameters
    ----------
    bed
        Model, context and settings.
    rates
        For the limit of each row; sampled between the turns of the steps.
    advance
        Called with the steps that all systems together have done.
    free
        What systems may take together; None for what is free now.
    make
        Returns a system by its name in the case.
    """
    setting, case = bed.setting, bed.setting.case
    names = case.systems if FLOOR in case.systems else (FLOOR, *case.systems)
    dtype = str(setting.model.dtype).removeprefix("torch.")
    blank = {
        name: replace(
            blank_row(case, name, dtype, setting.shape.layers, bed.all_layers),
            selection=MODELLED if setting.selections else REAL,
        )
        for name in names
    }
    systems = [make(name) for name in names]
    left_out = why_left_out(setting, systems, free or FreeRoom.read(setting.cold_dir))
    rows = {name: replace(row, skipped=left_out.get(name)) for name, row in blank.items()}
    systems = [system for system in systems if system.name not in left_out]
    if not systems:
        return list(rows.values())
    opened, held = [], []
    samples: list[MachineRates] = []
    with ExitStack() as closing:
        for system in systems:
            return_freed_memory()
            before = resident_bytes()
            try:
                opened.append((system, _open(system, bed, closing)))
            except HillInferError as error:
                rows[system.name] = replace(rows[system.name], skipped=str(error))
                continue
            return_freed_memory()
            held.append(resident_bytes() - before)
        steps = take_steps(
            setting.model,
            [one for _, one in opened],
            bed.source,
            case.warm_up,
            case.steps,
            case.turn,
            advance,
            lambda: samples.append(rates.sample()),
        )
        full = {system.name: own.logits for (system, _), own in zip(opened, steps, strict=True)}
        reference = next((full[name] for name in REFERENCES if name in full), None)
        best, middle = rates.start.best_of(samples), MachineRates.middle_of(samples)
        for (system, _), own in zip(opened, steps, strict=True):
            timing = Timing.of(own.seconds)
            if system.name == FLOOR:
                best = best.shown_by_floor(bed.weight_bytes, timing.minimum)
                middle = middle.shown_by_floor(bed.weight_bytes, timing.median)
            if own.counted is not None:
                read = own.counted.drive_read_bytes / len(own.seconds)
                best = best.shown_by_step(read, timing.minimum)
                middle = middle.shown_by_step(read, timing.median)
        limits = Rates(best, middle)
        for (system, one), own, own_held in zip(opened, steps, held, strict=True):
            row = _measured(rows[system.name], one, own, own_held, bed, limits)
            if bed.next_ids is not None and system.name != FLOOR:
                perplexity, agreement = step_quality(
                    own.logits, reference, bed.next_ids[case.warm_up :]
                )
                row = replace(row, perplexity=perplexity, agreement=agreement)
            rows[system.name] = row
    floor = rows[FLOOR].median_ms
    return [
        replace(row, kv_ms=row.median_ms - floor)
        if floor is not None and row.median_ms is not None and row.system != FLOOR
        else row
        for row in rows.values()
    ]


def _open(system: System, bed: Bed, closing: ExitStack) -> OpenSystem:
    opened = system.open(bed.setting)
    closing.callback(opened.close)
    for chunk in bed.source.chunks():
        opened.fill(chunk)
    queries = bed.source.last_queries()
    if queries is not None:
        opened.observe(queries)
    opened.settle()
    return opened


def predicted_layers(cache: Any, setting: BenchSetting) -> int:
    """Return how many layers the model's hooks predict for a cache."""
    if not getattr(cache, "takes_predictions", False):
        return 0
    if predictor_of(setting.model.config.model_type, setting.case.settings().query) is None:
        return 0
    return max(0, setting.shape.layers - FIRST_PREDICTED)


def _measured(
    row: BenchRow, system: OpenSystem, steps: Steps, held: int, bed: Bed, rates: Rates
) -> BenchRow:
    assert steps.counted is not None
    return with_figures(
        replace(
            row,
            chosen=system.describe(),
            shadow_used=system.shadow_used(),
            budget_bytes=bed.setting.budget_bytes,
            rss_bytes=held + steps.grown_bytes,
            predicted_layers=predicted_layers(system.cache, bed.setting),
        ),
        steps.counted,
        steps.seconds,
        bed.weight_bytes,
        rates,
    )


@dataclass(frozen=True)
class Rates:
    """What limits of a case are made with.

    Parameters
    ----------
    best
        The best that the machine has shown.
    middle
        The middle of what was measured between the turns of the case's steps.
    """

    best: MachineRates
    middle: MachineRates


def with_figures(
    row: BenchRow,
    counted: Counted,
    seconds: Sequence[float],
    weight_bytes: int,
    rates: Rates,
) -> BenchRow:
    """Return a row with times, bytes and limits, or skipped where the page cache was measured.

    Parameters
    ----------
    row
        With what does not follow from the others.
    counted
        Totals of all steps.
    seconds
        Of each step.
    weight_bytes
        Weights that each step reads.
    rates
        What limits are made with.
    """
    if counted.io_mode == "buffered":
        return replace(
            row,
            skipped="the drive gives no direct I/O, so the page cache would be measured: choose "
            "another --cold-dir",
        )
    timing = Timing.of(seconds)
    count = timing.steps
    best = rates.best
    limit = Limit.of(counted, count, weight_bytes, best)
    middle = Limit.of(counted, count, weight_bytes, rates.middle)
    return replace(
        row,
        min_ms=timing.minimum,
        median_ms=timing.median,
        spread=timing.spread,
        steps=count,
        step_ms=tuple(round(1e3 * one, 4) for one in seconds),
        tokens_per_second=row.batch / timing.median * 1e3,
        drive_reads=counted.drive_reads / count,
        drive_read_bytes=counted.drive_read_bytes / count,
        drive_write_bytes=counted.drive_write_bytes / count,
        dram_read_bytes=counted.dram_read_bytes / count,
        held_bytes=counted.held_bytes,
        hit_rate=counted.hit_rate,
        io_mode=counted.io_mode,
        memory_gbps=best.memory / 1e9,
        drive_gbps=best.drive / 1e9,
        read_us=best.read_seconds * 1e6,
        limit_ms=limit.overlapped_ms,
        serial_limit_ms=limit.serial_ms,
        middle_limit_ms=max(limit.overlapped_ms, middle.overlapped_ms),
        kv_limit_ms=Limit.of(counted, count, 0, best).overlapped_ms,
    )
