# SPDX-License-Identifier: Apache-2.0
"""The cache that a model is given instead of its ordinary one."""

from __future__ import annotations

import os
import sys
import weakref
from pathlib import Path
from typing import Any, Never

import torch

from hillinfer.errors import CacheUseError, UnsupportedFeatureError
from hillinfer.generate.prompt import PromptForm
from hillinfer.hf.batch import Batch, ForwardPlan, SequenceShare
from hillinfer.hf.engine import CacheFamily, Engine, Expectation
from hillinfer.hf.features import ModelInUse, check_attended, check_states
from hillinfer.hf.layer import AttachedCache, HillInferLayer
from hillinfer.hf.turns import Use
from hillinfer.kv.saved_sequences import SavedBytes, SessionOrigin
from hillinfer.kv.sequence import Sequence
from hillinfer.sessions.fingerprint import ModelIdentity
from hillinfer.settings import QuerySource
from hillinfer.statistics import CacheStatistics
from hillinfer.trace.trace_file import ForwardSpans

_CLOSED = "this cache is closed: make another with new_cache()"


class HillInferCache(AttachedCache):
    """Keys and values of a batch of sequences, on a drive and partly in DRAM.

    Pass it as `past_key_values` to an attached model, to `generate` or to forward calls of your
    own. Identical rows of a batch (beams, `num_return_sequences`) are stored once and part when
    their tokens do.

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

    Notes
    -----
    Threads may each use a fork, or a cache of their own. Forward passes of caches that share files
    and threads come one after the other, and what is asked of a cache from another thread waits
    until the pass that is under way is through.
    """

    def __init__(
        self,
        engine: Engine,
        family: CacheFamily | None = None,
        batch: Batch | None = None,
        identity: ModelIdentity | None = None,
        model: ModelInUse | None = None,
    ) -> None:
        runtime = engine.runtime
        super().__init__(
            layers=[HillInferLayer(self, layer) for layer in range(runtime.shape.layers)]
        )
        self._engine, self._runtime = engine, runtime
        self._batch = Batch(runtime) if batch is None else batch
        self._index_lengths = [0] * runtime.shape.layers
        self._identity = identity
        self._model = model
        self.spans = ForwardSpans(runtime.recorder)
        self._plan: ForwardPlan | None = None
        self._pass: Use | None = None
        self._generate: Use | None = None
        # Of tokens that were stored and not attended to; None where the open group alone has them.
        self._fresh: dict[int, list[tuple[torch.Tensor, torch.Tensor] | None]] = {}
        self._family = family or engine.open_family(Expectation())
        self._family.add(self._batch)
        engine.join()
        self._closer = weakref.finalize(self, engine.drop, self._family, self._batch)

    # --- what a user calls -----------------------------------------------------------------

    def statistics(self) -> CacheStatistics:
        """Return what this cache and its forks did so far, in memory that the engine has for all.

        What a forward pass brought that broke off is counted until the cache is used again.
        """
        self._check_process()
        # Also in the middle of a pass of a fork.
        if self._engine.turns.is_own:
            return self._engine.statistics_of(self._family)
        with Use(sys._getframe()) as use:
            self._engine.turns.take(use)
            return self._engine.statistics_of(self._family)

    @property
    def token_ids(self) -> list[list[int]]:
        """The tokens given to the model so far, a list per batch row, padding left out.

        Those of a forward pass that failed are the last of them: what was generated is not lost
        when a drive fails. Needs no drive.
        """
        return self._batch.token_ids

    def fork(self) -> HillInferCache:
        """Return a cache with the same tokens that shares all full groups and segments.

        Both may go on independently, also in different threads; nothing is read or written for it.
        `copy.copy` and `copy.deepcopy` of a cache are forks.
        """
        with self._alone(Use(sys._getframe())):
            batch = self._batch.fork()
            copy = HillInferCache(self._engine, self._family, batch, self._identity, self._model)
            copy._index_lengths = list(self._index_lengths)
            return copy

    def __copy__(self) -> HillInferCache:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> HillInferCache:
        # Before what refers to this cache is copied, which may refer to it again.
        memo[id(self)] = fork = self.fork()
        return fork

    def __reduce__(self) -> Never:
        raise CacheUseError(
            "a cache cannot be pickled, because its rows are on the drive: save_session(directory) "
            "and, where it is to go on, attachment.load_session(directory)"
        )

    def save_session(
        self,
        directory: str | Path,
        tokenizer: Any = None,
        chunk_tokens: int | None = None,
        prompt_form: PromptForm | None = None,
    ) -> SavedBytes:
        """Save what this cache holds, to go on from it in another process.

        The cache goes on as before. Rows are not written again where the directory is on the cold
        pool's file system and nothing else lies in the pool.

        Parameters
        ----------
        directory
            Must not exist, or be empty; appears whole or not at all.
        tokenizer
            Kept as a digest, so that a session is refused with another one.
        chunk_tokens
            Tokens of one forward pass that read the document, to be kept with it.
        prompt_form
            How the document became a prompt, to be kept with it.

        Raises
        ------
        SessionError
            Where it cannot be saved there; nothing is left then.
        CacheUseError
            Where the cache holds several sequences, or padding.
        """
        if self._identity is None:
            raise CacheUseError("this cache knows no model: make it with attachment.new_cache()")
        with self._alone(Use(sys._getframe())):
            sequence = self._batch.only_sequence()
            fingerprint = self._identity.fingerprint(self._runtime.settings.key_mode, tokenizer)
            origin = SessionOrigin(fingerprint, chunk_tokens, prompt_form)
            return self._runtime.save(sequence, Path(directory), origin)

    @classmethod
    def resumed(
        cls,
        engine: Engine,
        family: CacheFamily,
        sequence: Sequence,
        identity: ModelIdentity,
        model: ModelInUse,
    ) -> HillInferCache:
        """Return a cache of one row, the first of its family, that continues a sequence."""
        cache = cls(engine, family, Batch.of(engine.runtime, sequence), identity, model)
        cache._index_lengths = list(sequence.lengths)
        return cache

    def close(self) -> None:
        """Free the rows; with the last fork the files and threads go too.

        Harmless when done twice. Dropping the cache does the same, but the rows of one that others
        share files and threads with are freed when the next of them is used. Does nothing in a fork
        of the process that made the cache.
        """
        if self._engine.is_inherited:
            self._closer.detach()
            return
        if self._engine.turns.is_own and not (self._pass is not None and self._pass.is_own):
            # In the middle of a pass of a fork, which is not the last cache then.
            self._closer()
            return
        with Use(sys._getframe()) as use:
            self._engine.turns.take(use)
            # Whoever detaches it closes: a cache is closed or dropped, once.
            if self._closer.detach() is not None:
                self._engine.leave(self._family, self._batch)

    def fill(self, ids: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        """Take tokens whose keys and values are known, without a forward pass.

        Nothing attends, so no query of theirs counts as a first hit of the pools.

        Parameters
        ----------
        ids
            (batch, tokens).
        keys, values
            One tensor per layer, (batch, kv_heads, tokens, head_dim).
        """
        with self._alone(Use(sys._getframe())) as use:
            plan = self._begin(ids, None, use)
            for layer, states in enumerate(zip(keys, values, strict=True)):
                self.store(layer, *states)
                fresh = self._fresh.pop(layer)
                for share, new in zip(plan.shares, fresh, strict=True):
                    if new is not None:
                        self._runtime.code_full_segments(layer, share.sequence, new[0])
            self.end_forward()

    # --- what transformers calls -----------------------------------------------------------

    def reset(self) -> None:
        """Forget all tokens; the cache can be used for another prompt."""
        with self._alone(Use(sys._getframe())):
            self._forget_tokens()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens of every row.

        Parameters
        ----------
        tokens_to_remove
            A negative count, or 0, as transformers passes it.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass a negative number of tokens to remove"
            )
        with self._alone(Use(sys._getframe())):
            length = max(0, self.get_seq_length() + tokens_to_remove)
            self._batch.truncate(length)
            self._index_lengths = [length] * len(self._index_lengths)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let batch row i continue what row beam_idx[i] held."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row; the copies are stored once until they part."""
        with self._alone(Use(sys._getframe())):
            self._batch.choose([i for i in range(len(self._batch)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the given batch rows, in the given order."""
        with self._alone(Use(sys._getframe())):
            self._batch.choose([int(i) for i in indices])

    def activate_past_recording(self) -> None:
        """Refuse assisted decoding, which announces itself with this call."""
        raise UnsupportedFeatureError(
            "assisted and prompt-lookup decoding need a cache that takes tokens back at every "
            "step: call generate without assistant_model and prompt_lookup_num_tokens"
        )

    @property
    def batch_size(self) -> int:
        """Rows of the batch, -1 before the first forward."""
        return len(self._batch) or -1

    # Which thread asks is none of what a compiler could trace.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def index_length(self, layer: int) -> int:
        """Return the tokens of a layer, padding included.

        In the middle of a forward pass they include those that the layer has been brought by it;
        anywhere else, those of passes that got through.
        """
        plan, under_way = self._plan, self._pass
        if plan is None or (under_way is not None and under_way.is_own):
            return self._index_lengths[layer]
        return plan.start

    # --- what the adapter calls ------------------------------------------------------------

    def check_continues(self, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Refuse full ids that do not start with what this cache holds.

        Parameters
        ----------
        ids
            What `generate` was given, (batch, tokens).
        mask
            Its attention mask, (batch, tokens) or longer, or None.

        Raises
        ------
        CacheUseError
            Where another prompt is given on a used cache.
        """
        with self._alone(Use(sys._getframe())):
            past = self.get_seq_length()
            if past:
                self._batch.check_continues(ids, mask, past)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse a model whose number type is not the one that rows are stored for."""
        bfloat16 = self._runtime.layout.stored_type is torch.bfloat16
        if bfloat16 is not (dtype is torch.bfloat16):
            made_for = "bfloat16" if bfloat16 else "float16 or float32"
            raise CacheUseError(
                f"this cache was made while the model computed in {made_for}, and it computes in "
                f"{str(dtype).removeprefix('torch.')} now: make another with new_cache()"
            )

    def begin_generate(self, use: Use) -> Use | None:
        """Learn that a call of `generate` brings tokens until the use is over.

        Returns
        -------
        The call of this thread that this one is made in, for `end_generate`.

        Raises
        ------
        CacheUseError
            Where another thread's call is under way.
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

    def begin_forward(self, ids: torch.Tensor, mask: torch.Tensor | None, use: Use) -> None:
        """Learn which tokens a forward pass brings.

        Parameters
        ----------
        ids
            (batch, tokens), left-padded.
        mask
            (batch, past + tokens) of zeros for padding, or None.
        use
            Is over when the pass is.
        """
        self._check_generate()
        self._take_turn(use)
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
        for share in plan.shares:
            if plan.tokens == share.tokens == 1 and runtime.append_token(
                layer, share.sequence, keys, values, share.batch_rows[0]
            ):
                fresh.append(None)
                continue
            rounded = []
            for states in (keys, values):
                own = _newest(states[share.batch_rows[0]], share.tokens)
                stored, overflows = layout.round(own)
                runtime.counters.fp16_overflows += overflows
                rounded.append(stored)
            if share.tokens:
                runtime.append(layer, share.sequence, rounded[0], rounded[1])
            fresh.append((rounded[0], rounded[1]))
        self._fresh[layer] = fresh
        self._index_lengths[layer] += plan.tokens

    @property
    def takes_predictions(self) -> bool:
        """Whether the settings leave it open that queries are predicted."""
        return self._runtime.settings.query is not QuerySource.TRUE

    def announce(self, layer: int, query: torch.Tensor, scaling: float) -> None:
        """Let every sequence select for a layer before the layer's own turn.

        Parameters
        ----------
        layer
            Index of the decoder layer; its new keys and values are not stored yet.
        query
            Predicted, (batch, query_heads, 1, head_dim).
        scaling
            Factor on inner products.
        """
        assert self._plan is not None
        for share in self._plan.shares:
            if share.tokens:
                own = query[share.batch_rows[0]]
                self._runtime.announce(layer, share.sequence, own, scaling)

    def attend(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend to what `store` just completed.

        Parameters
        ----------
        layer
            Index of the decoder layer.
        query
            (batch, query_heads, tokens, head_dim).
        scaling
            Factor on inner products.

        Returns
        -------
        (batch, tokens, query_heads, head_dim), contiguous; zeros for padding.
        """
        assert self._plan is not None
        batch, heads, tokens, head_dim = query.shape
        shares, fresh = self._plan.shares, self._fresh.pop(layer)
        if batch == tokens == 1 and fresh[0] is None:
            attended = self._runtime.attend_selected(
                layer, shares[0].sequence, query[0], None, scaling
            )
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

    # --- what a joined batch calls ---------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """What this cache shares with others."""
        return self._engine

    @property
    def sequences(self) -> list[Sequence]:
        """What the batch rows hold, each sequence of the engine's runtime once."""
        return self._batch.sequences()

    @property
    def row_lengths(self) -> list[int]:
        """The tokens that each batch row holds, padding left out, of passes that got through."""
        if not self._closer.alive:
            raise CacheUseError(_CLOSED)
        length = self.get_seq_length()
        return [length - pad for pad in self._batch.pads]

    def begin_joined(self, ids: torch.Tensor, mask: torch.Tensor | None, use: Use) -> None:
        """Begin this cache's part of a pass of several, whose turn it is; as `begin_forward`."""
        self._check_generate()
        self._check_process()
        self._recover()
        self._take_tokens(ids, mask, use)

    def end_joined(self) -> None:
        """Learn that a pass got through, whose turn others end; as `end_forward`."""
        plan = self._plan
        if plan is not None:
            check_attended(plan, self._index_lengths, self._fresh)
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
        own, sequence, runtime = query[share.batch_rows[0]], share.sequence, self._runtime
        # Only a forward of a single token selects; longer ones attend to everything.
        if query.shape[2] == 1:
            keys = None if fresh is None else fresh[0]
            attended = runtime.attend_selected(layer, sequence, own, keys, scaling)
        else:
            assert fresh is not None
            own = _newest(own, share.tokens)
            attended = runtime.attend_dense(layer, sequence, own, *fresh, scaling)
        return attended.transpose(0, 1)

    def _planned(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> ForwardPlan:
        plan = self._plan
        if plan is None or self._pass is None or not self._pass.is_own:
            raise self._untold()
        if self._index_lengths[layer] != plan.start:
            raise CacheUseError(
                f"layer {layer} brings keys and values twice in one forward pass: each layer needs "
                "a number (layer_idx) of its own"
            )
        check_states(plan, self._runtime.shape, layer, keys, values)
        return plan

    def _alone(self, use: Use) -> Use:
        """Return a use that has its turn; the cache holds whole tokens."""
        self._take_turn(use)
        return use

    def _take_turn(self, use: Use) -> None:
        self._check_process()
        self._engine.turns.take(use)
        try:
            self._recover()
            self._engine.serve(self._family)
        except BaseException:
            use.end()
            raise

    def _begin(self, ids: torch.Tensor, mask: torch.Tensor | None, use: Use) -> ForwardPlan:
        """Begin a forward pass whose turn it is."""
        plan = self._take_tokens(ids, mask, use)
        # Last, so that the ids are kept even where the drive failed since the step before.
        self._runtime.begin_step()
        self.spans.begin(ids.shape[1])
        return plan

    def _take_tokens(self, ids: torch.Tensor, mask: torch.Tensor | None, use: Use) -> ForwardPlan:
        start = self.get_seq_length()
        shares = self._batch.begin_forward(ids, start, mask)
        plan = ForwardPlan(start=start, tokens=ids.shape[1], batch=ids.shape[0], shares=shares)
        self._plan, self._pass, self._fresh = plan, use, {}
        return plan

    def _recover(self) -> None:
        """Free dropped caches and forget a forward pass that broke off.

        The cache holds whole tokens again afterwards.
        """
        if not self._closer.alive:
            raise CacheUseError(_CLOSED)
        self._engine.free_dropped()
        if self._plan is None:
            return
        start = self._plan.start
        if start == 0:
            self._forget_tokens()
            return
        self._batch.truncate(start)
        self._index_lengths = [start] * len(self._index_lengths)
        self._forget_forward()

    def _forget_tokens(self) -> None:
        self._batch.clear()
        self._index_lengths = [0] * len(self._index_lengths)
        self._forget_forward()

    def _forget_forward(self) -> None:
        self._plan = self._pass = None
        self._fresh = {}

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
        return self._model.untold()


def _newest(states: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the last tokens of (heads, tokens, head_dim), as a view."""
    return states if tokens == states.shape[1] else states[:, states.shape[1] - tokens :]
