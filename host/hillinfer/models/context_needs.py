# SPDX-License-Identifier: Apache-2.0
"""What contexts of one model take, known before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hillinfer.byte_size import ByteSize, format_apart
from hillinfer.model_shape import ModelShape
from hillinfer.models.activations import activation_bytes
from hillinfer.models.capacity import Capacity
from hillinfer.models.errors import FitError
from hillinfer.models.footprint import Footprint
from hillinfer.models.loader import ModelOutline
from hillinfer.pools.budget_plan import BudgetPlan
from hillinfer.pools.shadow_choice import AUTO_FORMATS, ShadowChoice, working_bytes
from hillinfer.settings import Settings

DEFAULT_BUDGET_SHARE = 0.25


@dataclass(frozen=True)
class ContextNeeds:
    """What contexts of one model take under some settings.

    Parameters
    ----------
    shape
        The model's.
    settings
        The budget in it is replaced by `budget`.
    budget
        DRAM budget; None takes a quarter of the KV cache, or the least that keeps the key shadow in
        DRAM where that is more. A share is never less than what works.
    loading_bytes
        As in `Footprint`.
    activation_bytes
        Of a forward pass of a whole chunk.
    chunk_tokens
        Tokens of a chunk; a shorter context is read in one pass of its own length.
    ordinary_token_bytes
        Bytes per token of an ordinary cache held beside, 0 without one.
    fork_bytes
        What forks of the document's cache hold for themselves, 0 without forks.
    reserved_tokens
        Tokens of a context that may stay unused, because an answer may end early. A share of the
        KV cache leaves them out, so it holds however the run ends.
    stored_tokens
        Tokens whose rows lie on a drive already, in a session.
    packed_bytes
        As in `Footprint`.
    """

    shape: ModelShape
    settings: Settings
    budget: ByteSize | None
    loading_bytes: int
    activation_bytes: int
    chunk_tokens: int = 1
    ordinary_token_bytes: int = 0
    fork_bytes: int = 0
    reserved_tokens: int = 0
    stored_tokens: int = 0
    packed_bytes: int = 0

    @classmethod
    def of(
        cls,
        outline: ModelOutline,
        settings: Settings,
        budget: ByteSize | None,
        chunk_tokens: int,
        ordinary_caches: int,
        fork_bytes: int,
        reserved_tokens: int,
        stored_tokens: int = 0,
        packed_bytes: int = 0,
    ) -> ContextNeeds:
        """Take the needs of a model whose prompt is read in chunks of `chunk_tokens`."""
        shape = outline.shape
        states = 2 * shape.layers * shape.kv_heads * shape.head_dim * outline.dtype.itemsize
        return cls(
            shape=shape,
            settings=settings,
            budget=budget,
            loading_bytes=outline.loading_bytes,
            activation_bytes=activation_bytes(
                outline.config, shape, outline.dtype.itemsize, chunk_tokens
            ),
            chunk_tokens=chunk_tokens,
            ordinary_token_bytes=ordinary_caches * states,
            fork_bytes=fork_bytes,
            reserved_tokens=reserved_tokens,
            stored_tokens=stored_tokens,
            packed_bytes=packed_bytes,
        )

    def choice(self, tokens: int) -> ShadowChoice:
        """Return the settings for a context of `tokens`, budget in bytes and shadow named."""
        chosen = ByteSize(byte_count=self._budget_bytes(tokens))
        settings = replace(self.settings, dram_budget=chosen)
        choice = ShadowChoice.of(self.shape, settings, tokens, beside_bytes=self.fork_bytes)
        plan = replace(choice.plan, kept_bytes=choice.plan.kept_bytes + self.fork_bytes)
        return replace(choice, plan=plan)

    def plan(self, tokens: int) -> BudgetPlan:
        """Return the budget plan for a context of `tokens`, forks included."""
        return self.choice(tokens).plan

    def footprint(self, tokens: int) -> Footprint:
        """Return what a context of `tokens` takes."""
        plan = self.plan(tokens)
        return Footprint(
            weight_bytes=self.loading_bytes,
            activation_bytes=self.activation_bytes
            * min(tokens, self.chunk_tokens)
            // self.chunk_tokens,
            budget_bytes=plan.budget_bytes,
            ordinary_bytes=tokens * self.ordinary_token_bytes,
            drive_bytes=max(0, plan.kv_bytes - self.stored_tokens * self.shape.token_bytes),
            packed_bytes=self.packed_bytes,
        )

    def raised_budget(self, tokens: int) -> str | None:
        """Return what to say where the share asked for is too small for `tokens`, or None."""
        if self.budget is None or self.budget.share is None:
            return None
        share, taken = self._share_bytes(tokens), self._budget_bytes(tokens)
        if taken == share:
            return None
        texts = format_apart(share, taken)
        return (
            f"DRAM budget: {self.budget} of this context is {texts[0]}, which is too little; "
            f"{texts[1]} is taken, the least that works"
        )

    def largest_context(self, capacity: Capacity) -> int:
        """Return the longest context that fits, 0 where none does.

        What a context takes grows with it, so the bound is found by halving; only whether a
        budget holds its fixed buffers may get easier with length, where the budget is a share.
        """
        fits, too_long = 0, self.shape.max_positions + 1
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            if self._possible(middle, capacity):
                fits = middle
            else:
                too_long = middle
        return fits if fits and self._budget_works(fits) else 0

    def check(self, tokens: int, capacity: Capacity) -> None:
        """Refuse a context that cannot work on this machine.

        Raises
        ------
        BudgetError
            Where the DRAM budget cannot hold what it must.
        FitError
            Where memory or drive are too small; the message names the largest context that fits.
        """
        self.plan(tokens).check()
        shortages = self.footprint(tokens).shortages(capacity)
        if shortages:
            largest = self.largest_context(capacity)
            largest_that_fits = (
                f"the largest context that fits is {largest} tokens" if largest else "none fits"
            )
            raise FitError(
                f"a context of {tokens} tokens needs "
                f"{' and '.join(shortage.need for shortage in shortages)}; {largest_that_fits}: "
                f"shorten the prompt, {', or '.join(shortage.fix for shortage in shortages)}"
            )

    def _budget_bytes(self, tokens: int) -> int:
        if self.budget is not None and self.budget.share is None:
            return self.budget.resolve(0)
        share = self._share_bytes(tokens)
        if self.budget is not None:
            return working_bytes(
                self.shape, self.settings, tokens, share, beside_bytes=self.fork_bytes
            )
        if self.settings.shadow is None:
            narrowest = replace(self.settings, shadow=AUTO_FORMATS[-1])
            plan = BudgetPlan.with_whole_shadow(self.shape, narrowest, tokens)
            return max(share, plan.comfortable_bytes + self.fork_bytes)
        plan = BudgetPlan.with_whole_shadow(self.shape, self.settings, tokens)
        return max(share, plan.required_bytes + self.fork_bytes)

    def _share_bytes(self, tokens: int) -> int:
        sure_tokens = max(1, tokens - self.reserved_tokens)
        share = self.budget or ByteSize(share=DEFAULT_BUDGET_SHARE)
        return share.resolve(sure_tokens * self.shape.token_bytes)

    def _possible(self, tokens: int, capacity: Capacity) -> bool:
        fixed = self.budget is not None and self.budget.byte_count is not None
        return self.footprint(tokens).fits(capacity) and (not fixed or self._budget_works(tokens))

    def _budget_works(self, tokens: int) -> bool:
        plan = self.plan(tokens)
        return plan.budget_bytes >= plan.required_bytes
