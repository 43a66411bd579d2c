# SPDX-License-Identifier: Apache-2.0
"""Speedups over rivals and nearness to the limit, which the study's goals judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from hillinfer.placement.policies import MergedHulls
from hillinfer_bench.evicpress.played import Played
from hillinfer_bench.evicpress.rivals import Rival
from hillinfer_bench.placement.instances import random_instance
from hillinfer_bench.placement.optimum import optimum

GOALS = {
    "ttft_vs_lru_p50": 4.0,
    "ttft_vs_lru_p95": 4.0,
    "ttft_vs_int8_lru": 1.5,
    "ttft_vs_paper_policy": 1.3,
    "ttft_vs_int4_lru_at_99": 1 / 1.3,
    "share_of_optimum": 0.98,
    "placement_share_of_optimum": 0.98,
    "worst_tenth_agreement": 0.9,
    "token_vs_lru": 1.1,
    "ttft_vs_no_manager": 1.02,
    "profile_vs_prefill": 0.5,
    "topic_switch_points": 1.0,
}
_LEAST, _NEARLY_ALL = 0.97, 0.99
# Relative distance at which a random instance's optimum is near enough.
_GAP = 1e-3
_P50, _P95 = "first_token_p50", "first_token_p95"
# Of each figure the rival, and what is compared.
_AGAINST = {
    "ttft_vs_lru_p50": ("held + LRU", _P50),
    "ttft_vs_lru_p95": ("held + LRU", _P95),
    "ttft_vs_int8_lru": ("int8 + LRU", _P50),
    "ttft_vs_int4_lru": ("int4 + LRU", _P50),
}


def compared(played: Mapping[Rival, Played], nobody: Played) -> dict[str, Any]:
    """Return the figures of the goals, None where nothing says.

    Of a policy that has an α, that one counts whose answers agree by 0.97 or more and come soonest;
    where none does, the one that agrees most.

    Parameters
    ----------
    played
        What each rival did.
    nobody
        What was done with all rows of every document in memory, which is the limit.
    """
    by_name = {rival.name: own.figures() for rival, own in played.items()}
    found = first_tokens(by_name)
    ours, alpha = found["ours"], named(played, found["ours"]).alpha
    own, resting = played[named(played, ours)], played[named(played, "recompute")]
    optimal = played[named(played, ours.replace("ours", "optimum"))]
    three = (own, optimal, resting)
    return {
        **found,
        **limits(found, by_name, {name: nobody.figures()[name] for name in (_P50, _P95)}),
        "token_vs_lru": by_name[ours]["token_p50"] / by_name["held + LRU"]["token_p50"],
        "share_of_optimum": _share(
            *(one.expected_utility(alpha) for one in (own, optimal, resting))
        ),
        "timed_share_of_optimum": _share(*(one.utility(alpha) for one in three)),
    }


def first_tokens(by_name: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return how much sooner first tokens of ours come than those of others.

    Parameters
    ----------
    by_name
        The figures of each rival, by its name.
    """
    ours, paper = best(by_name, "ours, α"), best(by_name, "paper, α")
    mine = by_name[ours]
    found = {name: by_name[rival][what] / mine[what] for name, (rival, what) in _AGAINST.items()}
    nearly = best(by_name, "ours, α", _NEARLY_ALL)
    exact = by_name[nearly]
    is_kept = exact["agreement"] >= _NEARLY_ALL
    return {
        "ours": ours,
        "paper": paper,
        "agreement": mine["agreement"],
        **found,
        "ttft_vs_paper_policy": by_name[paper][_P50] / mine[_P50],
        "ours_at_99": nearly if is_kept else None,
        "ttft_vs_int4_lru_at_99": by_name["int4 + LRU"][_P50] / exact[_P50] if is_kept else None,
        "worst_tenth_agreement": mine["worst_tenth_agreement"],
    }


def limits(
    found: Mapping[str, Any],
    by_name: Mapping[str, Mapping[str, Any]],
    soonest: Mapping[str, float],
) -> dict[str, Any]:
    """Return of each ratio of first tokens what is possible, and the share of it that is reached.

    Parameters
    ----------
    found
        Of `first_tokens`.
    by_name
        As there.
    soonest
        The median and the 95th percentile that no placement goes below.
    """
    against = {**_AGAINST, "ttft_vs_paper_policy": (found["paper"], _P50)}
    if found["ours_at_99"] is not None:
        against["ttft_vs_int4_lru_at_99"] = ("int4 + LRU", _P50)
    told = {}
    for name, (rival, what) in against.items():
        possible = by_name[rival][what] / soonest[what]
        told[f"{name}_possible"] = possible
        told[f"{name}_of_possible"] = found[name] / possible
    return told


def random_shares(instances: int) -> dict[str, float | None]:
    """Return the least and the mean of what our policy gains of the optimum's gain.

    Parameters
    ----------
    instances
        Random ones of 20 to 60 documents that are placed; 0 for none.
    """
    shares = []
    for seed in range(instances):
        stock = random_instance(seed)
        found = optimum(stock, _GAP)
        stock.arrange(MergedHulls().plan(stock, None))
        shares.append(found.share(stock.utility()))
    return {
        "placement_share_of_optimum": min(shares, default=None),
        "placement_mean_share": fmean(shares) if shares else None,
    }


def paired(own: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of how much longer each took than another of the same moment."""
    return median(one / other for one, other in zip(own, others, strict=True))


def best(by_name: Mapping[str, Mapping[str, Any]], begins: str, least: float = _LEAST) -> str:
    """Return whose answers agree enough and come soonest, or else agree most.

    Parameters
    ----------
    by_name
        As in `first_tokens`.
    begins
        How names of those begin that are looked at.
    least
        Agreement that is enough.
    """
    names = [name for name in by_name if name.startswith(begins)]
    good = [name for name in names if by_name[name]["agreement"] >= least]
    if good:
        return min(good, key=lambda name: (by_name[name][_P50], by_name[name][_P95]))
    return max(names, key=lambda name: by_name[name]["agreement"])


def named(played: Mapping[Rival, Played], name: str) -> Rival:
    """Return the rival of a name."""
    return next(rival for rival in played if rival.name == name)


def _share(own: float, optimal: float, resting: float) -> float:
    """Return how much of what can be gained over reading texts anew is gained."""
    possible = optimal - resting
    return (own - resting) / possible if possible > 0 else 1.0
