# SPDX-License-Identifier: Apache-2.0
"""Passes over shadows that several sequences share, scored by the queries of all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.devices.device import DeviceSegment, ResidentShadow
from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.scoring.scorer import SegmentShadow
from hillinfer_model.beats import Beats
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec

# --- Queries that are asked together ---


@dataclass(frozen=True)
class AskedScoring:
    """What one sequence's scores are asked for with; as `Scorer.score` takes it."""

    query: torch.Tensor
    scaling: float
    segments: Sequence[SegmentShadow]
    coming: int


Choice = TypeVar("Choice")
Chosen = TypeVar("Chosen")


class ChoiceGroup(Generic[Choice, Chosen]):
    """Choices of one layer for several sequences, made by `choose` when the first is needed."""

    def __init__(self, choose: Callable[[list[Choice]], list[Chosen]]) -> None:
        self._choose = choose
        self.choices: list[Choice] = []
        self._chosen: list[Chosen] | None = None
        self._complete = threading.Event()

    def add(self, coming: Choice) -> Callable[[], Chosen]:
        """Add one; return what gives its choice to the scoring thread, which waits for `end`."""
        number = len(self.choices)
        self.choices.append(coming)

        def choice() -> Chosen:
            self._complete.wait()
            if self._chosen is None:
                self._chosen = self._choose(self.choices)
            return self._chosen[number]

        return choice

    def end(self) -> None:
        """Say that no more are added."""
        self._complete.set()


# --- Passes ---


class Started(Protocol):
    """A query coded for the segments of its sequence; see `StartedScoring`."""

    def query_blocks(self, numbers: Sequence[int]) -> Beats:
        """Return the query blocks of the segments of some numbers, one behind the other."""
        ...


@dataclass(frozen=True)
class SharedPass:
    """One launch for several queries.

    Parameters
    ----------
    askers
        Of the queries, by their number among those asked together.
    numbers
        Of each asker, which of its segments are scored.
    segments
        Where they lie on the device.
    """

    askers: list[int]
    numbers: list[list[int]]
    segments: list[DeviceSegment]


def shared_passes(asked: Sequence[AskedScoring], most: int) -> Iterator[SharedPass]:
    """Yield passes over segments that lie once on a device and belong to several sequences.

    Parameters
    ----------
    asked
        What is scored for.
    most
        Queries of a pass at most.
    """
    places = [
        {
            DeviceSegment(own.slot, own.base_position, own.device_tokens): number
            for number, own in enumerate(one.segments)
            if isinstance(own, ResidentShadow) and own.device_tokens
        }
        for one in asked
    ]
    waiting = list(range(len(asked)))
    while len(waiting) > 1:
        askers = [waiting.pop(0)]
        common = {*places[askers[0]]}
        for other in list(waiting):
            both = common & places[other].keys()
            if both and len(askers) < most:
                askers.append(other)
                waiting.remove(other)
                common = both
        if len(askers) > 1:
            segments = sorted(common, key=lambda own: own.base_position)
            numbers = [[places[asker][own] for own in segments] for asker in askers]
            yield SharedPass(askers, numbers, segments)


class SharedScores:
    """A launch for several queries, under way or read.

    Parameters
    ----------
    spec, scope
        Shape and rule; what shares one selected set.
    shadows
        Of the device, on which the launch is begun.
    shared
        The pass.
    started
        The query of each asker.

    Raises
    ------
    DeviceError
        Where the device fails; `tuples` may raise it, too.
    """

    def __init__(
        self,
        spec: KernelSpec,
        scope: Scope,
        shadows: DeviceShadows,
        shared: SharedPass,
        started: Sequence[Started],
    ) -> None:
        self._shared = shared
        self._sets = 1 if scope is Scope.LAYER else spec.kv_heads
        self._made: list[dict[int, NDArray[np.uint32]]] | None = None
        count = len(shared.segments)
        own = zip(started, shared.numbers, strict=True)
        blocks = [one.query_blocks(numbers).reshape(count, -1) for one, numbers in own]
        # Of each segment the queries of all askers, one behind the other.
        queries = np.concatenate(blocks, axis=1).reshape(-1, BEAT_BYTES)
        self._scoring = shadows.score(scope, queries, shared.segments)

    def tuples(self, asker: int) -> dict[int, NDArray[np.uint32]]:
        """Wait for the launch; return an asker's tuples of each segment by its number.

        They are uint32 of shape (sets, tokens) (contract, section 17).
        """
        if self._made is None:
            self._made = self._read()
        return self._made[asker]

    def _read(self) -> list[dict[int, NDArray[np.uint32]]]:
        shared = self._shared
        made: list[dict[int, NDArray[np.uint32]]] = [
            {
                number: np.empty((self._sets, segment.tokens), dtype=np.uint32)
                for number, segment in zip(numbers, shared.segments, strict=True)
            }
            for numbers in shared.numbers
        ]
        for found in self._scoring:
            stop = found.first_token + found.tuples.shape[1]
            parts = found.tuples.reshape(len(made), self._sets, -1)
            for tuples, numbers, part in zip(made, shared.numbers, parts, strict=True):
                tuples[numbers[found.segment]][:, found.first_token : stop] = part
        return made
