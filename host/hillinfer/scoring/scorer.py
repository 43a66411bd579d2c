# SPDX-License-Identifier: Apache-2.0
"""Which tokens one decode step attends to: the interface of scorers, and what asks them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.native.library import Variant
from hillinfer.scoring.layout import ProbeShadow
from hillinfer.settings import Settings
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.selection import exact_count, selected_count

# --- How many tokens to select ---


@dataclass(frozen=True)
class Wanted:
    """How many tokens a set has, and which of them are in it whatever their score.

    Parameters
    ----------
    sinks, recent
        How many of the first and of the newest tokens are kept.
    """

    count: int
    sinks: int
    recent: int

    def check(self, length: int, coming: int) -> None:
        """Raise ValueError where this cannot be had of `length` tokens, `coming` among them."""
        if min(self.sinks, self.recent - coming) < 0:
            raise ValueError(
                f"sinks={self.sinks} or recent={self.recent} is below what is kept with "
                f"coming={coming}"
            )
        kept = min(self.sinks + self.recent, length)
        if not kept <= self.count <= length:
            raise ValueError(f"count={self.count} is outside {kept}..{length}")


# --- The scorer's interface ---


@dataclass(frozen=True)
class SegmentShadow:
    """The key shadow of one segment of one layer and sequence.

    Parameters
    ----------
    base_position
        Logical position of the segment's first token, a multiple of the segment length.
    tokens
        Tokens coded so far; the segments of one call are consecutive, start at position 0, and
        only the last one may be short.
    shadow
        uint8 of shape (segment_beats, 64), in the layout of contract section 9. Groups lie at
        fixed places, so a short segment is the prefix of a full one, its last group included.
    probe_copy
        A copy of the probe tokens among `tokens`, kept beside a full shadow in DRAM, or None. A
        scorer that looks at them first then need not pass over the shadow twice.
    """

    base_position: int
    tokens: int
    shadow: NDArray[np.uint8]
    statistics: ChannelStatistics
    probe_copy: ProbeShadow | None = None

    @property
    def on_drive(self) -> bool:
        """Whether `shadow` is read when it is asked for, and valid until the next one is."""
        return False

    @property
    def device_tokens(self) -> int:
        """How many of the first tokens a device can score without the host's shadow."""
        return 0

    @property
    def probes(self) -> ProbeShadow:
        """The host's copy of the probe tokens among `device_tokens`."""
        raise ValueError("the host holds this shadow whole")


def total_tokens(segments: Sequence[SegmentShadow]) -> int:
    """Return how many tokens the consecutive segments of a sequence hold."""
    return segments[-1].base_position + segments[-1].tokens if segments else 0


