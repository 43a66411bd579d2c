# SPDX-License-Identifier: Apache-2.0
"""`python tools/placement_bench.py`: placement policies beside the optimum, and their time.

Nothing is read or moved: options are drawn, with sizes and times as of a model of 8 billion
parameters and a drive of 1 GB/s.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hillinfer.placement.options import FadingUses, FirstTokenUtility
from hillinfer.placement.policies import PLACEMENT_POLICIES, make_placement_policy
from hillinfer_bench.placement.instances import random_instance, random_stock
from hillinfer_bench.placement.optimum import optimum
from hillinfer_bench.placement.placing import Placing

# How many documents random instances have, at least and at most.
SIZES = ((20, 60), (5, 19))


def shares(instances: int, gap: float, sizes: tuple[int, int]) -> dict[str, dict[str, float]]:
    """Return how much of the possible gain each policy reaches on random instances, by policy."""
    reached: dict[str, list[float]] = {name: [] for name in PLACEMENT_POLICIES}
    for seed in range(instances):
        best = optimum(random_instance(seed, *sizes), gap)
        for name, own in reached.items():
            stock = random_instance(seed, *sizes)
            stock.arrange(make_placement_policy(name).plan(stock, None))
            own.append(best.share(stock.utility()))
    return {
        name: {
            "least": min(own),
            "p01": float(np.quantile(own, 0.01)),
            "mean": float(np.mean(own)),
            "at_least_98": float(np.mean(np.array(own) >= 0.98)),
        }
        for name, own in reached.items()
    }


def event_times(contexts: int, events: int, policy: str) -> dict[str, float]:
    """Return processor milliseconds per event: uses, new measurements and other budgets."""
    stock = random_stock(5, contexts, 0.15, 0.3)
    placed = Placing(stock.tiers, make_placement_policy(policy), FirstTokenUtility(), FadingUses())
    for now, (name, context) in enumerate(stock.contexts.items()):
        placed.put(name, context.options, float(now))
    other = random_stock(6, contexts, 0.15, 0.3)
    draw = np.random.default_rng(0)
    budget = stock.limited[0].budget or 0
    taken: list[float] = []
    for event in range(events):
        name, now = f"c{draw.integers(contexts):04}", 2.0 * contexts + event
        before = time.process_time()
        if event % 10 == 0:
            placed.put(name, other.contexts[name].options, now)
        elif event % 10 == 5:
            placed.resize("dram", int(budget * draw.uniform(0.97, 1.03)))
        else:
            placed.used(name, now)
        taken.append(1000 * (time.process_time() - before))
    return {
        "p50": float(np.quantile(taken, 0.5)),
        "p99": float(np.quantile(taken, 0.99)),
        "most": max(taken),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--gap", type=float, default=1e-4, help="of the optimum")
    parser.add_argument("--contexts", type=int, default=1000)
    parser.add_argument("--events", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("build/reports/placement.json"))
    given = parser.parse_args(arguments)
    reached: dict[str, dict[str, dict[str, float]]] = {}
    for fewest, most in SIZES:
        own = reached[f"{fewest}-{most}"] = shares(given.instances, given.gap, (fewest, most))
        print(
            f"share of the optimum's gain, {given.instances} instances of {fewest}-{most} documents"
        )
        for name, row in own.items():
            print(f"{name:14} " + "  ".join(f"{key} {value:.4f}" for key, value in row.items()))
    times = {
        name: event_times(given.contexts, given.events, name)
        for name in ("hulls", "paper", "per-byte", "lru")
    }
    print(f"processor milliseconds per event, {given.contexts} documents of 44 options")
    for name, row in times.items():
        print(f"{name:14} " + "  ".join(f"{key} {value:.2f}" for key, value in row.items()))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({"shares": reached, "milliseconds": times}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
