# SPDX-License-Identifier: Apache-2.0
"""Chooses whether tokens behind a stored prefix are read singly, at once, or with one set."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from hillinfer.attention.row_attention import MOST_QUERIES
from hillinfer.drive.files import PAGE_BYTES
from hillinfer.extents.recording import Recording
from hillinfer.generate.run_report import PassWay, StoreFacts
from hillinfer.model_shape import ModelShape


class Way(StrEnum):
    """How a pass gets at the rows of a stored prefix."""

    IN_PLACE = "opened in place"
    """Token by token, each gathers the rows that it selects."""
    STREAMED = "streamed"
    """All tokens at once attend to all rows, which stream by once."""
    ONE_SET = "one set"
    """All tokens at once attend to one selected set per layer, whose rows are read."""


@dataclass(frozen=True)
class PassRates:
    """What decides between both ways.

    Parameters
    ----------
    read_bytes_per_second
        What the drives give long reads.
    step_seconds
        What reading one token by itself takes.
    least_saving_seconds
        How much sooner reading singly must be: what is read so attends to a selection, and is not
        stored.
    source
        Where the rate of reads is from, for people.
    """

    read_bytes_per_second: float
    step_seconds: float
    least_saving_seconds: float = 0.0
    source: str = ""

    def at(self, before: int, prefix_bytes: int, tokens: int) -> PassRates:
        """Return these rates, whatever is read behind what."""
        return self

    def way(self, prefix_bytes: int, tokens: int, passes: int = 1) -> Way:
        """Return the sooner way to read so many tokens behind rows of so many bytes.

        Parameters
        ----------
        prefix_bytes, tokens
            Of rows that each pass streams by, and of what is read.
        passes
            How many passes read all tokens at once.
        """
        streaming, singly = self.seconds(prefix_bytes, tokens, passes)
        return Way.STREAMED if streaming < singly + self.least_saving_seconds else Way.IN_PLACE

    def seconds(self, prefix_bytes: int, tokens: int, passes: int = 1) -> tuple[float, float]:
        """Return what streaming and reading singly take; parameters as in `way`."""
        return passes * prefix_bytes / self.read_bytes_per_second, tokens * self.step_seconds

    def one_set_seconds(self, set_bytes: float, tokens: int, passes: int = 1) -> float:
        """Return what reading behind one selected set takes at most.

        Each query that is scored takes no longer than a whole step of one token.

        Parameters
        ----------
        set_bytes
            Of the pages that the set's rows lie in.
        tokens, passes
            As in `way`.
        """
        queries = min(tokens, passes * MOST_QUERIES)
        return queries * self.step_seconds + passes * set_bytes / self.read_bytes_per_second


@dataclass(frozen=True)
class NoRates:
    """Rates that nobody knows, and why, for people."""

    reason: str

    def at(self, before: int, prefix_bytes: int, tokens: int) -> NoRates:
        """Return none."""
        return self


class RateSource(Protocol):
    """Knows rates, or why it does not."""

    def at(self, before: int, prefix_bytes: int, tokens: int) -> PassRates | NoRates:
        """Return what holds for so many tokens behind so many others with rows of so many bytes."""
        ...


class WayChooser:
    """Chooses how tokens behind a stored prefix are read, and says why.

    Parameters
    ----------
    rates
        By which it chooses.
    shape
        Of the model.
    chunk_tokens
        Tokens of one forward pass; None: all of them.
    """

    def __init__(self, rates: RateSource, shape: ModelShape, chunk_tokens: int | None) -> None:
        self._rates, self._chunk_tokens = rates, chunk_tokens
        self._token_bytes, self._row_bytes = shape.token_bytes, shape.row_bytes

    def way(self, before: int, tokens: int) -> PassWay:
        """Return how so many tokens behind so many others are best read."""
        if tokens == 1:
            return PassWay(tokens, before, str(Way.IN_PLACE), "a single token selects anyway")
        stored = before * self._token_bytes
        rates = self._rates.at(before, stored, tokens)
        if isinstance(rates, NoRates):
            return PassWay(tokens, before, str(Way.STREAMED), rates.reason)
        passes = -(-tokens // (self._chunk_tokens or tokens))
        way = rates.way(stored, tokens, passes)
        streamed, singly = rates.seconds(stored, tokens, passes)
        reason = f"streaming {_short(streamed)}, token by token {_short(singly)} expected"
        if rates.source:
            reason += f", {rates.source}"
        return PassWay(tokens, before, str(way), reason, streamed, singly)

    def question_way(self, before: int, tokens: int, alpha: float) -> PassWay:
        """Return how a question's tokens are best read, one selected set among the ways.

        Parameters
        ----------
        before, tokens
            Of the document, and of the question.
        alpha
            Share of the document's tokens that a set has.
        """
        known = self.way(before, tokens)
        stored = before * self._token_bytes
        rates = self._rates.at(before, stored, tokens)
        if known.streamed_seconds is None or isinstance(rates, NoRates):
            return known
        passes = -(-tokens // (self._chunk_tokens or tokens))
        # Reads are whole pages: a set of α lies in more than α of them where rows are small.
        pages = 1 - (1 - alpha) ** max(1.0, PAGE_BYTES / self._row_bytes)
        seconds = rates.one_set_seconds(pages * stored, tokens, passes)
        told = replace(
            known,
            reason=f"{known.reason}; one set {_short(seconds)} at most",
            one_set_seconds=seconds,
        )
        others = known.streamed_seconds, known.in_place_seconds or 0.0
        saved = known.streamed_seconds - seconds
        if seconds < min(others) and saved >= rates.least_saving_seconds:
            return replace(told, way=str(Way.ONE_SET))
        return told


def _short(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


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