class Scorer(Protocol):
    """Makes key shadows and selects by them; one implementation per execution of the contract."""

    spec: KernelSpec
    scope: Scope

    @property
    def table_variant(self) -> Variant | None:
        """The variant of the native library that chooses over its tables as this scorer does.

        None where this scorer is to be asked.
        """

    def statistics(
        self, keys: torch.Tensor, first_position: int, preceding: ChannelStatistics | None
    ) -> ChannelStatistics:
        """Take a segment's channel statistics, once (contract, section 3).

        Parameters
        ----------
        keys
            float16 of shape (tokens, kv_heads, head_dim) on the CPU: the segment's tokens so far.
        first_position
            Logical position of the first of them; the sinks (positions 0..3) are left out.
        preceding
            Statistics of the segment before, None for the first.
        """

    def encode(
        self,
        keys: torch.Tensor,
        statistics: ChannelStatistics,
        shadow: NDArray[np.uint8],
        first_token: int,
    ) -> None:
        """Write the codes and exponents of `keys` into a segment's shadow, in place.

        Parameters
        ----------
        keys
            float16 of shape (tokens, kv_heads, head_dim) on the CPU.
        shadow
            uint8 of shape (segment_beats, 64).
        first_token
            Index of the first of `keys` within the segment.
        """

    def choose(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int,
        wanted: Sequence[Wanted],
    ) -> list[list[NDArray[np.int64]]]:
        """Select tokens for a query: the kept ones and the best others (contract, section 8).

        Scored once, whatever sizes are wanted.

        Parameters
        ----------
        query, scaling, segments, coming
            As for `tuples`, whose errors it raises; at least one token.
        wanted
            Sizes, one or more, each of N, the coming token included, which is one of the newest.

        Returns
        -------
        For each size one ascending int64 array of positions per selected set: one for the layer, or
        one per KV head. The coming token is the last of each.

        Raises
        ------
        ValueError
            More is wanted than there is, or less than is kept.
        """

    def tuples(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int = 0,
    ) -> NDArray[np.uint32]:
        """Return the tuples of every token of consecutive segments, which `choose` ranks.

        Parameters
        ----------
        query
            float32 of shape (query_heads, head_dim) on the CPU, after rotary embedding.
        scaling
            What the attention function multiplies inner products with.
        segments
            All segments of the sequence; their tokens together are N, this step's own included.
            Shadows on the drive are to be asked for in this order and copied from at once.
        coming
            Tokens that N counts and that have no key yet (contract, section 6): 1 where the query
            is a predicted one.

        Returns
        -------
        uint32 of shape (sets, N), in the order of positions (contract, section 11): one set for the
        layer, or one per KV head.

        Raises
        ------
        hillinfer_model.errors.NonFiniteQueryError
            Before anything is scored, where the query holds an infinity or a NaN.
        """


# --- Shadows that are read while they are scored ---


class StreamedShadow(SegmentShadow):
    """A `SegmentShadow` that is read from the drive when it is scored.

    Parameters
    ----------
    base_position, tokens, statistics
        As there.
    read
        Returns the shadow, valid until another segment's is asked for.
    place
        Descriptor and offset from which a device can load it, or None.
    probes
        The host's copy of the probe tokens where a device is to score it, else None.
    """

    def __init__(
        self,
        base_position: int,
        tokens: int,
        statistics: ChannelStatistics,
        read: Callable[[], NDArray[np.uint8]],
        place: tuple[int, int] | None = None,
        probes: ProbeShadow | None = None,
    ) -> None:
        # The class is frozen, and its `shadow` is no field here.
        vars(self).update(
            base_position=base_position, tokens=tokens, statistics=statistics, place=place,
            _read=read, _probes=probes,
        )  # fmt: skip

    place: tuple[int, int] | None
    _read: Callable[[], NDArray[np.uint8]]
    _probes: ProbeShadow | None

    @property
    def shadow(self) -> NDArray[np.uint8]:
        """Read the shadow, uint8 of shape (segment_beats, 64)."""
        return self._read()

    @property
    def on_drive(self) -> bool:
        """Say that it is."""
        return True

    @property
    def device_tokens(self) -> int:
        """All of them, where a device is to load and score it."""
        return 0 if self.place is None or self._probes is None else self.tokens

    @property
    def probes(self) -> ProbeShadow:
        """The host's copy of the probe tokens."""
        assert self._probes is not None
        return self._probes


# --- importance evaluation ---


@dataclass(frozen=True)
class Split:
    """The selected sets of a layer, and which of their tokens are exact (contract, section 15).

    Parameters
    ----------
    sets, exact
        One ascending int64 array of positions for each set; those of `exact` are among those of
        `sets`.
    """

    sets: list[NDArray[np.int64]]
    exact: list[NDArray[np.int64]]


