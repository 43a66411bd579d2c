# SPDX-License-Identifier: Apache-2.0
"""What storing costs whoever reads a prompt: its time with a store and without."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import hillinfer
from hillinfer.generate.answering import Generation
from hillinfer.store.store import Store

_CHUNK_TOKENS = 1024


@dataclass(frozen=True)
class CostRow:
    """Reading one prompt into a cache of HillInfer.

    Parameters
    ----------
    tokens
        Of the prompt.
    plain_seconds, storing_seconds
        Of each round, in turn: without a store, and with an empty one that has it afterwards.
    """

    tokens: int
    plain_seconds: list[float]
    storing_seconds: list[float]

    @property
    def share(self) -> float:
        """Of the plain seconds, that storing adds; the median over rounds, each its own pair."""
        return median(self.ratios) - 1

    @property
    def ratios(self) -> list[float]:
        """Storing over plain seconds of each round: what drifts over rounds drops out."""
        return [
            storing / plain
            for storing, plain in zip(self.storing_seconds, self.plain_seconds, strict=True)
        ]


def measure_cost(
    place: Path,
    model: Any,
    ids: Sequence[int],
    rounds: int,
    say: Callable[[str], None],
) -> CostRow:
    """Read a prompt with a store and without, in turn.

    Parameters
    ----------
    place
        An existing directory for stores and cold pools.
    model
        Of transformers.
    ids
        The prompt.
    rounds
        How often.
    say
        Takes a line of progress.
    """
    plain, storing = [], []
    for number in range(rounds):
        with hillinfer.attach(model, cold_dir=place) as hill:
            plain.append(_read(model, hill, ids))
        own = place / f"store-{number}"
        Store.create(own, 2 << 30)
        with Store(own) as store, hillinfer.attach(model, cold_dir=place, store=store) as hill:
            # The first prompt of a model hashes its weights, which is no part of storing another.
            _read(model, hill, ids[:2])
            storing.append(_read(model, hill, ids))
            assert store.counts.failures == 0, store.counts.last_failure
        say(f"{len(ids)} tokens read in {plain[-1]:.1f} s, and stored in {storing[-1]:.1f} s")
    return CostRow(len(ids), plain, storing)


def _read(model: Any, hill: Any, ids: Sequence[int]) -> float:
    """Return the seconds until a prompt is read, and found by everybody where there is a store."""
    with closing(hill.new_cache(len(ids) + 64)) as cache:
        generation = Generation(model, cache, _CHUNK_TOKENS)
        began = time.perf_counter()
        generation.read(ids)
        cache.await_stored()
        return time.perf_counter() - began
