# SPDX-License-Identifier: Apache-2.0
"""Which tokens one decode step attends to: the interface of scorers, and what asks them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
from hillinfer_model.score_block import ScoreBlock
from hillinfer_model.selection import kept_positions, selected_count

# --- How many tokens to select ---


@dataclass(frozen=True)
class Wanted:
    """How many tokens a set has, and which of them are in it whatever their score.

    Parameters
    ----------
    count
        Tokens of a set.
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
    statistics
        The segment's channel statistics.
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
    def is_fast(self) -> bool:
        """Whether the processor scores by itself, in C++ and with vectors."""
        ...

    @property
    def table_variant(self) -> Variant | None:
        """The variant of the native library that chooses over its tables as this scorer does.

        None where this scorer is to be asked.
        """
        ...

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
        ...

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
        statistics
            The segment's.
        shadow
            uint8 of shape (segment_beats, 64).
        first_token
            Index of the first of `keys` within the segment.
        """
        ...

    def choose(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int,
        wanted: Wanted,
    ) -> list[NDArray[np.int64]]:
        """Select tokens for a query: the kept ones and the best others (contract, section 8).

        Parameters
        ----------
        query, scaling, segments, coming
            As for `score`, whose errors it raises; at least one token.
        wanted
            Of N, the coming token included, which is one of the newest.

        Returns
        -------
        One ascending int64 array of positions per selected set: one for the layer, or one per KV
        head. The coming token is the last of each.

        Raises
        ------
        ValueError
            More is wanted than there is, or less than is kept.
        """
        ...

    def score(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int = 0,
    ) -> Iterator[ScoreBlock]:
        """Score every token of consecutive segments, which `choose` ranks, and yield score blocks.

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

        Raises
        ------
        hillinfer_model.errors.NonFiniteQueryError
            Before anything is scored, where the query holds an infinity or a NaN.
        """
        ...


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
        for name, value in (
            ("base_position", base_position),
            ("tokens", tokens),
            ("statistics", statistics),
            ("_read", read),
            ("place", place),
            ("_probes", probes),
        ):
            object.__setattr__(self, name, value)

    place: tuple[int, int] | None
    _probes: ProbeShadow | None

    @property
    def shadow(self) -> NDArray[np.uint8]:
        """Read the shadow, uint8 of shape (segment_beats, 64)."""
        read: Callable[[], NDArray[np.uint8]] = self._read  # type: ignore[attr-defined]
        return read()

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


# --- The exact top of score blocks ---


class TopAlpha:
    """Keeps the best tokens of all score blocks seen so far (HillInfer section 4.2, HIE).

    Ranking is (score code descending, position ascending), so the result does not depend on how
    scores were cut into blocks nor on the order the blocks came in.

    Parameters
    ----------
    count
        Tokens to select, the kept ones included.
    kept
        int64 positions that are selected whatever their score, ascending.
    """

    def __init__(self, count: int, kept: NDArray[np.int64]) -> None:
        self._kept = kept
        self._wanted = count - len(kept)
        self._best = np.empty(0, np.int64)
        self._waiting: list[NDArray[np.int64]] = []
        self._waiting_count = 0

    def merge(self, block: ScoreBlock) -> None:
        """Take one score block into account."""
        # One integer orders as (code descending, position ascending) when sorted descending.
        keys = (block.codes.astype(np.int64) << 40) + ((1 << 40) - 1 - block.positions)
        self._waiting.append(keys)
        self._waiting_count += len(keys)
        if self._waiting_count > max(2 * self._wanted, 4096):
            self._settle()

    def positions(self) -> NDArray[np.int64]:
        """Return the selected positions, int64, ascending, the kept ones among them."""
        self._settle()
        chosen = (1 << 40) - 1 - (self._best & ((1 << 40) - 1))
        return np.sort(np.concatenate([self._kept, chosen]))

    def _settle(self) -> None:
        keys = np.concatenate([self._best, *self._waiting])
        self._waiting, self._waiting_count = [], 0
        # Kept positions take part here so that they cannot push anything out: drop them first.
        positions = (1 << 40) - 1 - (keys & ((1 << 40) - 1))
        keys = keys[~np.isin(positions, self._kept)]
        if len(keys) > self._wanted:
            cut = len(keys) - self._wanted
            keys = np.partition(keys, cut)[cut:] if self._wanted else keys[:0]
        self._best = keys


def top_of_blocks(
    blocks: Iterable[ScoreBlock],
    spec: KernelSpec,
    scope: Scope,
    segments: Sequence[SegmentShadow],
    coming: int,
    wanted: Wanted,
) -> list[NDArray[np.int64]]:
    """Return the selected sets of a scorer that only scores; see `Scorer.choose`.

    Parameters
    ----------
    blocks
        All of `segments`, in any order.
    spec, scope
        Of the scorer.
    segments, coming, wanted
        As there, whose errors it raises.
    """
    length = total_tokens(segments) + coming
    wanted.check(length, coming)
    kept = kept_positions(length, wanted.sinks, wanted.recent)
    # One that is coming is among the newest, which are kept.
    kept = kept[: len(kept) - coming]
    sets = 1 if scope is Scope.LAYER else spec.kv_heads
    tops = [TopAlpha(wanted.count - coming, kept) for _ in range(sets)]
    for block in blocks:
        tops[block.kv_head].merge(block)
    newest = np.arange(length - coming, length)
    return [np.append(top.positions(), newest) for top in tops]


# --- importance evaluation ---


class ImportanceEvaluation:
    """Scores all tokens of a sequence where they lie and selects the top α (HIE).

    Parameters
    ----------
    scorer
        Executes the scoring contract.
    settings
        α, kept tokens and the upper bound.
    """

    def __init__(self, scorer: Scorer, settings: Settings) -> None:
        self._scorer = scorer
        self._settings = settings
        self._kept = settings.kept_tokens
        self._sets = 1 if scorer.scope is Scope.LAYER else scorer.spec.kv_heads
        # Of the length that was asked for last: all layers of a step have the same.
        self._last = (0, 0), self._wanted_of(0, 0)

    @property
    def is_fast(self) -> bool:
        """Whether the processor scores by itself, in C++ and with vectors."""
        return self._scorer.is_fast

    @property
    def table_variant(self) -> Variant | None:
        """The variant of the native library that chooses as this does; None where nothing does."""
        return self._scorer.table_variant

    def selects_all(self, length: int, lacking: int = 0) -> bool:
        """Say whether a sequence of this length is selected whole, so that nothing is scored."""
        return self.wanted(length, lacking).count == length

    def everything(self, length: int) -> list[NDArray[np.int64]]:
        """Return the sets of a sequence that is selected whole."""
        return [np.arange(length)] * self._sets

    def select(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        lacking: int = 0,
    ) -> list[NDArray[np.int64]]:
        """Select tokens for one query of one layer.

        Parameters
        ----------
        query
            float32 (query_heads, head_dim) on the CPU.
        scaling
            Factor on inner products.
        segments
            All segments of the sequence in this layer.
        lacking
            As in `wanted`.

        Returns
        -------
        One ascending int64 array of positions per selected set: one for the layer, or one per KV
        head.
        """
        length = total_tokens(segments)
        wanted = self.wanted(length, lacking)
        if wanted.count == length:
            return self.everything(length)
        return self._scorer.choose(query, scaling, segments, 0, wanted)

    def select_next(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        lacking: int = 0,
    ) -> list[NDArray[np.int64]]:
        """Select for the token after those of `segments`, which has a query and no key yet.

        It is as recent as a token can be, so it is kept; the others are chosen from what there is
        (HillInfer section 4.3).

        Parameters
        ----------
        query, scaling, segments, lacking
            As in `select`; the query is a predicted one.

        Returns
        -------
        As `select` of one token more: as many positions, the last of them the new token's.
        """
        length = total_tokens(segments) + 1
        wanted = self.wanted(length, lacking)
        if wanted.count == length:
            return self.everything(length)
        return self._scorer.choose(query, scaling, segments, 1, wanted)

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
        # One pair, because several threads ask.
        known, wanted = self._last
        if known != (length, lacking):
            wanted = self._wanted_of(length, lacking)
            self._last = (length, lacking), wanted
        return wanted

    def _wanted_of(self, length: int, lacking: int) -> Wanted:
        settings = self._settings
        tokens = length + lacking
        count = selected_count(tokens, settings.alpha, self._kept, settings.max_selected)
        return Wanted(min(count, length), settings.kept_sinks, settings.kept_recent)
