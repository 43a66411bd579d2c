# SPDX-License-Identifier: Apache-2.0
"""Scores and reads for the next layer while the one before it computes (HillInfer section 4.3)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.gpu.copies import CopiedRows, CopiesAhead
from hillinfer.kv.gather import Gather
from hillinfer.kv.prefetch_buffer import LandedRows
from hillinfer.kv.sequence import Sequence
from hillinfer_model.kernel_spec import GROUP_TOKENS

Sets = list[NDArray[np.int64]]


@dataclass(frozen=True)
class Ahead:
    """What is known of a layer before its attention begins.

    Parameters
    ----------
    sets
        The selected sets, one for the layer or one per KV head.
    landed
        Their cold rows that are read ahead, or None.
    copied
        What of them is on its way to the model's GPU; None where it has none.
    """

    sets: Sets
    landed: LandedRows | None
    copied: Future[CopiedRows] | None


class PrefetchPipeline:
    """Selects tokens and reads their rows for layers that have not begun (APP).

    One thread scores, in the order that layers are announced; the rows it selects are read by the
    prefetch buffer's own thread meanwhile.

    Parameters
    ----------
    gather
        Reads rows ahead.
    threads
        Compute threads of the scoring thread.
    copies
        Sends what is selected to the model's GPU; None where it has none.
    """

    def __init__(self, gather: Gather, threads: int, copies: CopiesAhead | None = None) -> None:
        self._gather = gather
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

    def announce(
        self, layer: int, sequence: Sequence, past: int, select: Callable[[], Sets]
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
        self, layer: int, sequence: Sequence, past: int, select: Callable[[], Sets]
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

    def keep(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        landed: LandedRows | None,
    ) -> None:
        """Keep what was chosen for a layer that comes next until `take`, and what lands of it."""
        self._known[layer, id(sequence)] = Ahead([positions], landed, None)

    def announced(self, layer: int, sequence: Sequence) -> Ahead | None:
        """Return what was announced of a layer, once it is selected; None where nothing was.

        Raises
        ------
        Exception
            What went wrong while selecting.
        """
        key = layer, id(sequence)
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
            self._gather.want(ahead.landed)
        return ahead

    def drop(self) -> None:
        """Forget what was announced, because the forward pass broke off."""
        for under_way in self._ahead.values():
            under_way.cancel()
        wait(self._ahead.values())
        self._ahead.clear()
        self._known.clear()
        if self._copies is not None:
            self._copies.settle()
        self._gather.abandon_unclaimed()

    def close(self) -> None:
        """Stop the scoring thread."""
        self._scoring.shutdown(cancel_futures=True)

    def _work(self, layer: int, sequence: Sequence, past: int, select: Callable[[], Sets]) -> Ahead:
        sets = select()
        union = sets[0] if len(sets) == 1 else np.unique(np.concatenate(sets))
        # The newest token is stored when its layer begins.
        stored = union[: union.searchsorted(past)]
        # When attention looks, the tail holds what it holds now, or what follows a full group.
        held = past // GROUP_TOKENS * GROUP_TOKENS
        landed = self._gather.land(layer, sequence, stored, held)
        if self._copies is None:
            return Ahead(sets, landed, None)
        # What is there is sent on at once, rather than with what has no room yet.
        self._gather.want(landed)
        return Ahead(sets, landed, self._copies.begin(layer, sequence, stored, held, landed))
