# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of prompts that are read in stages, beside reading all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import DynamicCache

import hillinfer
from hillinfer.errors import SettingsError
from hillinfer.pruning.passes import PrunedRead
from hillinfer.pruning.profile import read
from hillinfer_bench.report.rows import LARGEST_SPREAD, Timing
from hillinfer_bench.slim.quality import FULL

# Of the limit; attention takes longer per operation than linear layers do.
_BEYOND = 1.1
ORDINARY, DRIVE = "ordinary", "drive"
# In this order: the first is the rival.
CACHES = (ORDINARY, DRIVE)


@dataclass(frozen=True)
class SpeedRow:
    """One way to read prompts of one length, in turns with the others.

    Parameters
    ----------
    shape, layers, context
        What was read by which model, and how many of its layers were built.
    cache
        `ordinary`, transformers' own in memory, or `drive`, HillInfer's of an attached model.
    schedule
        `full` for reading all of it.
    new_tokens
        Decoded behind the prompt, part of the time.
    seconds, cpu_seconds
        Of each round: wall and of all threads, to the logits of the last token.
    speedup, cpu_speedup
        Median over rounds of the time of a whole read into the same cache over this one's.
    over_ordinary
        The same with a whole read into the ordinary cache; None where that was not read into.
    flop_limit
        What operations of linear layers and attention allow.
    choosing_share
        Of the time, for choosing blocks.
    boundary_bytes
        Of hidden states that wait, at most: in memory, or on the drive.
    dram_peak_bytes
        Of rows, shadows and buffers; None where nobody counts.
    dram_least_bytes
        Of these, what a cache with all of its rows in memory cannot do without: the rows that it
        has, and shadows and buffers as they are; None as above.
    """

    shape: str
    layers: int
    context: int
    cache: str
    schedule: str
    new_tokens: int
    seconds: list[float]
    cpu_seconds: list[float]
    speedup: float
    cpu_speedup: float
    over_ordinary: float | None
    flop_limit: float
    choosing_share: float
    boundary_bytes: int
    dram_peak_bytes: int | None
    dram_least_bytes: int | None

    @property
    def flagged(self) -> bool:
        """Whether rounds lie too far apart, or beyond what operations allow, to mean much."""
        wide = Timing.of(self.seconds).spread > LARGEST_SPREAD
        return wide or self.speedup > self.flop_limit * _BEYOND

    @property
    def share_of_limit(self) -> float:
        """What was reached of what operations allow."""
        return self.speedup / self.flop_limit


def parse_caches(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the caches that are named, in the order of `CACHES`; all where None.

    Raises SettingsError where one is none of these.
    """
    for name in names or ():
        if name not in CACHES:
            raise SettingsError(f"--caches {name}: choose of {' and '.join(CACHES)}")
    return tuple(one for one in CACHES if names is None or one in names)


def measure_speed(
    shape: str,
    model: Any,
    ids: Sequence[int],
    schedules: Sequence[str],
    rounds: int,
    new_tokens: int,
    warm_tokens: int,
    say: Callable[[str], None],
    caches: Sequence[str] = CACHES,
) -> list[SpeedRow]:
    """Read a prompt in every way, in turns.

    Parameters
    ----------
    shape
        As rows call the model.
    model
        Of transformers, unmodified.
    ids
        Of the prompt.
    schedules
        As `hillinfer.prune` takes them.
    rounds
        Counted ones; one more warms up.
    new_tokens
        Decoded behind the prompt, 1 at least: the first one comes with the prompt.
    warm_tokens
        Of the prompt, in the round that warms up.
    say
        Takes a line of progress.
    caches
        Into which it is read, of `CACHES`.
    """
    ways = [(cache, schedule) for cache in caches for schedule in (FULL, *schedules)]
    taken: dict[tuple[str, str], list[_Read]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way in ways:
            one = _timed(model, ids if number else ids[:warm_tokens], *way, new_tokens)
            if number:
                taken[way].append(one)
    rows = []
    for (cache, schedule), own in taken.items():
        both = list(zip(taken[cache, FULL], own, strict=True))
        rivals = zip(taken.get((ORDINARY, FULL), ()), own, strict=False)
        over = [whole.seconds / one.seconds for whole, one in rivals]
        pruned = own[-1].pruned
        row = SpeedRow(
            shape,
            len(model.get_decoder().layers),
            len(ids),
            cache,
            schedule,
            new_tokens,
            [one.seconds for one in own],
            [one.cpu_seconds for one in own],
            median(whole.seconds / one.seconds for whole, one in both),
            median(whole.cpu_seconds / one.cpu_seconds for whole, one in both),
            median(over) if over else None,
            1.0 if pruned is None else pruned.flop_limit,
            0.0 if pruned is None else pruned.choosing_seconds / own[-1].seconds,
            0 if pruned is None else pruned.boundary_bytes,
            own[-1].dram_peak_bytes,
            own[-1].dram_least_bytes,
        )
        say(row_text(row))
        rows.append(row)
    return rows


def row_text(row: SpeedRow) -> str:
    """Return a row for reading."""
    flag = " !" if row.flagged else ""
    return (
        f"{row.shape:<14} {row.context:>6} tokens, {row.new_tokens} new, {row.cache:<8} "
        f"{row.schedule:<26} {median(row.seconds):8.2f} s{flag}  x{row.speedup:.2f} (CPU "
        f"x{row.cpu_speedup:.2f}) of {row.flop_limit:.2f} possible: {row.share_of_limit:.0%}"
        f"{_over(row)}; choosing {row.choosing_share:.2%}{_peak(row)}"
    )


def _over(row: SpeedRow) -> str:
    over = row.over_ordinary
    return "" if over is None else f"; over the ordinary cache x{over:.2f}"


def _peak(row: SpeedRow) -> str:
    return "" if row.dram_peak_bytes is None else f"; peak {row.dram_peak_bytes / 2**20:.0f} MiB"


@dataclass(frozen=True)
class _Read:
    seconds: float
    cpu_seconds: float
    pruned: PrunedRead | None
    dram_peak_bytes: int | None
    dram_least_bytes: int | None


@torch.no_grad()
def _timed(
    model: Any, ids: Sequence[int], cache_kind: str, schedule: str, new_tokens: int
) -> _Read:
    with ExitStack() as stack:
        attached = None
        if cache_kind == DRIVE:
            place = stack.enter_context(TemporaryDirectory(prefix="hillinfer-slim-"))
            # A tenth is selected, and memory would hold all: time goes to computing alone.
            made = hillinfer.attach(model, cold_dir=place, alpha=0.1, dram_budget="120%")
            attached = stack.enter_context(made)
        pruning = None
        if schedule != FULL:
            pruning = stack.enter_context(hillinfer.prune(model, schedule))
        cache: Any = DynamicCache(config=model.config)
        if attached is not None:
            cache = attached.new_cache(expected_tokens=len(ids) + new_tokens)
        wall, cpu = time.perf_counter(), time.process_time()
        with nullcontext() if pruning is None else pruning.prompt(len(ids)):
            logits = read(model, cache, ids)
        for _ in range(new_tokens - 1):
            logits = read(model, cache, [int(logits.argmax())])
        spent = time.perf_counter() - wall, time.process_time() - cpu
        told = None if pruning is None else pruning.read_of(cache)
        peak = least = None
        if attached is not None:
            now = cache.statistics()
            peak = now.dram_peak_bytes
            # Rows of open groups are among the other bytes, too.
            around = now.shadow_bytes + now.staging_bytes + now.other_bytes
            least = min(peak, now.kv_bytes + around)
            cache.close()
        return _Read(*spent, told, peak, least)
