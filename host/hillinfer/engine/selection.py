# SPDX-License-Identifier: Apache-2.0
"""Which tokens a layer attends to, chosen in its turn or ahead of it (HillInfer section 4.3)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from hillinfer.devices.started_scoring import AskedScoring, ChoiceGroup
from hillinfer.drive.files import round_up
from hillinfer.engine.budget_plan import SCORE_GROWTH_TOKENS, score_bytes
from hillinfer.engine.coded_call import ChoiceAhead, SplitAhead
from hillinfer.engine.queries import Ahead, Choice, Explained, Sets, shadow_states
from hillinfer.gpu.copies import CopiesAhead
from hillinfer.kv.gather import Gather
from hillinfer.kv.pool_manager import PoolManager
from hillinfer.kv.prefetch_buffer import PrefetchBuffer
from hillinfer.kv.sequence import Sequence
from hillinfer.kv.sequence_shadows import SequenceShadows
from hillinfer.memory_budget import Accountant, Part
from hillinfer.scoring.scorer import ImportanceEvaluation, SegmentShadow, Split
from hillinfer.trace.recorder import Lane, Recorder
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec

if TYPE_CHECKING:
    from hillinfer.engine.gpu_coded_step import AnyCodedStep

# Scoring of one layer, as the native library counts it in bytes (`Shape::work_bytes`), that is done
# while another thread would still be waking, and taking Python's lock and caches.
QUICK_BYTES = 4 << 20


class TokenSelection:
    """Codes what the shadow lacks, scores it and takes the top α (HillInfer section 4.1, HIE).

    Any thread may ask; shadows are coded and scored by one at a time.

    Parameters
    ----------
    evaluation
        Scores and selects.
    shadow
        Codes keys.
    manager
        Learns what the last queries of a prompt would select.
    spec, scope
        Fix the memory that scores take.
    accountant
        Counts it.
    recorder
        Notes how long coding and scoring take.
    begin_together
        Begins to score for several sequences at once; None where nothing is gained by it.

    Attributes
    ----------
    scoring
        Held by whoever codes or scores.
    """

    def __init__(
        self,
        evaluation: ImportanceEvaluation,
        shadow: SequenceShadows,
        manager: PoolManager,
        spec: KernelSpec,
        scope: Scope,
        accountant: Accountant,
        recorder: Recorder,
        begin_together: Callable[[Seq[AskedScoring]], None] | None = None,
    ) -> None:
        self._begin_together = begin_together
        self._group: ChoiceGroup[Choice, Sets | Split] | None = None
        self._own: dict[int, Sets | Split] = {}
        self._evaluation = evaluation
        self._is_fast = evaluation.is_fast
        self._shadow, self._manager = shadow, manager
        self._spec, self._scope = spec, scope
        heads = spec.scored_heads // spec.kv_heads
        token_bytes = spec.segment_bytes / spec.segment_tokens
        self._token_work = token_bytes * heads / spec.key_mode.code_bits
        self._set_count = 1 if scope is Scope.LAYER else spec.kv_heads
        self._accountant, self._recorder = accountant, recorder
        self._score_bytes = self._room_tokens = 0
        self.scoring = threading.Lock()

    def selects_all(self, length: int, lacking: int) -> bool:
        """Say whether so many rows are selected whole; as `ImportanceEvaluation.selects_all`."""
        return self._evaluation.selects_all(length, lacking)

    def everything(self, layer: int, sequence: Sequence, keys: torch.Tensor) -> Sets:
        """Return the sets of a sequence that is selected whole.

        A segment takes its statistics when it is full or first scored, so the shadow waits here.
        Parameters as in `code_full_segments`.
        """
        self.code_full_segments(layer, sequence, keys)
        return self._evaluation.everything(sequence.lengths[layer])

    def code_full_segments(
        self, layer: int, sequence: Sequence, keys: torch.Tensor, values: torch.Tensor | None = None
    ) -> None:
        """Code the key shadow of segments that the newest tokens made full.

        Parameters
        ----------
        layer, sequence
            Where the tokens were just appended.
        keys, values
            Theirs, stored type, (kv_heads, tokens, head_dim). Values are read back where they are
            None and wanted.
        """
        given = None
        if values is not None and self._evaluation.has_coded:
            given = shadow_states(values)
        with self.scoring, self._recorder.span(Lane.HOST_SCORING, "code", layer=layer):
            self._shadow.code_full_segments(layer, sequence, shadow_states(keys), given)

    def own(
        self,
        layer: int,
        sequence: Sequence,
        query: torch.Tensor,
        keys: torch.Tensor,
        scaling: float,
        before: Ahead | SplitAhead | None = None,
    ) -> Ahead:
        """Select for a token that was just appended, by its own query, or take what was told.

        Parameters
        ----------
        layer, sequence
            Where.
        query
            (query_heads, 1, head_dim) on the model's device.
        keys
            The new token's, stored type, (kv_heads, 1, head_dim).
        scaling
            Factor on inner products.
        before
            What was read ahead, of rows that were told for a token before; None for nothing.

        Raises
        ------
        CacheUseError
            Where the query is not finite.
        """
        length, landed = sequence.lengths[layer], None if before is None else before.landed
        told = sequence.told_rows(length)
        if told is not None:
            return Ahead([told] * self._set_count, landed, None)
        if self.selects_all(length, sequence.lacking):
            return Ahead(self.everything(layer, sequence, keys), landed, None)
        chosen = self._own.pop(id(sequence), None)
        if chosen is None:
            (chosen,) = self._choose([Choice.own(layer, sequence, query, keys, scaling)])
        sets, exact = both_of(chosen)
        return Ahead(sets, landed, None, exact)

    def is_quick(self, layer: int, sequence: Sequence) -> bool:
        """Say whether scoring a layer takes no longer than having another thread do it.

        It does where the processor scores little, and waits for neither a device nor a drive.
        """
        if sequence.told is not None:
            return False
        if not self._is_fast or sequence.lengths[layer] * self._token_work > QUICK_BYTES:
            return False
        # A generator takes five times as long, at every layer.
        for segment in sequence.segments:  # noqa: SIM110
            if segment.layers[layer].slot is not None:
                return False
        return True

    def announced(
        self, layer: int, sequence: Sequence, scaling: float, bring: Callable[[], torch.Tensor]
    ) -> Callable[[], Sets | Split]:
        """Return what selects for the token that is about to come, for another thread to call.

        What takes memory or looks at the open group is done here.

        Parameters
        ----------
        layer, sequence
            Where one token more is coming; all others are stored.
        scaling
            Factor on inner products.
        bring
            Returns the predicted query, float32 (query_heads, head_dim) on the CPU; may wait.
        """
        past, lacking, told = sequence.lengths[layer], sequence.lacking, sequence.told
        if told is not None:
            # What a token before attended to is mostly what the one that comes does.
            return lambda: [told[1]] * self._set_count
        coming = Choice(layer, sequence, past, scaling, bring, lacking)
        self.make_room(past)
        is_quick = self._shadow.codes_from_tail(layer, sequence)
        if sequence.observed[layer] is not None or not is_quick:
            with self.scoring, Explained(layer):
                self._coded(coming)
        return self._group.add(coming) if self._group else lambda: self._choose([coming])[0]

    def _choose(self, choices: list[Choice]) -> list[Sets | Split]:
        """Choose for sequences of one layer; what they share a device scores for all of them."""
        queries, layer = [one.bring() for one in choices], choices[0].layer
        span = partial(self._recorder.span, Lane.HOST_SCORING, "score", layer=layer)
        chosen = []
        self.make_room(sum(one.tokens for one in choices))
        with self.scoring, Explained(layer):
            asked = [
                AskedScoring(query, one.scaling, self._coded(one), one.coming)
                for one, query in zip(choices, queries, strict=True)
            ]
            if len(asked) > 1 and self._begin_together is not None:
                self._begin_together(asked)
            for one, own in zip(choices, asked, strict=True):
                given = own.query, own.scaling, own.segments, own.coming, one.lacking
                with span(tokens=one.tokens):
                    chosen.append(self._evaluation.chosen(*given))
        return chosen

    @contextmanager
    def own_together(self, choices: list[Choice]) -> Iterator[None]:
        """Let `own` choose in a block for several sequences of one layer that nothing chose for."""
        if self._begin_together is not None and len(choices) > 1:
            sequences = [id(one.sequence) for one in choices]
            self._own = dict(zip(sequences, self._choose(choices), strict=True))
        try:
            yield
        finally:
            self._own = {}

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let layers that are announced in a block, of several sequences, be scored together."""
        if self._begin_together is None:
            yield
            return
        self._group = group = ChoiceGroup(self._choose)
        try:
            yield
            self.make_room(sum(one.tokens for one in group.choices))
        finally:
            self._group = None
            group.end()

    def _coded(self, one: Choice) -> list[SegmentShadow]:
        layer, sequence = one.layer, one.sequence
        with self._recorder.span(Lane.HOST_SCORING, "code", layer=layer):
            if one.keys is None:
                shadows = self._shadow.code_past(layer, sequence, one.tokens)
            else:
                shadows = self._shadow.code_all(layer, sequence, shadow_states(one.keys))
        self._count_observed(layer, sequence, one.scaling, shadows)
        return shadows

    def _count_observed(
        self, layer: int, sequence: Sequence, scaling: float, shadows: list[SegmentShadow]
    ) -> None:
        """Count what the last prefill queries would select as the first hits, once."""
        observed, sequence.observed[layer] = sequence.observed[layer], None
        for query in () if observed is None else observed:
            chosen = self._evaluation.chosen(query, scaling, shadows, 0, sequence.lacking)
            sets, exact = both_of(chosen)
            own = np.unique(np.concatenate(sets if exact is None else exact))
            self._manager.tally(layer, sequence, own)

    def expect(self, tokens: int) -> None:
        """Learn that layers are about to choose from so many tokens, before the first asks."""
        if not self._evaluation.selects_all(tokens):
            self.make_room(tokens)

    def make_room(self, tokens: int) -> None:
        """Count what scoring so many tokens takes of memory."""
        if tokens <= self._room_tokens:
            return
        needed = score_bytes(self._spec, self._scope, tokens)
        if needed > self._score_bytes:
            self._accountant.take(Part.OTHER, needed - self._score_bytes)
            self._score_bytes = needed
        # Until then every layer and step asks for no more.
        self._room_tokens = round_up(tokens, SCORE_GROWTH_TOKENS)


