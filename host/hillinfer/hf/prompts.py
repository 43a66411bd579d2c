# SPDX-License-Identifier: Apache-2.0
"""A cache's prompts: how their rows were computed, and looking them up in a store."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hillinfer.errors import ColdPoolError
from hillinfer.generate.answering import Generation
from hillinfer.generate.run_report import PassWay, StoreFacts
from hillinfer.statistics import StoreCounts
from hillinfer_model.kernel_spec import GROUP_TOKENS

if TYPE_CHECKING:
    from hillinfer.hf.cache import HillInferCache

# --- how rows were made ---


@dataclass(frozen=True)
class Made:
    """How the rows of one sequence were made, from its first token on.

    Rows of tokens that were decoded attended to a selected set, and so did everything that comes
    after them: no other prompt may be answered from those.

    Parameters
    ----------
    dense
        Tokens whose pass attended to everything, over rows that were made so, too.
    chunk, even
        Tokens of the first pass, and of all passes that were as long, one behind the other, in a
        batch of this row alone: the bits of their rows follow from the tokens and this length.
    """

    dense: int = 0
    chunk: int = 0
    even: int = 0

    def after(self, start: int, tokens: int, columns: int, rows: int) -> Made:
        """Return it with the tokens of a pass.

        Parameters
        ----------
        start, tokens
            How many the sequence had, and how many came.
        columns, rows
            Shape of the pass' tokens, padding included.
        """
        # A pass of a single token selects.
        if columns == 1 or not tokens or self.dense != start:
            return self
        chunk, even = self.chunk, self.even
        if rows == 1 and tokens == columns:
            if start == 0:
                chunk = even = tokens
            elif even == start and tokens == chunk:
                even += tokens
        return Made(start + tokens, chunk, even)

    def until(self, length: int) -> Made:
        """Return it without the tokens from a position on."""
        return Made(min(self.dense, length), self.chunk, min(self.even, length))


def in_place(positions: torch.Tensor | None, start: int, columns: int, pads: Sequence[int]) -> bool:
    """Whether tokens get the positions that they have without padding, with which rows are stored.

    Parameters
    ----------
    positions
        (1 or batch, columns) as given to the model; None where it makes them.
    start, columns
        Index of the first token of the pass, and how many come.
    pads
        Padding of each row.
    """
    if positions is None:
        return not any(pads)
    if positions.ndim != 2 or positions.shape[1] != columns:
        return False
    wanted = torch.arange(start, start + columns)[None] - torch.tensor(list(pads))[:, None]
    return bool(((positions.cpu() == wanted) | (wanted < 0)).all())


def ends_singly(tokens: int, chunk_tokens: int | None) -> bool:
    """Whether the last pass over so many tokens brings a single one, which selects.

    Parameters
    ----------
    tokens
        How many are read.
    chunk_tokens
        Of one pass; None: all of them.
    """
    return (tokens if chunk_tokens is None else tokens % chunk_tokens) == 1


# --- a store, as caches use it ---


class PromptReading(Protocol):
    """A prompt that goes to a store while it is read."""

    @property
    def is_asked(self) -> bool:
        """Whether the store has said which chunks it takes as they are made, none of them maybe."""

    def facts(self) -> StoreFacts:
        """Return what the store did, once it has done it."""


class Prompts(Protocol):
    """A store, as prompts use it that are read in chunks of one length."""

    @property
    def counts(self) -> StoreCounts:
        """What the store did for this process."""

    def open(self, cache: HillInferCache, ids: Sequence[int]) -> PromptReading:
        """Give an empty cache the longest stored prefix, and store the rows that it reads."""

    def fill(self, cache: HillInferCache, ids: Sequence[int]) -> StoreFacts:
        """Give an empty cache the longest stored prefix of a prompt, and no more."""

    def keep_from(self, cache: HillInferCache, ids: Sequence[int], seconds: float) -> int:
        """Store rows that a cache of one row holds; return how many tokens can be found."""

    def way(self, before: int, tokens: int) -> PassWay:
        """Return how tokens behind so many, of which a store brought the first, are best read."""

    def question_way(self, before: int, tokens: int, alpha: float) -> PassWay:
        """Return how a question is best read, behind one set of α among the ways."""

    def whole(self, tokens: int) -> int:
        """Return how many tokens, at most so many, end where a stored prefix may end."""

    def storable(self, made: Made) -> int:
        """Return how many tokens have rows that may be stored."""


class PromptStore(Protocol):
    """A store, as an attached model uses it."""

    @property
    def cipher(self) -> str:
        """What it is encrypted by, empty where it is not."""

    def divided(self, chunk_tokens: int | None) -> Prompts:
        """Return it as prompts use it that are read in such chunks; None: in one pass."""

    def note_step(self, before: int, seconds: float) -> None:
        """Learn what a pass of one token behind so many took."""

    def close(self) -> None:
        """Let it go, where it was opened for this."""


@dataclass(frozen=True)
class PromptCall:
    """What a call of the model, or of its `generate`, says about the prompt that it brings.

    Parameters
    ----------
    chunk_tokens
        Tokens of one forward pass; None: all of them.
    may_skip
        Whether its first tokens may come from a store: nothing is asked of them but their rows.
    copies
        How often each row of ids comes, as beams for one.
    """

    model: Any
    chunk_tokens: int | None
    may_skip: bool
    copies: int = 1

    @classmethod
    def of_generate(cls, model: Any, ids: torch.Tensor, given: dict[str, Any]) -> PromptCall:
        """Return what a call of `generate` says.

        Parameters
        ----------
        model, ids
            What generates, and from which ids (batch, tokens).
        given
            Its arguments by name.
        """
        configs = [one for one in (given.get("generation_config"), model.generation_config) if one]

        def told(name: str) -> Any:
            if name in given:
                return given[name]
            values = (getattr(one, name, None) for one in configs)
            return next((value for value in values if value is not None), None)

        # Without a mask `generate` takes these for padding.
        pads = {given.get("pad_token_id"), *(one.pad_token_id for one in configs)} - {None}
        return cls(
            model,
            told("prefill_chunk_size"),
            given.get("logits_to_keep", 1) == 1
            and given.get("position_ids") is None
            and given.get("custom_generate") is None
            and not told("token_healing")
            and not told("output_hidden_states")
            and not getattr(model.config, "output_hidden_states", False)
            and (
                given.get("attention_mask") is not None
                or not any(bool((ids == pad).any()) for pad in pads)
            ),
            max(told("num_beams") or 1, told("num_return_sequences") or 1),
        )

    @classmethod
    def of_forward(cls, model: Any, given: dict[str, Any]) -> PromptCall:
        """Return what a forward pass says, given its arguments by name."""
        kept, hidden = given.get("logits_to_keep"), given.get("output_hidden_states")
        if hidden is None:
            hidden = getattr(model.config, "output_hidden_states", False)
        last_alone = isinstance(kept, int) and kept == 1
        return cls(model, None, last_alone and not hidden and given.get("labels") is None)

    def read(self, cache: HillInferCache, ids: Sequence[int]) -> None:
        """Read tokens into a cache by themselves, in these chunks."""
        if ids:
            Generation(self.model, cache, self.chunk_tokens or len(ids)).read(ids)

    def read_singly(self, cache: HillInferCache, ids: Sequence[int]) -> None:
        """Read tokens into a cache one by one."""
        Generation(self.model, cache).read_singly(ids)


def without_first(arguments: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return the arguments of a forward pass without its first tokens; the mask is for all."""
    changed = {"input_ids": arguments["input_ids"][:, tokens:]}
    if arguments.get("position_ids") is not None:
        changed["position_ids"] = arguments["position_ids"][:, tokens:]
    return arguments | changed