class ImportanceEvaluation:
    """Scores all tokens of a sequence where they lie and selects the top α (HIE).

    Parameters
    ----------
    settings
        α, kept tokens, the upper bound and how many tokens are exact.
    """

    def __init__(self, scorer: Scorer, settings: Settings) -> None:
        self._scorer = scorer
        self._settings = settings
        self._kept = settings.kept_tokens
        self._rate, self._exact_share = settings.importance_rate, settings.exact_share
        self.has_coded = settings.has_coded_tokens
        self.sets = 1 if scorer.scope is Scope.LAYER else scorer.spec.kv_heads
        # Of the length that was asked for last: all layers of a step have the same.
        self._last = (0, 0), self._split_of(0, 0)

    @property
    def is_fast(self) -> bool:
        """Whether the processor scores by itself, in C++ and with vectors."""
        return self._scorer.table_variant not in (None, Variant.PORTABLE)

    @property
    def table_variant(self) -> Variant | None:
        """The variant of the native library that chooses as this does; None where nothing does."""
        return self._scorer.table_variant

    def selects_all(self, length: int, lacking: int = 0) -> bool:
        """Say whether a sequence of this length is selected whole, and nothing of it is coded."""
        return self.wanted(length, lacking).count == length and not self.codes(length, lacking)

    def codes(self, length: int, lacking: int = 0) -> bool:
        """Say whether some of the selected tokens are coded (contract, section 15).

        Parameters
        ----------
        length, lacking
            As in `wanted`.
        """
        if not self.has_coded:
            return False
        wanted, exact = self.wanted_split(length, lacking)
        return exact.count < wanted.count

    def everything(self, length: int) -> list[NDArray[np.int64]]:
        """Return the sets of a sequence that is selected whole."""
        return [np.arange(length)] * self.sets

    def select(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int = 0,
        lacking: int = 0,
    ) -> list[NDArray[np.int64]]:
        """Select tokens for one query of one layer.

        Parameters
        ----------
        query
            float32 (query_heads, head_dim) on the CPU.
        segments
            All segments of the sequence in this layer.
        coming
            1 where the query is a predicted one, of a token behind those of `segments` that has no
            key yet. As recent as a token can be, it is kept: the others are chosen from what there
            is (HillInfer section 4.3).
        lacking
            As in `wanted`.

        Returns
        -------
        One ascending int64 array of positions per selected set: one for the layer, or one per KV
        head. A coming token is the last of each.
        """
        length = total_tokens(segments) + coming
        wanted = self.wanted(length, lacking)
        if wanted.count == length:
            return self.everything(length)
        return self._scorer.choose(query, scaling, segments, coming, (wanted,))[0]

    def chosen(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int,
        lacking: int = 0,
    ) -> list[NDArray[np.int64]] | Split:
        """Return what `split` does where tokens are coded, else what `select` does."""
        is_coded = self.codes(total_tokens(segments) + coming, lacking)
        return (self.split if is_coded else self.select)(query, scaling, segments, coming, lacking)

    def split(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int,
        lacking: int = 0,
    ) -> Split:
        """Do as `select`, and say which tokens are exact; `codes` says that it is called."""
        wanted = self.wanted_split(total_tokens(segments) + coming, lacking)
        return Split(*self._scorer.choose(query, scaling, segments, coming, wanted))

    def wanted_split(self, length: int, lacking: int = 0) -> tuple[Wanted, Wanted]:
        """Return how much is selected of so many tokens, and how much of that is exact.

        As much where nothing is coded. Parameters as in `wanted`.
        """
        # One pair, because several threads ask.
        known, both = self._last
        if known != (length, lacking):
            both = self._split_of(length, lacking)
            self._last = (length, lacking), both
        return both

    def wanted(self, length: int, lacking: int = 0) -> Wanted:
        """Return how much is selected of so many tokens.

        Parameters
        ----------
        length
            Tokens that there are.
        lacking
            How many more the sequence has, without rows in this band: α counts them, and of rows
            there are no more than there are.
        """
        known, (wanted, _) = self._last
        return wanted if known == (length, lacking) else self.wanted_split(length, lacking)[0]

    def _split_of(self, length: int, lacking: int) -> tuple[Wanted, Wanted]:
        settings = self._settings
        tokens = length + lacking
        count = selected_count(tokens, self._rate, self._kept, settings.max_selected)
        wanted = Wanted(min(count, length), settings.kept_sinks, settings.kept_recent)
        if not self.has_coded:
            return wanted, wanted
        own = settings.exact_floor, min(self._kept, length), wanted.count
        return wanted, replace(wanted, count=exact_count(tokens, self._exact_share, *own))
