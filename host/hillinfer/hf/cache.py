# SPDX-License-Identifier: Apache-2.0
"""The cache that a model is given instead of its ordinary one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Never, Self, TypeVar

import torch

from hillinfer.errors import CacheUseError, SessionError, UnsupportedFeatureError
from hillinfer.extents.recording import EngineSide, Recording
from hillinfer.extents.shared_chunks import StoredRowsError
from hillinfer.generate.answering import Generation
from hillinfer.generate.prompt import PromptForm
from hillinfer.generate.run_report import StoreFacts, check_session
from hillinfer.hf.attention import without_autocast
from hillinfer.hf.batch import Batch, CacheFamily, Expectation
from hillinfer.hf.cache_pass import PassingCache
from hillinfer.hf.engine import Use
from hillinfer.hf.features import of_model
from hillinfer.hf.forward_plan import ForwardPlan, SequenceShare
from hillinfer.hf.prompts import ends_singly
from hillinfer.kv.opened_sequences import OpenedRows, StoredRows
from hillinfer.kv.saved_sequences import SavedBytes, SessionOrigin
from hillinfer.kv.sequence import Sequence
from hillinfer.settings import Settings
from hillinfer.statistics import CacheStatistics

# Of one pass that computes rows again, where nobody told how they were made.
_CHUNK_TOKENS = 1024
_Result = TypeVar("_Result")


class HillInferCache(PassingCache):
    """Keys and values of a batch of sequences, on a drive and partly in DRAM.

    Pass it as `past_key_values` to an attached model, to `generate` or to forward calls of your
    own. Identical rows of a batch (beams, `num_return_sequences`) are stored once and part when
    their tokens do.

    Made by `Attachment.new_cache` and `load_session`; parameters as in `PassingCache`.

    Notes
    -----
    Threads may each use a fork, or a cache of their own. Forward passes of caches that share files
    and threads come one after the other, and what is asked of a cache from another thread waits
    until the pass that is under way is through.
    """

    # --- what a user calls -----------------------------------------------------------------

    def statistics(self) -> CacheStatistics:
        """Return what this cache and its forks did so far, in memory that the engine has for all.

        Of steps of several caches together it counts its own rows. What no row is known for, such
        as bytes of key shadows and launches of a device, the attachment's statistics have alone.

        What a forward pass brought that broke off is counted until the cache is used again.
        """
        self._check_process()
        return self._engine.statistics(self._family)

    @property
    def token_ids(self) -> list[list[int]]:
        """The tokens given to the model so far, a list per batch row, padding left out.

        Those of a forward pass that failed are the last of them: what was generated is not lost
        when a drive fails. Needs no drive.
        """
        return self._batch.token_ids

    def fork(self) -> Self:
        """Return a cache with the same tokens that shares all full groups and segments.

        Both may go on independently, also in different threads; nothing is read or written for it.
        `copy.copy` and `copy.deepcopy` of a cache are forks.
        """
        return self._regaining(self._forked)

    def fork_for(self, expected_tokens: int, sequences: int = 1) -> Self:
        """Return a fork that is expected to get so long, as `Attachment.new_cache` says.

        Its statistics are its own. BudgetError where the budget does not hold it beside others.
        """
        family = self._engine.open_family(Expectation(expected_tokens, sequences))
        return self._regaining(partial(self._forked, family))

    @contextmanager
    def one_set(self) -> Iterator[None]:
        """Have passes of several tokens attend to one selected set per layer, as of a question.

        α says how many of the tokens before them; the pass' own tokens are all attended to. What is
        read so is not stored.
        """
        around, self.takes_one_set = self.takes_one_set, True
        try:
            yield
        finally:
            self.takes_one_set = around

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        tokens = ", ".join(str(len(row)) for row in self.token_ids)
        return f"<{type(self).__name__} of {tokens or 'no'} tokens{of_model(self._model)}>"

    def __copy__(self) -> Self:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
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
        SessionError, ColdPoolError
            Where it cannot be saved there, or a row not be read; nothing is left then.
        CacheUseError
            Where the cache holds several sequences, or padding.
        """
        if (identity := self._identity) is None:
            raise CacheUseError("this cache knows no model: make it with attachment.new_cache()")
        check_session(self.read_from_store, directory)

        def save() -> SavedBytes:
            with self._alone(Use(sys._getframe())):
                sequence = self._batch.only_sequence()
                bands = sequence.bands()
                is_whole = len({own.tokens for own in bands}) == 1
                if not is_whole or not all(own.is_ordered for own in bands):
                    raise SessionError(
                        f"cannot save the session {directory}: its prompt was read in stages, and "
                        "deeper layers have fewer rows, or have them in another order: complete it "
                        "with the pruning that read it, or read it without prune"
                    )
                fingerprint = identity.fingerprint(self._runtime.settings.key_mode.codes, tokenizer)
                origin = SessionOrigin(fingerprint, chunk_tokens, prompt_form)
                return self._runtime.save(sequence, Path(directory), origin)

        return self._regaining(save)

    def close(self) -> None:
        """Free the rows; with the last fork the files and threads go too.

        Harmless when done twice. Dropping the cache does the same, but the rows of one that others
        share files and threads with are freed when the next of them is used. Does nothing in a fork
        of the process that made the cache.
        """
        self.notes = None
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
                        own = share.sequence.of(layer)
                        self._runtime.code_full_segments(layer, own, *new)
            self.end_forward()

    def bring(self, first: int, act: Callable[[], None]) -> None:
        """Do something that brings the layers from `first` on tokens that the cache holds already.

        It is a forward pass of no new token, in which these layers get what stages bring them.

        Parameters
        ----------
        first
            Of the layers that get tokens.
        act
            Calls layers of the attached model.

        Raises
        ------
        CacheUseError
            Where the batch is not one sequence, or `act` left layers with different tokens.
        """
        with self._alone(Use(sys._getframe())) as use:
            shares = (SequenceShare(self._batch.only_sequence(), (0,), 0),)
            self._plan = ForwardPlan(self.get_seq_length(), 0, 1, shares)
            self._pass, self._fresh = use, {}
            self.lengths.begin(0)
            self.lengths.wait(first)
            self._runtime.begin_step()
            act()
            self.lengths.check_attended(self._fresh)
            self._forget_forward()

    def begin_stages(self) -> None:
        """Learn that layers get fewer tokens of the pass under way, so no store takes its rows."""
        assert self._plan is not None
        self._is_in_place = False
        self._end_recordings(self._plan)

    # --- what a store brings and takes -----------------------------------------------------

    def open_stored(self, stored: StoredRows) -> OpenedRows:
        """Take the first tokens of a stored prompt into this empty cache; see `SequenceOpener`."""
        with self._alone(Use(sys._getframe())):
            sequence = self._batch.open_one()
            try:
                opened = self._runtime.open_stored(sequence, stored)
            except BaseException:
                self._forget_tokens()
                raise
            self._settle_lengths()
            return opened

    def record(self, make: Callable[[EngineSide, int], Recording | None]) -> Recording | None:
        """Let the rows of the prompt that comes go to a store as they are made.

        Parameters
        ----------
        make
            Makes what takes them, of what they pass through, and of the first segment of the cache
            that has no statistics yet; None for nothing.
        """
        with self._alone(Use(sys._getframe())):
            sequence = (
                self._batch.open_one() if not len(self._batch) else self._batch.only_sequence()
            )
            segments = sequence.segments
            fresh = sum(own.layers[0].statistics is not None for own in segments)
            recording = make(self._runtime.parts.recording, fresh)
            sequence.recording = recording
            return recording

    def regain(self, error: StoredRowsError, model: Any) -> bool:
        """Have a model compute rows that a store cannot give back; False where nothing can.

        Nothing can where rows lie in a session's files.

        They go to the cold pool's own files, in the places of those that are lost, so forks and
        other caches of the same prompt have them there, too. All else stays: shadows, hot rows, and
        what was decoded. A forward pass that broke off is forgotten, and may begin again.

        Raises
        ------
        BudgetError
            Where the budget does not hold one sequence more.
        ColdPoolError
            Where the cold pool's own drive fails.
        """
        plan = self._plan
        if self._pass is not None:
            # Its tokens are computed in passes of their own.
            self._pass.end()
        coming = {} if plan is None else {id(one.sequence): one.tokens for one in plan.shares}
        is_dense = plan is not None and plan.tokens > 1
        for sequence, (_, made) in zip(self._batch.sequences(), self._batch.made, strict=True):
            whole = len(sequence.token_ids)
            # What is read in stages is not dense, and is read again by the pass itself.
            follows = is_dense and self._is_in_place
            follows = follows and made.dense == whole - coming.get(id(sequence), 0)
            dense = whole if follows else made.dense
            if not self._compute_again(model, sequence, made.chunk, dense):
                return False
        if self._prompts is not None:
            self._prompts.failed(str(error))
        if plan is not None and plan.start:
            with self._alone_as_is(Use(sys._getframe())):
                self._batch.truncate(plan.start)
                self._forget_forward()
        return True

    def _compute_again(self, model: Any, sequence: Sequence, chunk: int, dense: int) -> bool:
        """Read the first tokens of a sequence again, as far as any of their rows lie in a store.

        None do where another cache of the prompt had them computed meanwhile.

        Parameters
        ----------
        chunk
            Tokens of one pass, as they were read; 0 where nobody knows.
        """
        with self._alone_as_is(Use(sys._getframe())):
            self._runtime.settle()
            opener = self._runtime.parts.opener
            if opener.continues_session(sequence):
                return False
            stored = opener.stored_tokens(sequence)
            if not stored:
                return True
            size = chunk or _CHUNK_TOKENS
            # Whole passes: how many tokens one has shows in the bits of its rows.
            tokens = max(stored, min(-(-stored // size) * size, dense))
            again = opener.open_again(sequence, tokens)
            batch = Batch.of(self._runtime, again)
            side = HillInferCache(self._engine, self._family, batch, self._identity, self._model)
            side.is_again = True
        while ends_singly(tokens, size):
            size += 1
        try:
            # Rows that are stored were made without.
            with without_autocast(model.device.type):
                Generation(model, side, size).read(sequence.token_ids[:tokens].tolist())
        finally:
            side.close()
        return True

    def end_recording(self) -> None:
        """Publish all full groups that are recorded, and record no more."""
        with self._alone(Use(sys._getframe())):
            for sequence in self._batch.sequences():
                self._runtime.parts.rows.end_recording(sequence)

    @property
    def read_from_store(self) -> StoreFacts | None:
        """What a store did for the prompt that this cache began with; None where none is named."""
        return None

    def keep_read(self, tokens: int, seconds: float) -> None:
        """Store a prompt's first dense tokens, computed in `seconds`, where a store is named."""

    def await_stored(self) -> None:
        """Wait until everybody finds what of a complete prompt is on its way to a store."""

    @property
    def dense_tokens(self) -> int:
        """How many first tokens of all rows attended to all before them."""
        return min((made.dense for _, made in self._batch.made), default=0)

    @property
    def settings(self) -> Settings:
        """What the engine was opened with."""
        return self._runtime.settings

    # --- inside ----------------------------------------------------------------------------

    def _forked(self, family: CacheFamily | None = None) -> Self:
        with self._alone(Use(sys._getframe())):
            batch = self._batch.fork()
            try:
                return self._beside(batch, family)
            except BaseException:
                # Nobody else knows of these rows.
                batch.clear()
                raise

    def _regaining(self, act: Callable[[], _Result]) -> _Result:
        """Do something that reads rows back, once more where rows of a store had to be regained."""
        try:
            return act()
        except (StoredRowsError, SessionError) as error:
            lost = error.__cause__ if isinstance(error, SessionError) else error
            model = None if self._model is None else self._model.attached_model
            if model is None or not isinstance(lost, StoredRowsError):
                raise
            if not self.regain(lost, model):
                raise
        return act()

    def _beside(self, batch: Batch | None, family: CacheFamily | None = None) -> Self:
        """Return a cache with these rows; of this one's family where none is named."""
        prompts = None if self._prompts is None else self._prompts.fork()
        family, parts = family or self._family, (batch, self._identity, self._model, prompts)
        copy = type(self)(self._engine, family, *parts)
        copy.notes = None if self.notes is None else self.notes.fork()
        copy.passes = self.passes
        return copy

    # --- what transformers calls -----------------------------------------------------------

    def reset(self) -> None:
        """Forget all tokens; the cache can be used for another prompt."""
        # A pass that broke off needs no rows back first, which a drive may refuse.
        with self._alone_as_is(Use(sys._getframe())):
            self._forget_tokens()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens of every row.

        Parameters
        ----------
        tokens_to_remove
            A negative count, or 0, as transformers passes it.

        Raises
        ------
        BudgetError, ColdPoolError
            Where rows cannot be read back that stay. Nothing is forgotten then, unless other rows
            of the batch are cut already: whatever uses the cache next cuts the others first.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass a negative number of tokens to remove"
            )

        length: int | None = None

        def crop() -> None:
            nonlocal length
            with self._alone(Use(sys._getframe())):
                # Once: where lost rows are computed between, other rows are cut already.
                if length is None:
                    length = max(0, self.get_seq_length() + tokens_to_remove)
                # As a pass of no tokens: where it breaks off, whoever comes next forgets the rest.
                self._plan = ForwardPlan(length, 0, len(self._batch), ())
                try:
                    self._batch.truncate(length)
                finally:
                    if self._batch.is_even:
                        self._plan = None
                    self._settle_lengths()

        self._regaining(crop)

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
