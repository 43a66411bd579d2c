# SPDX-License-Identifier: Apache-2.0
"""HillInfer with some settings."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from hillinfer.engine.budget_growth import ShadowChoice
from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.engine.runtime import Runtime
from hillinfer.errors import SetupWarning
from hillinfer.hf.cache import HillInferCache
from hillinfer.hf.engine import Engine
from hillinfer.hf.hooks import with_named_query
from hillinfer.model_shape import ModelShape
from hillinfer.settings import Settings
from hillinfer.statistics import CacheStatistics
from hillinfer.values import ByteSize
from hillinfer_bench.systems.case import BenchSetting
from hillinfer_bench.systems.kv_source import Chunk
from hillinfer_bench.systems.replayed_selections import ReplayingRuntime
from hillinfer_bench.systems.system import BenchError, Counted, Needs, OpenSystem, System
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.value_layout import code_row_bytes

# Rows of the whole context, its shadow, and buffers.
_ALL_IN_DRAM = 2


class HillInferSystem(System):
    """The product, with settings that differ from the case's.

    Parameters
    ----------
    name
        In the table of systems.
    changes
        Settings by name.
    memory_kv
        M0 in KV caches of this context; None for the case's budget.
    """

    def __init__(
        self,
        name: str,
        changes: Mapping[str, Any] | None = None,
        memory_kv: float | None = None,
    ) -> None:
        super().__init__(name)
        self._changes = dict(changes or {})
        self._memory_kv = memory_kv

    @property
    def bounded(self) -> bool:
        """Whether it has the case's budget and no more; see `System`."""
        return self._memory_kv is None

    @property
    def traced(self) -> bool:
        """Whether it writes its lanes where a trace is asked for; see `System`."""
        return True

    @property
    def holds_all(self) -> bool:
        """Whether it has room for all rows; see `System`."""
        return self._memory_kv is not None

    @property
    def codes(self) -> bool:
        """Whether it may attend to codes of tokens: a share of exact ones is given."""
        return bool(self._changes.get("exact", 1) < 1)

    def needs(self, setting: BenchSetting) -> Needs:
        """Return M0, and the rows with the shadow on the drive."""
        return Needs(self._budget(setting), setting.kv_bytes * 5 // 4)

    def open(self, setting: BenchSetting) -> OpenSystem:
        """Return an empty cache with a runtime of its own; see `System`."""
        known = {field.name for field in fields(Settings)}
        missing = sorted(set(self._changes) - known)
        if missing:
            raise BenchError(f"{self.name} needs the setting {missing[0]}, which is not there")
        # Other systems on this model may want another query.
        wanted = with_named_query(
            setting.case.settings().changed(**self._changes), setting.model.config.model_type
        )
        # Shadow, and how much of it streams, as in the whole model, whose buffers weigh less.
        whole = self._choice(setting.whole, wanted)
        choice = self._choice(setting, whole.settings)
        choice.plan.check()
        limit = whole.limit_bytes * setting.shape.layers // setting.whole.shape.layers
        settings = replace(choice.settings, trace=setting.trace)
        budget = choice.plan.budget_bytes
        given = (setting.shape, settings, budget, setting.cold_dir)
        with warnings.catch_warnings():
            # Buffered reads are refused when they are counted.
            warnings.simplefilter("ignore", SetupWarning)
            runtime = (
                ReplayingRuntime(*given, setting.selections, shadow_limit_bytes=limit)
                if setting.selections
                else Runtime(*given, shadow_limit_bytes=limit)
            )
        streamed = whole.plan.streamed_shadow_bytes / whole.plan.kv_bytes
        return _OpenHillInfer(HillInferCache(Engine(runtime)), setting.shape, settings, streamed)

    def _choice(self, setting: BenchSetting, wanted: Settings) -> ShadowChoice:
        budget = ByteSize(byte_count=self._budget(setting))
        return ShadowChoice.of(
            setting.shape, wanted.changed(dram_budget=budget), setting.tokens, setting.case.batch
        )

    def _budget(self, setting: BenchSetting) -> int:
        if self._memory_kv is None:
            return setting.budget_bytes
        return setting.budget_bytes + int(self._memory_kv * setting.kv_bytes)


class _OpenHillInfer(OpenSystem):
    cache: HillInferCache

    def __init__(
        self, cache: HillInferCache, shape: ModelShape, settings: Settings, streamed: float
    ) -> None:
        self.cache = cache
        self._shape = shape
        self._settings = settings
        self._streamed = streamed
        self._spec = kernel_spec(shape, settings)

    def fill(self, chunk: Chunk) -> None:
        """Store the rows and code their shadow."""
        self.cache.fill(chunk.ids, chunk.keys, chunk.values)

    def settle(self) -> None:
        """Wait for promotions."""
        self.cache.statistics()

    def counted(self) -> Counted:
        """Return the runtime's own counts; see `counted_by`."""
        return counted_by(self.cache.statistics(), self._shape, self._spec)

    def shadow_used(self) -> str:
        """Return the format that was named or chosen; see `OpenSystem`."""
        return self._settings.key_mode.value

    def describe(self) -> str:
        """Return the shadow that was chosen, and whether it is streamed."""
        settings = self._settings
        text = f"shadow {settings.key_mode.value}, {settings.query.value} query"
        if settings.trace is not None:
            # Noting what goes on takes time within steps, too.
            text += ", traced"
        if self._streamed:
            text += f", {self._streamed:.1%} of the KV bytes of it streamed"
        return text

    def close(self) -> None:
        """Close the cache."""
        self.cache.close()


def counted_by(counts: CacheStatistics, shape: ModelShape, spec: KernelSpec) -> Counted:
    """Return what statistics of HillInfer count.

    Parameters
    ----------
    counts
        Of a cache or of an engine.
    shape, spec
        Of the model and of its shadow; shadows of scored tokens, selected rows and value codes are
        read.
    """
    rows = counts.hot_rows_read + counts.cold_rows_read
    scored = counts.scored_tokens * shadow_token_bytes(spec)
    codes = counts.coded_tokens * (code_row_bytes(spec) + spec.kv_heads)
    return Counted(
        counts.cold_read_bytes + counts.shadow_read_bytes,
        counts.cold_write_bytes + counts.shadow_write_bytes,
        rows * shape.row_bytes + codes + int(scored),
        counts.dram_peak_bytes,
        counts.hot_hit_rate,
        counts.io_mode,
        counts.cold_reads,
    )


def shadow_token_bytes(spec: KernelSpec) -> float:
    """Return the bytes of shadow of one token in one layer, exponents included."""
    return spec.segment_bytes / spec.segment_tokens
