# SPDX-License-Identifier: Apache-2.0
"""Promotions as late as they can be, so that whoever does not wait for one is found out.

A policy ranks in the thread that promotes, before anything is copied or moved. There it takes its
time until the main thread waits for somebody: however slow the machine is, what the main thread
does without waiting comes first.
"""

import gc
import sys
import threading
import time
from types import MappingProxyType

from hillinfer.drive.read_turns import ReadTurns
from hillinfer.kv import pool_policies

POLL_SECONDS = 0.002
# Seen at the same place so many times, it is not only about to go on.
POLLS = 3
# A promotion that nobody ever waits for ends all the same.
MOST_SECONDS = 5.0
# The innermost of Python's frames while a thread waits: for a future or another's note, and for a
# buffer that a promotion may still look at.
_WAITING = {threading.Condition.wait.__code__, ReadTurns.hurry.__code__}


def _waiting_at():
    """Return where the main thread waits, or None."""
    # As the engine does, which says why.
    gc.disable()
    try:
        frame = sys._current_frames()[threading.main_thread().ident]
    finally:
        gc.enable()
    return (id(frame), frame.f_lasti) if frame.f_code in _WAITING else None


def _until_main_waits():
    stop, seen = time.monotonic() + MOST_SECONDS, []
    while time.monotonic() < stop:
        seen = [*seen[1 - POLLS :], _waiting_at()]
        if len(seen) == POLLS and seen[0] is not None and len(set(seen)) == 1:
            return
        time.sleep(POLL_SECONDS)


def _slowed(policy):
    class Slowed(policy):
        def worth(self, rows):
            if threading.current_thread().name.startswith("hillinfer-pool"):
                _until_main_waits()
            return super().worth(rows)

    return Slowed


def slow_promotions(monkeypatch):
    """Let every policy of the table take its time."""
    slow = {name: _slowed(policy) for name, policy in pool_policies.POOL_POLICIES.items()}
    monkeypatch.setattr(pool_policies, "POOL_POLICIES", MappingProxyType(slow))
