# SPDX-License-Identifier: Apache-2.0
"""Queries: predicted, as scored, and told to the library; and what is chosen by them ahead."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.errors import CacheUseError
from hillinfer.gpu.copies import CopiedRows
from hillinfer.kv.hot_pools import HotPools
from hillinfer.kv.pool_policies import PoolPolicy
from hillinfer.kv.prefetch_buffer import LandedRows
from hillinfer.kv.sequence import NUMBER_TYPES, Sequence
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.native.library import native_library
from hillinfer.native.selected import MissList, SelectedRows
from hillinfer.native.signatures import RowStates
from hillinfer.native.structures import DecodeStep, Shape
from hillinfer.scoring.arguments import query_factor
from hillinfer.scoring.scorer import Wanted
from hillinfer.shadow.segments import SegmentLayer
from hillinfer_model.choices import Scope
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec

# --- Predicted queries ---

Rotary = tuple[torch.Tensor, torch.Tensor]


class Prediction(ABC):
    """A layer's predicted queries, which are computed once somebody asks for them."""

    @abstractmethod
    def queries(self) -> torch.Tensor:
        """Return the queries, (batch, query_heads, 1, head_dim)."""

    @abstractmethod
    def before_positions(self) -> tuple[torch.Tensor, Rotary | None]:
        """Return them as they are before positions turn them, and what would; None for nothing.

        That is cosines and sines, (batch, 1, head_dim).
        """


class GivenQuery(Prediction):
    """A query that is known already.

    Parameters
    ----------
    query
        (query_heads, 1, head_dim); a copy is kept.
    """

    def __init__(self, query: torch.Tensor) -> None:
        self._queries = query.clone()[None]

    def queries(self) -> torch.Tensor:
        """Return it, the only one of a batch."""
        return self._queries

    def before_positions(self) -> tuple[torch.Tensor, Rotary | None]:
        """Return it as it is: nothing is to turn it any more."""
        return self._queries, None


# --- Queries as they are scored ---


class Explained:
    """Says what to do about a query that cannot be scored.

    A class, because a generator takes several times as long at every layer and step.
    """

    def __init__(self, layer: int) -> None:
        self._layer = layer

    def __enter__(self) -> None:
        """Do nothing yet."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the reason in words that help."""
        if isinstance(error, NonFiniteQueryError):
            raise explained(self._layer, error) from error


def explained(layer: int, error: NonFiniteQueryError) -> CacheUseError:
    """Return an error that says what to do about a query that cannot be scored."""
    return CacheUseError(
        f"layer {layer} made a query that is not finite ({error}): the model's weights or its "
        "number type are at fault; try --dtype float32 (the rows that the drive returned are "
        "those that were written)"
    )


def shadow_states(states: torch.Tensor) -> torch.Tensor:
    """Return keys or values (kv_heads, tokens, head_dim) token by token in FP16, to be coded."""
    moved = states.transpose(0, 1)
    if moved.dtype is torch.float16 and moved.is_cpu:
        return moved
    return moved.to(device="cpu", dtype=torch.float16)


def host_query(query: torch.Tensor) -> torch.Tensor:
    """Return a query (query_heads, 1, head_dim) as it is scored with, on the processor."""
    own = query[:, 0]
    return own if own.dtype is torch.float32 and own.is_cpu else own.float().cpu()


def may_choose_aside(past: int, segment_tokens: int) -> bool:
    """Say whether what another thread looks at stays as it is until the layer's turn.

    It does where no segment of the sequence begins or becomes full with the token that comes behind
    `past` others, and its group goes on.
    """
    inside = past % segment_tokens
    return past % GROUP_TOKENS != 0 and 0 < inside < segment_tokens - 1


Sets = list[NDArray[np.int64]]


@dataclass(frozen=True)
class Ahead:
    """What a layer attends to, and what was done of it before its turn.

    Parameters
    ----------
    sets
        The selected sets, one for the layer or one per KV head.
    landed
        Their cold rows that are read ahead, or None.
    copied
        What of them is on its way to the model's GPU; None where it has none.
    exact
        Exact tokens of each set where others are coded; `landed` has rows of coded ones, too.
    """

    sets: Sets
    landed: LandedRows | None
    copied: Future[CopiedRows] | None
    exact: Sets | None = None

    @property
    def counts(self) -> tuple[int, int]:
        """How many sets there are, and how many tokens in all of them."""
        return len(self.sets), sum(map(len, self.sets))


