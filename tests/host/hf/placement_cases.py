# SPDX-License-Identifier: Apache-2.0
"""Runs of tiny models, and the placements none of which may change what comes out."""

from dataclasses import dataclass, field

from generation_runs import attached, run
from tiny_models import TinyModel, prompts

from hillinfer.engine.budget_plan import BudgetPlan
from hillinfer.kv.pool_policies import POOL_POLICIES
from hillinfer.model_shape import ModelShape
from hillinfer.settings import PoolSizes, Settings

ALL_HOT = "32MiB"


@dataclass(frozen=True)
class Case:
    """A model, prompts and every setting that may change what comes out."""

    tiny: TinyModel
    lengths: tuple[int, ...]
    chunk: int | None
    new_tokens: int
    selection: dict = field(default_factory=dict)

    def run(self, model, cold_dir, devices=None, **placement):
        ids, mask = prompts(list(self.lengths), seed=len(self.lengths))
        with attached(model, cold_dir, devices, **self.selection, **placement) as hill:
            cache = hill.new_cache(self.tokens, len(self.lengths))
            output = run(model, cache, ids, mask, self.new_tokens, prefill_chunk_size=self.chunk)
            statistics = cache.statistics()
            cache.close()
        assert statistics.dram_peak_bytes <= statistics.dram_budget_bytes
        return output, statistics

    def least_bytes(self, **placement):
        shape = ModelShape.from_config(self.tiny.config(), self.tiny.dtype)
        chosen = Settings().changed(**self.selection, **placement)
        sequences = len(self.lengths)
        return BudgetPlan.with_whole_shadow(shape, chosen, self.tokens, sequences).required_bytes

    @property
    def tokens(self):
        return max(self.lengths) + self.new_tokens


@dataclass(frozen=True)
class Placement:
    """Where rows lie and what scores them.

    `share` of the KV cache is left for hot rows beyond the least; None keeps all of them hot.
    """

    share: float | None
    changes: dict = field(default_factory=dict)

    def settings(self, least, kv_bytes):
        """Return the settings of this placement, given the least budget and the KV cache's size."""
        budget = ALL_HOT if self.share is None else int(least + self.share * kv_bytes)
        return {"dram_budget": budget} | self.changes

    def for_case(self, case, kv_bytes):
        """Return the settings of this placement for a case."""
        least = 0 if self.share is None else case.least_bytes(**self.changes)
        return self.settings(least, kv_bytes)


# A line each; every pool policy with every way to size pools is among them.
PLACEMENTS = {
    "golden-all-hot": Placement(None, {"device": "golden"}),
    "golden-least": Placement(0.0, {"device": "golden", "block_tokens": 77}),
    "lru": Placement(0.0, {"pool_policy": "lru"}),
    "lru-misses": Placement(
        0.3, {"pool_policy": "lru", "pool_sizes": "misses", "block_tokens": 16}
    ),
    "decayed": Placement(0.3, {"pool_policy": "decayed", "io_threads": 1}),
    "decayed-misses": Placement(0.1, {"pool_policy": "decayed", "pool_sizes": "misses"}),
    "paper": Placement(0.2, {"pool_policy": "paper"}),
    "paper-misses": Placement(0.05, {"pool_policy": "paper", "pool_sizes": "misses"}),
    "counts": Placement(0.1, {"pool_policy": "counts", "io_threads": 4}),
    "counts-misses": Placement(0.0, {"pool_policy": "counts", "pool_sizes": "misses"}),
    "sealed": Placement(0.1, {"encrypt_cold_pool": "yes"}),
    "recent": Placement(0.6, {"pool_policy": "recent", "block_tokens": 256}),
    "recent-misses": Placement(0.2, {"pool_policy": "recent", "pool_sizes": "misses"}),
}


def pools_of(placement):
    chosen = Settings().changed(**placement.changes)
    return chosen.pool_policy, chosen.pool_sizes


assert {pools_of(placement) for placement in PLACEMENTS.values()} == {
    (policy, sizes) for policy in POOL_POLICIES for sizes in PoolSizes
}, "every pool policy and way to size pools has a line here"
