# SPDX-License-Identifier: Apache-2.0
"""Makes the report of the peers' answers: rows, comparisons with HillInfer, and a text table."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hillinfer_bench.report.rows import LARGEST_SPREAD, Timing
from peers.compared import Compared
from peers.crossover import Crossover
from peers.goal import goal_of
from peers.peer import PEERS, REFERENCE


@dataclass
class Measured:
    """What a peer did in all rounds.

    Parameters
    ----------
    facts
        As it answered when opened.
    runs
        Answers by context.
    skipped
        Why it stopped taking part; None where it did not.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    runs: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    skipped: str | None = None


def report_of(
    results: Mapping[str, Measured], contexts: Sequence[int], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the whole report.

    Parameters
    ----------
    results
        By peer.
    contexts
        In tokens, ascending.
    facts
        What holds for all: `trained_context`, `new_tokens` and `left_out` among others.
    """
    taking_part = [peer for peer in PEERS if peer.name in results]
    reference = results.get(REFERENCE, Measured())
    of_peer: dict[str, dict[int, dict[str, Any]]] = {}
    rows = []
    for peer in taking_part:
        measured = results[peer.name]
        own = [_row(peer.name, one, measured, reference) for one in contexts if measured.runs[one]]
        for row in own:
            last = row["context"] + facts["new_tokens"]
            row["beyond_trained_context"] = last > facts["trained_context"]
        of_peer[peer.name] = {row["context"]: row for row in own}
        rows += own
    return {
        **facts,
        "systems": {peer.name: results[peer.name].facts for peer in taking_part},
        "rows": rows,
        "comparisons": [
            _comparison(ours.name, other.name, of_peer[ours.name], of_peer[other.name], contexts)
            for ours in taking_part
            for other in taking_part
            if ours.ours and not other.ours and of_peer[ours.name].keys() & of_peer[other.name]
        ],
        "skipped": {
            peer.name: why
            for peer in taking_part
            if (why := results[peer.name].skipped) is not None
        },
    }


def _row(peer: str, context: int, measured: Measured, reference: Measured) -> dict[str, Any]:
    """Return one row; times in milliseconds but that to the first token."""
    runs = measured.runs[context]
    steps = [1e3 * statistics.median(run["step_seconds"]) for run in runs]
    firsts = [run["ttft_seconds"] for run in runs]
    others = reference.runs.get(context)
    spread = _spread(steps, runs[0]["step_seconds"])
    return {
        "peer": peer,
        "context": context,
        **{name: measured.facts[name] for name in ("weights", "compute", "kv", "threads")},
        "step_ms": {
            "fastest": 1e3 * min(min(run["step_seconds"]) for run in runs),
            "median": statistics.median(steps),
        },
        "decode_tokens_per_second": 1e3 / statistics.median(steps),
        "ttft_seconds": {"fastest": min(firsts), "median": statistics.median(firsts)},
        "spread": spread,
        "spread_over": "rounds" if len(runs) > 1 else "steps",
        "wide_spread": spread > LARGEST_SPREAD,
        "agreement": _agreement(runs[0]["tokens"], others[0]["tokens"]) if others else None,
        "new_tokens": len(runs[0]["tokens"]),
        "shadow": runs[0].get("shadow"),
        "parts_ms": next((run["parts"] for run in runs if run.get("parts")), None),
    }


def _spread(medians: Sequence[float], first: Sequence[float]) -> float:
    """Return how far rounds lie apart, or the steps of the first where there is no other."""
    return Timing.of(first).spread if len(medians) == 1 else max(medians) / min(medians) - 1


def _agreement(own: Sequence[int], other: Sequence[int]) -> float:
    """Return the share of tokens that are the same."""
    return statistics.mean(one == two for one, two in zip(own, other, strict=True))


def _comparison(
    ours: str,
    other: str,
    own: Mapping[int, dict[str, Any]],
    theirs: Mapping[int, dict[str, Any]],
    asked: Sequence[int],
) -> dict[str, Any]:
    """Compare two peers' rows, by context, where both have one."""
    contexts = sorted(own.keys() & theirs)
    steps, others = (
        {one: rows[one]["step_ms"]["median"] for one in contexts} for rows in (own, theirs)
    )
    compared = Compared(
        {one: others[one] / steps[one] for one in contexts},
        Crossover.of(contexts, list(steps.values()), list(others.values())),
        frozenset(asked).difference(contexts),
        frozenset(one for one in contexts if own[one]["wide_spread"] or theirs[one]["wide_spread"]),
    )
    goal = goal_of(other)
    return {
        "ours": ours,
        "peer": other,
        "speedups": {str(one): ratio for one, ratio in compared.speedups.items()},
        "crossover": {"kind": compared.crossover.kind, "context": compared.crossover.context},
        "missing": sorted(compared.missing),
        "flagged": sorted(compared.flagged),
        "goal": goal.text,
        "met": goal.met(compared),
    }


_MET = {True: "met", False: "missed", None: "not measured"}
_DOUBTS = {"missing": "no times", "flagged": "spread above 20 %"}


def table_text(report: Mapping[str, Any]) -> str:
    """Return the report for reading."""
    lines = [
        f"{'':30} {'weights':>8} {'compute':>8} {'KV':>8} {'context':>7} {'TTFT s':>7} "
        f"{'ms/token':>8} {'tokens/s':>8} {'agreement':>9}"
    ]
    for row in report["rows"]:
        agreement = "-" if row["agreement"] is None else f"{row['agreement']:.3f}"
        flags = "  spread above 20 %" if row["wide_spread"] else ""
        if row["shadow"]:
            flags += f"  shadow {row['shadow']}"
        if row["beyond_trained_context"]:
            flags += f"  beyond the {report['trained_context']} tokens the model was made for"
        lines.append(
            f"{row['peer']:30} {row['weights']:>8} {row['compute']:>8} {row['kv']:>8} "
            f"{row['context']:7d} {row['ttft_seconds']['median']:7.2f} "
            f"{row['step_ms']['median']:8.1f} {row['decode_tokens_per_second']:8.1f} "
            f"{agreement:>9}{flags}"
        )
    lines.append("")
    for row in report["rows"]:
        if parts := row["parts_ms"]:
            lines.append(
                f"{row['peer']} at {row['context']}: a step of {parts['step']:.1f} ms is "
                f"{parts['linear']:.1f} linear layers, {parts['attention']:.1f} attention, "
                f"{parts['prediction']:.1f} prediction, {parts['rest']:.1f} rest"
            )
    lines.append("")
    for one in report["comparisons"]:
        ratios = ", ".join(f"{ratio:.2f}x at {at}" for at, ratio in one["speedups"].items())
        where = one["crossover"]["context"]
        doubts = "".join(
            f"; {text} at {', '.join(map(str, one[name]))}"
            for name, text in _DOUBTS.items()
            if one[name]
        )
        lines.append(
            f"{one['ours']} over {one['peer']}: {ratios}; faster from: "
            f"{'' if where is None else f'{where:.0f} tokens, '}{one['crossover']['kind']}; "
            f"goal, {one['goal']}: {_MET[one['met']]}{doubts}"
        )
    lines.append("")
    for name, facts in report["systems"].items():
        if facts:
            pairs = {**facts["versions"], "threads": facts["threads"], **facts["settings"]}
            pairs |= pairs.pop("variables", {})
            lines.append(f"{name}: {', '.join(f'{key} {value}' for key, value in pairs.items())}")
    lines += [f"{context} tokens: left out: {why}" for context, why in report["left_out"].items()]
    lines += [f"{name}: skipped: {why}" for name, why in report["skipped"].items()]
    return "\n".join(lines)