class AsideChoice:
    """Tokens that a thread of the library's chooses, from `begin` to `end`.

    The library fills and empties what stands for it: wherever an interrupt comes, that says whether
    a thread is choosing.

    Attributes
    ----------
    address
        Where a call of the library finds what it is to end.
    """

    def __init__(self) -> None:
        self._library, self._handle = native_library(), ctypes.c_void_p()
        self.address = ctypes.addressof(self._handle)

    @property
    def is_under_way(self) -> bool:
        """Whether a choice was begun that nobody has ended."""
        return bool(self._handle)

    def begin(self, variant: int, table: int, past: int, *asked: int | None) -> None:
        """Begin to choose; see host/native/decode_step.cpp.

        Parameters
        ----------
        variant
            Number of the instruction set.
        table, past, asked
            Address, stored tokens; addresses of what is asked, sets, exact ones or None. They live.
        """
        # It takes a few microseconds.
        begin = self._library.tables.hillinfer_choose_begin
        outcome = begin(variant, table, past, *asked, self.address)
        if outcome:
            self._library.check("hillinfer_choose_begin", outcome)

    def end(self) -> None:
        """Return once tokens are chosen, where that was begun and nobody ended it.

        Raises
        ------
        NonFiniteQueryError
            Where the query was not finite.
        """
        if self._handle:
            outcome = self._library.functions.hillinfer_choose_end(self.address)
            if outcome:
                self._library.check("hillinfer_choose_end", outcome)


@dataclass
class KeptQuery:
    """What was predicted of a layer, until its turn.

    Parameters
    ----------
    asked
        Tokens that are stored, how many the sequence has beside them, and the scaling.
    query
        What computes it as the only one of its batch.
    own
        The layer's last segment, which learns how many of its tokens are coded.
    held
        What else the library looks at until it has chosen.
    choice
        Where a thread of the library's chooses already; None where none does.
    told
        What lives until the library has read it.
    """

    asked: tuple[int, int, float]
    query: Prediction
    own: SegmentLayer
    held: object
    choice: AsideChoice | None = None
    told: object = None


# --- What the library is told of them ---

_NOT_COUNTED = -1  # Hits are counted in Python.
# After a step with cold rows it is looked for so many steps what is to be read.
STEPS_AFTER_COLD = 16


class AskedStep:
    """What layers of one step are asked for alike, and what it is filled in for (`of`).

    That is the tokens that are stored, how many the sequence has beside them, and the scaling.
    """

    def __init__(self, step: DecodeStep) -> None:
        self.step = step
        self.address = ctypes.addressof(step)
        self.of: tuple[int, int, float] | None = None
        self.count = 0

    def tell(self, of: tuple[int, int, float], coming: int, wanted: Wanted, exact: int = 0) -> None:
        """Fill in how much is to be chosen, how much of it is exact, and with which factors."""
        # After an interrupt in between it is filled in for nothing.
        step, before, self.of = self.step, self.of, None
        if before is None or before[2] != of[2]:
            self.tell_scaling(of[2])
        step.coming = coming
        step.sinks, step.recent, step.count = wanted.sinks, wanted.recent, wanted.count
        step.threads, step.exact = torch.get_num_threads(), exact
        self.of, self.count = of, wanted.count

    def tell_scaling(self, scaling: float) -> None:
        """Fill in the factors alone."""
        self.step.scaling, self.step.factor = scaling, query_factor(scaling)


