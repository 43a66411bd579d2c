# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of prompts that are read in stages, beside reading all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache

import hillinfer
from hillinfer.pruning.profile import read
from hillinfer_bench.report.rows import LARGEST_SPREAD, Timing
from hillinfer_bench.slim.quality import FULL

# Of the limit; attention takes longer per operation than linear layers do.
_BEYOND = 1.1


@dataclass(frozen=True)
class SpeedRow:
    """One way to read prompts of one length, in turns with the others.

    Parameters
    ----------
    shape, layers, context
        What was read by which model, and how many of its layers were built.
    schedule
        `full` for reading all of it.
    new_tokens
        Decoded behind the prompt, part of the time.
    seconds, cpu_seconds
        Of each round: wall and of all threads, to the logits of the last token.
    speedup, cpu_speedup
        Median over rounds of the whole read's time over this one's in the same round.
    flop_limit
        What operations of linear layers and attention allow.
    choosing_share
        Of the time, for choosing blocks.
    boundary_bytes
        Of hidden states that wait, at most.
    """

    shape: str
    layers: int
    context: int
    schedule: str
    new_tokens: int
    seconds: list[float]
    cpu_seconds: list[float]
    speedup: float
    cpu_speedup: float
    flop_limit: float
    choosing_share: float
    boundary_bytes: int

    @property
    def flagged(self) -> bool:
        """Whether rounds lie too far apart, or beyond what operations allow, to mean much."""
        wide = Timing.of(self.seconds).spread > LARGEST_SPREAD
        return wide or self.speedup > self.flop_limit * _BEYOND

    @property
    def share_of_limit(self) -> float:
        """What was reached of what operations allow."""
        return self.speedup / self.flop_limit


def measure_speed(
    shape: str,
    model: Any,
    ids: Sequence[int],
    schedules: Sequence[str],
    rounds: int,
    new_tokens: int,
    say: Callable[[str], None],
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
    say
        Takes a line of progress.
    """
    taken: dict[str, list[tuple[float, float, Any]]] = {}
    for number in range(rounds + 1):
        for schedule in (FULL, *schedules):
            one = _timed(model, ids, schedule, new_tokens)
            if number:
                taken.setdefault(schedule, []).append(one)
    rows = []
    for schedule, own in taken.items():
        both = list(zip(taken[FULL], own, strict=True))
        pruned = own[-1][2]
        row = SpeedRow(
            shape,
            len(model.get_decoder().layers),
            len(ids),
            schedule,
            new_tokens,
            [one[0] for one in own],
            [one[1] for one in own],
            median(whole[0] / one[0] for whole, one in both),
            median(whole[1] / one[1] for whole, one in both),
            1.0 if pruned is None else pruned.flop_limit,
            0.0 if pruned is None else pruned.choosing_seconds / own[-1][0],
            0 if pruned is None else pruned.boundary_bytes,
        )
        say(row_text(row))
        rows.append(row)
    return rows


def row_text(row: SpeedRow) -> str:
    """Return a row for reading."""
    flag = " !" if row.flagged else ""
    return (
        f"{row.shape:<14} {row.context:>6} tokens, {row.new_tokens} new, {row.schedule:<26} "
        f"{median(row.seconds):8.2f} s{flag}  x{row.speedup:.2f} (CPU x{row.cpu_speedup:.2f}) of "
        f"{row.flop_limit:.2f} possible: {row.share_of_limit:.0%}; choosing "
        f"{row.choosing_share:.2%}"
    )


@torch.no_grad()
def _timed(
    model: Any, ids: Sequence[int], schedule: str, new_tokens: int
) -> tuple[float, float, Any]:
    around = nullcontext() if schedule == FULL else hillinfer.prune(model, schedule)
    with around as pruning:
        cache = DynamicCache(config=model.config)
        wall, cpu = time.perf_counter(), time.process_time()
        with nullcontext() if pruning is None else pruning.prompt(len(ids)):
            logits = read(model, cache, ids)
        for _ in range(new_tokens - 1):
            logits = read(model, cache, [int(logits.argmax())])
        spent = time.perf_counter() - wall, time.process_time() - cpu
        return *spent, None if pruning is None else pruning.read_of(cache)
