# SPDX-License-Identifier: Apache-2.0
"""Promotions as late as they can be, so that whoever does not wait for one is found out.

A policy ranks in the thread that promotes, before anything is copied or moved. There it takes its
time until the main thread is blocked: however slow the machine is, what the main thread does
without waiting comes first.
"""

import sys
import threading
import time
from pathlib import Path
from types import MappingProxyType

from hillinfer.policies import pool_policies

POLL_SECONDS = 0.002
# Seen blocked at the same place so many times, it is not only about to go on.
POLLS = 3
# A promotion that nobody ever waits for ends all the same.
MOST_SECONDS = 5.0


def _blocked_at():
    """Return where the main thread sleeps, or None while it runs or waits for a processor."""
    main = threading.main_thread()
    status = Path(f"/proc/self/task/{main.native_id}/stat").read_text()
    if status.rpartition(")")[2].split()[0] != "S":
        return None
    frame = sys._current_frames()[main.ident]
    return id(frame), frame.f_lasti


def _until_main_is_blocked():
    stop, seen = time.monotonic() + MOST_SECONDS, []
    while time.monotonic() < stop:
        seen = [*seen[1 - POLLS :], _blocked_at()]
        if len(seen) == POLLS and seen[0] is not None and len(set(seen)) == 1:
            return
        time.sleep(POLL_SECONDS)


def _slowed(policy):
    class Slowed(policy):
        def worth(self, rows):
            if threading.current_thread().name.startswith("hillinfer-pool"):
                _until_main_is_blocked()
            return super().worth(rows)

    return Slowed


def slow_promotions(monkeypatch):
    """Let every policy of the table take its time."""
    slow = {name: _slowed(policy) for name, policy in pool_policies.POOL_POLICIES.items()}
    monkeypatch.setattr(pool_policies, "POOL_POLICIES", MappingProxyType(slow))
