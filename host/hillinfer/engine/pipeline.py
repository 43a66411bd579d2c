# SPDX-License-Identifier: Apache-2.0
"""Tokens are selected and their rows read while the layer before computes (section 4.3, APP)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import numpy as np
import torch

from hillinfer.engine.coded_step import CodedStep
from hillinfer.engine.selection import Ahead, Sets, both_of
from hillinfer.gpu.copies import CopiesAhead
from hillinfer.kv.gather import Gather
from hillinfer.kv.prefetch_buffer import LandedRows, PrefetchBuffer
from hillinfer.kv.sequence import Sequence
from hillinfer.scoring.scorer import Split
from hillinfer_model.kernel_spec import GROUP_TOKENS

if TYPE_CHECKING:
    from hillinfer.engine.choice_ahead import ChoiceAhead


class PrefetchPipeline:
    """Selects tokens and reads their rows for layers that have not begun (APP).

    One thread scores, in the order that layers are announced; the rows it selects are read by the
    prefetch buffer's own thread meanwhile.

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
        coded: CodedStep | None = None,
        copies: CopiesAhead | None = None,
    ) -> None:
        self._coded = coded
        self._gather = gather
        self._prefetch = prefetch
        self._copies = copies
        self._scoring = ThreadPoolExecutor(
            1,
            thread_name_prefix="hillinfer-score",
            # Threads start with the machine's number of them, not with what was chosen.
            initializer=torch.set_num_threads,
            initargs=(threads,),
        )
        self._ahead: dict[tuple[int, int], Future[Ahead]] = {}
        # Chosen in the caller's own thread.
        self._known: dict[tuple[int, int], Ahead] = {}
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
        self._ahead[layer, id(sequence)] = self._scoring.submit(
            self._work, layer, sequence, past, select
        )

    @property
    def is_idle(self) -> bool:
        """Whether the scoring thread has nothing to do."""
        return all(one.done() for one in self._ahead.values())

    def select_now(
        self, layer: int, sequence: Sequence, past: int, select: Callable[[], Sets | Split]
    ) -> None:
        """Select for a layer that comes next in the caller's own thread; only reads go on.

        For what is selected sooner than another thread would begin to, while that is idle: layers
        are selected one after the other. Parameters as in `announce`, and errors wait for `take` as
        there.
        """
        ahead: Future[Ahead] = Future()
        try:
            ahead.set_result(self._work(layer, sequence, past, select))
        except Exception as error:
            ahead.set_exception(error)
        self._ahead[layer, id(sequence)] = ahead

    def keep(self, layer: int, sequence: Sequence, sets: Sets, landed: LandedRows | None) -> None:
        """Keep what was chosen for a layer that comes next until `take`, and what lands of it."""
        self._known[layer, id(sequence)] = Ahead(sets, landed, None)

    def keep_choice(self, layer: int, sequence: Sequence, choice: ChoiceAhead) -> None:
        """Keep what is being chosen of rows that are all hot, until `take`."""
        self._choices[layer, id(sequence)] = choice

    def announced(self, layer: int, sequence: Sequence) -> Ahead | None:
        """Return what was announced of a layer, once it is selected; None where nothing was.

        Raises
        ------
        Exception
            What went wrong while selecting.
        """
        key = layer, id(sequence)
        choice = self._choices.get(key)
        if choice is not None:
            self._known[key] = Ahead(choice.sets(), None, None)
            del self._choices[key]
        known = self._known.get(key)
        if known is not None:
            return known
        ahead = self._ahead.get(key)
        return None if ahead is None else ahead.result()

    def take(self, layer: int, sequence: Sequence) -> Ahead | None:
        """Return what `announced` does, of which nobody else is to know any more.

        Its rows are wanted now.
        """
        # An interrupt while waiting leaves it to `drop`.
        ahead = self.announced(layer, sequence)
        if ahead is not None:
            key = layer, id(sequence)
            if self._known.pop(key, None) is None:
                del self._ahead[key]
            for landed in (ahead.landed, ahead.arriving):
                if landed is not None:
                    self._prefetch.want(landed)
        return ahead

    def drop(self) -> None:
        """Forget what was announced, because the forward pass broke off."""
        # Every step asks, and mostly each layer has taken what was announced of it.
        if self._ahead:
            for under_way in self._ahead.values():
                under_way.cancel()
            wait(self._ahead.values())
            self._ahead.clear()
        self._known.clear()
        self._drop_choices()
        if self._copies is not None:
            self._copies.settle()
        if self._prefetch.unclaimed:
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
    ) -> Ahead:
        sets, exact = both_of(select())
        wanted = sets if exact is None else exact
        union = wanted[0] if len(wanted) == 1 else np.unique(np.concatenate(wanted))
        # The newest token is stored when its layer begins.
        stored = union[: union.searchsorted(past)]
        # When attention looks, the tail holds what it holds now, or what follows a full group.
        held = past // GROUP_TOKENS * GROUP_TOKENS
        landed = self._gather.land(layer, sequence, stored, held)
        if self._copies is None:
            if exact is None or self._coded is None:
                return Ahead(sets, landed, None)
            missing = self._coded.missing(layer, sequence, sets, exact, held)
            arriving = self._gather.land(layer, sequence, missing, held)
            return Ahead(sets, landed, None, exact, arriving)
        # What is there is sent on at once, rather than with what has no room yet.
        self._prefetch.want(landed)
        return Ahead(sets, landed, self._copies.begin(layer, sequence, stored, held, landed))
