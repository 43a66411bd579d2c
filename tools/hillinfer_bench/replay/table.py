# SPDX-License-Identifier: Apache-2.0
"""The pools table: every policy and bound on a trace, and the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from hillinfer.generate.run_report import json_bytes
from hillinfer.kv.pool_policies import POOL_POLICIES, make_pool_policy
from hillinfer.settings import PoolSizes, Settings
from hillinfer.system.files import cannot_write, write_whole
from hillinfer_bench.replay.belady import demand_bound, prefetch_bound, shared_demand_bound
from hillinfer_bench.replay.pool_replay import PoolReplay, Replayed
from hillinfer_bench.replay.selection_trace import SelectionTrace
from hillinfer_model.kernel_spec import GROUP_TOKENS
from hillinfer_model.selection import selected_count

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


DEMAND = "belady, demand"
PREFETCH = "belady, prefetch"
EQUAL, MISSES, SHARED = "equal", "misses", "shared"
ALL_TEXTS = "all"


@dataclass(frozen=True)
class PoolRow:
    """How one policy did on one trace with one pool size.

    Parameters
    ----------
    policy
        Name in the table of pool policies, or one of Belady's bounds.
    pool_alphas
        Rows in DRAM per layer, half a group of them for the open group, over α·N.
    alpha, rule, shadow, text
        Of the trace; `ALL_TEXTS` for a mean over texts.
    sizes
        `equal` or `misses` as the setting; `shared` where a bound divides the same total among
        layers as it likes.
    pool_rows
        Slots of a layer's hot pool, the mean over layers.
    hit_rate
        Selected tokens, kept ones included, found in the hot pool or in the open group.
    settled_hit_rate
        The same without the open group.
    worst_layer_hit_rate
        `hit_rate` of the layer where it is lowest.
    promoted_rows, demoted_rows
        Of all layers and steps; None for a bound.
    """

    policy: str
    pool_alphas: float
    alpha: float
    rule: str
    shadow: str
    text: str
    sizes: str
    pool_rows: int
    hit_rate: float
    settled_hit_rate: float
    worst_layer_hit_rate: float
    promoted_rows: int | None = None
    demoted_rows: int | None = None

    @property
    def key(self) -> tuple[str, str, float, float, str, str]:
        """Return what tells rows of the same text apart."""
        return self.rule, self.shadow, self.alpha, self.pool_alphas, self.policy, self.sizes


def means(rows: Iterable[PoolRow]) -> list[PoolRow]:
    """Return the mean over texts of each policy, pool size and kind of trace, in first order."""
    groups: dict[tuple[str, str, float, float, str, str], list[PoolRow]] = {}
    for row in rows:
        groups.setdefault(row.key, []).append(row)
    return [
        replace(
            own[0],
            text=ALL_TEXTS,
            hit_rate=fmean(row.hit_rate for row in own),
            settled_hit_rate=fmean(row.settled_hit_rate for row in own),
            worst_layer_hit_rate=min(row.worst_layer_hit_rate for row in own),
            promoted_rows=_mean_count([row.promoted_rows for row in own]),
            demoted_rows=_mean_count([row.demoted_rows for row in own]),
        )
        for own in groups.values()
    ]


def _mean_count(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return round(fmean(known)) if known else None


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
                alpha=trace.settings.importance_rate,
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
        trace.prefix + trace.steps,
        settings.importance_rate,
        settings.kept_tokens,
        settings.max_selected,
    )


_HEADINGS = ("α", "selection", "pool, α·N", "policy", "sizes", "hit rate", "worst layer", "earlier")
HOW_COUNTED = (
    "hits are selected tokens, kept tokens included, found in the hot pool or in the open group; "
    "a pool of x α·N counts half a group for the open group and the rest as slots"
)


def table_text(rows: Sequence[PoolRow]) -> str:
    """Return the means over texts as a Markdown table with its columns aligned."""
    cells = [_HEADINGS, *(_cells(row) for row in means(rows))]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADINGS))]
    rule = ["-" * width for width in widths]
    head, *others = (
        [text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in cells
    )
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *others))


def earlier_rate(row: PoolRow) -> float | None:
    """Return the earlier figure of the same policy, pool and α; None where there is none."""
    if row.rule != EARLIER_RULE or row.sizes != EQUAL:
        return None
    return EARLIER.get((row.policy, row.pool_alphas, row.alpha))


def write_report(file: Path, rows: Sequence[PoolRow], facts: dict[str, Any]) -> None:
    """Write every row, the means over texts, the earlier figures and the circumstances as JSON.

    Raises
    ------
    ReportError
        Where the file cannot be written.
    """
    record = {
        "label": "measured",
        **facts,
        "counting": HOW_COUNTED,
        "earlier": {
            "label": EARLIER_ABOUT,
            "rows": [
                {"policy": policy, "pool_alphas": pool_alphas, "alpha": alpha, "hit_rate": rate}
                for (policy, pool_alphas, alpha), rate in EARLIER.items()
            ],
        },
        "means": [asdict(row) for row in means(rows)],
        "rows": [asdict(row) for row in rows],
    }
    try:
        write_whole(file, json_bytes(record))
    except OSError as error:
        raise cannot_write(file, error, "--out") from error


def _cells(row: PoolRow) -> tuple[str, ...]:
    earlier = earlier_rate(row)
    return (
        f"{row.alpha:g}",
        f"{row.rule} {row.shadow.upper()}",
        f"{row.pool_alphas:g}",
        row.policy,
        row.sizes,
        f"{row.hit_rate:.3f}",
        f"{row.worst_layer_hit_rate:.3f}",
        "" if earlier is None else f"{earlier:.3f}",
    )
