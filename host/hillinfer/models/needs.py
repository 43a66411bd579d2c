# SPDX-License-Identifier: Apache-2.0
"""Estimates memory and drive space that contexts of a model take, before weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hillinfer.drive.directories import DriveFacts
from hillinfer.engine.budget_growth import AUTO_FORMATS, ShadowChoice, working_bytes
from hillinfer.engine.budget_plan import BudgetPlan, kernel_spec
from hillinfer.errors import FitError
from hillinfer.model_shape import ModelShape
from hillinfer.settings import Encryption, Settings
from hillinfer.shadow.coming_codes import file_bytes
from hillinfer.system.machine import MemoryFacts, visible_gpus
from hillinfer.values import ByteSize, format_apart, format_bytes

# --- Activations ---

_FLOAT32_BYTES = 4
_LOGIT_COPIES = 4
_MERGE_COPIES = 4
# Freed blocks stay with the allocator and fit the next request only in part.
_ALLOCATOR_SLACK = 2


def activation_bytes(config: Any, shape: ModelShape, item_bytes: int, chunk_tokens: int) -> int:
    """Estimate the most that activations of one prefill chunk take.

    Counted are the residual stream and its norms, the projections, the feed-forward layer, the
    float32 sums that merge attention over blocks, and logits of one token.
    """
    hidden = int(config.hidden_size)
    feed_forward = int(
        getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * hidden
    )
    heads = shape.query_heads * shape.head_dim
    projections = 2 * heads + 4 * shape.kv_heads * shape.head_dim
    per_token = item_bytes * (4 * hidden + 3 * feed_forward + projections)
    merging = _FLOAT32_BYTES * _MERGE_COPIES * heads
    logits = _FLOAT32_BYTES * _LOGIT_COPIES * int(config.vocab_size)
    return _ALLOCATOR_SLACK * (chunk_tokens * (per_token + merging) + logits)


def ordinary_token_bytes(shape: ModelShape, item_bytes: int) -> int:
    """Return what a token takes in an ordinary cache, whose numbers have so many bytes."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * item_bytes


# --- Free memory and drive ---


@dataclass(frozen=True)
class Capacity:
    """What is free now, in bytes.

    Limits of control groups count. `drive_bytes` is room for the cold pool, `gpu_bytes` None where
    the model runs on the host.
    """

    memory_bytes: int
    drive_bytes: int
    gpu_bytes: int | None = None

    @classmethod
    def measure(cls, drive: DriveFacts, device: str, root: Path = Path("/")) -> Capacity:
        """Look at this machine now.

        `drive` is what the cold directory stands on; the model will run on `device`, `cpu` or
        `cuda`; `/proc` and `/sys` lie in `root`.
        """
        gpus = visible_gpus() if device == "cuda" else None
        return cls(
            memory_bytes=MemoryFacts.read(root).available_bytes,
            drive_bytes=drive.free_bytes,
            gpu_bytes=gpus[0].free_bytes if gpus else None,
        )


# --- One context ---


@dataclass(frozen=True)
class Shortage:
    """One thing that is too small.

    `need` says what is needed and what of it is free, `fix` what helps beside a shorter context.
    """

    need: str
    fix: str


@dataclass(frozen=True)
class Footprint:
    """What one context takes, in bytes.

    Parameters
    ----------
    weight_bytes
        The most that weights take, while they are loaded.
    activation_bytes
        Estimate of the activations of one prefill chunk; the context's length does not matter.
    budget_bytes
        M0.
    ordinary_bytes
        The ordinary cache of a comparison, 0 without one.
    drive_bytes
        The cold pool: every row is written once, and the codes of its values beside it.
    packed_bytes
        The most that packed projections take beside the weights, 0 without them.
    """

    weight_bytes: int
    activation_bytes: int
    budget_bytes: int
    ordinary_bytes: int
    drive_bytes: int
    packed_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        """Everything but the drive."""
        return self.on_gpu_bytes + self.budget_bytes

    @property
    def on_gpu_bytes(self) -> int:
        """What a GPU holds where the model runs on one: all but the budget."""
        return self.weight_bytes + self.packed_bytes + self.activation_bytes + self.ordinary_bytes

    def fits(self, capacity: Capacity) -> bool:
        """Whether memory, GPU and drive are large enough."""
        return not self.shortages(capacity)

    def shortages(self, capacity: Capacity) -> list[Shortage]:
        """Return what is too small."""
        parts = (
            f"weights {format_bytes(self.weight_bytes)}, activations "
            f"{format_bytes(self.activation_bytes)}"
        )
        if self.packed_bytes:
            parts += f", packed projections {format_bytes(self.packed_bytes)}"
        if self.ordinary_bytes:
            parts += f", ordinary cache {format_bytes(self.ordinary_bytes)}"
        budget = f"DRAM budget {format_bytes(self.budget_bytes)}"
        host_bytes, host_parts, wanted = self.memory_bytes, f"{parts}, {budget}", []
        if capacity.gpu_bytes is not None:
            host_bytes, host_parts = self.budget_bytes, budget
            what, fix = f"of GPU memory ({parts})", "load the weights with --dtype bfloat16"
            wanted.append((self.on_gpu_bytes, what, capacity.gpu_bytes, fix))
        what, fix = f"of memory ({host_parts})", "lower --dram-budget, or close other programs"
        wanted.append((host_bytes, what, capacity.memory_bytes, fix))
        what = "on the drive of the cold directory"
        fix = "free space there, or choose another drive with --cold-dir"
        wanted.append((self.drive_bytes, what, capacity.drive_bytes, fix))
        return [
            Shortage(f"{format_bytes(needed)} {what} but {format_bytes(free)} is free", fix)
            for needed, what, free, fix in wanted
            if needed > free
        ]


