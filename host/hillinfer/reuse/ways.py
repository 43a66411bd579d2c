# SPDX-License-Identifier: Apache-2.0
"""How tokens behind a stored prefix are read, and what comes of reading a prompt."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from enum import StrEnum

from hillinfer.extents.recording import Recording
from hillinfer.generate.run_report import StoreFacts


class Way(StrEnum):
    """How a pass gets at the rows of a stored prefix."""

    IN_PLACE = "opened in place"
    """Token by token, each gathers the rows that it selects."""
    STREAMED = "streamed"
    """All tokens at once attend to all rows, which stream by once."""


@dataclass(frozen=True)
class PassRates:
    """What decides between both ways.

    Parameters
    ----------
    read_bytes_per_second
        What the drive gives long reads.
    step_seconds
        What reading one token by itself takes.
    """

    read_bytes_per_second: float
    step_seconds: float

    def way(self, prefix_bytes: int, tokens: int) -> Way:
        """Return the sooner way to read so many tokens behind rows of so many bytes."""
        streaming = prefix_bytes / self.read_bytes_per_second
        return Way.STREAMED if streaming < tokens * self.step_seconds else Way.IN_PLACE


class StoredReading:
    """A prompt that a cache is about to read, or has read, as far as a store had no rows of it.

    Parameters
    ----------
    facts
        What came of opening it.
    recording
        Takes rows to the store; None where none are stored.
    """

    def __init__(self, facts: StoreFacts, recording: Recording | None) -> None:
        self._facts, self._recording = facts, recording

    @property
    def is_recording(self) -> bool:
        """Whether rows go to the store as they are made."""
        return self._recording is not None

    @property
    def found_tokens(self) -> int:
        """Tokens that the cache holds already."""
        return self._facts.found_tokens

    def facts(self) -> StoreFacts:
        """Return what the store did, once everything is published that is queued."""
        if self._recording is None:
            return self._facts
        began = time.perf_counter()
        self._recording.settle()
        stored = max(0, self._recording.published_tokens - self._facts.found_tokens)
        seconds = self._facts.store_seconds + time.perf_counter() - began
        return replace(self._facts, stored_tokens=stored, store_seconds=seconds)
