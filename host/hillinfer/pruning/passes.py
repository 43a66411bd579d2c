# SPDX-License-Identifier: Apache-2.0
"""State of pruned prefill: the coming prompt, the document in a cache, and the current pass."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from hillinfer.errors import UnsupportedFeatureError
from hillinfer.generate.stages import OnDeeper
from hillinfer.pruning.schedule import Schedule
from hillinfer.pruning.states import Boundary, States

if TYPE_CHECKING:
    from hillinfer.pruning.decoding import Swapping


class LaterTurns(StrEnum):
    """What is done when a prompt goes on behind an answer."""

    # The new tokens meet what was kept.
    KEEP = "keep"
    # All of it is chosen anew from boundary states, which are kept.
    ANEW = "anew"
    # It is chosen anew, too, and what stays keeps its rows: only what enters is computed.
    ENTER = "enter"

    @property
    def chooses(self) -> bool:
        """Whether a later prompt chooses, from boundary states of all that came before."""
        return self is not LaterTurns.KEEP


@dataclass(frozen=True)
class PrunedRead:
    """What one prompt lost, and what reading it took.

    Parameters
    ----------
    tokens
        Of the prompt, in each layer.
    kept
        Blocks that each cut kept, int64; one tensor for each.
    flop_limit
        How much faster reading may have become.
    choosing_seconds, band_seconds
        Choosing blocks, and taking what stayed through the layers behind each cut.
    boundary_bytes
        Of boundary states, at most, in memory or on the drive.
    brought
        First tokens that were not read, because a store or a session had their rows in every layer.
    entered
        Tokens that went through the layers behind the cut, where the others kept rows of an earlier
        prompt; None where none did. `flop_limit` is then that of a prompt that begins.
    """

    tokens: list[int]
    kept: list[torch.Tensor]
    flop_limit: float
    choosing_seconds: float
    band_seconds: list[float]
    boundary_bytes: int
    brought: int = 0
    entered: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it by name, as a report has it."""
        kept = [one.tolist() for one in self.kept]
        return {**vars(self), "kept": kept, "deep_seconds": sum(self.band_seconds)}


@dataclass(frozen=True)
class ComingPrompt:
    """What is known of a prompt before it comes.

    Parameters
    ----------
    tokens
        At its end, with all that the cache holds already.
    question_tokens
        How many of the last ones are the question; None where nobody knows.
    on_deeper
        Takes a band's layers, how many tokens went through them, and how many are to; None where
        nobody asks.
    """

    tokens: int
    question_tokens: int | None = None
    on_deeper: OnDeeper | None = None

    def telling(
        self, band: range, tokens: int, leave: Callable[[torch.Tensor], object]
    ) -> Callable[[torch.Tensor], None]:
        """Return what passes on states (batch, tokens, hidden_size) behind a band, and tells it."""
        done, on_deeper = 0, self.on_deeper or (lambda *told: None)
        on_deeper(band, 0, tokens)

        def left(states: torch.Tensor) -> None:
            nonlocal done
            leave(states)
            done += states.shape[1]
            on_deeper(band, done, tokens)

        return left


# Of the call that this thread is in.
coming_prompt: ContextVar[ComingPrompt | None] = ContextVar(
    "hillinfer_prompt_that_comes", default=None
)


@dataclass(frozen=True)
class Window:
    """What enters a layer that decides, of the last tokens.

    Parameters
    ----------
    states
        (1, tokens, hidden_size).
    end
        Tokens up to the last of them.
    """

    states: torch.Tensor
    end: int

    @classmethod
    def behind(cls, last: Window | None, hidden: torch.Tensor, start: int, wanted: int) -> Window:
        """Return the last `wanted` tokens once those of a pass have come behind `start`."""
        before, gone = (None, 0) if last is None else (last.states, last.end - start)
        if before is not None and gone:
            # What was cut off, or of a pass that broke off, is no part of it.
            before = before[:, : before.shape[1] - gone] if 0 < gone < before.shape[1] else None
        joined = hidden if before is None else torch.cat([before, hidden], 1)
        return cls(joined[:, -wanted:].clone(), start + hidden.shape[1])


