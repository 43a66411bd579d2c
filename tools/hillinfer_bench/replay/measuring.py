# SPDX-License-Identifier: Apache-2.0
"""Every policy and bound on one trace."""

from __future__ import annotations

from dataclasses import replace

from hillinfer.policies.pool_policies import POOL_POLICIES, make_pool_policy
from hillinfer.pools.layer_shares import PoolSizes
from hillinfer.settings import Settings
from hillinfer_bench.replay.bounds import demand_bound, prefetch_bound, shared_demand_bound
from hillinfer_bench.replay.pool_replay import PoolReplay
from hillinfer_bench.replay.pool_row import DEMAND, EQUAL, PREFETCH, SHARED, PoolRow
from hillinfer_bench.replay.replayed import Replayed
from hillinfer_bench.replay.selection_trace import SelectionTrace
from hillinfer_model.kernel_spec import GROUP_TOKENS
from hillinfer_model.selection import selected_count

POOL_ALPHAS = (0.5, 1.0, 2.0)


def pool_rows(trace: SelectionTrace) -> list[PoolRow]:
    """Return the rows of one trace: each policy with equal pools, the default one also by misses.

    A pool of x α·N is x times the last step's selected set. Half a group of it stands for the
    open group, which is in DRAM beside the slots and holds that much on average.
    """
    rows = []
    for pool_alphas in POOL_ALPHAS:
        wanted = int(pool_alphas * _set_size(trace))
        slots = max(0, wanted - GROUP_TOKENS // 2)

        def row(
            policy: str,
            sizes: str,
            replayed: Replayed,
            pool_alphas: float = pool_alphas,
            slots: int = slots,
        ) -> PoolRow:
            return PoolRow(
                policy=policy,
                pool_alphas=pool_alphas,
                alpha=trace.settings.alpha,
                rule=trace.settings.rule.value,
                shadow=trace.settings.key_mode.value,
                text=trace.text,
                sizes=sizes,
                pool_rows=slots,
                hit_rate=replayed.hit_rate,
                settled_hit_rate=replayed.settled_hit_rate,
                worst_layer_hit_rate=float(replayed.layer_hit_rates.min()),
            )

        pairs = [(name, PoolSizes.EQUAL) for name in POOL_POLICIES]
        for name, sizes in [*pairs, (Settings().pool_policy, PoolSizes.MISSES)]:
            replayed = replay_policy(trace, name, slots, sizes)
            rows.append(
                replace(
                    row(name, sizes.value, replayed),
                    promoted_rows=int(replayed.promoted.sum()),
                    demoted_rows=int(replayed.demoted.sum()),
                )
            )
        rows.append(row(DEMAND, EQUAL, demand_bound(trace, slots)))
        rows.append(row(DEMAND, SHARED, shared_demand_bound(trace, slots)))
        bound = prefetch_bound(trace, wanted)
        rows.append(
            replace(
                rows[-1],
                policy=PREFETCH,
                sizes=EQUAL,
                hit_rate=bound,
                settled_hit_rate=bound,
                worst_layer_hit_rate=bound,
            )
        )
    return rows


def replay_policy(trace: SelectionTrace, name: str, slots: int, sizes: PoolSizes) -> Replayed:
    """Play a trace to a policy of the table; see `PoolReplay`."""
    policy = make_pool_policy(name)
    # A policy that asks for no prefill queries is shown none.
    seen = policy.observed_queries
    observed = tuple(sets[len(sets) - seen :] if seen else () for sets in trace.observed)
    return PoolReplay(replace(trace, observed=observed), policy, slots, sizes).run()


def _set_size(trace: SelectionTrace) -> int:
    settings = trace.settings
    return selected_count(
        trace.prefix + trace.steps, settings.alpha, settings.kept_tokens, settings.max_selected
    )
