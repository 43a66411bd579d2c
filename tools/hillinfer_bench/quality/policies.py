# SPDX-License-Identifier: Apache-2.0
"""Selection policies that are measured, the product's own among them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.scoring.scorer import Scorer, SegmentShadow, Wanted, total_tokens
from hillinfer.settings import Settings
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import BEAT_BYTES
from hillinfer_model.selection import kept_positions, selected_count


@dataclass(frozen=True)
class LayerQueries:
    """Queries of the newest tokens of a sequence in one layer, and the keys of all its tokens.

    Query i belongs to the token at position `first_length` - 1 + i and sees that token and those
    before it, as if the tokens had been decoded one after the other.

    Parameters
    ----------
    queries
        float32 of shape (queries, query_heads, head_dim) on the CPU, after rotary embedding.
    keys
        The stored type, shape (N, kv_heads, head_dim), on the CPU.
    scaling
        Factor on inner products.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    scaling: float

    @property
    def first_length(self) -> int:
        """Tokens that the first query sees."""
        return len(self.keys) - len(self.queries) + 1

    @property
    def lengths(self) -> range:
        """Tokens that each query sees, its own included."""
        return range(self.first_length, len(self.keys) + 1)

    def inner_products(self) -> torch.Tensor:
        """Return scaled inner products in float32, (kv_heads, group, queries, N).

        Tokens after a query's own are -inf.
        """
        count, _, head_dim = self.queries.shape
        tokens, kv_heads, _ = self.keys.shape
        rows = self.queries.transpose(0, 1).reshape(kv_heads, -1, head_dim)
        products = rows @ self.keys.float().permute(1, 2, 0) * self.scaling
        products = products.view(kv_heads, -1, count, tokens)
        return products.masked_fill_(~causal_mask(count, tokens), -torch.inf)


def causal_mask(queries: int, tokens: int) -> torch.Tensor:
    """Return which of `tokens` the newest `queries` of them see, bool (queries, tokens)."""
    return torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)


class Attending(ABC):
    """A way to attend that is more than selecting tokens, for comparison."""

    @abstractmethod
    def attend(self, layer: LayerQueries, values: torch.Tensor) -> torch.Tensor:
        """Attend for each query of a layer.

        Parameters
        ----------
        layer
            Queries and keys.
        values
            The stored type, shape (N, kv_heads, head_dim), on the CPU.

        Returns
        -------
        float32 of shape (query_heads, queries, head_dim).
        """


class SelectionPolicy(ABC):
    """A way to select tokens, for comparison; subclasses override one method.

    What is the same for every policy lies here: how many tokens are selected and which are kept.
    The product selects by the scoring contract alone (`ContractSelection`).

    Parameters
    ----------
    settings
        α, the kept tokens, the upper bound; a policy may read more of it, such as the scope.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @abstractmethod
    def select(self, layer: LayerQueries) -> list[NDArray[np.int64]]:
        """Select tokens for each query of a layer.

        Parameters
        ----------
        layer
            Queries and keys. A policy must not look at keys after a query's own token.

        Returns
        -------
        One int64 array of shape (sets, k) per query: ascending positions, the kept tokens among
        them, k as `count` says; sets is 1, or the KV heads where each has a set of its own.
        """

    def count(self, length: int) -> int:
        """Return k, how many of `length` tokens are selected."""
        settings = self.settings
        return selected_count(
            length, settings.importance_rate, settings.kept_tokens, settings.max_selected
        )

    def kept(self, length: int) -> NDArray[np.int64]:
        """Return the kept tokens of `length`, int64 ascending."""
        return kept_positions(length, self.settings.kept_sinks, self.settings.kept_recent)

    def best(self, scores: torch.Tensor) -> NDArray[np.int64]:
        """Return the kept tokens and the best of the others, for policies that score tokens.

        Parameters
        ----------
        scores
            Floating point, (sets, length), higher is better; ties fall to the lower position.

        Returns
        -------
        int64 of shape (sets, k), ascending.
        """
        length = scores.shape[-1]
        ranked = scores.clone()
        ranked[:, torch.from_numpy(self.kept(length))] = torch.inf
        order = torch.argsort(ranked, dim=-1, descending=True, stable=True)
        return np.sort(order[:, : self.count(length)].numpy(), axis=-1)


class ContractSelection(SelectionPolicy):
    """Selects as a `HillInferCache` does, for a rule, a shadow and a scope (scoring contract).

    Codes of a token are the same whenever they are made, so all tokens are coded once and each
    query is shown the codes up to its own token.

    Parameters
    ----------
    scorer
        Executes the scoring contract.
    settings
        α, kept tokens and the upper bound.
    """

    def __init__(self, scorer: Scorer, settings: Settings) -> None:
        super().__init__(settings)
        self._scorer = scorer

    def select(self, layer: LayerQueries) -> list[NDArray[np.int64]]:
        """Score and choose for each query in turn; see `SelectionPolicy`."""
        segments = self.segments(layer)
        return [
            self.chosen(query, layer.scaling, up_to(segments, length))
            for query, length in zip(layer.queries, layer.lengths, strict=True)
        ]

    def chosen(
        self, query: torch.Tensor, scaling: float, segments: Sequence[SegmentShadow]
    ) -> NDArray[np.int64]:
        """Return what one query selects of the tokens of some segments, int64 (sets, k)."""
        wanted = self._wanted(total_tokens(segments))
        return np.stack(self._scorer.choose(query, scaling, segments, 0, (wanted,))[0])

    def _wanted(self, length: int) -> Wanted:
        settings = self.settings
        return Wanted(self.count(length), settings.kept_sinks, settings.kept_recent)

    def segments(self, layer: LayerQueries) -> list[SegmentShadow]:
        """Code all tokens, each segment's statistics taken as in decode (contract, section 3)."""
        spec = self._scorer.spec
        keys = layer.keys.half()
        # Nothing is scored while every token is selected.
        scored = (length for length in layer.lengths if self.count(length) < length)
        first_scored = next(scored, layer.first_length)
        segments: list[SegmentShadow] = []
        for base in range(0, len(keys), spec.segment_tokens):
            own = keys[base : base + spec.segment_tokens]
            # Statistics are taken once: of a full segment, of what the segment held when the
            # first query was scored, or of the one token that opened it later.
            seen = max(first_scored - base, 1)
            statistics = self._scorer.statistics(
                own[:seen], base, segments[-1].statistics if segments else None
            )
            shadow = np.zeros((spec.segment_beats, BEAT_BYTES), np.uint8)
            self._scorer.encode(own, statistics, shadow, 0)
            segments.append(SegmentShadow(base, len(own), shadow, statistics))
        return segments