# --- Contexts of a model ---

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
    beside_token_bytes
        What the budget must hold for each token of a context, beside what a plan counts.
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
    beside_token_bytes: int = 0

    def choice(self, tokens: int) -> ShadowChoice:
        """Return the settings for a context of `tokens`, budget in bytes and shadow named."""
        chosen = ByteSize(byte_count=self._budget_bytes(tokens))
        settings = replace(self.settings, dram_budget=chosen)
        beside = self._beside_bytes(tokens)
        choice = ShadowChoice.of(self.shape, settings, tokens, beside_bytes=beside)
        plan = replace(choice.plan, kept_bytes=choice.plan.kept_bytes + beside)
        return replace(choice, plan=plan)

    def plan(self, tokens: int) -> BudgetPlan:
        """Return the budget plan for a context of `tokens`, forks included."""
        return self.choice(tokens).plan

    def footprint(self, tokens: int) -> Footprint:
        """Return what a context of `tokens` takes."""
        choice = self.choice(tokens)
        plan, stored = choice.plan, self.stored_tokens * self.shape.token_bytes
        return Footprint(
            weight_bytes=self.loading_bytes,
            activation_bytes=self.activation_bytes
            * min(tokens, self.chunk_tokens)
            // self.chunk_tokens,
            budget_bytes=plan.budget_bytes,
            ordinary_bytes=tokens * self.ordinary_token_bytes,
            drive_bytes=max(0, plan.kv_bytes - stored) + self._code_bytes(choice.settings, tokens),
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
        if self._possible(too_long - 1, capacity):
            # Which is so on most machines, and each look makes a whole plan.
            fits = too_long - 1
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            if self._possible(middle, capacity):
                fits = middle
            else:
                too_long = middle
        return fits if fits and self._budget_works(fits) else 0

    def check(self, tokens: int, capacity: Capacity) -> None:
        """Refuse a context that cannot work on this machine.

        Raises BudgetError where the DRAM budget cannot hold what it must, and FitError where memory
        or drive are too small; the message names the largest context that fits.
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

    def _code_bytes(self, settings: Settings, tokens: int) -> int:
        """Return what codes take on the drive, those of a session too: it brings them as a copy."""
        if not settings.has_coded_tokens or settings.encrypt_cold_pool is Encryption.YES:
            return 0
        return file_bytes(kernel_spec(self.shape, settings), self.shape.layers, tokens)

    def _beside_bytes(self, tokens: int) -> int:
        return self.fork_bytes + tokens * self.beside_token_bytes

    def _budget_bytes(self, tokens: int) -> int:
        if self.budget is not None and self.budget.share is None:
            return self.budget.resolve(0)
        share, beside = self._share_bytes(tokens), self._beside_bytes(tokens)
        if self.budget is not None:
            return working_bytes(self.shape, self.settings, tokens, share, beside_bytes=beside)
        if self.settings.shadow is None:
            narrowest = replace(self.settings, shadow=AUTO_FORMATS[-1])
            plan = BudgetPlan.with_whole_shadow(self.shape, narrowest, tokens)
            return max(share, plan.comfortable_bytes + beside)
        plan = BudgetPlan.with_whole_shadow(self.shape, self.settings, tokens)
        return max(share, plan.required_bytes + beside)

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
