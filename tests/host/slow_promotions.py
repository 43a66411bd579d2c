# SPDX-License-Identifier: Apache-2.0
"""Pool policies that take their time, so that whoever does not wait for a promotion is found out."""

import threading
import time
from types import MappingProxyType

from hillinfer.policies import pool_policies

# Many times what a forward pass of a tiny model takes, of which a promotion has all but nothing.
PROMOTION_SECONDS = 0.03


def _slowed(policy):
    class Slowed(policy):
        """Ranks late in the thread that promotes, before it has copied or moved anything."""

        def worth(self, rows):
            if threading.current_thread().name.startswith("hillinfer-pool"):
                time.sleep(PROMOTION_SECONDS)
            return super().worth(rows)

    return Slowed


def slow_promotions(monkeypatch):
    """Let every policy of the table take its time."""
    slow = {name: _slowed(policy) for name, policy in pool_policies.POOL_POLICIES.items()}
    monkeypatch.setattr(pool_policies, "POOL_POLICIES", MappingProxyType(slow))
