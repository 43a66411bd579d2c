# SPDX-License-Identifier: Apache-2.0
"""What `hillinfer doctor --profile` says of exact and coded tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hillinfer.doctor.finding import Finding, Verdict
from hillinfer.drive.files import round_up
from hillinfer.engine.budget_plan import BudgetPlan, kernel_spec
from hillinfer.memory_budget import TABLE_GROWTH_ROWS
from hillinfer.model_shape import ModelShape
from hillinfer.settings import Settings
from hillinfer.shadow.values import CODE_SHARE, slot_bytes
from hillinfer.values import format_bytes
from hillinfer_model.step_need import ExactShare, StepNeed, step_need


@dataclass(frozen=True)
class CodedNeed:
    """What a step with coded tokens needs, and how much of all codes a budget keeps; computed.

    Parameters
    ----------
    shape, settings
        Of a model and a run; the settings name the shadow.
    tokens
        N, of one sequence.
    """

    shape: ModelShape
    settings: Settings
    tokens: int

    @property
    def need(self) -> StepNeed:
        """Bytes of one step of all layers."""
        settings = self.settings
        share = ExactShare(
            settings.importance_rate,
            settings.exact_share,
            settings.exact_floor,
            settings.kept_tokens,
        )
        spec = kernel_spec(self.shape, settings)
        return step_need(spec, settings.scope, self.shape.layers, self.tokens, share)

    @property
    def exact_share(self) -> float:
        """Exact tokens of a set over all tokens; 1 where nothing is coded."""
        return self.need.exact_tokens / self.tokens if self.settings.has_coded_tokens else 1.0

    @property
    def all_code_bytes(self) -> int:
        """What M0 holds where the codes of all tokens are kept, with their slots' tables."""
        if not self.settings.has_coded_tokens:
            return 0
        # As many as tables have row numbers.
        slots = round_up(self.tokens, TABLE_GROWTH_ROWS)
        return slots * self.shape.layers * slot_bytes(kernel_spec(self.shape, self.settings))

    @property
    def kept_code_bytes(self) -> int:
        """What codes take of what they share with hot rows: all that there are, or nine tenths."""
        plan = BudgetPlan.for_context(self.shape, self.settings, self.tokens)
        room = max(0, plan.hot_bytes - plan.kept_bytes)
        every = self.all_code_bytes
        return every if every <= room else int(room * CODE_SHARE)

    @property
    def kept_share(self) -> float:
        """Codes that DRAM keeps over all there are."""
        every = self.all_code_bytes
        return self.kept_code_bytes / every if every else 1.0

    @property
    def least_budget_bytes(self) -> int:
        """The smallest budget that holds all codes, the whole shadow and the kept rows."""
        plan = BudgetPlan.with_whole_shadow(self.shape, self.settings, self.tokens)
        return plan.required_bytes + self.all_code_bytes

    @property
    def settings_text(self) -> str:
        """What is said of the settings behind alpha."""
        return f", exact {self.settings.exact_share:g}" if self.settings.has_coded_tokens else ""

    def findings(self) -> Iterator[Finding]:
        """Yield what a step needs and whether all codes fit; nothing where all are exact."""
        if not self.settings.has_coded_tokens:
            return
        need, least = self.need, self.least_budget_bytes
        budget = BudgetPlan.for_context(self.shape, self.settings, self.tokens).budget_bytes
        fits = self.all_code_bytes == self.kept_code_bytes
        found = (
            f"a step needs {format_bytes(need.exact_row_bytes)} of rows of "
            f"{need.exact_tokens} exact tokens, {format_bytes(need.value_code_bytes)} of codes of "
            f"{need.coded_tokens} coded ones and {format_bytes(need.key_shadow_bytes)} of key "
            f"shadow (computed); all codes take {format_bytes(self.all_code_bytes)} of DRAM and "
            + (
                "fit"
                if fits
                else f"do not fit: {self.kept_share:.0%} are kept, the others come as rows"
            )
        )
        fix = (
            None
            if fits
            else f"--dram-budget {_mebibytes(least)}MiB, "
            f"{least / need.kv_bytes:.0%} of the KV cache, keeps all codes; it is "
            f"{format_bytes(budget)} now"
        )
        verdict = Verdict.OK if fits else Verdict.WARNING
        yield Finding("coded tokens", verdict, found, fix)


def _mebibytes(count: int) -> int:
    return -(-count // 2**20)
