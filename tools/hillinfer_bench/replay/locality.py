# SPDX-License-Identifier: Apache-2.0
"""How much the selected sets of consecutive steps have in common."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from hillinfer.pools.layer_shares import PoolSizes
from hillinfer.settings import Settings
from hillinfer_bench.replay.measuring import replay_policy
from hillinfer_bench.replay.selection_trace import SelectionTrace
from hillinfer_model.selection import kept_positions

# Largest difference of a share between a recording and what was made from it.
TOLERANCE = 0.05
_RUN_TOLERANCE = 0.25


@dataclass(frozen=True)
class Locality:
    """Means over layers and steps of one trace; tokens that are always kept are left out.

    Those are as many at any context, so what they add says nothing about what is ranked.

    Parameters
    ----------
    overlap
        Share of a selected set that was selected in the step before.
    recent_share
        Share of it among the most recent tokens, as many as are selected.
    hit_rate
        Share found in a hot pool as large as one selected set, with the default policy.
    run_tokens
        Consecutive tokens of a run, on average.
    """

    overlap: float
    recent_share: float
    hit_rate: float
    run_tokens: float

    @classmethod
    def of(cls, trace: SelectionTrace) -> Locality:
        """Measure a trace of at least two steps."""
        overlaps, recent, runs = [], [], []
        for sets in trace.layers:
            before = None
            for step, positions in enumerate(sets):
                length = trace.prefix + step + 1
                ranked = _ranked(positions, length, trace.settings)
                newest = length - trace.settings.kept_recent
                recent.append(np.mean(ranked >= newest - len(ranked)))
                runs.append(len(ranked) / (1 + np.count_nonzero(np.diff(ranked) != 1)))
                if before is not None:
                    overlaps.append(np.mean(np.isin(ranked, before, assume_unique=True)))
                # A token that was kept in the step before is no part of what was ranked there.
                before = positions
        return cls(
            float(np.mean(overlaps)),
            float(np.mean(recent)),
            _hit_rate(trace),
            float(np.mean(runs)),
        )

    def difference(self, other: Locality) -> str | None:
        """Return what differs by more than the tolerance, in words, or None."""
        for name in ("overlap", "recent_share", "hit_rate"):
            own, theirs = getattr(self, name), getattr(other, name)
            if abs(own - theirs) > TOLERANCE:
                return f"{name} is {own:.3f}, recorded {theirs:.3f}: more than {TOLERANCE} apart"
        if abs(self.run_tokens / other.run_tokens - 1) > _RUN_TOLERANCE:
            return (
                f"runs have {self.run_tokens:.2f} tokens, recorded {other.run_tokens:.2f}: more "
                f"than {_RUN_TOLERANCE:.0%} apart"
            )
        return None

    def as_record(self) -> dict[str, float]:
        """Return the four figures by name, rounded."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def _ranked(positions: NDArray[np.int32], length: int, settings: Settings) -> NDArray[np.int32]:
    """Return the selected positions that are not always kept."""
    kept = kept_positions(length, settings.kept_sinks, settings.kept_recent)
    return positions[~np.isin(positions, kept, assume_unique=True)]


def _hit_rate(trace: SelectionTrace) -> float:
    slots = len(trace.layers[0][-1])
    replayed = replay_policy(trace, Settings().pool_policy, slots, PoolSizes.EQUAL)
    # Kept tokens are always found.
    kept = trace.settings.kept_tokens * trace.steps * len(trace.layers)
    return float((replayed.hits.sum() - kept) / (replayed.selected.sum() - kept))
