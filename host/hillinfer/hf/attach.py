# SPDX-License-Identifier: Apache-2.0
"""Puts HillInfer on a model and takes it off."""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.directories import filesystem_of, memory_warning, prepared_cold_dir
from hillinfer.engine.budget_growth import CachePlan
from hillinfer.engine.runtime import Runtime
from hillinfer.errors import (
    ColdPoolError,
    SessionError,
    SettingsError,
    SetupWarning,
    UnsupportedFeatureError,
)
from hillinfer.gpu.staging import CopyLane, lane_of
from hillinfer.hf import attention
from hillinfer.hf.attention import AttachedCache, check_ids
from hillinfer.hf.batch import Batch, Expectation
from hillinfer.hf.cache import HillInferCache
from hillinfer.hf.engine import RUNTIME_THREADS, Engine, Use
from hillinfer.hf.features import (
    NAME,
    AttachedName,
    Guard,
    ModelInUse,
    check_model,
    check_uses_interface,
    check_versions,
)
from hillinfer.hf.hooks import (
    GuardedForward,
    forward_hooks,
    named,
    predictor_of,
    query_hooks,
    regaining,
    with_named_query,
)
from hillinfer.hf.joined_cache import JoinedCache
from hillinfer.hf.prompts import CachePrompts, PromptCall, PromptStore
from hillinfer.hf.stored_cache import StoredCache
from hillinfer.memory_budget import Accountant, Loan
from hillinfer.model_shape import ModelShape
from hillinfer.native.library import native_library
from hillinfer.secrecy.cold_pages import with_store
from hillinfer.sessions.fingerprint import ModelIdentity
from hillinfer.sessions.manifest import Manifest
from hillinfer.sessions.opening import SavedSession
from hillinfer.settings import Settings
from hillinfer.statistics import CacheStatistics
from hillinfer.values import path, whole_number


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
    plan
        Returns what a cache is to be made of; parameters as of `CachePlan.of`.
    make_lane
        Returns what copies to and from the devices of the model, None where nothing needs to.
    open_runtime
        Opens what is behind the caches, given the parameters of `Runtime`: that with some of its
        own, like devices or an observer.
    prompts
        The store that the caches look prompts up in, let go after the last of them; none where
        None.

    Raises
    ------
    UnsupportedFeatureError
        Where the model cannot work with selected tokens.
    NativeError
        The native library is missing; the message says how to get it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: Settings,
        calls: DriveCalls | None = None,
        plan: Callable[[ModelShape, Settings, int | None, int], CachePlan] = CachePlan.of,
        make_lane: Callable[[Collection[torch.device]], CopyLane | None] = lane_of,
        open_runtime: Callable[..., Runtime] = Runtime,
        prompts: PromptStore | None = None,
    ) -> None:
        check_versions()
        # Nothing is attended to without it: said here rather than after a prefill.
        native_library()
        check_model(model)
        if model.config._attn_implementation == NAME:
            raise UnsupportedFeatureError("this model is attached already: detach it first")
        self.model = model
        placed = settings.computed_on(model.device.type)
        self.settings = with_named_query(placed, model.config.model_type)
        self._seal_beside(prompts)
        self.calls = calls or DriveCalls()
        self._prompts = prompts
        self._plan, self._make_lane, self._open_runtime = plan, make_lane, open_runtime
        predictor = predictor_of(model.config.model_type, settings.query)
        self._identity = ModelIdentity(model)
        self._previous = model.config._attn_implementation
        AttentionInterface.register(NAME, attention.attention)
        AttentionMaskInterface.register(NAME, attention.mask)
        model.set_attn_implementation(NAME)
        check_uses_interface(model, NAME)
        model.config._attn_implementation = AttachedName(self._previous)
        hooks = [] if predictor is None else query_hooks(model, predictor)
        hooks += forward_hooks(model)
        # What is taken off the model again.
        self._put_on = [*hooks, GuardedForward(model), GuardedGenerate(model)]
        self._model_in_use = ModelInUse(model)
        # One at a time opens it: what is open is shared by all caches.
        self._opening = threading.Lock()
        # Held by its caches alone: with the last of them its memory goes, too.
        self._engine: weakref.ref[Engine] | None = None
        self._opened_for: object = None

    def new_cache(
        self,
        expected_tokens: int | None = None,
        sequences: int = 1,
        prompts: PromptStore | None = None,
    ) -> HillInferCache:
        """Return an empty cache.

        Parameters
        ----------
        expected_tokens
            Longest context expected, prompt and answer; the model's positions are the most. A
            budget in bytes too small for it is refused here and not in the middle. A budget that is
            a share of the KV cache is that of this context, and follows a longer one; without a
            length it follows from the start. It is never less than what works. A device
            gets its share of the expected context, where β is automatic.
        sequences
            Sequences of different rows that are expected.
        prompts
            The store that this cache looks prompts up in, as of another tenant, open while the
            cache is; the attachment's where None.

        Raises
        ------
        BudgetError, ColdPoolError, SettingsError
            Where budget, cold directory, settings or these arguments cannot work.
        CacheUseError
            After `detach`.
        """
        expected_tokens = self._expected(expected_tokens)
        expectation = Expectation(expected_tokens, checked_count("sequences", sequences))
        with self._opening:
            self._seal_beside(prompts)
            engine = self._joined(expectation)
            try:
                family = engine.open_family(expectation)
                kind, own = self._cache_with(prompts or self._prompts)
                return kind(engine, family, None, self._identity, self._model_in_use, own)
            finally:
                engine.part()

    def join(self, caches: Iterable[HillInferCache]) -> JoinedCache:
        """Return caches of this attachment as one batch, for a step together.

        See `JoinedCache`; a joined batch is made anew whenever caches come or leave.

        Raises
        ------
        CacheUseError
            Where they cannot take a step together; the message names the caches.
        """
        return JoinedCache(tuple(caches))

    def load_session(
        self,
        directory: str | Path,
        expected_tokens: int | None = None,
        tokenizer: Any = None,
    ) -> HillInferCache:
        """Return a cache that holds what a session was saved with, beside those of `new_cache`.

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
            Where the session was damaged, or saved with another model or other settings than this
            attachment or the caches of it that are open have.
        BudgetError, ColdPoolError, SettingsError, CacheUseError
            As in `new_cache`.
        """
        expected_tokens = self._expected(expected_tokens)
        with SavedSession(path("directory", directory), self.calls) as saved:
            shadow = self._with_shadow_of(saved.manifest).key_mode.codes
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
            Opened and verified; its files of rows and shadow are not its own afterwards.
        tokens
            How many to take, at least 1. Fewer than all come back as rows and whole segments of
            shadow; all of them with everything as it was.
        expected_tokens, tokenizer
            As in `load_session`, which see for errors.
        """
        manifest = saved.manifest
        settings = self._with_shadow_of(manifest)
        found = self._identity.fingerprint(settings.key_mode.codes, tokenizer)
        manifest.fingerprint.check(found, saved.directory)
        expected_tokens = self._expected(expected_tokens)
        if expected_tokens is not None:
            expected_tokens = max(expected_tokens, tokens)
        expectation = Expectation(expected_tokens, from_start=tokens)
        with self._opening:
            engine = self._joined(expectation, settings)
        try:
            _check_shadow(saved, engine)
            family = engine.open_family(expectation)
            # Whoever opens another one meanwhile must leave room for it.
            family.await_one()
            kind, own = self._cache_with(self._prompts)
            try:
                batch = Batch.of(engine.runtime, engine.resume(family, saved, tokens))
                return kind(engine, family, batch, self._identity, self._model_in_use, own)
            finally:
                family.lose()
        finally:
            engine.part()

    def statistics(self) -> CacheStatistics | None:
        """Return what all caches from `new_cache` did together, None where none is left.

        Waits, as a cache's own do, until the forward pass of another thread is through.
        """
        engine = self._shared_engine
        return None if engine is None or engine.is_inherited else engine.statistics()

    @property
    def accountant(self) -> Accountant | None:
        """What counts the budget of the engine that is open, None where none is."""
        engine = self._shared_engine
        return None if engine is None or engine.is_closed else engine.runtime.parts.accountant

    def has_room(
        self, expected_tokens: int, sequences: int = 1, without: Iterable[HillInferCache] = ()
    ) -> bool:
        """Return whether `new_cache` finds room in the open engine once `without` are closed."""
        engine = self._shared_engine
        expectation = Expectation(self._expected(expected_tokens), sequences)
        return engine is not None and engine.has_room(expectation, [one.family for one in without])

    def lend(self, byte_count: int) -> Loan | None:
        """Lend bytes of the open engine's budget to an ordinary cache; see `Engine.lend`."""
        engine = self._shared_engine
        return None if engine is None else engine.lend(byte_count)

    @property
    def _shared_engine(self) -> Engine | None:
        return None if self._engine is None else self._engine()

    def _joined(self, expectation: Expectation, settings: Settings | None = None) -> Engine:
        """Return the engine that is open, or a new one, with one cache more, for `Engine.part`.

        Parameters
        ----------
        expectation
            What a new one is planned for.
        settings
            Of a new one; the attachment's where None.
        """
        self._model_in_use.check_attached()
        engine, wanted = self._shared_engine, (self.settings, self._shape, self._devices)
        fits = engine is not None and not engine.is_inherited and self._opened_for == wanted
        if engine is not None and fits and engine.join():
            return engine
        made = self._made(expectation.tokens, expectation.sequences, settings)
        runtime = self._runtime(made)
        engine = Engine(runtime)
        # Where Ctrl-C spoiled the count of its caches, which closes it otherwise.
        weakref.finalize(engine, _end_uncounted, runtime, os.getpid()).atexit = False
        self._engine, self._opened_for = weakref.ref(engine), wanted
        engine.join()
        return engine

    def _seal_beside(self, prompts: PromptStore | None) -> None:
        """Learn of a store whose rows caches of this attachment will hold from here on."""
        if prompts is not None:
            self.settings = with_store(self.settings, prompts.cipher)

    @staticmethod
    def _cache_with(
        prompts: PromptStore | None,
    ) -> tuple[type[HillInferCache], CachePrompts | None]:
        """Return what to make a cache of that looks its prompts up there."""
        if prompts is None:
            return HillInferCache, None
        return StoredCache, CachePrompts(prompts)

    @property
    def _devices(self) -> frozenset[torch.device]:
        return frozenset(parameter.device for parameter in self.model.parameters())

    def _expected(self, tokens: int | None) -> int | None:
        """Return the length to plan for, at most what the model has positions for."""
        if tokens is None:
            return None
        count, positions = checked_count("expected_tokens", tokens), self._shape.max_positions
        if count > positions:
            warnings.warn(
                f"expected_tokens={count} is more than the model's {positions} positions: the "
                f"cache is planned for {positions}",
                SetupWarning,
                stacklevel=3,
            )
        return min(count, positions)

    @property
    def _shape(self) -> ModelShape:
        return ModelShape.from_config(self.model.config, self.model.dtype)

    def _with_shadow_of(self, manifest: Manifest) -> Settings:
        """Return the settings, with the session's shadow where none is named."""
        return replace(self.settings, shadow=self.settings.shadow or manifest.shadow)

    def _made(
        self, expected_tokens: int | None, sequences: int, settings: Settings | None = None
    ) -> CachePlan:
        made = self._plan(self._shape, settings or self.settings, expected_tokens, sequences)
        if made.warning:
            warnings.warn(made.warning, SetupWarning, stacklevel=3)
        return made

    def _runtime(self, made: CachePlan) -> Runtime:
        cold_dir: Path = prepared_cold_dir(made.settings.cold_dir)
        in_memory = memory_warning(cold_dir, filesystem_of(cold_dir))
        if in_memory:
            warnings.warn(in_memory, SetupWarning, stacklevel=4)
        return self._open_runtime(
            self._shape,
            made.settings,
            made.budget_bytes,
            cold_dir,
            calls=self.calls,
            shadow_limit_bytes=made.shadow_limit_bytes,
            announce_streaming=made.announce_streaming,
            growth=made.growth,
            lane=self._make_lane(self._devices),
        )

    def detach(self) -> None:
        """Leave the model as it was; harmless when done twice."""
        if not self._model_in_use.attached:
            return
        self._model_in_use.attached = False
        while self._put_on:
            self._put_on.pop(0).remove()
        self.model.set_attn_implementation(self._previous)
        if self._prompts is not None:
            engine = self._shared_engine
            if engine is None or engine.is_closed:
                self._prompts.close()
            else:
                # Its caches may go on behind another attachment, and read what the store holds.
                weakref.finalize(engine, _closed_aside, self._prompts)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()


