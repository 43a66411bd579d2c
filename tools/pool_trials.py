# SPDX-License-Identifier: Apache-2.0
"""`python tools/pool_trials.py`: rankings of KV rows that became no pool policy.

What the real model selects is recorded as `hillinfer-bench pools` does, and with it the score code
of every token. The sets are played to the pools of the product; trials rank rows by hits, by score
codes, near misses among them, or both. All a trial says of a token fits the 2 bytes that the
hit-rate table has for it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.devices.opening import make_scorer
from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.kv.pool_policies import MOST_HITS, PoolPolicy
from hillinfer.models.loader import ModelOutline
from hillinfer.models.sources import ModelSource
from hillinfer.scoring.scorer import SegmentShadow
from hillinfer.settings import PoolSizes, Settings
from hillinfer.system.machine import NumberType, ProcessorFacts
from hillinfer_bench.quality.forced_reading import Prefix, compute_threads, forced_logits, selecting
from hillinfer_bench.quality.policies import ContractSelection, LayerQueries
from hillinfer_bench.quality.texts import file_samples, standard_library_samples
from hillinfer_bench.replay.belady import demand_bound
from hillinfer_bench.replay.pool_replay import PoolReplay
from hillinfer_bench.replay.processes import spawned_processes
from hillinfer_bench.replay.selection_trace import SelectionTrace
from hillinfer_model.kernel_spec import GROUP_TOKENS
from hillinfer_model.selection import kept_positions

MODEL = "smollm2-135m"
# Score codes have ten fraction bits: so many of them are a factor of two.
OCTAVE = 1 << 10
MARGIN_OCTAVES = 2.0
Worth = NDArray[np.float32]


@dataclass(frozen=True)
class ScoredTrace:
    """A trace and the score codes that its sets come from, uint16 (tokens,) per layer and step."""

    trace: SelectionTrace
    codes: tuple[tuple[NDArray[np.uint16], ...], ...]


@dataclass(frozen=True)
class Seen:
    """One layer's last step: what was selected, as 0 and 1, and score codes; (tokens,) each."""

    selected: Worth
    codes: NDArray[np.uint16]
    kept: NDArray[np.int64]

    @property
    def margins(self) -> Worth:
        """Octaves above the worst score that was selected, cut at 2; below 0 for near misses."""
        ranked = self.selected > 0
        ranked[self.kept] = False
        worst = int(self.codes[ranked].min()) if ranked.any() else 0
        octaves = (self.codes.astype(np.float32) - worst) / OCTAVE
        return np.clip(octaves, -MARGIN_OCTAVES, MARGIN_OCTAVES)


Ranking = Callable[[Seen], Worth]


class Mean:
    """A mean of each token over the steps, of which a part fades at every step; new ones are 0."""

    def __init__(self, fade: float) -> None:
        self._fade = np.float32(fade)
        self._mean: Worth = np.zeros(0, np.float32)

    def __call__(self, values: Worth) -> Worth:
        """Return the mean after one more step."""
        self._mean = np.concatenate([self._mean, self._first(values[len(self._mean) :])])
        self._mean += self._fade * (values - self._mean)
        return self._mean

    def _first(self, values: Worth) -> Worth:
        return np.zeros_like(values)


class MeanFromFirst(Mean):
    """The same, where a new token begins at its first value."""

    def _first(self, values: Worth) -> Worth:
        return values


def hits(*fades: float) -> Ranking:
    """Rank by the mean of hits that fade at these rates."""
    means = [Mean(fade) for fade in fades]
    return lambda seen: _average([mean(seen.selected) for mean in means])


def hits_of_neighbours() -> Ranking:
    """Rank by hits that fade by a quarter, a fifth of them those of the tokens around."""
    mean = Mean(1 / 4)

    def rank(seen: Seen) -> Worth:
        near = np.convolve(seen.selected, np.array([1, 1, 1, 0, 1, 1, 1]) / 6, "same")
        return mean((0.8 * seen.selected + 0.2 * near).astype(np.float32))

    return rank


def hits_and_recency() -> Ranking:
    """Rank by hits that fade by a quarter, and a little by how new a token is."""
    mean = Mean(1 / 4)

    def rank(seen: Seen) -> Worth:
        age = np.arange(len(seen.codes), 0, -1)
        return (0.8 * mean(seen.selected) + 0.2 / (1 + np.log(age))).astype(np.float32)

    return rank