@dataclass
class Document:
    """What is known of one cache, of passes that got through.

    Parameters
    ----------
    schedule
        By which it is read: which layers are in which band.
    length
        Tokens of the first layer.
    boundary
        Boundary states of all tokens; forgotten once nobody needs them. Of a prompt that was just
        read they stay until a pass behind it shows that it counted. What they say was brought
        always stays.
    waits
        Whether tokens wait behind those that deeper layers have.
    passes
        What the cache had counted when the last pass began; None where it counts none.
    windows
        Of passes so far, by the number of the cut; of the first cut alone where decoding moves no
        blocks.
    positions
        Of the tokens in each band behind the first cut, those of answers included; empty where
        deeper layers are to be read.
    read
        Of the last prompt; None where nothing was pruned.
    completed
        How many first tokens all of the deeper layers have, dropped or not; what was brought where
        they have what was chosen, or nothing else.
    dense
        How many first tokens came in passes of several, which attended to all before them.
    completing_seconds
        What completing took so far.
    swapping
        What decoding did with blocks of the prompt; None where it moves none.
    is_new
        Whether the pass that last came read a prompt through the deeper layers.
    under_way
        The pass that goes through the cache; threads know it by this alone, so it goes with the
        cache.
    """

    schedule: Schedule
    length: int = 0
    boundary: Boundary = field(default_factory=Boundary)
    waits: bool = False
    passes: int | None = None
    windows: dict[int, Window] = field(default_factory=dict)
    positions: list[torch.Tensor] = field(default_factory=list)
    read: PrunedRead | None = None
    completed: int = 0
    dense: int = 0
    completing_seconds: float = 0.0
    swapping: Swapping | None = None
    is_new: bool = False
    under_way: Pass | None = field(default=None, repr=False, compare=False)

    @property
    def is_pending(self) -> bool:
        """Whether deeper layers have not been brought all of its prompt."""
        return self.waits or not self.positions

    def fork(self) -> Document:
        """Return what is known of a cache with the same tokens that goes on by itself."""
        return replace(
            self,
            positions=list(self.positions),
            windows=dict(self.windows),
            under_way=None,
        )


