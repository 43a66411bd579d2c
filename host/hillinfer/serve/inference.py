# SPDX-License-Identifier: Apache-2.0
"""The one thread that owns the model, and how the rest of a server reaches it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from enum import StrEnum
from typing import Any

from torch.overrides import TorchFunctionMode

from hillinfer.errors import ColdPoolError
from hillinfer.serve.jobs import Job
from hillinfer.serve.refusals import ApiError
from hillinfer.serve.rules import ServerRules
from hillinfer.serve.scheduler import InTurns, ReadingPolicy, Scheduler
from hillinfer.serve.served_model import ServedModel
from hillinfer.store.pool_files import StoreFailedError

_RETRY_SECONDS = 5


class State(StrEnum):
    """What a server can do now."""

    LOADING = "loading"
    READY = "ok"
    DEGRADED = "degraded"
    DRAINING = "draining"
    FAILED = "failed"


class Inference:
    """Opens a model in a thread of its own, and answers requests there.

    Parameters
    ----------
    opening
        Opens the model: entered and left in that thread.
    rules
        Of the server.
    on_end
        Called in that thread with each request that has ended, and what failed or None.
    on_state
        Called in that thread when the model is ready, and when the thread ends.
    policy
        Chooses whose prompt is read.
    """

    def __init__(
        self,
        opening: Callable[[], AbstractContextManager[ServedModel]],
        rules: ServerRules,
        on_end: Callable[[Job, BaseException | None], None],
        on_state: Callable[[], None] = lambda: None,
        policy: ReadingPolicy | None = None,
    ) -> None:
        self._opening, self._rules = opening, rules
        self._on_end, self._on_state = on_end, on_state
        self._policy = policy or InTurns()
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._documents: deque[Job] = deque()
        self._served: ServedModel | None = None
        self._scheduler: Scheduler | None = None
        self._is_draining = self._is_stopping = False
        self._drive_failed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="inference")

    # --- any thread ------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """What it can do now."""
        if self._error is not None:
            return State.FAILED
        if self._is_draining or self._is_stopping:
            return State.DRAINING
        if self._served is None:
            return State.LOADING
        return State.DEGRADED if self._drive_failed else State.READY

    @property
    def error(self) -> BaseException | None:
        """What ended the thread; None where nothing did."""
        return self._error

    @property
    def has_ended(self) -> bool:
        """Whether the thread has begun and ended."""
        return self._thread.ident is not None and not self._thread.is_alive()

    @property
    def served(self) -> ServedModel:
        """The model, once it is there.

        Raises
        ------
        ApiError
            Where nobody can use it now.
        """
        served, state = self._served, self.state
        if served is None or state in (State.FAILED, State.DRAINING):
            raise _unready(state)
        return served

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that are worked on; documents that are read ahead are none."""
        scheduler = self._scheduler
        return 0 if scheduler is None else scheduler.requests

    @property
    def is_idle(self) -> bool:
        """Whether no request is there, and no document to be read."""
        return self._scheduler is None or self._scheduler.is_idle

    def start(self) -> None:
        """Begin to open the model."""
        self._thread.start()

    def check_room(self) -> None:
        """Refuse a request that would find no place.

        Raises
        ------
        ApiError
            Then.
        """
        _ = self.served
        # Who comes while there is nothing to do waits for no one.
        if len(self._waiting) > self._rules.queue or (
            len(self._waiting) == self._rules.queue and self.running >= self._rules.parallel
        ):
            raise ApiError(
                429,
                f"{len(self._waiting)} requests wait, and this server lets no more in: try again "
                "later",
                "queue_full",
                "rate_limit_error",
                retry_after=_RETRY_SECONDS,
            )

    def submit(self, job: Job) -> None:
        """Let a request wait for its turn, where none is in the background; as `check_room`."""
        with self._changed:
            if job.is_background:
                _ = self.served
                self._documents.append(job)
            else:
                self.check_room()
                self._waiting.append(job)
            self._changed.notify_all()

    def drain(self) -> None:
        """Take no request more; those that are there go on."""
        with self._changed:
            self._is_draining = True
            self._changed.notify_all()

    def stop(self) -> None:
        """End what is left and let the model go."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    def join(self, seconds: float | None = None) -> None:
        """Wait for the thread's end."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    # --- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with ExitStack() as opened:
                with _WhileWanted(lambda: self._is_stopping):
                    served = opened.enter_context(self._opening())
                self._scheduler = Scheduler(
                    served,
                    self._waiting,
                    self._documents,
                    self._rules.parallel,
                    self._policy,
                    self._note_end,
                )
                self._served = served
                self._on_state()
                self._work(self._scheduler)
        except _UnwantedError:
            # The server was told to end before it had a model, which is no failure.
            pass
        except BaseException as error:
            # Whoever asks for the state is told, and whoever runs the server ends it.
            self._error = error
        finally:
            self._served = None
            self._on_state()

    def _work(self, scheduler: Scheduler) -> None:
        try:
            while True:
                self._rest(scheduler)
                if self._is_stopping:
                    return
                scheduler.turn()
        except BaseException as error:
            self._error = error
            raise
        finally:
            with self._changed:
                # Whoever submits from here on is refused, and waits for nobody.
                self._is_stopping = True
            scheduler.end_all(self._error or _unready(State.DRAINING))

    def _rest(self, scheduler: Scheduler) -> None:
        """Wait until there is something to do; documents move meanwhile, now and then."""
        pause = self._rules.pause_seconds
        while scheduler.is_idle and not self._is_stopping:
            with self._changed:
                if scheduler.is_idle and not self._is_stopping:
                    self._changed.wait(pause)
            served = self._served
            if served is not None and scheduler.is_idle and not self._is_stopping:
                served.rest(lambda: self._is_stopping or not scheduler.is_idle)
            pause = self._rules.rest_seconds

    def _note_end(self, job: Job, error: BaseException | None) -> None:
        if isinstance(error, ColdPoolError | StoreFailedError):
            self._drive_failed = True
        elif error is None and job.answer_tokens > 1:
            # Rows were written and selected since.
            self._drive_failed = False
        self._on_end(job, error)


class _UnwantedError(BaseException):
    """Ends the loading of a model; no `except Exception` makes a message of it."""


class _WhileWanted(TorchFunctionMode):
    """Ends what a thread computes once nobody wants it any more.

    Loading a large model takes minutes and calls torch for each weight.

    Parameters
    ----------
    is_over
        Says so; asked at each call of torch.
    """

    def __init__(self, is_over: Callable[[], bool]) -> None:
        super().__init__()
        self._is_over = is_over

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self._is_over():
            raise _UnwantedError
        return func(*args, **(kwargs or {}))


def _unready(state: State) -> ApiError:
    if state is State.LOADING:
        said = "the model is being loaded: try again later"
        return ApiError(503, said, "loading", "server_error", retry_after=_RETRY_SECONDS)
    if state is State.FAILED:
        return ApiError(503, "the model has failed: the log says why", "failed", "server_error")
    return ApiError(503, "the server is about to end", "draining", "server_error")
