# SPDX-License-Identifier: Apache-2.0
"""Hit rates that were measured before the project began, to be shown beside its own."""

from __future__ import annotations

from types import MappingProxyType

EARLIER_ABOUT = (
    "measured before the project began, with a simulator of its own: the same model, English and "
    "reference prose, 4,096 tokens, the last 256 teacher-forced, rule raw_sum in float32, scope "
    "layer, no open group"
)

# By policy, pool in α·N and α.
EARLIER = MappingProxyType(
    {
        ("paper", 1.0, 0.2): 0.740,
        ("paper", 2.0, 0.2): 0.942,
        ("paper", 2.0, 0.1): 0.904,
        ("decayed", 1.0, 0.2): 0.775,
        ("decayed", 2.0, 0.2): 0.963,
        ("decayed", 2.0, 0.1): 0.933,
        ("lru", 1.0, 0.2): 0.818,
        ("lru", 2.0, 0.2): 0.968,
        ("lru", 2.0, 0.1): 0.942,
        ("recent", 1.0, 0.2): 0.630,
        ("recent", 2.0, 0.2): 0.831,
        ("recent", 2.0, 0.1): 0.784,
        ("counts", 1.0, 0.2): 0.689,
        ("counts", 2.0, 0.2): 0.932,
        ("counts", 2.0, 0.1): 0.866,
    }
)
EARLIER_RULE = "raw_sum"
