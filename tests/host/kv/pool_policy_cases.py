# SPDX-License-Identifier: Apache-2.0
"""Every pool policy, a line each, and histories to ask it about."""

from dataclasses import dataclass

import numpy as np

from hillinfer.kv.pool_policies import POOL_POLICIES, RowHistory


@dataclass(frozen=True)
class PoolPolicyCase:
    """What is expected of one policy.

    `after_hits` are the entries of a token that is selected in every one of the first steps, and
    `learns` says whether hits change what a row is worth.
    """

    observed_queries: int
    after_hits: tuple[int, int, int]
    learns: bool


CASES = {
    "lru": PoolPolicyCase(0, (1, 2, 3), learns=False),
    "decayed": PoolPolicyCase(0, (16384, 28672, 37888), learns=True),
    "paper": PoolPolicyCase(16, (1, 2, 3), learns=True),
    "counts": PoolPolicyCase(0, (1, 2, 3), learns=True),
    "recent": PoolPolicyCase(0, (1, 2, 3), learns=False),
}
assert CASES.keys() == POOL_POLICIES.keys(), "every pool policy has a line here"


def history(positions, counts=0, last_selected=0, length=1000, alpha=0.1):
    """Return rows at the given positions; everything else for each of them or for all."""
    shape = np.shape(positions)
    return RowHistory(
        positions=np.asarray(positions, np.int32),
        counts=np.broadcast_to(np.asarray(counts, np.uint16), shape).copy(),
        last_selected=np.broadcast_to(np.asarray(last_selected, np.int32), shape).copy(),
        lengths=np.broadcast_to(np.asarray(length, np.int32), shape).copy(),
        alpha=alpha,
    )