def second_hits() -> Ranking:
    """Rank by hits that fade by a quarter, last what a mean over ten steps forgot."""
    mean, long = Mean(1 / 4), Mean(1 / 10)

    def rank(seen: Seen) -> Worth:
        after = long(seen.selected)
        first = (seen.selected > 0) & (after < 1 / 10 + 0.005)
        worth = mean(seen.selected).copy()
        worth[first] = 0
        return worth

    return rank


def last_score(seen: Seen) -> Worth:
    """Rank by the last score."""
    return seen.codes.astype(np.float32) / np.float32(MOST_HITS)


def hits_then_score() -> Ranking:
    """Rank by hits that fade by a quarter, in 256 steps, then by the last score."""
    mean = Mean(1 / 4)

    def rank(seen: Seen) -> Worth:
        coarse = np.floor(mean(seen.selected) * np.float32(255))
        return np.asarray((coarse + last_score(seen)) / 256, np.float32)

    return rank


def margins(*fades: float) -> Ranking:
    """Rank by the mean of margins that fade at these rates."""
    means = [MeanFromFirst(fade) for fade in fades]

    def rank(seen: Seen) -> Worth:
        average = _average([mean(seen.margins) for mean in means])
        return (average + MARGIN_OCTAVES) / (2 * MARGIN_OCTAVES)

    return rank


TRIALS: Mapping[str, Callable[[], Ranking]] = {
    "hits, 1/4 fades": lambda: hits(1 / 4),
    "hits, 1/2 fades": lambda: hits(1 / 2),
    "hits, 1/8 fades": lambda: hits(1 / 8),
    "hits, 1/16 fades": lambda: hits(1 / 16),
    "hits, 1/2 and 1/16": lambda: hits(1 / 2, 1 / 16),
    "hits and neighbours": hits_of_neighbours,
    "hits and recency": hits_and_recency,
    "second hits": second_hits,
    "hits, then last score": hits_then_score,
    "last score": lambda: last_score,
    "margins, 1/2 fades": lambda: margins(1 / 2),
    "margins, 1/4 fades": lambda: margins(1 / 4),
    "margins, 3/4 and 1/16": lambda: margins(3 / 4, 1 / 16),
}


class TrialPolicy(PoolPolicy):
    """Writes what a trial says of every token where the product's policies keep hits.

    Parameters
    ----------
    scored
        What is replayed, without observed sets; its layers are asked for in turn, step by step.
    make
        Makes a ranking for each layer.
    """

    def __init__(self, scored: ScoredTrace, make: Callable[[], Ranking]) -> None:
        self._scored = scored
        self._rankings = [make() for _ in scored.codes]
        self._calls = 0

    def tally(self, counts: NDArray[np.uint16], selected: NDArray[np.int64]) -> None:
        """Rank all tokens anew; see `PoolPolicy`."""
        step, layer = divmod(self._calls, len(self._rankings))
        self._calls += 1
        codes, settings = self._scored.codes[layer][step], self._scored.trace.settings
        chosen = np.zeros(len(codes), np.float32)
        chosen[selected] = 1
        kept = kept_positions(len(codes), settings.kept_sinks, settings.kept_recent)
        worth = self._rankings[layer](Seen(chosen, codes, kept))
        counts[: len(codes)] = np.rint(np.clip(worth, 0, 1) * MOST_HITS)


@dataclass(frozen=True)
class Row:
    """How one trial did on one text; rows promoted are a mean over steps and layers."""

    trial: str
    text: str
    pool_alphas: float
    hit_rate: float
    promoted: float


