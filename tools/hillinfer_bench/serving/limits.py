# SPDX-License-Identifier: Apache-2.0
"""What streams can gain together: the model's own loop for several rows, beside one for one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

_WARM_UP, _STEPS = 2, 8

Say = Callable[[str], None]


@dataclass
class LimitRow:
    """Seconds of a step of the model alone, by its rows.

    Parameters
    ----------
    step_seconds
        Median of each round, with next to nothing to attend to. No server, sampling or HTTP is in
        it.
    """

    step_seconds: dict[int, list[float]] = field(default_factory=dict)

    def speedup(self, count: int) -> float:
        """Return how many times the tokens per second of one stream so many streams can have."""
        return count * median(self.step_seconds[1]) / median(self.step_seconds[count])


@torch.no_grad()
def measure_limit(model: Any, counts: Sequence[int], rounds: int, say: Say) -> LimitRow:
    """Take steps of a model that nothing is attached to, in turns.

    Parameters
    ----------
    model
        One of transformers, on whichever device it computes.
    counts
        Rows of a batch; 1 is one of them.
    rounds
        How often.
    say
        Takes a line of progress.
    """
    from transformers import DynamicCache

    row = LimitRow()
    for turn in range(rounds):
        for count in counts:
            cache, ids = DynamicCache(), torch.full((count, 1), 5, device=model.device)
            seconds = []
            for _ in range(_WARM_UP + _STEPS):
                began = time.perf_counter()
                model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                if model.device.type == "cuda":
                    # A step is over when its logits are there, and not when it was asked for.
                    torch.cuda.synchronize(model.device)
                seconds.append(time.perf_counter() - began)
            row.step_seconds.setdefault(count, []).append(median(seconds[_WARM_UP:]))
        told = ", ".join(f"{1e3 * row.step_seconds[count][-1]:.1f}" for count in counts)
        say(f"round {turn + 1}: {told} ms for {', '.join(map(str, counts))} rows")
    return row
