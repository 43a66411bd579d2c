# SPDX-License-Identifier: Apache-2.0
"""Waiting in tests for what another thread or process is about to do."""

import time


def until(condition, seconds=30):
    """Look until the condition holds; fail once it took longer than the given seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
