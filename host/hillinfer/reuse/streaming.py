# SPDX-License-Identifier: Apache-2.0
"""Streams a stored prefix into a cache in memory, layer by layer, while other layers compute.

Layer l of a pass needs rows of layer l alone. So reading goes on while the layers before compute,
and a pass begins before it knows whether all rows will come as they were written. Where they do
not, what was computed so far is right all the same: it used rows that were compared with their
checksums. What is missing is then computed from the tokens themselves, in the middle of the pass,
by a pass of its own behind the rows that did come.
"""

from __future__ import annotations

import contextvars
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeGuard

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hillinfer.arrived_rows import ArrivedRows
from hillinfer.reuse.landed_states import LandedStates, StreamedLayer
from hillinfer.reuse.row_placing import PlacingRules, RowPlacing, StoppedError
from hillinfer.schedule.windows import SlackTable
from hillinfer.store.keys import CHUNK_TOKENS
from hillinfer.store.prefix import StoredPrefix, WrongBytesError
from hillinfer.trace.recorder import Lane, Recorder
from hillinfer_model.kernel_spec import GROUP_TOKENS

States = tuple[torch.Tensor, torch.Tensor]


class OrdinaryCache(Protocol):
    """A cache of transformers that lies in memory."""

    def update(self, key_states: Any, value_states: Any, layer_idx: int) -> Any:
        """Take keys and values of new tokens in one layer."""

    def get_seq_length(self) -> int:
        """Return how many tokens it holds."""


def takes_streams(cache: Any) -> TypeGuard[DynamicCache]:
    """Return whether a cache's layers can be replaced by streamed ones."""
    return (
        type(cache) is DynamicCache
        and not cache.offloading
        and all(type(layer) is DynamicLayer for layer in cache.layers)
    )


@dataclass
class LoadingCounts:
    """What loading stored prefixes into caches in memory took, running totals.

    Parameters
    ----------
    prefixes, tokens, read_bytes
        What was loaded.
    read_seconds
        From the first read to the last row in its place.
    bubble_seconds
        What passes waited for rows.
    placing_seconds
        What passes took to put rows to their places themselves.
    recomputed_tokens
        Tokens whose rows did not come, or not as they were written, and were computed anew.
    """

    prefixes: int = 0
    tokens: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    bubble_seconds: float = 0.0
    placing_seconds: float = 0.0
    recomputed_tokens: int = 0


# Less than this is no waiting but taking a lock.
_UNTOLD_NS = 50_000


class _LessLandedError(Exception):
    """Rows that somebody waits for will not come."""


def _unseen(new_tokens: int, past_tokens: int) -> None:
    """Look at no pass."""


class PassClock:
    """Learns how long layers of a cache in memory compute, and says when they will want rows.

    A window is the time from when a layer has its rows until the next one wants its own. Passes of
    one token are no business of it. One thread at a time.

    Parameters
    ----------
    table
        Of windows; learns.
    """

    def __init__(self, table: SlackTable) -> None:
        self._table = table
        self._gone: tuple[int, float, int, int] | None = None
        self._came: tuple[int, int, int] | None = None

    def passed(self, layer: int, new_tokens: int, past_tokens: int) -> None:
        """Learn that a pass comes to a layer, or goes on from it where there are no tokens."""
        now = time.monotonic()
        if new_tokens > 1:
            gone = self._gone
            if gone is not None and (gone[0] + 1, *gone[2:]) == (layer, new_tokens, past_tokens):
                self._table.observe(new_tokens, past_tokens, now - gone[1])
            self._came, self._gone = (layer, new_tokens, past_tokens), None
        elif not new_tokens and self._came is not None:
            came, self._came = self._came, None
            self._gone = came[0], now, *came[1:]

    def deadlines(self, new_tokens: int, past_tokens: int) -> Callable[[int], float]:
        """Return what says when layers of a pass that begins now will want their rows.

        Where nobody knows how long layers take, each is wanted at once.
        """
        window = self._table.window(new_tokens, past_tokens) or 0.0
        now = time.monotonic()
        return lambda layer: now + layer * window