class LayerCalls:
    """Tells the library of queries, and the pools and their policy of what it found.

    Attributes
    ----------
    aside_from
        The first step from which on rows are thought to be hot again.
    counts_here
        Whether the library leaves it to `count` what was selected.
    """

    def __init__(
        self,
        shape: ModelShape,
        spec: KernelSpec,
        scope: Scope,
        pools: HotPools,
        policy: PoolPolicy,
    ) -> None:
        self._shape = shape
        self._spec = spec
        self._scope = scope
        self._pools = pools
        self._policy = policy
        self._query_shape = shape.query_heads, 1, shape.head_dim
        self._turn_shape = 1, 1, shape.head_dim
        # A policy that counts in a way of its own does it in Python.
        is_common = type(policy).tally is PoolPolicy.tally
        self._shift = policy.fade_shift if is_common else _NOT_COUNTED
        self.counts_here = not is_common
        self.aside_from = 0
        # What the last predicted query was turned by, and in which step it was told.
        self._turning: Rotary | None = None
        self._turned: DecodeStep | None = None

    def asked(self) -> AskedStep:
        """Return what a kind of call asks for: another thread may still look at another kind's."""
        shape = self._shape
        return AskedStep(
            DecodeStep(
                shape=Shape.of(self._spec, self._scope),
                group_size=shape.group_size,
                stored_type=0 if shape.stored_type is StoredType.BFLOAT16 else 1,
                fade_shift=self._shift,
            )
        )

    def tell_query(self, step: DecodeStep, query: torch.Tensor) -> bool:
        """Say where a query lies; False where the library cannot read it, or others refuse it."""
        number_type, strides = NUMBER_TYPES.get(query.dtype), query.stride()
        if number_type is None or query.shape != self._query_shape or not query.is_cpu:
            return False
        if strides[2] != 1:
            return False
        step.query, step.head_stride, step.query_type = query.data_ptr(), strides[0], number_type
        return True

    def tell_coming(self, step: DecodeStep, query: torch.Tensor | Prediction) -> object | None:
        """Say where a query lies, or what one is made of, for a token that is about to come.

        Returns what lives until the library has read it; None where the library cannot.
        """
        if isinstance(query, Prediction):
            return self.tell_prediction(step, query, query.before_positions())
        if not self.tell_query(step, query):
            return None
        self._turning, self._turned, step.cosines, step.sines = None, step, None, None
        return query

    def tell_prediction(
        self, step: DecodeStep, predicted: Prediction, product: tuple[torch.Tensor, Rotary | None]
    ) -> object:
        """Say where a predicted query lies; return what lives until the library has read it.

        Parameters
        ----------
        step
            Of the choice.
        predicted, product
            Who computes it as the only one of its batch, and what it is before positions turn it.
        """
        queries, rotary = product
        if rotary is not None and not self._turns(queries, rotary):
            queries, rotary = predicted.queries(), None
        query = queries[0]
        if not self.tell_query(step, query):
            query = host_query(query)[:, None].contiguous()
            self.tell_query(step, query)
        # All layers of a step are turned alike.
        if rotary is not self._turning or step is not self._turned:
            self._turning, self._turned, given = rotary, step, rotary or ()
            step.cosines, step.sines = [one.data_ptr() for one in given] or (None, None)
        return query

    def _turns(self, query: torch.Tensor, rotary: Rotary) -> bool:
        """Say whether the library turns a query as torch does."""
        cosines, sines = rotary
        if rotary is self._turning and query.dtype is torch.float32:
            return query.is_cpu
        if not query.dtype is cosines.dtype is sines.dtype is torch.float32 or not query.is_cpu:
            return False
        return cosines.shape == self._turn_shape and cosines.stride(2) == sines.stride(2) == 1

    def settle(self, layer: int, sequence: Sequence, length: int) -> None:
        """Wait until no row of a layer moves, and have room to count hits.

        Not with `attending` held: rows may move behind an observer that waits for it.
        """
        self._pools.settle(layer)
        if length > len(sequence.hits.counts[layer]):
            self._pools.cover_hits(sequence.hits, layer, length)

    def note_hits(
        self, layer: int, sequence: Sequence, selected: SelectedRows, misses: MissList
    ) -> None:
        """Note that what is selected was counted, or count it: each row once."""
        length = sequence.lengths[layer]
        self._pools.hits.note(layer, sequence, length & -GROUP_TOKENS, length)
        if self.counts_here:
            self.count(layer, sequence, selected, misses)

    def count(
        self, layer: int, sequence: Sequence, selected: SelectedRows, misses: MissList
    ) -> None:
        """Count what is selected by a policy that the library does not know."""
        counts = sequence.hits.counts[layer]
        self._policy.tally(counts, selected.rows)
        misses.recount(counts)

    def note_cold(self, step: int) -> None:
        """Note that rows were cold in a step."""
        self.aside_from = step + STEPS_AFTER_COLD


# --- Of a whole batch ---


@dataclass(frozen=True)
class Choice:
    """What tokens of a sequence are chosen by, for a token that is about to come or just came.

    Parameters
    ----------
    layer, sequence
        Where.
    tokens
        Of it that are stored.
    scaling
        Factor on inner products.
    bring
        Returns the query, float32 (query_heads, head_dim) on the CPU; may wait.
    lacking
        As in `ImportanceEvaluation.wanted`.
    keys
        The newest token's where its own query is asked for; None where one more is to come.
    """

    layer: int
    sequence: Sequence
    tokens: int
    scaling: float
    bring: Callable[[], torch.Tensor]
    lacking: int
    keys: torch.Tensor | None = None

    @classmethod
    def own(
        cls, layer: int, sequence: Sequence, query: torch.Tensor, keys: torch.Tensor, scaling: float
    ) -> Choice:
        """Return that of a token's own query, (query_heads, 1, head_dim)."""
        bring, lacking = partial(host_query, query), sequence.lacking
        return cls(layer, sequence, sequence.lengths[layer], scaling, bring, lacking, keys)

    @property
    def coming(self) -> int:
        """How many tokens are to come: 1 or 0."""
        return int(self.keys is None)


@dataclass
class AnnouncedLayer:
    """What is known of a layer before its turn.

    Parameters
    ----------
    query
        Predicted, (batch, query_heads, 1, head_dim), or what computes it.
    scaling
        Factor on its inner products.
    segments
        Of each part its last segment; None for one that is announced by itself.
    held
        What else the library looks at until it has chosen.
    """

    query: torch.Tensor | Prediction
    scaling: float
    segments: list[SegmentLayer | None]
    held: list[object] = field(default_factory=list)


def readable_states(states: torch.Tensor | Prediction) -> torch.Tensor:
    """Return a batch's states as the library can read them."""
    if isinstance(states, Prediction):
        states = states.queries()
    if states.is_cpu and states.dtype in NUMBER_TYPES and states.stride(-1) == 1:
        return states
    return states.float().cpu().contiguous()


def row_states(states: torch.Tensor) -> RowStates:
    """Say where a batch's states lie that `readable_states` returned."""
    strides = states.stride()
    return RowStates(states.data_ptr(), strides[0], strides[1], NUMBER_TYPES[states.dtype])