# --- the prompts of one cache ---


class CachePrompts:
    """A cache's prompt that is under way, and the store that it is looked up in.

    Attributes
    ----------
    is_tentative
        Whether nothing came yet behind what was looked up for a pass.
    """

    def __init__(self, store: PromptStore) -> None:
        self._store = store
        self.is_tentative = False
        self._facts: StoreFacts | None = None
        self._reading: PromptReading | None = None
        # What stores rows that come before this cache's own: its document's, where it is a fork.
        self._before: PromptReading | None = None
        self._is_recording = False
        self._is_first = True
        self._until = 0
        self._chunk_tokens: int | None = None
        self._current: Prompts | None = None
        self._is_grown = False
        self._began = 0.0
        self._pass = 0, 0
        self._seconds, self._computed = 0.0, 0
        # Shared with forks, which ask about one document.
        self._ways: list[PassWay] = []
        self._failure = ""

    def fork(self) -> CachePrompts:
        """Return what a fork of the cache begins with."""
        twin = CachePrompts(self._store)
        twin._ways = self._ways
        twin._before = self._reading or self._before
        return twin

    @property
    def facts(self) -> StoreFacts | None:
        """What the store did for the prompt that the cache began with; None before."""
        told = self._facts if self._reading is None else self._reading.facts()
        if told is None:
            return None
        return replace(told, passes=tuple(self._ways), failure=told.failure or self._failure)

    @property
    def is_recording(self) -> bool:
        """Whether what the store takes of the prompt under way goes there as it is made."""
        return self._is_recording

    def brought(self, facts: StoreFacts, reading: PromptReading | None = None) -> None:
        """Learn what the store brought for the prompt that the cache begins with.

        Parameters
        ----------
        facts
            What it did so far.
        reading
            Stores the rows that come now; None where they are to be copied at the end.
        """
        self._facts, self._reading, self._is_first = facts, reading, True
        self._ways = list(facts.passes)
        self._failure = ""
        self._is_recording = reading is not None
        # Whatever was stored before is not what is computed now.
        self._is_grown = False
        self._seconds, self._computed = 0.0, 0

    def failed(self, failure: str) -> None:
        """Learn that rows of the prompt that the cache began with could not be read, and why."""
        self._failure = self._failure or failure

    def expect(self, until: int, chunk_tokens: int | None) -> None:
        """Learn that a prompt comes, in chunks, up to an index."""
        self._until, self._chunk_tokens, self._current = until, chunk_tokens, None

    @property
    def store(self) -> Prompts:
        """The store, for the prompt that is under way."""
        if self._current is None:
            self._current = self._store.divided(self._chunk_tokens)
        return self._current

    def awaits(self, length: int) -> bool:
        """Whether more of the prompt under way is to come to a cache of this length."""
        return length < self._until

    def forget(self) -> None:
        """Learn that nothing more of the prompt under way comes."""
        self._until, self._chunk_tokens, self._current = 0, None, None
        self._is_grown = self.is_tentative = self._is_recording = False
        self._seconds, self._computed = 0.0, 0

    def reads_singly(self, length: int, tokens: int) -> bool:
        """Whether tokens that come to a cache of this length are best read one by one.

        Only where it began with a stored prefix; what is chosen is told in `facts`.
        """
        if not self._ways or not tokens:
            return False
        first = self._ways[0]
        if (length, tokens) == (first.before, first.tokens):
            return first.is_read_singly
        way = self.store.way(length, tokens)
        self._ways.append(way)
        return way.is_read_singly

    def question_way(self, length: int, tokens: int, alpha: float) -> PassWay | None:
        """Return how a question that comes to a cache of this length is best read.

        None where the cache did not begin with a stored prefix; what is chosen is told in `facts`.
        """
        if not self._ways or not tokens:
            return None
        self._ways.append(self.store.question_way(length, tokens, alpha))
        return self._ways[-1]

    def begin_pass(self) -> None:
        """Learn that a pass begins."""
        self._began = time.perf_counter()

    def note_pass(self, before: int, tokens: int) -> None:
        """Learn how many tokens the pass that began brings, in all rows, behind so many."""
        self._pass = before, tokens

    def note_step(self) -> None:
        """Learn that the pass is through, and let a pass of one token teach what those take."""
        before, tokens = self._pass
        self._pass = 0, 0
        if before and tokens == 1:
            self._store.note_step(before, time.perf_counter() - self._began)

    def end_pass(self, tokens: int, groups: int) -> None:
        """Learn that a pass got through.

        Parameters
        ----------
        tokens, groups
            Tokens that it read densely, and groups that it filled with rows that may be stored.
        """
        self.is_tentative = False
        if tokens:
            self._seconds += time.perf_counter() - self._began
            self._computed += tokens
        self._is_grown = self._is_grown or groups > 0

    def is_complete(self, length: int) -> bool:
        """Whether a cache of this length holds a prompt that was under way, or rows to store."""
        return (self._until > 0 or self._is_grown) and not self.awaits(length)

    def keep_read(self, cache: HillInferCache, made: Made, seconds: float) -> None:
        """Store the rows of a prompt that is complete, and was not stored as it was read.

        Parameters
        ----------
        cache
            Of one row.
        """
        self._facts, self._reading = self.facts or StoreFacts(made.dense), None
        self._seconds, self._computed = seconds, made.dense
        self._is_first, self._is_grown, self._is_recording = True, True, False
        self.keep([(cache, made)])

    def keep(self, rows: Iterable[tuple[HillInferCache, Made]]) -> None:
        """Store what was computed of a prompt that is complete; a failure costs the answer nothing.

        Parameters
        ----------
        rows
            Caches of one row each, and how their rows were made; not asked for where there is
            nothing to store.
        """
        begun, stored, refused, failure = time.perf_counter(), 0, 0, ""
        if self._is_grown and not self._is_recording:
            store, each = self.store, self._seconds / max(1, self._computed)
            if (writing := self._reading or self._before) is not None:
                # What goes on in a chunk finds it published, and nobody else's to fill.
                writing.facts()
            before = store.counts.refused_chunks
            for cache, made in rows:
                ids = cache.token_ids[0][: store.storable(made)]
                if len(ids) < GROUP_TOKENS:
                    continue
                try:
                    stored += store.keep_from(cache, ids, each * len(ids))
                except ColdPoolError as error:
                    # Rows that cannot be read back are not stored.
                    failure = str(error)
            refused = store.counts.refused_chunks - before
        if self._is_first and self._facts is not None:
            self._facts = replace(
                self._facts,
                stored_tokens=max(0, stored - self._facts.found_tokens),
                store_seconds=time.perf_counter() - begun,
                failure=self._facts.failure or failure,
                refused_chunks=refused,
            )
        self._is_first = self._is_recording = False
        self.forget()
