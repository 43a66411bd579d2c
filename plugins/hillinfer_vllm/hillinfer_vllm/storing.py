# SPDX-License-Identifier: Apache-2.0
"""The worker's saves: prompt rows leave their blocks as a step computes them, and are published."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import aligned_buffer
from hillinfer.store.prefix import StoredPrefix
from hillinfer.store.writer import PrefixWriter
from hillinfer_model.kernel_spec import GROUP_TOKENS
from hillinfer_vllm.adapters import adapted
from hillinfer_vllm.loading import WorkerSide
from hillinfer_vllm.step_plan import PlannedSave

# Rows that wait to be written at once: a drive that is slower holds the passes up behind them.
_MOST_WAITING_BYTES = 256 << 20


class Publishing(StrEnum):
    """When the rows of a step may be found."""

    AT_ONCE = "at once"
    """Once they are written."""
    TOGETHER = "together"
    """Once all ranks have told the scheduler that they have written theirs."""


class _Save:
    """One request whose rows are being stored; its methods run in the storing thread.

    Parameters
    ----------
    side
        Where to.
    plan
        Of its first step.
    """

    def __init__(self, side: WorkerSide, plan: PlannedSave) -> None:
        self._side = side
        self.prompt, self._stored = plan.prompt, plan.stored
        self._found: StoredPrefix | None = None
        self._writer: PrefixWriter | None = None
        self._is_open = False
        self._begins = 0
        # Of the thread that computes: tokens whose rows were taken.
        self.taken = plan.stored

    def write(self, layer: int, first: int, rows: NDArray[np.uint8]) -> None:
        """Give rows of full groups to the store."""
        if not self._is_open:
            self._is_open = True
            self._begin()
        if self._writer is None:
            return
        # Rows that somebody else has stored meanwhile are there; what is cut begins a page.
        known = min(max(0, self._begins - first), len(rows))
        if known < len(rows):
            self._writer.write(layer, (first + known) // GROUP_TOKENS, rows[known:])

    def publish(self, tokens: int) -> int:
        """Let everybody find the rows below a position; return how many tokens are new."""
        if self._writer is None:
            return 0
        before = self._writer.published_tokens
        self._writer.publish(tokens)
        return max(0, self._writer.published_tokens - before)

    def close(self) -> None:
        """End; what was not published is thrown away."""
        if self._writer is not None:
            self._writer.close()
        if self._found is not None:
            self._found.close()
        self._writer, self._found = None, None

    def _begin(self) -> None:
        ids, salt = self.prompt.ids, self.prompt.salt
        store = self._side.store
        namespace = adapted(self._side.namespace, self.prompt.adapter)
        self._found = store.find(namespace, ids, salt)
        self._begins = 0 if self._found is None else self._found.tokens
        # Where something was evicted, the rows that come do not begin where the store ends.
        if self._begins >= self._stored:
            self._writer = store.writer(namespace, ids, self._found, salt)


class Saves:
    """Stores rows of prompts, in a thread of its own.

    Parameters
    ----------
    side
        Where rows come from and go to.
    publishing
        Whether rows wait for those of other ranks.
    """

    def __init__(self, side: WorkerSide, publishing: Publishing = Publishing.AT_ONCE) -> None:
        self._side, self._numbers = side, side.numbers()
        self._publishing = publishing
        self._written: dict[str, int] = {}
        self._requests: dict[str, _Save] = {}
        self._plans: list[PlannedSave] = []
        self._writing = ThreadPoolExecutor(1, "hillinfer-vllm-store")
        self._room = threading.Condition()
        self._waiting_bytes = 0

    def begin(self, plans: Sequence[PlannedSave]) -> None:
        """Learn what the step that begins will compute."""
        self._plans = list(plans)
        for plan in plans:
            own = self._requests.get(plan.request)
            if own is not None and own.prompt != plan.prompt:
                # Another request of the same name, where vLLM is told to keep names.
                self._writing.submit(own.close)
                own = None
            if own is None:
                self._requests[plan.request] = _Save(self._side, plan)

    def take(self, layer: str) -> None:
        """Take the rows of a layer that the step has just computed."""
        if not self._plans:
            return
        started = time.perf_counter()
        blocks, number = self._side.layers[layer], self._numbers[layer]
        for plan in self._plans:
            save = self._requests[plan.request]
            stop = plan.stop // GROUP_TOKENS * GROUP_TOKENS
            if stop <= save.taken:
                continue
            size = (stop - save.taken) * blocks.row_bytes
            self._make_room(size)
            rows = aligned_buffer(size)[:size].reshape(-1, blocks.row_bytes)
            blocks.gather(save.taken, plan.blocks, rows)
            self._writing.submit(self._write, save, number, save.taken, rows)
        self._side.counts.add(storing_seconds=time.perf_counter() - started)

    def end(self, failed: set[int]) -> None:
        """Publish what the step computed, once it is written; nobody waits for that.

        Parameters
        ----------
        failed
            Blocks whose rows did not come. What was computed behind them is wrong, whichever
            request loaded them, and is thrown away.
        """
        for plan in self._plans:
            save = self._requests[plan.request]
            stop = plan.stop // GROUP_TOKENS * GROUP_TOKENS
            if not failed.isdisjoint(plan.blocks):
                # Nothing more of it is stored; the next request with this prompt is.
                save.taken = len(plan.prompt.ids)
                self._writing.submit(save.close)
            elif stop > save.taken:
                save.taken = stop
                if self._publishing is Publishing.AT_ONCE:
                    self._writing.submit(self._publish, save, stop)
                else:
                    self._written[plan.request] = stop
        self._plans = []

    def written(self) -> dict[str, int]:
        """Return how far requests' rows were given to the writing thread, once; they wait there.

        It writes and publishes in turn: what is published behind this is written.
        """
        written, self._written = self._written, {}
        return written

    def publish(self, ready: Sequence[tuple[str, int]]) -> None:
        """Let everybody find the rows of requests up to positions that all ranks have written."""
        for request, stop in ready:
            save = self._requests.get(request)
            if save is not None:
                self._writing.submit(self._publish, save, stop)

    def finish(self, requests: set[str]) -> None:
        """End storing for requests that are over."""
        for request in requests:
            save = self._requests.pop(request, None)
            if save is not None:
                self._writing.submit(save.close)

    def close(self) -> None:
        """Write what waits and end."""
        self.finish(set(self._requests))
        self._writing.shutdown()

    # --- inside ----------------------------------------------------------------------------

    def _make_room(self, size: int) -> None:
        with self._room:
            self._room.wait_for(
                lambda: not self._waiting_bytes or self._waiting_bytes + size <= _MOST_WAITING_BYTES
            )
            self._waiting_bytes += size

    def _publish(self, save: _Save, stop: int) -> None:
        tokens = save.publish(stop)
        size = tokens * self._side.token_bytes
        self._side.counts.add(stored_tokens=tokens, stored_bytes=size)

    def _write(self, save: _Save, layer: int, first: int, rows: NDArray[np.uint8]) -> None:
        try:
            save.write(layer, first, rows)
        finally:
            with self._room:
                self._waiting_bytes -= rows.nbytes
                self._room.notify_all()
