# SPDX-License-Identifier: Apache-2.0
"""The table of pool policies: which class for which `--pool-policy`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hillinfer.errors import SettingsError
from hillinfer.policies.decayed_counts import DecayedCounts
from hillinfer.policies.least_recently_used import LeastRecentlyUsed
from hillinfer.policies.most_recent import MostRecent
from hillinfer.policies.pinned_counts import PinnedCounts
from hillinfer.policies.pool_policy import PoolPolicy

POOL_POLICIES: Mapping[str, type[PoolPolicy]] = MappingProxyType(
    {
        "decayed": DecayedCounts,
        "lru": LeastRecentlyUsed,
        "paper": PinnedCounts,
        "counts": PoolPolicy,
        "recent": MostRecent,
    }
)


def make_pool_policy(name: str) -> PoolPolicy:
    """Return the policy of a name, or raise SettingsError naming those there are."""
    if name not in POOL_POLICIES:
        raise SettingsError(
            f"pool_policy={name!r} is unknown: choose one of {', '.join(POOL_POLICIES)}"
        )
    return POOL_POLICIES[name]()
