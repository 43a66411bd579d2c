# SPDX-License-Identifier: Apache-2.0
"""Checks rows that were read and copies them into a cache, in reading threads or in the pass.

Where a pass keeps every core busy, each of its parallel loops ends when its slowest thread does. A
thread that reads takes a core from one of them and the others wait: what it computes costs the pass
all of its time, and not the share of a core. So rows stay where they were read, and a thread that
has a core only while nobody else wants it puts them to their places. What it has not done when the
pass comes for them all threads of the pass do together.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from hillinfer.arrived_rows import ArrivedRows, Taker
from hillinfer.reuse.landed_states import LandedStates, OfferedRows

# So often whoever settles looks whether the pass came, and so long it waits for a group that was
# begun when no core was wanted, and that none is left for.
_LOOK_SECONDS, _ENDING_SECONDS = 0.02, 0.001
_NO_HURRY_SECONDS = 1.0
# Layers that memory must hold of what waits: the one that a pass comes to, and the next.
_LEAST_LAYERS = 2
# Layers that come at once: each time several threads wake beside the pass.
_WAITING_LAYERS = 8


def threads_of_passes() -> int:
    """Return how many threads of a pass keep every core busy; 0 where some core is left."""
    threads = torch.get_num_threads()
    return threads if threads >= len(os.sched_getaffinity(0)) else 0


@dataclass(frozen=True)
class PlacingRules:
    """When rows wait for a pass that places them.

    Parameters
    ----------
    threads
        Of a pass, which keep every core busy; with 0 nothing waits. As torch and the cores of this
        process say where None.
    patience_seconds
        A pass that does not come for rows is not waited for any longer.
    """

    threads: int | None = None
    patience_seconds: float = 0.5

    def __post_init__(self) -> None:
        if (self.threads or 0) < 0 or not self.patience_seconds >= 0:
            raise ValueError(f"{self}: give 0 or more")


class StoppedError(Exception):
    """Nobody waits any longer."""


@dataclass
class _Waiting:
    """Rows of a piece that wait for a pass.

    Parameters
    ----------
    rows
        Of it.
    offered
        Their way to their places.
    taker
        The thread that places them; None where none does.
    is_done
        Whether they are in their places, or never will be.
    error
        Why not.
    """

    rows: list[ArrivedRows]
    offered: OfferedRows
    taker: int | None = None
    is_done: bool = False
    error: Exception | None = None

    @property
    def layer(self) -> int:
        """Whose rows they are; the first layer's of several."""
        return self.rows[0].layer


