# SPDX-License-Identifier: Apache-2.0
"""Pruned prefill on an unmodified model: deeper layers see fewer of a prompt's tokens.

Chunks wait at the first cut as boundary states, hidden states that enter its layer. With the last
chunk the layer before it decides which blocks stay, and what stays goes through the deeper layers,
chunk by chunk, up to the next cut. SlimInfer, section 3, which drops blocks for good; here a later
turn may choose anew from the boundary states.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hillinfer.errors import SettingsError, UnsupportedFeatureError
from hillinfer.generate.stages import Completed, OnDeeper
from hillinfer.hf.features import Guard, check_model
from hillinfer.hf.joined_cache import JoinedCache
from hillinfer.pruning.block_policies import DecodedBlocks, Decoding, Keep
from hillinfer.pruning.caches import Documents, empty_waiting, staged_cache
from hillinfer.pruning.decoding import BlockManager
from hillinfer.pruning.guards import (
    DocumentTracker,
    LayerGuard,
    PromptGuard,
    check_outputs,
    predictor_for,
    warn_of_pieces,
)
from hillinfer.pruning.passes import (
    ComingPrompt,
    Document,
    LaterTurns,
    Pass,
    PrunedRead,
    StagedCache,
    ThreadsPass,
    Window,
    coming_prompt,
    no_states,
)
from hillinfer.pruning.rankers import Ranker, check_weights
from hillinfer.pruning.schedule import BLOCK_TOKENS, Schedule
from hillinfer.pruning.stages import Stages, pruned_read
from hillinfer.pruning.states import Boundary, ChosenStates, States

# Of one piece that nobody waits for; a question that comes waits for the rest of it.
PIECE_TOKENS = 512


def _wait_between(cache: StagedCache, came: list[States], states: torch.Tensor) -> None:
    came.append(cache.wait_between(states))


def _never() -> bool:
    return False


class Pruning:
    """Makes a model read prompts in stages, with ordinary caches; a context manager that ends it.

    One sequence at a time, without padding. A prompt is a forward pass of several tokens, all
    chunks of a call of `generate`, or what `prompt` says. Of its logits those of the last token
    are there, and of no more than stayed. Threads may each use a cache of their own.

    Parameters
    ----------
    model
        A decoder-only model of a family whose queries are known, unmodified, with SDPA or eager
        attention.
    schedule
        Which layers lose tokens.
    ranker
        Chooses blocks.
    later
        What a turn behind an answer does.
    chunk_tokens
        Tokens that go through the deeper layers at once.
    decoding
        Which blocks bands have while tokens are decoded.
    know_cache
        Returns a cache as reading in stages knows it; see `staged_cache`.

    Raises
    ------
    SettingsError
        Where the schedule has layers that the model has not, keeps by weights and the ranker has
        none, or has several cuts and rows are to stay.
    UnsupportedFeatureError
        Where the model's attention is another one, or it is pruned already.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        schedule: Schedule,
        ranker: Ranker,
        later: LaterTurns = LaterTurns.KEEP,
        chunk_tokens: int = 1024,
        decoding: Decoding | None = None,
        know_cache: Callable[[Any, Documents], StagedCache | None] = staged_cache,
    ) -> None:
        check_model(model)
        decoder = model.get_decoder()
        schedule.check_layers(len(decoder.layers))
        check_weights(schedule, ranker)
        if later is LaterTurns.ENTER and len(schedule.cuts) > 1:
            raise SettingsError(
                f'prune={schedule}: later="enter" has states for one cut alone, and those that '
                'enter a second band are gone: take later="anew", or one cut'
            )
        if decoding is not None and decoding.enters and len(schedule.cuts) > 1:
            raise SettingsError(
                f'prune={schedule}: decoding="enter" has states for one cut alone: take '
                'decoding="blocks", or one cut'
            )
        self.schedule = schedule
        predictor, self._decoder = predictor_for(model), decoder
        self._ranker, self._later, self._know_cache = ranker, later, know_cache
        self._documents: Documents = weakref.WeakKeyDictionary()
        self._own = ThreadsPass()
        self._guards: list[Guard] = [PromptGuard(model, schedule)]
        self.layers = [LayerGuard(self, number, one) for number, one in enumerate(decoder.layers)]
        self._guards += self.layers
        self._stages = Stages(decoder, self.layers, predictor, ranker, schedule, chunk_tokens)
        self._blocks = BlockManager(self._stages, decoding or Keep())
        self._tracker = DocumentTracker(self._stages.bands, self._blocks, later)

    def __enter__(self) -> Pruning:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Give the model back as it was; harmless when done twice.

        Ordinary caches whose prompt still waits are emptied, which a warning says.
        """
        while self._guards:
            self._guards.pop().remove()
        self.layers.clear()
        empty_waiting(self._documents)

    @contextmanager
    def prompt(
        self, tokens: int, question_tokens: int | None = None, on_deeper: OnDeeper | None = None
    ) -> Iterator[None]:
        """Say how long the prompt is that forward passes in a block of code bring, in any chunks.

        Parameters
        ----------
        tokens
            At its end, with all that the cache held before.
        question_tokens
            How many of the last ones are the question, by whose queries blocks are chosen.
        on_deeper
            Takes a band's layers, how many tokens went through, and how many are to; from 0 on.
            With later="enter" it is told nothing behind the first prompt.
        """
        token = coming_prompt.set(ComingPrompt(tokens, question_tokens, on_deeper))
        try:
            yield
        finally:
            coming_prompt.reset(token)

    def read_of(self, cache: Any) -> PrunedRead | None:
        """Return what the last prompt of a cache lost; None where it lost nothing."""
        document = self._document(cache)
        return None if document is None else document.read

    def told_of(self, cache: Any) -> dict[str, Any] | None:
        """Return what `read_of` does, and by which schedule, as a report has it."""
        read = self.read_of(cache)
        return None if read is None else {"schedule": str(self.schedule), **read.as_json()}

    def waiting(self, cache: Any) -> range | None:
        """Return the layers for which a cache's prompt waits; None where it waits for none."""
        document = self._document(cache)
        waits = document is not None and document.is_pending
        return range(self.schedule.cuts[0].layer, len(self.layers)) if waits else None

    def decoding_of(self, cache: Any) -> DecodedBlocks | None:
        """Return what decoding did with blocks of a cache's last prompt; None where it may not."""
        document = self._document(cache)
        return None if document is None else self._blocks.report(document)

    def _document(self, cache: Any) -> Document | None:
        staged = self._know_cache(cache, self._documents)
        return None if staged is None else staged.document

    # --- while nobody waits ---

    @torch.no_grad()
    def complete(
        self, cache: Any, is_over: Callable[[], bool] = _never, piece_tokens: int = PIECE_TOKENS
    ) -> Completed:
        """Read whole what was read in stages: what was dropped goes through deeper layers, too.

        They begin anew, from boundary states of all tokens, and see all tokens before theirs. A
        cache that is whole then is as if nothing had been pruned, up to rounding, and stays so.
        What is not whole yet goes on here, or is chosen from by the next prompt.

        Parameters
        ----------
        cache
            That prompts were read into, of one sequence.
        is_over
            Asked before each piece: whether to stop, and go on another time.
        piece_tokens
            Of one piece.

        Returns
        -------
        How far it is.

        Raises
        ------
        UnsupportedFeatureError
            Where boundary states are not there: of answers they are kept with later="anew" alone.
        BudgetError, ColdPoolError
            As of a forward pass. Deeper layers have nothing then, and are read again by whatever
            comes.
        """
        staged = self._know_cache(cache, self._documents)
        document = None if staged is None else staged.document
        tokens, began = cache.get_seq_length(), time.perf_counter()
        if staged is None or document is None:
            # Nothing of it was ever dropped.
            return Completed(tokens, tokens)
        if document.boundary.tokens < tokens:
            raise no_states(tokens - document.boundary.tokens, tokens)
        bring = partial(self._complete, cache, staged, document, is_over, max(2, piece_tokens))
        first = self.schedule.cuts[0].layer
        try:
            staged.bring(first, bring)
        finally:
            document.completing_seconds += time.perf_counter() - began
        done, seconds = document.completed, document.completing_seconds
        if done == tokens:
            staged.note(None)
            # What reading all of it would have taken, by what its deeper layers did.
            layers = len(self.layers)
            staged.keep_whole(document.dense, seconds * layers / (layers - first))
        return Completed(tokens, done, seconds)

    def _complete(
        self,
        cache: Any,
        staged: StagedCache,
        document: Document,
        is_over: Callable[[], bool],
        piece_tokens: int,
    ) -> None:
        """Bring deeper layers pieces until they have all, or it is over."""
        tokens, bands = cache.get_seq_length(), self._stages.bands
        # Here, where no other thread uses what rows lie in.
        if tokens != document.length or not self._tracker.is_as_left(document, staged):
            self._tracker.cut_back(document, staged, tokens)
        if document.boundary.tokens != tokens:
            raise no_states(tokens - document.boundary.tokens, tokens)
        try:
            if document.positions:
                self._tracker.empty(document, staged)
            while document.completed < tokens and not is_over():
                start = document.completed
                # A single token reads all rows for itself alone: the piece before takes it along.
                more = tokens - start - piece_tokens
                stop = tokens if more <= 1 else start + piece_tokens
                states = document.boundary.take(torch.arange(start, stop))
                self._stages.whole(states, start, tokens, staged, cache)
                document.completed = stop
            if document.completed == tokens:
                staged.keep([torch.arange(tokens)] * len(bands), tokens)
        except BaseException:
            self._tracker.empty(document, staged)
            raise

    # --- a forward pass ---

    def run(
        self, number: int, layer: LayerGuard, hidden: torch.Tensor, given: dict[str, Any]
    ) -> Any:
        """Take hidden states (batch, tokens, hidden_size) through a layer, or let them wait."""
        cache = given.get("past_key_values")
        if cache is None or getattr(cache, "is_again", False):
            return layer.dense(hidden, given)
        if number == 0:
            self._own.end()
            self._own.begin(self._begin(cache, hidden, given))
        now = self._own.now
        if now is None:
            return layer.dense(hidden, given)
        try:
            out = self._run(now, number, layer, hidden, given)
        except BaseException:
            self._own.end()
            self._tracker.undo(now)
            raise
        if number == len(self.layers) - 1:
            self._own.end()
        return out

    def _run(
        self, now: Pass, number: int, layer: LayerGuard, hidden: torch.Tensor, given: dict[str, Any]
    ) -> Any:
        first = self.schedule.cuts[0].layer
        # Stages note what enters deeper layers.
        cut = self._blocks.windows.get(number) if number < first or not now.stages else None
        if cut is not None:
            wanted, windows = self._ranker.window(now.question_tokens), now.document.windows
            windows[cut] = Window.behind(windows.get(cut), hidden[:1], now.before, wanted)
        if number < first:
            length = now.before + now.tokens
            if number == first - 1 and now.stages and now.before and length == now.whole:
                now.cache.expect_keys(number, length)
            return layer.dense(hidden, given)
        if number == first:
            hidden = self._reach_cut(now, hidden, given)
        if now.stages:
            return hidden
        self._blocks.step(now, number, given)
        # Decoded tokens, and new ones behind what was kept, see what their own layer has.
        return layer.dense(hidden, given | self._stages.mask(now.cache, number, hidden))

    def _begin(self, cache: Any, hidden: torch.Tensor, given: dict[str, Any]) -> Pass | None:
        """Return what a pass brings; None where it is none of ours."""
        tokens, before = hidden.shape[1], cache.get_seq_length()
        coming = coming_prompt.get() or ComingPrompt(0)
        whole = max(coming.tokens, before + tokens)
        staged = self._know_cache(cache, self._documents)
        if staged is not None and not before:
            staged.note(None)
        document = None if staged is None else staged.document
        is_new = document is None
        if document is None and not self._begins(cache, staged, before, tokens, coming):
            return None
        assert staged is not None
        if document is not None and document.schedule != self.schedule:
            raise UnsupportedFeatureError(
                f"prune: this cache was read by the schedule {document.schedule}, and not by "
                f"{self.schedule}: go on with that one, or begin with an empty cache"
            )
        if document is None:
            document = Document(self.schedule, before, Boundary(before), completed=before)
            document.dense = min(before, staged.brought_dense or 0)
        elif document.length or before:
            if not coming.tokens and not self._later.chooses:
                warn_of_pieces(document, before, tokens)
            self._tracker.cut_back(document, staged, before)
        is_prompt = before < coming.tokens if coming.tokens else tokens > 1
        anew = self._later.chooses and is_prompt
        stages = document.is_pending or anew
        if stages:
            check_outputs(self._decoder.config, given)
            staged.check(hidden, given.get("attention_mask"))
            if document.boundary.tokens != before:
                raise no_states(before - document.boundary.tokens, before)
        self._blocks.check(staged, hidden.shape[0])
        if self._later is LaterTurns.ENTER and not staged.rows_move:
            raise UnsupportedFeatureError(
                'prune: later="enter" puts rows between those of a DynamicCache, and rows of a '
                'cache of new_cache() only come behind each other: take later="anew", or complete '
                "the document, which makes every later question cheaper"
            )
        if is_new:
            staged.open_bands([cut.layer for cut in self.schedule.cuts])
            staged.note(document)
        if stages:
            staged.begin_stages()
        document.passes = staged.passes
        held, question = document.fork(), coming.question_tokens
        return Pass(staged, document, before, tokens, whole, question, stages, held, is_prompt)

    def _begins(
        self,
        cache: Any,
        staged: StagedCache | None,
        before: int,
        tokens: int,
        coming: ComingPrompt,
    ) -> bool:
        """Whether a prompt begins that loses blocks, in a cache of which nothing is known."""
        is_pruned = before and cache.get_seq_length(self.schedule.cuts[0].layer) != before
        new = max(coming.tokens - before, tokens)
        prunes = self.schedule.prunes(new)
        if before and not is_pruned and staged is not None:
            # Behind what a store or a session brought: all of it stays, and the question does.
            has_more = new - (coming.question_tokens or 0) > 2 * BLOCK_TOKENS
            is_first = staged.brought_dense is not None
            return is_first and tokens > 1 and has_more and prunes
        if isinstance(cache, JoinedCache):
            is_pruned = is_pruned or any(one.notes is not None for one in cache.caches)
        if not is_pruned and (before or not prunes):
            return False
        if staged is None:
            raise UnsupportedFeatureError(
                "prune: a prompt is read in stages into a DynamicCache, or a cache of "
                f"new_cache(), not a {type(cache).__name__}: pass one of these"
            )
        if is_pruned:
            raise UnsupportedFeatureError(
                f"prune: nothing is known of a cache with {before} tokens in its first layer "
                "and fewer in deeper ones: go on with the cache itself and not a copy, and "
                "with the pruning that read it"
            )
        return True

    def _reach_cut(self, now: Pass, hidden: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        """Let a chunk wait, or take the whole prompt through the deeper layers."""
        document, length = now.document, now.before + now.tokens
        if now.stages or self._later.chooses or self._blocks.enters:
            # Rows of a batch that are one sequence have the same.
            # Behind steps that brought none they would be taken for those of the first tokens.
            if now.cache.is_alike and document.boundary.tokens == now.before:
                piece = now.cache.wait_with(hidden[:1])
                document.boundary = document.boundary.behind(piece)
            else:
                document.boundary = document.boundary.forgotten()
        document.length = length
        if now.tokens > 1 and document.dense == now.before:
            document.dense = length
        if not now.stages:
            # Their rows come behind those that were kept.
            new = torch.arange(now.before, length, device=hidden.device)
            document.positions = [torch.cat([one, new.to(one)]) for one in document.positions]
            return hidden
        now.cache.wait(self.schedule.cuts[0].layer)
        document.waits = length < now.whole and bool(document.positions)
        if length < now.whole:
            return hidden
        return self._deepen(now, given).expand(hidden.shape[0], -1, -1)

    def _deepen(self, now: Pass, given: dict[str, Any]) -> torch.Tensor:
        """Choose, and take what stays through band after band; return the last chunk's end."""
        if self._later is LaterTurns.ENTER and now.document.positions:
            return self._renew(now, given)
        document, cache = now.document, now.cache
        bands, window = self._stages.bands, document.windows[0].states
        boundary, now.emptied = document.boundary, True
        tokens, brought = boundary.tokens, boundary.brought
        self._tracker.empty(document, cache)
        active, came = torch.arange(tokens, device=window.device), [*boundary.pieces]
        document.positions, choosing, through = [], 0.0, list[float]()
        # A last piece may be a short one.
        end = deque[torch.Tensor](maxlen=2)
        for number, band in enumerate(bands):
            began = time.perf_counter()
            self._blocks.note_prompt(document, number, active, came, window)
            chosen = self._stages.chosen(cache, number, window, active, tokens, brought)
            active = active[chosen]
            # What was brought stays in its place, and is not read.
            entering = ChosenStates(came, chosen[brought:] - brought)
            document.positions.append(active)
            decided = time.perf_counter()
            wanted = self._ranker.window(now.question_tokens)
            came = []
            leave = partial(_wait_between, cache, came) if band is not bands[-1] else end.append
            own = active[brought:]
            leave = (coming_prompt.get() or ComingPrompt(0)).telling(band, len(own), leave)
            window = self._stages.through(entering, own, band, cache, given, wanted, leave)
            choosing += decided - began
            through.append(time.perf_counter() - decided)
        self._note_read(now, choosing, through)
        return torch.cat([*end], 1)[:, -self._stages.chunk :]

    def _renew(self, now: Pass, given: dict[str, Any]) -> torch.Tensor:
        """Choose, and compute what enters the band; return the last chunk's end."""
        document, (band,) = now.document, self._stages.bands
        window, (held,) = document.windows[0].states, document.positions
        boundary, began = document.boundary, time.perf_counter()
        active = torch.arange(boundary.tokens, device=window.device)
        self._blocks.note_prompt(document, 0, active, boundary.pieces, window)
        chosen = active[self._stages.chosen(now.cache, 0, window, active, boundary.tokens)]
        decided, now.emptied = time.perf_counter(), True
        rows, take = now.cache.ordinary(), boundary.take
        end = self._stages.renew(rows, held, chosen, take, band, given)
        document.positions = [chosen]
        through = [time.perf_counter() - decided]
        self._note_read(now, decided - began, through, end.shape[1])
        return end[:, -self._stages.chunk :]

    def _note_read(
        self, now: Pass, choosing: float, through: list[float], entered: int | None = None
    ) -> None:
        """Keep what a prompt lost, and the seconds of choosing and of each band."""
        document, bands = now.document, self._stages.bands
        now.cache.keep(document.positions, document.boundary.tokens)
        document.read = pruned_read(self._decoder, bands, document, choosing, through, entered)
        document.is_new = True
