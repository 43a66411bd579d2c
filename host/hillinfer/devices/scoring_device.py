# SPDX-License-Identifier: Apache-2.0
"""The seam between the host and whatever holds key shadows and scores them where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hillinfer_model.beats import Beats
from hillinfer_model.choices import Scope


@dataclass(frozen=True)
class DeviceSegment:
    """What one launch scores of one segment.

    Parameters
    ----------
    slot
        Where its shadow lies on the device.
    base_position
        Position of its first token.
    tokens
        How many of its tokens.
    """

    slot: int
    base_position: int
    tokens: int


@dataclass(frozen=True)
class ScoredTokens:
    """Tuples of consecutive tokens that a device has finished.

    Parameters
    ----------
    segment
        Index among the segments of the call.
    first_token
        Index of the first token within the segment.
    tuples
        uint32 of shape (sets, tokens): 1 set, or one per KV head.
    """

    segment: int
    first_token: int
    tuples: NDArray[np.uint32]


@dataclass(frozen=True)
class StoredShadow:
    """The shadow of a whole segment in a file, and where on a device it is to go.

    Parameters
    ----------
    slot
        Where it goes.
    file
        Descriptor, readable; direct I/O where the file system allows it.
    offset
        Where the shadow starts, a multiple of 4,096 bytes; the file holds whole pages.
    """

    slot: int
    file: int
    offset: int


class ScoringDevice(Protocol):
    """Holds shadows in slots of one segment and scores them (design, section 5).

    Every method may raise `DeviceError`, in bounded time; the device is then lost for good.
    """

    @property
    def slots(self) -> int:
        """Shadows of one segment that it has room for."""
        ...

    def has_room(self, slot: int) -> bool:
        """Say whether a slot can be used: memory may be shared with others who came first."""
        ...

    def write(self, slot: int, first_beat: int, beats: Beats) -> None:
        """Put beats, uint8 (beats, 64), into a slot's shadow."""
        ...

    def load(self, shadows: Sequence[StoredShadow]) -> None:
        """Fill slots with shadows of whole segments from open files, past host memory."""
        ...

    def read(self, slot: int, into: Beats) -> None:
        """Fill `into`, uint8 (beats, 64), with the first beats of a slot's shadow."""
        ...

    def score(
        self, scope: Scope, queries: Beats, segments: Sequence[DeviceSegment]
    ) -> Iterator[ScoredTokens]:
        """Score segments and yield what is finished while the rest is still being scored.

        Parameters
        ----------
        scope
            What shares one selected set.
        queries
            A query block per segment, one behind the other (contract, section 6).
        segments
            What to score; at least one, each of at least one token.

        Returns
        -------
        Iterator[ScoredTokens]
            Every token once, each segment's in ascending order. The launch goes on while the
            caller does something else between two of them.
        """
        ...

    def close(self) -> None:
        """Let go of the device; harmless when done twice."""
        ...
