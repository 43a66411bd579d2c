# SPDX-License-Identifier: Apache-2.0
"""Every placement policy, a line each, and documents to ask it about."""

from dataclasses import dataclass

from hillinfer.placement.options import FirstTokenUtility, Option, Tier
from hillinfer.placement.policies import PLACEMENT_POLICIES, make_placement_policy
from hillinfer_bench.placement.placing import Placing

MB = 1_000_000


@dataclass(frozen=True)
class PlacementCase:
    """What is expected of one policy.

    `moves_up` says whether room that is left brings a document to a better form without its being
    asked for, `shares` whether documents take smaller forms where not all fit.
    """

    moves_up: bool
    shares: bool


CASES = {
    "hulls": PlacementCase(moves_up=True, shares=True),
    "paper": PlacementCase(moves_up=False, shares=True),
    "paper-printed": PlacementCase(moves_up=False, shares=True),
    "per-byte": PlacementCase(moves_up=False, shares=True),
    "lru": PlacementCase(moves_up=False, shares=False),
}
assert CASES.keys() == PLACEMENT_POLICIES.keys(), "every placement policy has a line here"


def options(size=100, dropped=0.2):
    """Return a document's options: `size` MB of KV, and what quality is lost by dropping half.

    From DRAM a form takes 10 ms for 100 MB, from the drive 100 ms.
    """
    forms = {"held": (1.0, 1.0), "int4": (0.28, 0.96), "half": (0.5, 1 - dropped)}
    made = [Option("rows", "rest", 0, 1.0, 0.002 * size)]
    for form, (share, quality) in forms.items():
        taken = int(size * share * MB)
        for tier, per_mb in (("dram", 0.0001), ("drive", 0.001)):
            made.append(Option(form, tier, taken, quality, per_mb * size * share))
    return made


def placing(policy="hulls", dram=200, drive=1000, alpha=1.0, **changes):
    """Return an empty placing, with budgets in MB."""
    tiers = (Tier("dram", dram * MB), Tier("drive", drive * MB), Tier("rest"))
    chosen = make_placement_policy(policy) if isinstance(policy, str) else policy
    return Placing(tiers, chosen, FirstTokenUtility(alpha), **changes)


def places(placed):
    """Return form and tier of every document, by name."""
    return {name: placed.stock.option(name).place for name in placed.stock.contexts}
