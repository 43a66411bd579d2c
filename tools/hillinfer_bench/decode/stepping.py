# SPDX-License-Identifier: Apache-2.0
"""Decode steps of several systems on one model, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hillinfer_bench.decode.kv_source import KVSource
from hillinfer_bench.decode.resident import resident_bytes
from hillinfer_bench.decode.turns import turns
from hillinfer_bench.systems.system import Counted, OpenSystem


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
    """
    taken = 0
    done = [Steps() for _ in systems]
    before: list[Counted | None] = [None] * len(systems)
    for own in turns(len(systems), warm_up + steps, turn, warm_up):
        system, result = systems[own.system], done[own.system]
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
    for system, result, earlier in zip(systems, done, before, strict=True):
        assert earlier is not None
        result.counted = system.counted().since(earlier)
    return done
