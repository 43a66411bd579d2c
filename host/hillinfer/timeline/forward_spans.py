# SPDX-License-Identifier: Apache-2.0
"""Tells the model's own compute from the cache's part of a forward pass."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from hillinfer.timeline.lane import Lane
from hillinfer.timeline.recorder import Detail, Recorder


class ForwardSpans:
    """Notes the model's time between the cache's calls, layer by layer, and whole steps.

    A layer's model span goes from the end of its attention to the next call of the cache: its own
    output projection and MLP, and the next layer's projections. The one before layer 0 has no
    layer: the embedding, and the projections of layer 0.

    Parameters
    ----------
    recorder
        Notes.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._details: dict[str, Detail] = {}
        self._started = self._resumed = self._tokens = 0

    def begin(self, tokens: int) -> None:
        """Begin a forward pass of so many tokens a row."""
        self._details = {}
        self._tokens = tokens
        self._started = self._resumed = time.perf_counter_ns()

    @contextmanager
    def announce(self) -> Iterator[None]:
        """Enclose what a predicted query sets going, in the middle of the model's time."""
        self._leave_model()
        yield
        self._resumed = time.perf_counter_ns()

    def store(self, layer: int) -> AbstractContextManager[None]:
        """Leave the model, and return what encloses the storing of a layer's rows."""
        self._leave_model()
        return self._recorder.span(Lane.COPIES, "store", layer=layer)

    def attend(self, layer: int) -> AbstractContextManager[None]:
        """Return what encloses a layer's attention; `resume` follows."""
        return self._recorder.span(Lane.STEPS, "attend", layer=layer)

    def resume(self, layer: int) -> None:
        """Note that the model goes on after a layer's attention."""
        self._details = {"layer": layer}
        self._resumed = time.perf_counter_ns()

    def end(self) -> None:
        """End the forward pass; one that breaks off leaves no step behind."""
        self._leave_model()
        stop = time.perf_counter_ns()
        self._recorder.note(Lane.STEPS, "step", self._started, stop, tokens=self._tokens)

    def _leave_model(self) -> None:
        stop = time.perf_counter_ns()
        self._recorder.note(Lane.COMPUTE, "model", self._resumed, stop, **self._details)