class Landing:
    """Brings the rows of a stored prefix to their places, in a thread of its own.

    Parameters
    ----------
    found
        The prefix, which it closes.
    tokens
        How many of its tokens are wanted.
    border
        Where a prefix may end.
    states
        Where its rows go.
    counts
        Where it counts.
    recorder
        Notes waiting.
    deadline
        Says when a layer's rows are wanted, in seconds of `time.monotonic`.
    rules
        Say when rows wait for a pass.
    """

    def __init__(
        self,
        found: StoredPrefix,
        tokens: int,
        border: int,
        states: LandedStates,
        counts: LoadingCounts,
        recorder: Recorder,
        deadline: Callable[[int], float],
        rules: PlacingRules,
    ) -> None:
        self._deadline, self._rules = deadline, rules
        self._found = found
        self._tokens = tokens
        self._border = border
        self._states = states
        self._counts = counts
        self._recorder = recorder
        self._changed = threading.Condition()
        # Layers all of whose tokens are there, and those whose first tokens are, once less comes.
        self._whole = self._part = 0
        # Of each layer, which groups are still to come.
        self._missing: list[set[int]] = [set() for _ in range(found.shape.layers)]
        # How many tokens can still come.
        self._most = tokens
        self._placing: RowPlacing | None = None
        self._is_computing = self._is_stopped = False
        self._has_ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hillinfer-store-land")
        self._thread.start()

    @property
    def most_tokens(self) -> int:
        """How many tokens of every layer are there or can still come."""
        return self._most

    def wait(self, layer: int, tokens: int) -> None:
        """Wait until the first tokens of a layer are in their places.

        Raises
        ------
        _LessLandedError
            Where they will not come.
        """
        # Mostly so, and each lock that a pass takes may make it wait for who reads.
        if not tokens or self._is_there(layer, tokens):
            return
        waited = placed = 0
        while True:
            started = time.perf_counter_ns()
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._is_there(layer, tokens)
                        or self._has_ended
                        or self._most < tokens
                        or self._has_waiting(layer)
                    )
                )
                is_there = self._is_there(layer, tokens)
                placing = self._placing if self._has_waiting(layer) else None
            came = time.perf_counter_ns()
            waited += came - started
            if came - started > _UNTOLD_NS:
                self._recorder.note(Lane.BUBBLES, "rows", started, came, layer=layer)
            if is_there or placing is None:
                break
            placing.help(layer)
            stop = time.perf_counter_ns()
            placed += stop - came
            self._recorder.note(Lane.COPIES, "rows placed", came, stop, layer=layer)
        self._counts.bubble_seconds += waited / 1e9
        self._counts.placing_seconds += placed / 1e9
        self._found.note_bubble(waited / 1e9)
        if is_there:
            return
        if self._error is not None:
            raise self._error
        raise _LessLandedError

    def note_computing(self) -> None:
        """Learn that a pass computes and will come for more: rows may wait for it."""
        self._is_computing = True
        # The thread that reads may be through at any moment, and leave none.
        placing = self._placing
        if placing is not None:
            placing.let_wait()

    def note_end(self) -> None:
        """Learn that a pass comes for no more: rows are placed as they are read."""
        self._is_computing = False
        placing = self._placing
        if placing is not None:
            placing.place_at_once()

    def stop(self) -> None:
        """Read no more: nobody waits any longer."""
        self._is_stopped = True
        placing = self._placing
        if placing is not None:
            placing.stop()

    def _has_waiting(self, layer: int) -> bool:
        placing = self._placing
        return placing is not None and placing.has_waiting(layer)

    def _is_there(self, layer: int, tokens: int) -> bool:
        return layer < self._whole or (layer < self._part and tokens <= self._most)

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            with self._found:
                while self._most:
                    try:
                        self._land()
                        break
                    except WrongBytesError as error:
                        self._lose(self._found.chunks.index(error.chunk) * CHUNK_TOKENS)
                    except OSError:
                        # Nobody knows which of its bytes the drive still has.
                        self._lose(0)
        except StoppedError as error:
            # Its frames know this, and so the memory of a cache that somebody dropped.
            self._error = error.with_traceback(None)
        except BaseException as error:
            # Whoever waits is told.
            self._error = error
        finally:
            with self._changed:
                self._has_ended = True
                # It knows this, too: a ring of objects would keep the memory of a dropped cache
                # until Python looks for rings.
                self._placing = None
                self._counts.read_seconds += time.perf_counter() - started
                self._changed.notify_all()

    def _lose(self, tokens: int) -> None:
        with self._changed:
            self._most = min(self._most, tokens) // self._border * self._border
            self._changed.notify_all()

    def _land(self) -> None:
        """Land layer after layer, from the first that is not there yet."""
        chunks, most = -(-self._most // CHUNK_TOKENS), self._most
        first = max(self._whole, self._part)
        rules, ahead = self._rules, self._found.layers_ahead(chunks)
        threads = RowPlacing.threads_for(self._states, ahead, rules)
        landed = partial(self._landed, most)
        own = self._changed, threads, rules.patience_seconds
        placing = RowPlacing(self._states, most, landed, *own)
        with self._changed:
            groups = sum(one.groups for one in self._found.chunks[:chunks])
            self._missing = [set(range(groups)) for _ in self._missing]
            self._placing = placing
        if self._is_computing:
            placing.let_wait()
        try:
            with closing(self._found.stream(first, chunks, self._deadline, placing)) as coming:
                for _ in coming:
                    if self._is_stopped:
                        raise StoppedError
        finally:
            placing.close()

    def _landed(self, most: int, rows: ArrivedRows) -> None:
        """Learn that rows of the first so many tokens are in their places."""
        if most > self._most:
            # Of a part that is being read anew.
            return
        self._counts.read_bytes += rows.rows.nbytes
        # In one step, and as often as whoever placed them was interrupted.
        first = rows.position // GROUP_TOKENS
        self._missing[rows.layer].difference_update(range(first, first + len(rows.salts)))
        layers = len(self._missing)
        part = max(self._whole, self._part)
        while part < layers and not self._missing[part]:
            part += 1
        self._part = part
        if most == self._tokens:
            self._whole = part
        self._changed.notify_all()


class Loading:
    """A prefix that one cache is being loaded with, and what makes good what does not come.

    Parameters
    ----------
    landing
        Brings rows; stopped when nobody has this any more.
    states
        Keys and values of each layer, (1, kv_heads, room, head_dim), that it fills.
    tokens
        How many it fills.
    read
        Computes tokens behind those that a cache holds: called with the cache and the positions of
        the first token and behind the last one.
    passed
        Called when a pass comes to a layer and when it goes on, with the layer, the tokens of the
        pass and those before them, then with 0 twice.
    counts
        Where it counts.
    """

    def __init__(
        self,
        landing: Landing,
        states: Sequence[States],
        tokens: int,
        read: Callable[[Any, int, int], None],
        passed: Callable[[int, int, int], None],
        counts: LoadingCounts,
    ) -> None:
        self._landing = landing
        self._states = states
        self._tokens = tokens
        self._read = read
        self._counts = counts
        self._passed = passed
        self._is_recomputed = False
        weakref.finalize(self, landing.stop)

    def layers(self) -> list[StreamedLayer]:
        """Return new layers of a cache, which keep this alive until their rows are there."""
        return [
            StreamedLayer(
                *own, self._tokens, partial(self._arrive, layer), partial(self._pass, layer)
            )
            for layer, own in enumerate(self._states)
        ]

    def _pass(self, layer: int, new_tokens: int, past_tokens: int) -> None:
        self._passed(layer, new_tokens, past_tokens)
        if layer + 1 == len(self._states):
            self._landing.note_end()
        elif not new_tokens:
            self._landing.note_computing()

    def _arrive(self, layer: int) -> None:
        if self._is_recomputed:
            return
        try:
            self._landing.wait(layer, self._tokens)
        except _LessLandedError:
            self._recompute()
            self._is_recomputed = True

    def _recompute(self) -> None:
        """Compute what does not come, behind what does."""
        from transformers import DynamicCache

        while True:
            start = self._landing.most_tokens
            cache = DynamicCache()
            # They write to the same room, as far as it is filled here and no farther.
            cache.layers = [
                StreamedLayer(*own, start, partial(self._landing.wait, layer, start), _unseen)
                for layer, own in enumerate(self._states)
            ]
            try:
                # The pass under way may collect what its layers put out, in a variable of its
                # context; this one is none of its.
                contextvars.Context().run(self._read, cache, start, self._tokens)
                break
            except _LessLandedError:
                continue
        self._counts.recomputed_tokens += self._tokens - start
