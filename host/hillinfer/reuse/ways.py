# SPDX-License-Identifier: Apache-2.0
"""How tokens behind a stored prefix are read, and what comes of reading a prompt."""

from __future__ import annotations

import time
from collections.abc import Callable
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
    refused
        Returns how many chunks the store refused since it was opened.
    is_asked
        Whether the store was asked which of its chunks come in.
    """

    def __init__(
        self,
        facts: StoreFacts,
        recording: Recording | None,
        refused: Callable[[], int],
        *,
        is_asked: bool,
    ) -> None:
        self._facts, self._recording = facts, recording
        self._refused, self._is_asked = refused, is_asked
        self._last: StoreFacts | None = None

    @property
    def is_asked(self) -> bool:
        """Whether the store has said which chunks it takes as they are made, none of them maybe."""
        return self._is_asked

    @property
    def found_tokens(self) -> int:
        """Tokens that the cache holds already."""
        return self._facts.found_tokens

    def facts(self) -> StoreFacts:
        """Return what the store did, once everything is published that is queued."""
        if self._last is not None:
            return self._last
        if self._recording is None:
            self._last = replace(self._facts, refused_chunks=self._refused())
            return self._last
        began = time.perf_counter()
        self._recording.settle()
        stored = max(0, self._recording.published_tokens - self._facts.found_tokens)
        seconds = self._facts.store_seconds + time.perf_counter() - began
        told = replace(
            self._facts,
            stored_tokens=stored,
            store_seconds=seconds,
            refused_chunks=self._refused(),
        )
        if self._recording.is_done:
            # What is refused from now on is of other prompts.
            self._last = told
        return told
