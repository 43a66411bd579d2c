# SPDX-License-Identifier: Apache-2.0
"""A cache's side of a forward pass: its tokens come, are stored, and layers attend to them."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from hillinfer.engine.queries import Explained, Prediction
from hillinfer.errors import CacheUseError, UnsupportedFeatureError
from hillinfer.hf.attention import AttachedCache, HillInferLayer, is_autocast
from hillinfer.hf.batch import Batch, CacheFamily, Expectation
from hillinfer.hf.engine import Engine, Use
from hillinfer.hf.features import ModelInUse, of_another_type
from hillinfer.hf.forward_plan import (
    ForwardPlan,
    Fresh,
    LayerLengths,
    LoneToken,
    Notes,
    SequenceShare,
)
from hillinfer.hf.prompts import CachePrompts, in_place
from hillinfer.kv.sequence import Sequence
from hillinfer.sessions.fingerprint import ModelIdentity
from hillinfer.settings import QuerySource
from hillinfer.trace.recorder import ForwardSpans

_CLOSED = "this cache is closed: make another with new_cache()"


class PassingCache(AttachedCache):
    """What hooks, layers and the attention function of an attached model call of a cache.

    Parameters
    ----------
    engine
        Where rows and shadow live, with those of other caches.
    family
        The cache that this is a fork of and its other forks; None for a cache of its own.
    batch
        The rows to start with, None for an empty cache.
    identity
        Of the model, for saving sessions; without one none can be saved.
    model
        The model that was attached, for messages.
    prompts
        The store that prompts are looked up in; None where none is named.
    """

    def __init__(
        self,
        engine: Engine,
        family: CacheFamily | None = None,
        batch: Batch | None = None,
        identity: ModelIdentity | None = None,
        model: ModelInUse | None = None,
        prompts: CachePrompts | None = None,
    ) -> None:
        runtime = engine.runtime
        super().__init__(
            layers=[HillInferLayer(self, layer) for layer in range(runtime.shape.layers)]
        )
        self._engine, self._runtime = engine, runtime
        self._batch = Batch(runtime) if batch is None else batch
        self.lengths = LayerLengths(runtime.shape.layers)
        self._identity = identity
        self._model = model
        self._prompts = prompts
        # Of the pass under way: whether its tokens are where and as a prompt's own pass has them.
        self._is_in_place = True
        self.spans = ForwardSpans.of(runtime.recorder)
        self.notes: Notes | None = None
        # Whether passes of several tokens attend to one set per layer.
        self.takes_one_set = False
        # Whether it computes rows again that were lost, which every layer is to have.
        self.is_again = False
        self.passes = 0
        self._plan: ForwardPlan | None = None
        self._pass: Use | None = None
        self._generate: Use | None = None
        # Of tokens that were stored and not attended to; None where the open group alone has them.
        self._fresh: Fresh = {}
        self._family = family or engine.open_family(Expectation())
        self._family.add(self._batch)
        engine.join()
        self._closer = weakref.finalize(self, engine.drop, self._family, self._batch)
        self._settle_lengths()

    # --- what the hooks and the attention function call -------------------------------------

    # Which thread asks is none of what a compiler could trace.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def index_length(self, layer: int) -> int:
        """Return the tokens of a layer, padding included.

        In the middle of a forward pass they include those that the layer has been brought by it;
        anywhere else, those of passes that got through.
        """
        plan, under_way = self._plan, self._pass
        if plan is None or (under_way is not None and under_way.is_own):
            return self.lengths.now[layer]
        return self.lengths.before(layer)

    def check_continues(self, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Refuse full ids that do not start with what this cache holds; see `Batch`."""
        with self._alone(Use(sys._getframe())):
            past = self.get_seq_length()
            if past:
                self._batch.check_continues(ids, mask, past)

    def check_model(self, model: Any) -> None:
        """Refuse another model than the cache's, and a number type that rows are not stored for."""
        if self._model is not None and self._model.model() is not model:
            raise self._model.of_another(model, self, self._engine.open_caches)
        stored, dtype = self._runtime.layout.stored_type, model.dtype
        if (stored is torch.bfloat16) is not (dtype is torch.bfloat16):
            raise of_another_type(stored, dtype)

    def check_positions(self, positions: torch.Tensor | None) -> None:
        """Notice positions, or numbers, that rows of the same tokens would not be stored with."""
        plan = self._plan
        if plan is not None and plan.tokens > 1:
            is_dense = not self.takes_one_set and not is_autocast()
            self._is_in_place = is_dense and in_place(
                positions, plan.start, plan.tokens, self._batch.pads
            )
            if not self._is_in_place:
                self._end_recordings(plan)

    def begin_generate(self, use: Use) -> Use | None:
        """Learn that a call of `generate` brings tokens until the use is over; see `AttachedCache`.

        Raises CacheUseError where another thread's call is under way.
        """
        self._check_generate()
        around, self._generate = self._generate, use
        return around

    def end_generate(self, around: Use | None) -> None:
        """Learn that the call is over, also one that Ctrl-C broke off in a forward pass."""
        self._generate = around
        # No hook told of that, and the pass would keep what the call refers to, this cache too.
        if self._pass is not None and not self._pass.is_under_way:
            self._pass.end()
        if self._prompts is not None:
            if self._prompts.is_tentative:
                # Nothing came behind what the store brought: the cache is as it was before.
                with self._alone(Use(sys._getframe())):
                    self._forget_tokens()
            self._prompts.forget()

    def begin_forward(self, ids: torch.Tensor, mask: torch.Tensor | None, use: Use) -> None:
        """Learn which tokens a forward pass brings; see `AttachedCache` and `Batch`."""
        self._check_generate()
        self._take(use, self._recover)
        try:
            self._begin(ids, mask, use)
        except BaseException:
            use.end()
            raise

    def end_forward(self) -> None:
        """Learn that the forward pass got through, and its tokens count.

        Raises
        ------
        CacheUseError
            Where a layer left the cache out; the pass is then forgotten.
        """
        if self.spans is not None:
            self.spans.end()
        use = self._pass
        try:
            self.end_joined()
        finally:
            # Last, because another thread that waits for its turn may fork this cache at once.
            if use is not None:
                use.end()

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store a layer's new keys and values, (batch, kv_heads, tokens, head_dim)."""
        plan = self._planned(layer, keys, values)
        layout, runtime = self._runtime.layout, self._runtime
        fresh: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        is_decoded = plan.tokens == 1 and not self.lengths.is_staged(layer)
        for share in plan.shares:
            sequence = share.sequence.of(layer)
            is_single, row = is_decoded and share.tokens, share.batch_rows[0]
            if is_single and runtime.append_token(layer, sequence, keys, values, row):
                fresh.append(None)
                continue
            own = [layout.round(share.newest(states)) for states in (keys, values)]
            runtime.count_overflows(sequence, sum(overflows for _, overflows in own))
            rounded = own[0][0], own[1][0]
            if share.tokens:
                runtime.append(layer, sequence, *rounded)
            fresh.append(rounded)
        self._fresh[layer] = fresh
        self.lengths.now[layer] += plan.tokens

    @property
    def takes_predictions(self) -> bool:
        """Whether the settings leave it open that queries are predicted."""
        return self._runtime.settings.query is not QuerySource.TRUE

    def announce(self, layer: int, predicted: Prediction, scaling: float) -> None:
        """Let every sequence select for a layer before the layer's own turn."""
        plan = self._plan
        assert plan is not None
        # Attention is computed without autocast.
        if plan.batch > 1 or is_autocast():
            self.announce_queries(layer, predicted.queries(), scaling)
            return
        share = plan.shares[0]
        if self._may_announce(layer, share, sequence := share.sequence.of(layer)):
            self._runtime.announce(layer, sequence, predicted, scaling)

    def begin_choice(self, layer: int) -> None:
        """Have tokens of a layer chosen that waited for its turn."""
        plan = self._plan
        if plan is not None and plan.shares:
            self._runtime.begin_choice(layer, plan.shares[0].sequence.of(layer))

    def announce_queries(self, layer: int, query: torch.Tensor, scaling: float) -> None:
        """Do what `announce` does with queries (batch, query_heads, 1, head_dim)."""
        assert self._plan is not None
        for share in self._plan.shares:
            if self._may_announce(layer, share, sequence := share.sequence.of(layer)):
                own = query[share.batch_rows[0]]
                self._runtime.announce(layer, sequence, own, scaling)

    def attend(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend to what `store` just completed; zeros for padding, and contiguous."""
        assert self._plan is not None
        batch, heads, tokens, head_dim = query.shape
        shares = self.lengths.attending(layer, self._plan).shares
        fresh = self._fresh.pop(layer, None)
        if fresh is None:
            raise UnsupportedFeatureError(
                f"layer {layer} attends twice to what it stored once (differential attention): "
                "this model needs its ordinary cache"
            )
        if batch == tokens == 1 and fresh[0] is None:
            sequence = shares[0].sequence.of(layer)
            attended = self._runtime.attend_selected(layer, sequence, query[0], None, scaling)
            return attended.view(1, 1, heads, head_dim)
        if batch == 1 and shares[0].tokens == tokens:
            return self._attended(layer, shares[0], query, scaling, fresh[0]).contiguous()[None]
        out = query.new_zeros((batch, tokens, heads, head_dim))
        for share, new in zip(shares, fresh, strict=True):
            if share.tokens:
                attended = self._attended(layer, share, query, scaling, new)
                for row in share.batch_rows:
                    out[row, tokens - share.tokens :] = attended
        return out

    @property
    def takes_whole(self) -> bool:
        """Whether a store is named, and the next pass may be a prompt's first."""
        is_empty = self._plan is not None or not self.get_seq_length()
        return self._prompts is not None and is_empty

    @property
    def holds_prompt(self) -> bool:
        """Whether there is a prompt to store, which is complete."""
        prompts = self._prompts
        return prompts is not None and prompts.is_complete(self.get_seq_length())

    # --- what joined batches and reading in stages call ------------------------------------

    @property
    def engine(self) -> Engine:
        """What this cache shares with others."""
        return self._engine

    @property
    def family(self) -> CacheFamily:
        """What it and its forks are, of which statistics are told together."""
        return self._family

    @property
    def sequences(self) -> list[Sequence]:
        """What the batch rows hold, each sequence once."""
        return self._batch.sequences()

    @property
    def row_lengths(self) -> list[int]:
        """The tokens that each batch row holds, padding left out, of passes that got through."""
        if not self._closer.alive:
            raise CacheUseError(_CLOSED)
        length = self.get_seq_length()
        return [length - pad for pad in self._batch.pads] or [0]

    @property
    def lone_token(self) -> LoneToken | None:
        """What the pass under way brings, where that is one token to the cache's only row."""
        return LoneToken.of(self._plan, self.lengths, self._fresh)

    def begin_joined(
        self, ids: torch.Tensor, mask: torch.Tensor | None, use: Use, others: int
    ) -> None:
        """Begin this cache's part of a pass, whose turn it is, with so many rows of others."""
        self._check_generate()
        self._check_process()
        self._recover()
        self._take_tokens(ids, mask, use, others)

    def end_joined(self) -> None:
        """Learn that a pass got through, whose turn others end; as `end_forward`."""
        plan = self._plan
        if plan is not None:
            self.lengths.check_attended(self._fresh)
            self.passes += 1
            for share in plan.shares:
                if share.sequence.recording is not None:
                    self._runtime.parts.rows.note_pass(share.sequence)
            if plan.tokens > 1 and self._is_in_place:
                groups = self._batch.end_forward(plan)
                if self._prompts is not None:
                    self._prompts.end_pass(sum(one.tokens for one in plan.shares), groups)
            elif self._prompts is not None:
                self._prompts.end_pass(0, 0)
        self._forget_forward()

    # --- inside ----------------------------------------------------------------------------

    def _attended(
        self,
        layer: int,
        share: SequenceShare,
        query: torch.Tensor,
        scaling: float,
        fresh: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """Return what one sequence's new tokens see, (tokens, query_heads, head_dim)."""
        own, runtime, sequence = share.newest(query), self._runtime, share.sequence.of(layer)
        # Only a forward of a single token selects; longer ones attend to everything, and so do
        # tokens of a prompt that come by stages, of which a single one may be left.
        if query.shape[2] == 1 and not self.lengths.is_staged(layer):
            keys = None if fresh is None else fresh[0]
            attended = runtime.attend_selected(layer, sequence, own, keys, scaling)
        else:
            assert fresh is not None
            among = sequence.told_among(layer)
            if self.takes_one_set and not self.lengths.is_staged(layer):
                with Explained(layer):
                    among = runtime.parts.one_set.chosen(layer, sequence, own, scaling)
            attended = runtime.attend_dense(layer, sequence, own, *fresh, scaling, among)
        return attended.transpose(0, 1)

    def _may_announce(self, layer: int, share: SequenceShare, sequence: Sequence) -> bool:
        # Where others say what is attended to, rows alone are read ahead, and to host memory.
        is_read = sequence.told is None or self._runtime.decode is not None
        return bool(share.tokens) and is_read and not self.lengths.waits(layer)

    def _planned(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> ForwardPlan:
        plan = self._plan
        if plan is None or self._pass is None or not self._pass.is_own:
            raise self._untold()
        plan = self.lengths.plan(layer, plan)
        plan.check_states(self._runtime.shape, layer, keys, values)
        return plan

    def _alone(self, use: Use) -> Use:
        """Return a use that has its turn; the cache holds whole tokens."""
        self._take(use, self._recover)
        return use

    def _alone_as_is(self, use: Use) -> Use:
        """Return a use that has its turn, whatever a pass that broke off left behind."""
        self._take(use, self._free)
        return use

    def _take(self, use: Use, prepare: Callable[[], None]) -> None:
        self._check_process()
        self._engine.turns.take(use)
        try:
            prepare()
            self._engine.serve(self._family)
        except BaseException:
            use.end()
            raise

    def _free(self) -> None:
        if not self._closer.alive:
            raise CacheUseError(_CLOSED)
        self._engine.free_dropped()

    def _begin(self, ids: torch.Tensor, mask: torch.Tensor | None, use: Use) -> ForwardPlan:
        """Begin a forward pass whose turn it is."""
        plan = self._take_tokens(ids, mask, use)
        # Last, so that the ids are kept even where the drive failed since the step before.
        self._runtime.begin_step()
        if self.spans is not None:
            self.spans.begin(ids.shape[1])
        return plan

    def _take_tokens(
        self, ids: torch.Tensor, mask: torch.Tensor | None, use: Use, others: int = 0
    ) -> ForwardPlan:
        start = self.get_seq_length()
        self._is_in_place = not self.takes_one_set
        if self._prompts is not None:
            self._prompts.begin_pass()
            if self._prompts.is_tentative and 0 < len(self._batch) < len(ids):
                # `generate` repeats its ids for beams, and what came from the store with them.
                self._batch.repeat(len(ids))
        shares = self._batch.begin_forward(ids, start, mask)
        plan = ForwardPlan(start, ids.shape[1], ids.shape[0], shares, others)
        # First of all: what fails from here on takes its tokens back.
        self._plan, self._pass, self._fresh = plan, use, {}
        self.lengths.begin(plan.tokens)
        if plan.tokens == 1 or self.takes_one_set:
            # Its rows are made under selection, and so is all that follows.
            self._end_recordings(plan)
        return plan

    def _end_recordings(self, plan: ForwardPlan) -> None:
        for share in plan.shares:
            if share.sequence.recording is not None:
                self._runtime.parts.rows.end_recording(share.sequence)

    def _recover(self) -> None:
        """Free dropped caches and forget a forward pass that broke off.

        The cache holds whole tokens again afterwards.
        """
        self._free()
        if self._plan is None:
            return
        start = self._plan.start
        if start == 0 or (self._prompts is not None and self._prompts.is_tentative):
            self._forget_tokens()
            return
        self._batch.truncate(start)
        self._forget_forward()

    def _forget_tokens(self) -> None:
        self._batch.clear()
        self.notes = None
        if self._prompts is not None:
            self._prompts.forget()
        self._forget_forward()

    def _forget_forward(self) -> None:
        self._plan, self._pass, self._fresh = None, None, {}
        self._settle_lengths()

    def _settle_lengths(self) -> None:
        layers = self._runtime.shape.layers
        self.lengths.set(self._batch.lengths(layers), self._batch.lacking_from(layers))

    def _check_process(self) -> None:
        if self._engine.is_inherited:
            raise CacheUseError(
                f"this cache belongs to the process that made it, and this is a fork of it (process"
                f" {os.getpid()}): save_session there and load_session in a process that was "
                "spawned, not forked (multiprocessing.get_context('spawn'))"
            )

    def _check_generate(self) -> None:
        if self._generate is not None and self._generate.is_elsewhere:
            raise CacheUseError(
                "another thread is generating with this cache: give each thread a fork() of it"
            )

    def _untold(self) -> CacheUseError:
        """Return why nobody announced what is being stored."""
        if not self._closer.alive:
            return CacheUseError(_CLOSED)
        self._check_process()
        if self._model is None:
            return CacheUseError(
                "this cache was not told about the forward pass: call the model that was attached"
            )
        return self._model.untold(self, self._engine.open_caches)