class RowPlacing(Taker):
    """Checks rows and puts them to their places.

    Parameters
    ----------
    states
        Where they go.
    tokens
        How many are wanted.
    landed
        Called with rows that are right and in their places, by whoever placed them; again where
        whoever did was interrupted.
    changed
        Held while `landed` is called, and told of everything that a pass may wait for.
    threads
        Of a pass that places what waits for it; with 0 nothing waits.
    patience_seconds
        As in `PlacingRules`.
    """

    def __init__(
        self,
        states: LandedStates,
        tokens: int,
        landed: Callable[[ArrivedRows], None],
        changed: threading.Condition,
        threads: int,
        patience_seconds: float = PlacingRules.patience_seconds,
    ) -> None:
        self._states, self._tokens, self._landed = states, tokens, landed
        self._changed = changed
        self._threads, self._patience = threads, patience_seconds
        # Few, because a layer that waits takes memory until the pass comes to it.
        self.most_layers = _WAITING_LAYERS if threads else None
        self._waiting: list[_Waiting] = []
        self._of: dict[ArrivedRows, _Waiting] = {}
        self._ending: list[OfferedRows] = []
        self._is_computing = self._is_stopped = False

    @staticmethod
    def threads_for(states: LandedStates, layers_ahead: int, rules: PlacingRules) -> int:
        """Return how many threads of a pass place rows; 0 where those that read do.

        Parameters
        ----------
        states
            Where rows go.
        layers_ahead
            Layers that may wait in memory.
        rules
            Say what a pass has.
        """
        if not states.is_native or layers_ahead < _LEAST_LAYERS:
            return 0
        return threads_of_passes() if rules.threads is None else rules.threads

    def has_waiting(self, layer: int) -> bool:
        """Return whether `help` has something to do for a layer."""
        return any(one.layer <= layer for one in self._waiting)

    def take(self, arrived: Iterable[ArrivedRows]) -> None:
        """Place rows, or let them wait while a pass computes; StoppedError after `stop`."""
        if self._is_stopped:
            raise StoppedError
        if not (self._threads and self._is_computing):
            for one in arrived:
                one.check()
                self._states.place(one.layer, one.position, one.rows, self._tokens)
                with self._changed:
                    self._landed(one)
            return
        rows = list(arrived)
        own = _Waiting(rows, self._states.offer(rows, self._tokens))
        with self._changed:
            self._of[own.rows[0]] = own
            self._waiting.append(own)
            self._changed.notify_all()

    def settle(self, arrived: Sequence[ArrivedRows]) -> bool:
        """Wait until rows are placed that were to wait; raise why they are not right.

        Return whether nobody uses their memory any more.
        """
        own = self._of.get(arrived[0])
        if own is None:
            return True
        until = time.monotonic() + self._patience
        while not own.offered.is_placed(_LOOK_SECONDS):
            if own.taker is not None or not self._is_computing or time.monotonic() > until:
                break
        with self._changed:
            # Some passes end in the middle, and some compute for long.
            self._is_computing = self._is_computing and time.monotonic() <= until
            # A pass that is interrupted while it places them gives them back.
            self._changed.wait_for(lambda: own.is_done or own.taker is None)
            is_own = not own.is_done
            if is_own:
                self._waiting.remove(own)
                own.taker = threading.get_ident()
        if is_own:
            try:
                self._place([own], 1)
            finally:
                # `close` waits for it, whatever was raised.
                own.is_done = True
        # The memory of those that have ended since is not held any longer.
        self._ending = [one for one in self._ending if not one.end(0.0)]
        is_free = own.offered.end(_ENDING_SECONDS)
        if not is_free:
            self._ending.append(own.offered)
        # Not before: `close` ends what is still there, whatever was raised above.
        del self._of[arrived[0]]
        if own.error is not None:
            raise own.error
        return is_free

    def help(self, layer: int) -> None:
        """Place what waits of a layer and those before it, with all threads of the pass."""
        own: list[_Waiting] = []
        try:
            with self._changed:
                own += [one for one in self._waiting if one.layer <= layer]
                for one in own:
                    one.taker = threading.get_ident()
                self._waiting = [one for one in self._waiting if one.layer > layer]
            self._place(own, self._threads)
        except BaseException:
            # Of an interrupt, too, and wherever that struck. Nothing is wrong with these rows: who
            # read them places them, once more where they were placed.
            with self._changed:
                for one in own:
                    if one.taker == threading.get_ident() and not one.is_done:
                        one.taker = None
                        self._waiting = [*(o for o in self._waiting if o is not one), one]
                self._changed.notify_all()
            raise

    def close(self) -> None:
        """Forget rows that were not settled; return once nobody uses them, or any other."""
        with self._changed:
            left, self._waiting = list(self._of.values()), []
            for own in left:
                own.is_done = own.is_done or own.taker is None
            # The pass may be placing some, or be interrupted.
            self._changed.wait_for(lambda: all(own.is_done or own.taker is None for own in left))
            self._waiting = []
        for one in [*self._ending, *(own.offered for own in left)]:
            while not one.end(_NO_HURRY_SECONDS):
                pass

    def let_wait(self) -> None:
        """Let rows wait from here on: a pass computes, and will come for them."""
        if not self._is_computing:
            with self._changed:
                self._is_computing = True

    def place_at_once(self) -> None:
        """Place rows as they are read from here on: no pass computes."""
        with self._changed:
            self._is_computing = False
            self._changed.notify_all()

    def stop(self) -> None:
        """Place nothing from here on: nobody waits any longer."""
        self._is_stopped = True
        self.place_at_once()

    # --- inside ----------------------------------------------------------------------------

    def _place(self, waiting: Sequence[_Waiting], threads: int) -> None:
        """Place rows; `settle` raises what is wrong with them, and not the pass in its middle."""
        for own in waiting:
            sums = own.offered.place(threads)
            try:
                for one, found in zip(own.rows, sums, strict=True):
                    one.check(found)
            except Exception as error:
                own.error = error
            with self._changed:
                for one in own.rows:
                    if one.is_checked:
                        self._landed(one)
                own.is_done = True
                self._changed.notify_all()
