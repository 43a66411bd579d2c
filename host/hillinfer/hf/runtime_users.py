# SPDX-License-Identifier: Apache-2.0
"""The caches that share one runtime."""

from __future__ import annotations

import os
import threading
from collections import deque

from hillinfer.hf.batch import Batch
from hillinfer.hf.turns import Turns
from hillinfer.runtime import Runtime

# How the names of all threads begin that runtimes start.
RUNTIME_THREADS = "hillinfer-"


class RuntimeUsers:
    """Counts the caches that share a runtime and closes it after the last.

    They use it in turns. All of them belong to the process that made the first: a fork of it has
    none of the runtime's threads, and must leave alone what the parent goes on using.

    A cache is closed by its user or dropped. The garbage collector drops one in whatever thread it
    happens to run, in the middle of anything, so `drop` neither waits nor takes a lock.

    Parameters
    ----------
    runtime
        What they share.

    Attributes
    ----------
    turns
        Taken by whoever uses the runtime.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # Deques, because their methods are atomic without a lock.
        self._members: deque[None] = deque()
        self._dropped: deque[Batch] = deque()
        self._to_close = deque([runtime])
        self._process = os.getpid()
        self.turns = Turns()

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork of the one that made the runtime."""
        return self._process != os.getpid()

    def join(self) -> None:
        """Count one cache more."""
        self._members.append(None)

    def leave(self, batch: Batch) -> None:
        """Free the sequences of one cache, count it no more and close the runtime after the last.

        Parameters
        ----------
        batch
            That cache's rows; empty afterwards.
        """
        self.free_dropped()
        batch.clear()
        if self._is_last():
            self._runtime.close()

    def drop(self, batch: Batch) -> None:
        """Count a cache no more that nobody closed; safe in any thread at any moment.

        Its sequences are freed by `free_dropped`. After the last cache the runtime is closed
        instead: here, or where this is a runtime's thread, which would wait for itself, in a fresh
        one that the interpreter waits for at its exit.

        Parameters
        ----------
        batch
            That cache's rows.
        """
        if self.is_inherited:
            return
        self._dropped.append(batch)
        if not self._is_last():
            return
        # Any runtime's thread: two of them may each hold the last cache of the other's.
        if threading.current_thread().name.startswith(RUNTIME_THREADS):
            threading.Thread(
                target=self._runtime.close, name=f"{RUNTIME_THREADS}close", daemon=False
            ).start()
        else:
            self._runtime.close()

    def free_dropped(self) -> None:
        """Free the sequences of dropped caches, in the thread that is about to use the runtime."""
        while self._dropped:
            self._dropped.popleft().clear()

    def _is_last(self) -> bool:
        """Count one cache less and say whether its leaving closes the runtime, once."""
        self._members.pop()
        if self._members:
            return False
        try:
            self._to_close.pop()
        except IndexError:
            return False
        return True
