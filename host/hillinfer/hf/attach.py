# SPDX-License-Identifier: Apache-2.0
"""Puts HillInfer on a model and takes it off."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from hillinfer.byte_size import format_bytes
from hillinfer.cold_dir import prepared_cold_dir
from hillinfer.errors import (
    SettingsError,
    SetupWarning,
    UnsupportedFeatureError,
)
from hillinfer.gpu.lane_of import lane_of
from hillinfer.hf import attention
from hillinfer.hf.attached_name import NAME, AttachedName
from hillinfer.hf.cache import HillInferCache
from hillinfer.hf.features import check_model, check_uses_interface, check_versions
from hillinfer.hf.forward_hooks import ForwardHooks
from hillinfer.hf.guarded_generate import GuardedGenerate
from hillinfer.hf.model_in_use import ModelInUse
from hillinfer.hf.predictors.table import predictor_of, with_named_query
from hillinfer.hf.query_hooks import QueryHooks
from hillinfer.model_shape import ModelShape
from hillinfer.pools.budget_plan import kernel_spec, staging_bytes
from hillinfer.pools.shadow_choice import ShadowChoice
from hillinfer.runtime import Runtime
from hillinfer.sessions.manifest import Manifest
from hillinfer.sessions.model_identity import ModelIdentity
from hillinfer.sessions.saved_session import SavedSession
from hillinfer.setting_values import path, whole_number
from hillinfer.settings import Settings
from hillinfer.storage.drive_calls import DriveCalls
from hillinfer.storage.shadow_store import shadow_bytes
from hillinfer.storage.stored_base import StoredBase
from hillinfer_model.kernel_spec import GROUP_TOKENS


@dataclass(frozen=True)
class _CachePlan:
    """What a runtime is made with."""

    settings: Settings
    budget_bytes: int
    shadow_limit_bytes: int
    announce_streaming: Callable[[], None]


def _said() -> None:
    """Say nothing: the plan's warning did."""


def _warn_of_streaming(segment_bytes: int) -> None:
    warnings.warn(
        "half of the DRAM budget is left for rows, and the key shadow has outgrown the rest: from "
        f"here on, {format_bytes(segment_bytes)} more are read from the drive for every new token "
        "with every 1,024 tokens of context; raise dram_budget to keep them in memory, or say how "
        "long the context gets with new_cache(expected_tokens=...)",
        SetupWarning,
        stacklevel=2,
    )