def both_of(chosen: Sets | Split) -> tuple[Sets, Sets | None]:
    """Return selected sets, and the exact tokens of each where others are coded."""
    return (chosen.sets, chosen.exact) if isinstance(chosen, Split) else (chosen, None)


# --- while the layer before it computes ---


class PrefetchPipeline:
    """Selects tokens and reads their rows for layers that have not begun (APP).

    One thread scores, in the order that layers are announced; the rows it selects are read by the
    prefetch buffer's threads meanwhile.

    Parameters
    ----------
    gather
        Finds what is cold.
    prefetch
        Reads it ahead.
    threads
        Compute threads of the scoring thread.
    coded
        Knows which coded tokens' rows are wanted; None where none are coded.
    copies
        Sends what is selected to the model's GPU; None where it has none.
    """

    def __init__(
        self,
        gather: Gather,
        prefetch: PrefetchBuffer,
        threads: int,
        coded: AnyCodedStep | None = None,
        copies: CopiesAhead | None = None,
    ) -> None:
        self._coded, self._copies = coded, copies
        self._gather, self._prefetch = gather, prefetch
        self._scoring = ThreadPoolExecutor(
            1,
            thread_name_prefix="hillinfer-score",
            # Threads start with the machine's number of them, not with what was chosen.
            initializer=torch.set_num_threads,
            initargs=(threads,),
        )
        self._ahead: dict[tuple[int, int], Future[Ahead | SplitAhead]] = {}
        # An interrupt may come when the thread has it, and nobody else knows.
        self._is_announcing = False
        # Chosen in the caller's own thread.
        self._known: dict[tuple[int, int], Ahead | SplitAhead] = {}
        # In one of the native library's.
        self._choices: dict[tuple[int, int], ChoiceAhead] = {}

    def announce(
        self, layer: int, sequence: Sequence, past: int, select: Callable[[], Sets | Split]
    ) -> None:
        """Begin to select for a layer that comes next.

        Parameters
        ----------
        layer, sequence
            Whose attention comes.
        past
            Tokens of it that are stored; one more is coming.
        select
            Returns the selected sets; called from the scoring thread.
        """
        self._is_announcing = True
        self._ahead[layer, id(sequence)] = self._scoring.submit(
            self._work, layer, sequence, past, select
        )
        self._is_announcing = False

    @property
    def is_idle(self) -> bool:
        """Whether the scoring thread has nothing to do."""
        return all(one.done() for one in self._ahead.values())

    def select_now(
        self, layer: int, sequence: Sequence, past: int, select: Callable[[], Sets | Split]
    ) -> None:
        """Select for a layer that comes next in the caller's own thread; only reads go on.

        For what is selected sooner than another thread would begin to, while that is idle.
        Parameters as in `announce`, and errors wait for `take` as there.
        """
        ahead: Future[Ahead | SplitAhead] = Future()
        try:
            ahead.set_result(self._work(layer, sequence, past, select))
        except Exception as error:
            ahead.set_exception(error)
        self._ahead[layer, id(sequence)] = ahead

    def keep(self, layer: int, sequence: Sequence, ahead: Ahead | SplitAhead | ChoiceAhead) -> None:
        """Keep what was chosen for a layer that comes next until `take`, or who chooses it."""
        if isinstance(ahead, ChoiceAhead):
            self._choices[layer, id(sequence)] = ahead
        else:
            self._known[layer, id(sequence)] = ahead

    def read_on(self) -> None:
        """Begin to read what is cold of layers that come next, once they are chosen.

        Errors wait for `take`.
        """
        if not self._choices:
            return
        for key in [key for key, choice in self._choices.items() if choice.reads]:
            ahead: Future[Ahead | SplitAhead] = Future()
            try:
                ahead.set_result(self._choices[key].ahead())
            except Exception as error:
                ahead.set_exception(error)
            self._ahead[key] = ahead
            del self._choices[key]

    def begin_late(self, layer: int, sequence: Sequence) -> None:
        """Have tokens chosen by whoever waited for the layer's own products."""
        choice = self._choices.get((layer, id(sequence)))
        if choice is not None:
            choice.begin_late()

    def announced(self, layer: int, sequence: Sequence) -> Ahead | SplitAhead | None:
        """Return what was announced of a layer, once it is selected; None where nothing was.

        Raises
        ------
        Exception
            What went wrong while selecting.
        """
        key = layer, id(sequence)
        choice = self._choices.get(key)
        if choice is not None:
            self._known[key] = choice.ahead()
            del self._choices[key]
        known = self._known.get(key)
        if known is not None:
            return known
        ahead = self._ahead.get(key)
        return None if ahead is None else ahead.result()

    def take(self, layer: int, sequence: Sequence) -> Ahead | SplitAhead | None:
        """Return what `announced` does, of which nobody else is to know any more.

        Its rows are wanted now.
        """
        # An interrupt while waiting leaves it to `drop`.
        key = layer, id(sequence)
        choice = self._choices.get(key)
        if choice is not None:
            ahead: Ahead | SplitAhead | None = choice.ahead()
            del self._choices[key]
        else:
            ahead = self.announced(layer, sequence)
            if ahead is not None and self._known.pop(key, None) is None:
                del self._ahead[key]
        if ahead is not None and ahead.landed is not None:
            self._prefetch.want(ahead.landed)
        return ahead

    def drop(self) -> None:
        """Forget what was announced, because the forward pass broke off."""
        if self._ahead:  # Mostly each layer has taken what was announced of it.
            for under_way in self._ahead.values():
                under_way.cancel()
            wait(self._ahead.values())
            self._ahead.clear()
        if self._is_announcing:
            # Closed, nothing is under way.
            with suppress(CancelledError, RuntimeError):
                self._scoring.submit(int).result()
            self._is_announcing = False
        self._known.clear()
        self._drop_choices()
        if self._copies is not None:
            self._copies.settle()
        if self._prefetch.unclaimed or self._prefetch.claimed:
            self._prefetch.abandon_unclaimed()

    def close(self) -> None:
        """Stop the scoring thread, and wait for what is being chosen."""
        self._drop_choices()
        self._scoring.shutdown(cancel_futures=True)

    def _drop_choices(self) -> None:
        for choice in self._choices.values():
            choice.drop()
        self._choices.clear()

    def _work(
        self, layer: int, sequence: Sequence, past: int, select: Callable[[], Sets | Split]
    ) -> Ahead | SplitAhead:
        sets, exact = both_of(select())
        if exact is not None and self._coded is not None:
            return self._coded.begin_to_read(layer, sequence, past, sets, exact)
        union = sets[0] if len(sets) == 1 else np.unique(np.concatenate(sets))
        # The newest token is stored when its layer begins.
        stored = union[: union.searchsorted(past)]
        # When attention looks, the tail holds what it holds now, or what follows a full group.
        held = past // GROUP_TOKENS * GROUP_TOKENS
        landed = self._gather.land(layer, sequence, stored, held)
        if self._copies is None:
            return Ahead(sets, landed, None)
        # What is there is sent on at once, rather than with what has no room yet.
        self._prefetch.want(landed)
        return Ahead(sets, landed, self._copies.begin(layer, sequence, stored, held, landed))
