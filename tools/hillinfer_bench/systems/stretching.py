# SPDX-License-Identifier: Apache-2.0
"""Recorded selections laid out over longer contexts, and how local they stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hillinfer.errors import SettingsError
from hillinfer.settings import PoolSizes, Settings
from hillinfer_bench.replay.selection_trace import SelectionTrace, Sets
from hillinfer_bench.replay.table import replay_policy
from hillinfer_model.selection import kept_positions, selected_count

# Largest difference of a share between a recording and what was made from it.
LOCALITY_TOLERANCE = 0.05
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
            if abs(own - theirs) > LOCALITY_TOLERANCE:
                return (
                    f"{name} is {own:.3f}, recorded {theirs:.3f}: more than {LOCALITY_TOLERANCE} "
                    "apart"
                )
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


STRETCHING_RULE = (
    "sinks, the last kept tokens of the prefix and all decoded tokens keep their distance to the "
    "prefix' ends; between them every block of 32 recorded positions is laid out, inside it "
    "unchanged, as often as the context is longer, at the same share of the distance to the end; "
    "what the longer context must select beyond or below that is taken by a fixed random order of "
    "positions"
)
BLOCK_TOKENS = 32
_SEED = 0


class Stretch:
    """Which recorded position each position of a longer context mirrors; see `STRETCHING_RULE`.

    The map is the same for every step, so what changes from step to step is what changed in the
    recording, and runs of consecutive tokens stay runs.

    Parameters
    ----------
    recorded, stretched
        Tokens of the prefix in the recording and in the longer context.
    settings
        Says which tokens are kept.

    Raises
    ------
    SettingsError
        Where the recording is too short, or not the shorter of both.
    """

    def __init__(self, recorded: int, stretched: int, settings: Settings) -> None:
        sinks, recent = settings.kept_sinks, settings.kept_recent
        if recorded - sinks - recent < BLOCK_TOKENS or stretched < recorded:
            raise SettingsError(
                f"a recording of {recorded} tokens cannot be stretched to {stretched}: record "
                f"between {sinks + recent + BLOCK_TOKENS} and {stretched} tokens"
            )
        self._shift = stretched - recorded
        self._settings = settings
        middle, long_middle = (one - sinks - recent for one in (recorded, stretched))
        blocks, long_blocks = middle // BLOCK_TOKENS, -(-long_middle // BLOCK_TOKENS)
        ages = np.arange(long_middle)
        copied = ages // BLOCK_TOKENS * blocks // long_blocks
        age = copied * BLOCK_TOKENS + ages % BLOCK_TOKENS
        source = np.arange(stretched)
        source[sinks : stretched - recent] = (recorded - recent - 1 - age)[::-1]
        source[stretched - recent :] -= self._shift
        self.source: NDArray[np.int64] = source
        # One order for all steps: tokens that leave or enter by it do so once.
        self._order = np.random.default_rng(_SEED).random(stretched)

    def positions(self, recorded: NDArray[np.int32], length: int, recorded_length: int) -> Sets:
        """Return one recorded set stretched, as a tuple of one int32 array, ascending.

        Parameters
        ----------
        recorded
            Positions, ascending.
        length, recorded_length
            Tokens at this step in the longer context and in the recording.
        """
        settings = self._settings
        chosen = np.zeros(recorded_length, bool)
        chosen[recorded] = True
        selected = np.zeros(length, bool)
        prefix = len(self.source)
        selected[:prefix] = chosen[self.source]
        selected[prefix:] = chosen[prefix - self._shift :]
        selected[kept_positions(length, settings.kept_sinks, settings.kept_recent)] = True
        wanted = selected_count(
            length, settings.importance_rate, settings.kept_tokens, settings.max_selected
        )
        surplus = int(selected.sum()) - wanted
        first, end = settings.kept_sinks, prefix - settings.kept_recent
        free = np.flatnonzero(selected[first:end] == (surplus > 0)) + first
        turned = free[np.argsort(self._order[free], kind="stable")[: abs(surplus)]]
        selected[turned] = surplus < 0
        return (np.flatnonzero(selected).astype(np.int32),)


def recording_settings(settings: Settings, recorded: int, stretched: int, steps: int) -> Settings:
    """Return settings whose recording, once stretched, has about as many tokens as are selected.

    Parameters
    ----------
    settings
        Those of the longer context.
    recorded, stretched
        Tokens of the prefix in the recording and in the longer context.
    steps
        Decode steps to record.
    """
    kept = settings.kept_tokens
    last = stretched + steps
    wanted = selected_count(last, settings.importance_rate, kept, settings.max_selected)
    # Decoded tokens are not repeated, whatever share of them is selected.
    middle = (wanted - kept) * (recorded - kept) / (stretched - kept)
    alpha = min(1.0, (middle + kept + steps / 2) / (recorded + steps))
    return replace(settings, alpha=alpha, max_selected=None)


def stretched_trace(
    trace: SelectionTrace, prefix: int, settings: Settings, sources: Sequence[int]
) -> SelectionTrace:
    """Return a recording laid out over a longer context.

    Parameters
    ----------
    trace
        What was recorded.
    prefix
        Tokens before the first step in the longer context.
    settings
        Those of the longer context: α and the kept tokens.
    sources
        For each layer of the result, the recorded layer that it replays.
    """
    stretch = Stretch(trace.prefix, prefix, settings)
    made: dict[int, Sets] = {}
    for source in set(sources):
        made[source] = tuple(
            stretch.positions(sets, prefix + step + 1, trace.prefix + step + 1)[0]
            for step, sets in enumerate(trace.layers[source])
        )
    return SelectionTrace(
        trace.text,
        settings,
        prefix,
        tuple(made[source] for source in sources),
        ((),) * len(sources),
    )