def trial_rows(scored: ScoredTrace, sizes: Sequence[float]) -> list[Row]:
    """Return a row for each trial and pool size, and for Belady's demand bound."""
    trace = scored.trace
    rows = []
    for size in sizes:
        # As `hillinfer-bench pools` counts: half a group of it stands for the open group.
        slots = max(0, int(size * len(trace.layers[0][-1])) - GROUP_TOKENS // 2)
        for name, make in TRIALS.items():
            found = PoolReplay(trace, TrialPolicy(scored, make), slots, PoolSizes.EQUAL).run()
            promoted = float(found.promoted.sum()) / (trace.steps * len(trace.layers))
            rows.append(Row(name, trace.text, size, found.hit_rate, promoted))
        bound = demand_bound(trace, slots).hit_rate
        rows.append(Row("belady, demand", trace.text, size, bound, 0.0))
    return rows


class _Scored(ContractSelection):
    """Selects as the product does and remembers sets and score codes."""

    def __init__(self, scorer: Any, settings: Settings) -> None:
        super().__init__(scorer, settings)
        self.codes: list[tuple[NDArray[np.uint16], ...]] = []
        self.layers: list[tuple[NDArray[np.int32], ...]] = []
        self._codes: list[NDArray[np.uint16]] = []

    def select(self, layer: LayerQueries) -> list[NDArray[np.int64]]:
        self._codes = []
        selected = super().select(layer)
        self.codes.append(tuple(self._codes))
        self.layers.append(tuple(sets[0].astype(np.int32) for sets in selected))
        return selected

    def chosen(
        self, query: torch.Tensor, scaling: float, segments: Sequence[SegmentShadow]
    ) -> NDArray[np.int64]:
        (tuples,) = self._scorer.tuples(query, scaling, segments)
        self._codes.append((tuples >> np.uint32(16)).astype(np.uint16))
        return super().chosen(query, scaling, segments)


def record(
    model: Any, token_ids: Sequence[int], last: int, settings: Settings, text: str
) -> ScoredTrace:
    """Return what is selected and scored while the last tokens of a text are read one by one."""
    start = len(token_ids) - last
    prefix = Prefix.read(model, token_ids[:start])
    scorer = make_scorer(settings.device, kernel_spec(prefix.shape, settings), settings.scope)
    scored = _Scored(scorer, settings)
    with selecting(model):
        forced_logits(model, prefix, token_ids[start:], scored)
    none = ((),) * len(scored.layers)
    trace = SelectionTrace(text, settings, start, tuple(scored.layers), none)
    return ScoredTrace(trace, tuple(scored.codes))


def main() -> None:
    """Record, replay and print a table of hit rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, nargs="+", help="default: the Python reference")
    parser.add_argument("--parts", type=int, default=2, help="parts of it, 3 at most")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--last", type=int, default=256)
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--rule", default="weight_sum")
    parser.add_argument("--shadow", default="int4")
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.5, 1.0, 1.5, 2.0])
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    settings = Settings().changed(alpha=chosen.alpha, rule=chosen.rule, shadow=chosen.shadow)
    outline = ModelOutline.read(ModelSource.locate(MODEL, print), NumberType.AUTO)
    samples = (
        file_samples(outline.tokenizer, chosen.texts, chosen.context)
        if chosen.texts
        else standard_library_samples(outline.tokenizer, chosen.context)[: chosen.parts]
    )
    loaded = outline.load()
    threads = ProcessorFacts.read().cores
    with compute_threads(threads):
        traces = [
            record(loaded.model, one.token_ids[: chosen.context], chosen.last, settings, one.name)
            for one in samples
        ]
    with spawned_processes(min(threads, len(traces))) as workers:
        found = workers.map(trial_rows, traces, [chosen.sizes] * len(traces))
        rows = [row for own in found for row in own]
    for text in (None, *(sample.name for sample in samples)):
        print(f"\n{text or 'mean over texts'}: hit rate (rows promoted a step and layer)")
        print(" " * 24 + "".join(f"{size:>8g} αN     " for size in chosen.sizes))
        for name in (*TRIALS, "belady, demand"):
            print(f"{name:<24}" + "".join(_cell(rows, name, size, text) for size in chosen.sizes))
    report = {
        "label": "measured",
        "model": loaded.name,
        "settings": {key: str(value) for key, value in vars(chosen).items()},
        "processor": ProcessorFacts.read().name,
        "rows": [asdict(row) for row in rows],
    }
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(report, indent=2) + "\n")


def _cell(rows: Sequence[Row], trial: str, size: float, text: str | None) -> str:
    own = [one for one in rows if one.trial == trial and one.pool_alphas == size]
    own = [one for one in own if text in (None, one.text)]
    return (
        f"{fmean(one.hit_rate for one in own):>8.4f} ({fmean(one.promoted for one in own):>3.0f})"
    )


def _average(values: Sequence[Worth]) -> Worth:
    return np.asarray(np.mean(values, axis=0), np.float32)


if __name__ == "__main__":
    main()
