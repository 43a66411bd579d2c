# SPDX-License-Identifier: Apache-2.0
"""Score several queries in one pass over the keys with the simulated RTL, and one beside them.

Writes build/reports/query_passes.json: token scores per cycle of kernels of one query and several,
over the same keys, in simulated memory. Wrong bytes, broken rules of the bus and a gain below the
goal end it with 1. Cycles are of the hand-written RTL in simulation: no measurement of a card.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("tools", "sw_model", "tests/hw", "tests/sw_model")]

from launch_builder import ScoreSegment, score_launch  # noqa: E402
from launch_cases import any_keys, any_query, base_of  # noqa: E402

from hillinfer_hw.memory_model import MEMORIES, MemoryModel  # noqa: E402
from hillinfer_hw.rtl import RtlSession, check_outcome  # noqa: E402
from hillinfer_model.choices import KeyMode, Rule, Scope  # noqa: E402
from hillinfer_model.golden_launch import run_score_launch  # noqa: E402
from hillinfer_model.kernel_spec import MOST_QUERIES, KernelSpec  # noqa: E402
from hillinfer_model.presets import PRESETS, preset_spec  # noqa: E402
from hillinfer_model.score_launch import ScoreLaunch  # noqa: E402

# Of four queries, in token scores per cycle, over one.
GOAL = 3.8


def launch_of(spec: KernelSpec, scope: Scope, segments: int) -> ScoreLaunch:
    """Return a launch of full segments of any keys, with as many queries as the kernel knows."""
    generator = np.random.default_rng(1)
    made = []
    for index in range(segments):
        keys = any_keys(spec, generator, spec.segment_tokens)
        first, *further = (any_query(spec, generator, 2**12, -40, 0) for _ in range(spec.queries))
        made.append(ScoreSegment(base_of(spec, index), keys, first, tuple(further)))
    return score_launch(spec, scope, made)


def row_of(spec: KernelSpec, scope: Scope, memory: MemoryModel, segments: int) -> dict[str, Any]:
    """Run one launch and return its row."""
    launch = launch_of(spec, scope, segments)
    golden = run_score_launch(spec, launch)
    session = RtlSession(spec, "score_tokens")
    try:
        run = session.run(launch, replace(memory, seed=1), expected=golden.output)
    finally:
        session.close()
    wrong = int((run.result.output != golden.output).any(axis=1).sum())
    wrong += int((run.result.status != golden.status).any(axis=1).sum())
    scores = segments * spec.segment_tokens * spec.queries
    outcome = run.outcome
    return {
        "queries": spec.queries,
        "scope": scope.value,
        "memory": memory.name,
        "token_scores": scores,
        "cycles": outcome.cycles,
        "scores_per_cycle": round(scores / outcome.cycles, 5),
        "key_beats": run.beats,
        "other_beats": outcome.read_beats[1] + outcome.write_beats,
        "wrong_beats": wrong,
        "faults": check_outcome(outcome),
    }


def main() -> int:
    """Run the launches and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=list(PRESETS), default="llama-3.1-8b")
    parser.add_argument("--mode", choices=list(KeyMode), default=KeyMode.INT4)
    parser.add_argument("--rule", choices=list(Rule), default=Rule.WEIGHT_SUM)
    parser.add_argument("--queries", type=int, choices=range(2, MOST_QUERIES + 1), default=4)
    parser.add_argument("--segments", type=int, default=16)
    parser.add_argument("--scope", nargs="+", choices=list(Scope), default=[Scope.LAYER])
    parser.add_argument("--memory", nargs="+", choices=list(MEMORIES), default=["realistic"])
    out = ROOT / "build" / "reports" / "query_passes.json"
    parser.add_argument("--out", type=Path, default=out)
    given = parser.parse_args()
    specs = [
        preset_spec(given.preset, KeyMode(given.mode), Rule(given.rule), queries)
        for queries in (1, given.queries)
    ]
    rows, wrong = [], []
    for scope in map(Scope, given.scope):
        for memory in given.memory:
            one, several = (row_of(spec, scope, MEMORIES[memory], given.segments) for spec in specs)
            gain = several["scores_per_cycle"] / one["scores_per_cycle"]
            rows += [one, {**several, "gain": round(gain, 4)}]
            for row in rows[-2:]:
                print(
                    f"{given.preset} {given.mode} {row['scope']:7} {row['memory']:9} "
                    f"{row['queries']} queries: {row['token_scores']} token scores in "
                    f"{row['cycles']} cycles, {row['scores_per_cycle']:.4f} a cycle, "
                    f"{row['wrong_beats']} wrong beats {'; '.join(row['faults'])}",
                    flush=True,
                )
                wrong += [f"{row['wrong_beats']} wrong beats"] if row["wrong_beats"] else []
                wrong += row["faults"]
            print(f"gain: {gain:.3f}", flush=True)
            if scope is Scope.LAYER and given.queries == MOST_QUERIES and gain < GOAL:
                wrong.append(f"{gain:.3f} times the token scores of one query, goal {GOAL}")
    label = "RTL simulation (hand-written SystemVerilog, Verilator)"
    given.out.parent.mkdir(parents=True, exist_ok=True)
    chosen = {"preset": given.preset, "mode": given.mode, "rule": given.rule}
    report = {"label": label, **chosen, "rows": rows, "wrong": wrong}
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