class StagedCache(ABC):
    """A cache whose deeper layers may have rows of fewer tokens."""

    @property
    @abstractmethod
    def document(self) -> Document | None:
        """What is known of it; None where nothing is."""

    @abstractmethod
    def note(self, document: Document | None) -> None:
        """Say what is known of it from now on."""

    @property
    @abstractmethod
    def passes(self) -> int | None:
        """How many passes got through so far, whoever made them; None where nobody counts."""

    @property
    @abstractmethod
    def brought_dense(self) -> int | None:
        """Of how many first tokens rows attended to all before them, by whoever made them.

        None where the cache has no rows but those of passes.
        """

    @property
    @abstractmethod
    def is_alike(self) -> bool:
        """Whether all rows of the batch hold the same tokens."""

    @property
    @abstractmethod
    def is_causal(self) -> bool:
        """Whether its attention needs no mask to be causal."""

    @abstractmethod
    def begin_stages(self) -> None:
        """Learn that the pass under way is read in stages: its rows are for nobody else."""

    @abstractmethod
    def keep_whole(self, dense: int, seconds: float) -> None:
        """Learn that all layers have all tokens now, as if nothing had been read in stages.

        Parameters
        ----------
        dense
            How many of the first tokens attended to all before them.
        seconds
            What reading them took, or would have taken.
        """

    @abstractmethod
    def check(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Refuse a pass whose rows would not all keep the same tokens.

        Parameters
        ----------
        hidden
            (batch, tokens, hidden_size).
        mask
            As decoder layers get it; None where none is needed.
        """

    @abstractmethod
    def length(self, layer: int) -> int:
        """Return the tokens of a layer, those of the pass under way included."""

    @abstractmethod
    def expect_keys(self, layer: int, tokens: int) -> None:
        """Learn that a layer's keys are wanted once so many tokens are there, by this pass.

        Raises as `keys` does.
        """

    @abstractmethod
    def keys(
        self, layer: int, unit_tokens: int | None = None
    ) -> AbstractContextManager[torch.Tensor]:
        """Return what gives the keys of all tokens of a layer, (kv_heads, tokens, head_dim).

        They are there in the block of code that it encloses, and no longer.

        Parameters
        ----------
        layer
            Whose keys.
        unit_tokens
            Of how many tokens a key in FP32 is made there, whose memory is counted as well.
        """

    @abstractmethod
    def shorten(self, layers: range, tokens: int) -> None:
        """Leave the first tokens in layers that have fewer than the first one."""

    @abstractmethod
    def restart(self, layers: range, brought: int) -> None:
        """Forget what layers have but the first tokens, which the cache began with."""

    @abstractmethod
    def open_bands(self, starts: Sequence[int]) -> None:
        """Learn from which layers on fewer tokens will come."""

    @abstractmethod
    def wait(self, first: int) -> None:
        """Learn that the layers from `first` on get nothing of the pass but what pieces bring."""

    @abstractmethod
    def piece(self, layers: range, tokens: int) -> AbstractContextManager[None]:
        """Return what encloses bringing so many tokens to layers that wait."""

    @abstractmethod
    def keep(self, positions: Sequence[torch.Tensor], until: int) -> None:
        """Learn which of the first `until` tokens each band behind the first cut has.

        Parameters
        ----------
        positions
            Theirs, int64 for each band, in the order of its rows.
        until
            All later tokens are in every band, behind these.
        """

    @abstractmethod
    def kept(self, until: int) -> tuple[list[torch.Tensor], int] | None:
        """Return which of its `until` tokens each band behind the first cut has, as in `keep`.

        Beside them, how many first tokens were not cut off since `keep` said that. None where
        nobody but who reads in stages knows.
        """

    @abstractmethod
    def wait_with(self, states: torch.Tensor) -> States:
        """Keep boundary states (batch, tokens, hidden_size), and return them as they wait."""

    @abstractmethod
    def wait_between(self, states: torch.Tensor) -> States:
        """Keep states (batch, tokens, hidden_size) behind a band until those behind it take them.

        Raises as `wait_with` does.
        """

    @abstractmethod
    def bring(self, first: int, act: Callable[[], None]) -> None:
        """Do something that brings the layers from `first` on pieces, outside of a forward pass.

        Raises whatever `act` raises.
        """

    @abstractmethod
    def undo(self, layers: range, tokens: int) -> None:
        """Forget what a pass that broke off brought to layers that had so many tokens before."""

    @property
    @abstractmethod
    def rows_move(self) -> bool:
        """Whether rows may come between others."""

    @abstractmethod
    def attend_to(self, layers: range, rows: torch.Tensor, coming: int = 1) -> None:
        """Learn which rows of a band its layers attend to at the tokens that come next.

        Parameters
        ----------
        layers
            Of the band.
        rows
            int64, ascending; of a single token its own is among them, of several none.
        coming
            How many come.
        """

    @abstractmethod
    def enter(self, layers: range) -> None:
        """Learn that a band was brought tokens of the prompt, and gets those of the pass now."""

    @abstractmethod
    def ordinary(self) -> DynamicCache:
        """Return transformers' own cache, whose rows may be moved.

        Raises UnsupportedFeatureError where rows lie elsewhere and only come behind each other.
        """


@dataclass
class Pass:
    """A forward pass under way.

    Parameters
    ----------
    cache, document
        Which cache, and what is known of it.
    before, tokens
        What it held, and what comes.
    whole
        Tokens that the prompt has at its end, where it is one; what comes behind it is none.
    question_tokens
        As in `ComingPrompt`.
    stages
        Whether what comes waits at the first cut, and goes deeper once the prompt is whole.
    held
        What was known before.
    is_prompt
        Whether its tokens are of a prompt, and not decoded.
    emptied
        Whether a stage has begun, which first forgets what deeper layers had.
    moved
        Keys and values of layers as they were before blocks moved.
    entered
        Whether blocks ran through a band whose rows stay in their place.
    """

    cache: StagedCache
    document: Document
    before: int
    tokens: int
    whole: int
    question_tokens: int | None
    stages: bool
    held: Document
    is_prompt: bool
    emptied: bool = False
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    entered: bool = False


class ThreadsPass(threading.local):
    """The pass that a thread is in, which its cache keeps alive and nothing else."""

    _known: weakref.ref[Pass] | None = None

    @property
    def now(self) -> Pass | None:
        """The pass; None where the thread is in none of ours."""
        return None if self._known is None else self._known()

    def begin(self, now: Pass | None) -> None:
        """Enter a pass, or one that is none of ours."""
        self._known = None
        if now is not None:
            now.document.under_way, self._known = now, weakref.ref(now)

    def end(self) -> None:
        """Leave the pass."""
        now, self._known = self.now, None
        if now is not None:
            now.document.under_way = None


def no_states(missing: int, tokens: int) -> UnsupportedFeatureError:
    """Return what refuses to choose anew where boundary states of so many tokens are missing."""
    return UnsupportedFeatureError(
        f"prune: nothing can be chosen anew or read whole, because hidden states of {missing} of "
        f'{tokens} tokens are not there (of answers in several rows, of turns with later="keep" '
        'or without prune): go on with later="keep", or begin with an empty cache and later="anew"'
    )