def up_to(segments: Sequence[SegmentShadow], length: int) -> list[SegmentShadow]:
    """Return the segments of the first `length` tokens, the last cut short."""
    return [
        SegmentShadow(
            segment.base_position,
            min(segment.tokens, length - segment.base_position),
            segment.shadow,
            segment.statistics,
        )
        for segment in segments
        if segment.base_position < length
    ]


class FloatWeights(SelectionPolicy):
    """Ranks tokens by the sum of their softmax weights over the query heads of a scope.

    Reads every key exactly, in floating point, so it is no way to serve: it shows what the best
    ranking of this kind gives, apart from number formats.
    """

    def select(self, layer: LayerQueries) -> list[NDArray[np.int64]]:
        """Rank by float32 softmax weights; see `SelectionPolicy`."""
        weights = torch.softmax(layer.inner_products(), dim=-1).sum(1)
        if self.settings.scope is Scope.LAYER:
            weights = weights.sum(0, keepdim=True)
        return [self.best(weights[:, i, :length]) for i, length in enumerate(layer.lengths)]


PAGE_TOKENS = 16


class Pages(SelectionPolicy):
    """Selects pages of 16 tokens by their least and largest keys, per KV head (as Quest does).

    A page's score for a query head is an upper bound of its tokens' inner products: the sum over
    channels of the larger of query times least key and query times largest key. Query heads that
    share a KV head add their bounds. Pages are taken whole, best first, until k tokens are
    reached; of the last page only as many as fit, lower positions first. Kept tokens are always
    among them, as for every policy.
    """

    def select(self, layer: LayerQueries) -> list[NDArray[np.int64]]:
        """Rank pages; see `SelectionPolicy`."""
        # A bound is linear in the positive and in the negative part of the query, so the sum over
        # the query heads of a KV head is the bound of their summed parts.
        count, _, head_dim = layer.queries.shape
        grouped = layer.queries.view(count, layer.keys.shape[1], -1, head_dim)
        rising, falling = grouped.clamp(min=0).sum(2), grouped.clamp(max=0).sum(2)
        least, largest = running_bounds(layer.keys.float(), PAGE_TOKENS)
        ends = slice(PAGE_TOKENS - 1, None, PAGE_TOKENS)
        scores = page_bounds(rising, falling, least[ends], largest[ends])
        chosen = []
        for i, length in enumerate(layer.lengths):
            pages = -(-length // PAGE_TOKENS)
            own = scores[i, :, :pages].clone()
            # The page of the query's own token holds what has come of it so far.
            last = slice(length - 1, length)
            own[:, -1:] = page_bounds(
                rising[i : i + 1], falling[i : i + 1], least[last], largest[last]
            )
            chosen.append(self.best(own.repeat_interleave(PAGE_TOKENS, -1)[:, :length]))
        return chosen


def running_bounds(keys: torch.Tensor, page_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return least and largest key per channel of each page up to each token.

    (N, kv_heads, head_dim) in; the last page is filled up with its last token.
    """
    missing = -len(keys) % page_tokens
    padded = torch.cat([keys, keys[-1:].expand(missing, -1, -1)])
    paged = padded.view(-1, page_tokens, *keys.shape[1:])
    least, largest = paged.cummin(1).values, paged.cummax(1).values
    return least.flatten(0, 1), largest.flatten(0, 1)


def page_bounds(
    rising: torch.Tensor, falling: torch.Tensor, least: torch.Tensor, largest: torch.Tensor
) -> torch.Tensor:
    """Return the bounds of pages, (queries, kv_heads, pages), of summed parts of queries."""
    return torch.einsum("qhd,phd->qhp", rising, largest) + torch.einsum(
        "qhd,phd->qhp", falling, least
    )


class RecentOnly(SelectionPolicy):
    """A sliding window with attention sinks (the StreamingLLM baseline): what scores must beat."""

    def select(self, layer: LayerQueries) -> list[NDArray[np.int64]]:
        """Take the newest tokens; see `SelectionPolicy`."""
        return [self.best(torch.arange(length).double()[None]) for length in layer.lengths]