def _end_uncounted(runtime: Runtime, process: int) -> None:
    """Close the runtime of an engine that nobody can use any more, as `_closed_aside` does."""
    # A fork of the process leaves alone what its parent goes on using.
    if os.getpid() == process and not runtime.is_closed:
        name = f"{RUNTIME_THREADS}close"
        threading.Thread(target=runtime.close, name=name, daemon=False).start()


def _closed_aside(prompts: PromptStore) -> None:
    """Let a store go in a thread of its own: the garbage collector may be in the middle of it.

    Nobody waits for a thread that begins once the interpreter ends, and then nothing is collected.
    """
    if threading.main_thread().is_alive():
        threading.Thread(target=prompts.close, name=f"{RUNTIME_THREADS}store", daemon=False).start()
    else:
        prompts.close()


def _check_shadow(saved: SavedSession, engine: Engine) -> None:
    """Refuse a session whose shadow is another than that of the caches that are open."""
    own, here = saved.manifest.shadow, engine.runtime.settings.key_mode.codes
    if own is not here:
        raise SessionError(
            f"the session {saved.directory} does not fit: shadow is {own.value} in the session and "
            f"{here.value} in the caches of this model that are open, which share one engine: "
            f"close them first, or open all of them with --shadow {own.value}"
        )


def checked_count(name: str, value: Any) -> int:
    """Return an argument that counts something; SettingsError where it is no number from 1 on."""
    count = whole_number(name, value)
    if count < 1:
        raise SettingsError(f"{name}={count} must be at least 1")
    return count


# --- what stands around `generate` ---


class GuardedGenerate(Guard):
    """Wraps `generate`, which slices ids before any forward pass could compare them.

    Parameters as in `Guard`.
    """

    _name = "generate"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate; a cache is refused first where the ids do not continue it."""
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, AttachedCache):
            return self._guarded(*args, **kwargs)
        with Use(sys._getframe()) as use:
            around = cache.begin_generate(use)
            try:
                given = named(self._guarded, args, kwargs)
                ids, mask = given.get("input_ids", given.get("inputs")), given.get("attention_mask")
                if ids is not None:
                    check_ids(ids)
                    check = functools.partial(cache.check_continues, ids, mask)
                    regaining(cache, self._model, check)
                    call = PromptCall.of_generate(self._model, ids, given)
                    begin = functools.partial(cache.begin_prompt, ids, mask, call)
                    regaining(cache, self._model, begin)
                return self._guarded(*args, **kwargs)
            except ColdPoolError as error:
                raise ColdPoolError(
                    f"{error}; the tokens generated until then are in the cache's token_ids"
                ) from error
            finally:
                cache.end_generate(around)
