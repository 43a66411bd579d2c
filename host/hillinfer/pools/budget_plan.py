# SPDX-License-Identifier: Apache-2.0
"""What the DRAM budget must hold for a context, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from hillinfer.byte_size import format_bytes
from hillinfer.errors import BudgetError
from hillinfer.hie.scratch import score_bytes_per_token, scratch_bytes
from hillinfer.model_shape import ModelShape
from hillinfer.policies.pool_policies import make_pool_policy
from hillinfer.pools.hit_rate_table import HIT_BYTES, room_for
from hillinfer.pools.hot_pools import TABLE_GROWTH_ROWS
from hillinfer.pools.slot_table import SLOT_BYTES
from hillinfer.settings import Settings
from hillinfer.storage.aligned_buffer import PAGE_BYTES, round_up
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec

SPILL_BUFFERS = 2
GATHER_BUFFERS = 2
_WIDENED_ITEM_BYTES = 4
_KEY_ITEM_BYTES = 2
_QUERY_ITEM_BYTES = 4
_STATISTICS_ITEM_BYTES = 5
_SLOT_TABLE_BYTES = 4
_SCORE_GROWTH_TOKENS = 1024
_MERGING_TOKEN_BYTES = 48
_WAITING_TOKEN_BYTES = 16


def kernel_spec(shape: ModelShape, settings: Settings) -> KernelSpec:
    """Return the kernel spec of a model's shape under some settings."""
    return KernelSpec(
        head_dim=shape.head_dim,
        kv_heads=shape.kv_heads,
        group_size=shape.group_size,
        key_mode=settings.shadow,
        rule=settings.rule,
        block_tokens=settings.block_tokens,
    )


@dataclass(frozen=True)
class BudgetPlan:
    """The parts of M0 for one context length (design, section 2), all in bytes.

    Parameters
    ----------
    budget_bytes
        M0.
    kv_bytes
        Rows of the whole context, for comparison.
    shadow_bytes
        Key shadow of all segments.
    kept_bytes
        The least hot rows that make sense: the kept tokens and the open group of every layer.
    staging_bytes
        Every I/O, gather, spill and prefill buffer, and scoring scratch.
    other_bytes
        Statistics, slot tables, hit-rate tables, observed queries, scores.
    """

    budget_bytes: int
    kv_bytes: int
    shadow_bytes: int
    kept_bytes: int
    staging_bytes: int
    other_bytes: int

    @classmethod
    def for_context(
        cls, shape: ModelShape, settings: Settings, tokens: int, sequences: int = 1
    ) -> BudgetPlan:
        """Plan for `tokens` positions in each of `sequences` sequences of their own rows."""
        spec = kernel_spec(shape, settings)
        segments = -(-tokens // spec.segment_tokens) * sequences
        kv_bytes = tokens * sequences * shape.token_bytes
        statistics = segment_statistics_bytes(spec)
        rows = round_up(round_up(tokens, GROUP_TOKENS) * sequences, TABLE_GROWTH_ROWS)
        slots = rows * _SLOT_TABLE_BYTES
        kept_row = shape.layers * (shape.row_bytes + SLOT_BYTES)
        return cls(
            budget_bytes=settings.dram_budget.resolve(kv_bytes),
            kv_bytes=kv_bytes,
            shadow_bytes=segments * shape.layers * spec.segment_bytes,
            kept_bytes=(settings.kept_tokens * kept_row + GROUP_TOKENS * shape.token_bytes)
            * sequences,
            staging_bytes=staging_bytes(shape, settings),
            other_bytes=segments * shape.layers * statistics
            + slots * shape.layers
            + hit_bytes(shape, tokens) * sequences
            + observed_bytes(shape, make_pool_policy(settings.pool_policy).observed_queries)
            * sequences
            + score_bytes(spec, settings.scope, tokens),
        )

    @property
    def required_bytes(self) -> int:
        """The smallest budget this context can run with."""
        return self.shadow_bytes + self.kept_bytes + self.staging_bytes + self.other_bytes

    @property
    def hot_bytes(self) -> int:
        """Bytes left for hot rows, the kept ones included."""
        return self.budget_bytes - self.required_bytes + self.kept_bytes

    def check(self) -> None:
        """Raise BudgetError where the budget is too small, naming the parts and the least."""
        if self.budget_bytes < self.required_bytes:
            raise BudgetError(
                f"the DRAM budget of {format_bytes(self.budget_bytes)} is too small: this context "
                f"needs {format_bytes(self.required_bytes)} (shadow "
                f"{format_bytes(self.shadow_bytes)}, kept rows {format_bytes(self.kept_bytes)}, "
                f"staging {format_bytes(self.staging_bytes)}, other "
                f"{format_bytes(self.other_bytes)}); raise --dram-budget, or shrink the shadow "
                "with --shadow int4 or int2"
            )


def score_bytes(spec: KernelSpec, scope: Scope, tokens: int) -> int:
    """Return the bytes of the scores of one call over `tokens`, in steps of 1,024 tokens."""
    # Sorted integers of code and position: of the set being merged with their copies, and of every
    # set while it waits.
    sets = 1 if scope is Scope.LAYER else spec.kv_heads
    per_token = score_bytes_per_token(spec) + _MERGING_TOKEN_BYTES + sets * _WAITING_TOKEN_BYTES
    return round_up(tokens, _SCORE_GROWTH_TOKENS) * per_token


def hit_bytes(shape: ModelShape, tokens: int) -> int:
    """Return the bytes of one sequence's hit-rate table, one layer of it twice while it grows."""
    return (shape.layers + 1) * HIT_BYTES * room_for(tokens)


def observed_bytes(shape: ModelShape, queries: int) -> int:
    """Return the bytes of the last prefill queries of one sequence."""
    return shape.layers * queries * shape.query_heads * shape.head_dim * _QUERY_ITEM_BYTES


def segment_statistics_bytes(spec: KernelSpec) -> int:
    """Return the bytes of one segment's channel statistics in one layer."""
    return spec.kv_heads * spec.head_dim * _STATISTICS_ITEM_BYTES


def staging_bytes(shape: ModelShape, settings: Settings) -> int:
    """Return the bytes of all buffers, which follow from the block size and never the budget."""
    spec = kernel_spec(shape, settings)
    block = round_up(settings.block_rows * shape.row_bytes, PAGE_BYTES)
    channels = shape.kv_heads * shape.head_dim
    read = round_up(max(block, shape.row_bytes + 2 * PAGE_BYTES), PAGE_BYTES)
    spill = round_up(settings.block_rows, GROUP_TOKENS) * shape.row_bytes
    widened = settings.block_rows * 2 * channels * _WIDENED_ITEM_BYTES
    keys = spec.segment_tokens * channels * _KEY_ITEM_BYTES
    return (
        # Each buffer, what is on its way into it from slots or from the read buffer, and out of it
        # into slots.
        (2 * GATHER_BUFFERS + 1) * block
        + read
        + SPILL_BUFFERS * round_up(spill, PAGE_BYTES)
        + widened
        + keys
        + scratch_bytes(spec)
    )