class Attachment:
    """HillInfer on one model; a context manager that takes it off at the end.

    While attached, a forward pass with a `HillInferCache` (or a `RivalCache`) goes through it; with
    any other cache the model computes what it always did.

    Parameters
    ----------
    model
        A decoder-only transformers model. Models that share its config object are attached too.
    settings
        For the caches made by `new_cache`.
    calls
        How the drive is reached; the operating system itself where None.

    Raises
    ------
    UnsupportedFeatureError
        Where the model cannot work with selected tokens.
    """

    def __init__(
        self, model: PreTrainedModel, settings: Settings, calls: DriveCalls | None = None
    ) -> None:
        check_versions()
        check_model(model)
        if model.config._attn_implementation == NAME:
            raise UnsupportedFeatureError("this model is attached already: detach it first")
        self.model = model
        self.settings = with_named_query(settings, model.config.model_type)
        self.calls = calls or DriveCalls()
        predictor = predictor_of(model.config.model_type, settings.query)
        self._identity = ModelIdentity(model)
        self._previous = model.config._attn_implementation
        AttentionInterface.register(NAME, attention.attention)
        AttentionMaskInterface.register(NAME, attention.mask)
        model.set_attn_implementation(NAME)
        check_uses_interface(model, NAME)
        model.config._attn_implementation = AttachedName(self._previous)
        self._query_hooks = None if predictor is None else QueryHooks(model, predictor)
        self._hooks = ForwardHooks(model)
        self._generate = GuardedGenerate(model)
        self._model_in_use = ModelInUse(model)

    def new_cache(self, expected_tokens: int | None = None, sequences: int = 1) -> HillInferCache:
        """Return an empty cache.

        Parameters
        ----------
        expected_tokens
            Longest context expected, prompt and answer; needed where the budget is a share of the
            KV cache. A budget too small for it is refused here and not in the middle. A device gets
            its share of that context, where β is automatic.
        sequences
            Sequences of different rows that are expected.

        Raises
        ------
        BudgetError, ColdPoolError, SettingsError
            Where budget, cold directory or settings cannot work.
        """
        if expected_tokens is not None:
            expected_tokens = _count("expected_tokens", expected_tokens)
        sequences = _count("sequences", sequences)
        runtime = self._runtime(self._made(expected_tokens, sequences))
        runtime.expect(expected_tokens or 0)
        return HillInferCache(runtime, identity=self._identity, model=self._model_in_use)

    def load_session(
        self,
        directory: str | Path,
        expected_tokens: int | None = None,
        tokenizer: Any = None,
    ) -> HillInferCache:
        """Return a cache that holds what a session was saved with.

        Every file is read and checked first. Rows are read where they lie from then on, so the
        directory must stay as it is while the cache lives.

        Parameters
        ----------
        directory
            As given to `HillInferCache.save_session`.
        expected_tokens
            As in `new_cache`, the session's tokens included.
        tokenizer
            Compared with the session's where both are known.

        Raises
        ------
        SessionError
            Where the session was damaged, or saved with another model or other settings.
        BudgetError, ColdPoolError, SettingsError
            As in `new_cache`.
        """
        if expected_tokens is not None:
            expected_tokens = _count("expected_tokens", expected_tokens)
        with SavedSession(path("directory", directory), self.calls) as saved:
            shadow = self._with_shadow_of(saved.manifest).key_mode
            found = self._identity.without_weights(shadow, tokenizer)
            saved.manifest.fingerprint.check(found, saved.directory)
            saved.verify()
            return self.resume(saved, saved.tokens, expected_tokens, tokenizer)

    def resume(
        self,
        saved: SavedSession,
        tokens: int,
        expected_tokens: int | None = None,
        tokenizer: Any = None,
    ) -> HillInferCache:
        """Return a cache that holds the first tokens of a session.

        Parameters
        ----------
        saved
            Opened and verified; its row files belong to the cache afterwards.
        tokens
            How many to take, at least 1. Fewer than all come back as rows and whole segments of
            shadow; all of them with everything as it was.
        expected_tokens, tokenizer
            As in `load_session`, which see for errors.
        """
        manifest = saved.manifest
        settings = self._with_shadow_of(manifest)
        found = self._identity.fingerprint(settings.key_mode, tokenizer)
        manifest.fingerprint.check(found, saved.directory)
        if expected_tokens is not None:
            expected_tokens = max(expected_tokens, tokens)
        made = self._made(expected_tokens, 1, settings)
        base = saved.take_base(-(-tokens // GROUP_TOKENS))
        try:
            runtime = self._runtime(made, base)
        except BaseException:
            base.close()
            raise
        try:
            runtime.expect(expected_tokens or tokens)
            sequence = runtime.resume(saved, tokens)
        except BaseException:
            runtime.close()
            raise
        return HillInferCache.resumed(runtime, sequence, self._identity, self._model_in_use)

    @property
    def _shape(self) -> ModelShape:
        return ModelShape.from_config(self.model.config, self.model.dtype)

    def _with_shadow_of(self, manifest: Manifest) -> Settings:
        """Return the settings, with the session's shadow where none is named."""
        return replace(self.settings, shadow=self.settings.shadow or manifest.shadow)

    def _made(
        self, expected_tokens: int | None, sequences: int, settings: Settings | None = None
    ) -> _CachePlan:
        wanted = settings or self.settings
        if expected_tokens is None:
            return self._without_length(wanted)
        choice = ShadowChoice.of(self._shape, wanted, expected_tokens, sequences)
        choice.plan.check()
        if choice.warning:
            warnings.warn(choice.warning, SetupWarning, stacklevel=3)
        return _CachePlan(choice.settings, choice.plan.budget_bytes, choice.limit_bytes, _said)

    def _without_length(self, settings: Settings) -> _CachePlan:
        """Plan a cache of unknown length."""
        if settings.dram_budget.byte_count is None:
            raise SettingsError(
                "a DRAM budget in percent needs new_cache(expected_tokens=...); or set "
                "dram_budget in bytes, like 2GiB"
            )
        budget_bytes = settings.dram_budget.byte_count
        # Half is left for rows, however long the context gets.
        staging = staging_bytes(self._shape, settings)
        limit = max(0, budget_bytes // 2 - staging)
        segment = self._shape.layers * shadow_bytes(kernel_spec(self._shape, settings))
        return _CachePlan(settings, budget_bytes, limit, partial(_warn_of_streaming, segment))

    def _runtime(self, made: _CachePlan, base: StoredBase | None = None) -> Runtime:
        cold_dir: Path = prepared_cold_dir(made.settings.cold_dir)
        return Runtime(
            self._shape,
            made.settings,
            made.budget_bytes,
            cold_dir,
            calls=self.calls,
            shadow_limit_bytes=made.shadow_limit_bytes,
            base=base,
            announce_streaming=made.announce_streaming,
            lane=lane_of({parameter.device for parameter in self.model.parameters()}),
        )

    def detach(self) -> None:
        """Leave the model as it was; harmless when done twice."""
        if not self._model_in_use.attached:
            return
        self._model_in_use.attached = False
        self._hooks.remove()
        if self._query_hooks is not None:
            self._query_hooks.remove()
        self._generate.remove()
        self.model.set_attn_implementation(self._previous)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()


def _count(name: str, value: int) -> int:
    """Return a number of things that there must be at least one of."""
    if (count := whole_number(name, value)) < 1:
        raise SettingsError(f"{name}={count} must be at least 1")
    return count
