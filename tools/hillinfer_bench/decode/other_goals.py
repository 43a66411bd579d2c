# SPDX-License-Identifier: Apache-2.0
"""Goals that other benchmarks' reports tell of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hillinfer_bench.decode.goal_bound import AtLeast, AtMost, GoalBound
from hillinfer_bench.decode.goal_point import GoalPoint
from hillinfer_bench.decode.goal_record import GoalRecord, judged, unjudged

FIRST_TOKEN = "time to the first token: at most 1.1 times ordinary chunked prefill, KV in DRAM"
SHADOW_GROWTH = "selected rows fixed: decode time grows with the shadow's bytes and nothing else"
FLAT_MEMORY = "memory flat at M0 and what the report names, to 256k tokens"
SCORER = "scorer: at least 80% of what memory reads, INT8 and INT4 shadows"
DRIVE = "drive: at least 80% of what fio reads"
BETA = "β chosen: at most 5% slower than the best measured"
# Who is compared with, and what is aimed at beside them.
_PEERS = {
    "transformers": "peers: ahead of transformers' own caches at every context from 4096 tokens",
    "llama.cpp": "peers: crossover with llama.cpp at 16384 tokens or below",
    "vllm": "peers: crossover with vLLM at 16384 tokens or below",
}
_AHEAD_FROM = 4096
_SCORER_MODES = ("int8", "int4")
_GOALLESS = "the report states no goals of its own: run it with this version"


@dataclass(frozen=True)
class OtherGoals:
    """What one report tells of goals.

    Parameters
    ----------
    file
        Name of the report.
    command
        That writes it.
    goals
        In words, stated where the report is not there.
    take
        Returns the records of a report that has no `goals`; raises KeyError, TypeError, ValueError
        or AttributeError where its form is another.
    """

    file: str
    command: str
    goals: tuple[str, ...]
    take: Callable[[Mapping[str, Any]], list[GoalRecord]]

    def records(self, found: Mapping[str, Any]) -> list[GoalRecord]:
        """Return the report's own records, where it has any, else those made of its figures."""
        if found.get("goals"):
            return [_own(one) for one in found["goals"]]
        return self.take(found)

    def unknown(self, reason: str) -> list[GoalRecord]:
        """Return a record of each goal with the reason why nothing is known."""
        return [GoalRecord(goal, None, reason, None, None) for goal in self.goals]


def _own(found: Mapping[str, Any]) -> GoalRecord:
    """Return a record that a report holds; where it is flagged, it is not met."""
    met = False if found["met"] and found["flagged"] else found["met"]
    row = found.get("row") or "no row is named"
    return GoalRecord(found["goal"], found["reached"], row, met, found["flagged"])


def _prefill(found: Mapping[str, Any]) -> list[GoalRecord]:
    goal = found["goal"]
    points = [
        GoalPoint(row["seconds_ratio"], f"{row['contender']}, {row['tokens']} tokens")
        for row in found["rows"]
        if row["contender"] == goal["contender"]
    ]
    return [_verdict(FIRST_TOKEN, points, AtMost(goal["ratio_at_most"]))]


def _peers(found: Mapping[str, Any]) -> list[GoalRecord]:
    records = []
    for family, goal in _PEERS.items():
        own = [one for one in found["comparisons"] if one["peer"].startswith(family)]
        for one in own:
            ahead = family == "transformers"
            name = f"{goal} ({one['ours']} beside {one['peer']})"
            records.append(_ahead(name, one) if ahead else _crossover(name, one))
        if not own:
            skipped = [
                f"{peer} was skipped: {why}"
                for peer, why in found["skipped"].items()
                if peer.startswith(family)
            ]
            reason = "; ".join(skipped) or f"nothing was compared with {family}"
            records.append(GoalRecord(goal, None, reason, None, None))
    return records


def _ahead(name: str, one: Mapping[str, Any]) -> GoalRecord:
    speedups = {int(context): ratio for context, ratio in one["speedups"].items()}
    flagged = [context for context in one["flagged"] if context >= _AHEAD_FROM]
    # Below the aim's contexts the worst is told where no other is there.
    own = {at: ratio for at, ratio in speedups.items() if at >= _AHEAD_FROM} or speedups
    context = min(own, key=lambda at: own[at])
    return GoalRecord(
        name, own[context], f"speed-up at {context} tokens", one["met"], bool(flagged)
    )


def _crossover(name: str, one: Mapping[str, Any]) -> GoalRecord:
    crossing = one["crossover"]
    ratios = ", ".join(f"{ratio:.2f}x at {at}" for at, ratio in one["speedups"].items())
    row = f"faster from: {crossing['kind']}; speed-ups {ratios}"
    return GoalRecord(name, crossing["context"], row, one["met"], bool(one["flagged"]))


def _space(found: Mapping[str, Any]) -> list[GoalRecord]:
    beyond = max(point["beyond_m0_bytes"] for point in found["points"]) / (1 << 20)
    share = found["largest_unexplained_share"]
    return [
        GoalRecord(
            SHADOW_GROWTH,
            share,
            f"largest share of a step that is neither; {_GOALLESS}",
            None,
            None,
        ),
        GoalRecord(FLAT_MEMORY, beyond, f"MiB beyond M0 at most; {_GOALLESS}", None, None),
    ]


def _scorer(found: Mapping[str, Any]) -> list[GoalRecord]:
    points = [
        GoalPoint(
            row["native_of_bandwidth"],
            f"{row['shape']} {row['key_mode']}, {row['bytes'] >> 20} MiB of shadows, median",
        )
        for row in found["rows"]
        if row["key_mode"] in _SCORER_MODES
    ]
    return [_verdict(SCORER, points, AtLeast(0.8))]


def _drive(found: Mapping[str, Any]) -> list[GoalRecord]:
    points = []
    for name, case in found["cases"].items():
        engine = "uring" if "uring" in case else "threads"
        points.append(GoalPoint(case[engine]["ratio_to_fio"], f"{name}, {engine}, median"))
    return [_verdict(DRIVE, points, AtLeast(found["goal_ratio_to_fio"]))]


def _beta(found: Mapping[str, Any]) -> list[GoalRecord]:
    row = f"beta_regret, {found['label']}, max_selected {found['max_selected']}"
    points = [GoalPoint(found["beta_regret"], row)]
    return [_verdict(BETA, points, AtMost(found["goal"]))]


def _verdict(goal: str, points: Sequence[GoalPoint], bound: GoalBound) -> GoalRecord:
    if not points:
        return unjudged(goal, points, bound, "the report has no row of it")
    return judged(goal, points, bound)


OTHER_GOALS = (
    OtherGoals("prefill.json", "make prefill", (FIRST_TOKEN,), _prefill),
    OtherGoals("peers.json", "make peers", tuple(_PEERS.values()), _peers),
    OtherGoals("space_lengths.json", "make space", (SHADOW_GROWTH, FLAT_MEMORY), _space),
    OtherGoals("scorer.json", "make scorer", (SCORER,), _scorer),
    OtherGoals("drive.json", "make drive", (DRIVE,), _drive),
    OtherGoals("beta.json", "make beta", (BETA,), _beta),
)
