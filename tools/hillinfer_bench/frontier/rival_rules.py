# SPDX-License-Identifier: Apache-2.0
"""Selection rules of rivals for many queries at once, each tested against its rival."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.settings import Settings
from hillinfer_bench.quality.policies import LayerQueries, SelectionPolicy
from hillinfer_bench.rivals.infinigen import RATIO
from hillinfer_bench.rivals.paged import CHUNK_TOKENS, PAGE_TOKENS
from hillinfer_bench.systems.kv_source import CHUNK_TOKENS as FILLED_TOKENS
from hillinfer_bench.systems.kv_source import LastQueries
from hillinfer_model.kernel_spec import GROUP_TOKENS

_SPLIT = CHUNK_TOKENS // PAGE_TOKENS
# Chunks that LeoAM splits have this many times the tokens wanted.
CANDIDATES = 2


def partial_channels(head_dim: int) -> int:
    """Return how many channels of a key InfiniGen keeps in memory."""
    return max(1, round(RATIO * head_dim))


class InfiniGenRule(SelectionPolicy):
    """Ranks by partial keys, as `rivals.infinigen` does with a layer's own query.

    The directions are those of the chunk of the prompt that a rival is filled with first.

    Parameters
    ----------
    settings
        α and the kept tokens.
    """

    def select(self, layer: LayerQueries) -> list[NDArray[np.int64]]:
        """Rank by sums of softmax weights of partial products; see `SelectionPolicy`."""
        count, heads, _ = layer.queries.shape
        tokens, kv_heads, head_dim = layer.keys.shape
        wide = layer.keys.float().transpose(0, 1)
        first = wide[:, : min(FILLED_TOKENS, tokens - count)]
        centred = first - first.mean(1, keepdim=True)
        vectors = torch.linalg.eigh(centred.transpose(1, 2) @ centred).eigenvectors
        directions = vectors[:, :, -partial_channels(head_dim) :]
        keys = (wide @ directions).transpose(0, 1).to(layer.keys.dtype)
        grouped = layer.queries.transpose(0, 1).reshape(kv_heads, -1, head_dim)
        queries = (grouped @ directions).reshape(heads, count, -1).transpose(0, 1)
        products = replace(layer, queries=queries, keys=keys).inner_products()
        weights = torch.softmax(products, -1).sum((0, 1))
        return [self.best(weights[None, i, :length]) for i, length in enumerate(layer.lengths)]


def spilled_tokens(length: int, kept_recent: int) -> int:
    """Return how many of a sequence's tokens have left a rival's tail, in groups of 64."""
    return max(0, -(-(length - GROUP_TOKENS - kept_recent) // GROUP_TOKENS)) * GROUP_TOKENS


def wanted_pages(settings: Settings, length: int, selected: int) -> int:
    """Return how many pages of 16 a rival fetches, all there are at most.

    Parameters
    ----------
    settings
        The kept tokens.
    length, selected
        Tokens, and how many of them α wants.
    """
    spilled = spilled_tokens(length, settings.kept_recent)
    wanted = max(1, -(-(selected - (length - spilled)) // PAGE_TOKENS))
    return min(wanted, spilled // PAGE_TOKENS)


class QuestRule(SelectionPolicy):
    """Takes whole pages of 16 by bounds on their keys, as `rivals.paged` does: one set per layer.

    The tail is attended to whole; so a set has rather more tokens than α says.

    Parameters
    ----------
    settings
        α and the kept tokens.
    """

    def select(self, layer: LayerQueries) -> list[NDArray[np.int64]]:
        """Rank pages for each query in turn; see `SelectionPolicy`."""
        fine = _Bounds(layer, PAGE_TOKENS)
        chosen = []
        for i, length in enumerate(layer.lengths):
            spilled = spilled_tokens(length, self.settings.kept_recent)
            wanted = wanted_pages(self.settings, length, self.count(length))
            pages = np.arange(spilled // PAGE_TOKENS)
            if wanted < len(pages):
                pages = self.best_pages(i, pages, wanted, fine, layer)
            tokens = (pages[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).reshape(-1)
            chosen.append(np.concatenate([tokens, np.arange(spilled, length)])[None])
        return chosen

    def best_pages(
        self, i: int, pages: NDArray[np.int64], wanted: int, fine: _Bounds, layer: LayerQueries
    ) -> NDArray[np.int64]:
        """Return the pages that query i fetches, ascending.

        Parameters
        ----------
        i
            Number of the query.
        pages
            Those there are.
        wanted
            How many, fewer than there are.
        fine
            Bounds of all pages.
        layer
            What coarser bounds are made of.
        """
        return _top(pages, fine.scores(i, pages), wanted)


class LeoAMRule(QuestRule):
    """Ranks chunks of 64 and splits the best into pages of 16, as `rivals.paged` does.

    Parameters
    ----------
    settings
        α and the kept tokens.
    """

    def select(self, layer: LayerQueries) -> list[NDArray[np.int64]]:
        """Rank chunks, then pages; see `SelectionPolicy`."""
        self._coarse = _Bounds(layer, CHUNK_TOKENS)
        return super().select(layer)

    def best_pages(
        self, i: int, pages: NDArray[np.int64], wanted: int, fine: _Bounds, layer: LayerQueries
    ) -> NDArray[np.int64]:
        """Rank the parts of the best chunks; see `QuestRule`."""
        chunks = np.arange(len(pages) // _SPLIT)
        split = -(-CANDIDATES * wanted // _SPLIT)
        if split < len(chunks):
            chunks = _top(chunks, self._coarse.scores(i, chunks), split)
        parts = (chunks[:, None] * _SPLIT + np.arange(_SPLIT)).reshape(-1)
        return _top(parts, fine.scores(i, parts), wanted)


class _Bounds:
    """Upper bounds of the inner products of pages, for all queries of a layer."""

    def __init__(self, layer: LayerQueries, page_tokens: int) -> None:
        whole = len(layer.keys) // page_tokens * page_tokens
        paged = layer.keys[:whole].float().view(-1, page_tokens, *layer.keys.shape[1:])
        most, least = (part.permute(1, 2, 0) for part in (paged.amax(1), paged.amin(1)))
        count, _, head_dim = layer.queries.shape
        kv_heads = layer.keys.shape[1]
        rows = layer.queries.transpose(0, 1).reshape(kv_heads, -1, head_dim)
        bounds = rows.clamp(min=0) @ most + rows.clamp(max=0) @ least
        # (query heads, queries, pages)
        self._logits = (bounds * layer.scaling).reshape(-1, count, most.shape[-1])

    def scores(self, i: int, pages: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the softmax of some pages' bounds for query i, summed over query heads."""
        own = self._logits[:, i, torch.from_numpy(pages)]
        scores: NDArray[np.float32] = torch.softmax(own, -1).sum(0).numpy()
        return scores


def _top(numbers: NDArray[np.int64], scores: NDArray[np.float32], wanted: int) -> NDArray[np.int64]:
    """Return the numbers of the best scores, the first among them, ascending."""
    scores[0] = np.inf
    best = np.argpartition(scores, len(scores) - wanted)[len(scores) - wanted :]
    return numbers[np.sort(best)]


class H2ODropRule(SelectionPolicy):
    """Keeps the tokens with the largest weights so far and drops the others for good.

    As `rivals.h2o.H2ODrop` does. It is used for one pass, whose layers come in their order: what
    is kept follows from the queries before it.

    Parameters
    ----------
    settings
        α and the kept tokens.
    prompt
        The prompt's last queries, as that rival observes them; None keeps the recent tokens.
    """

    def __init__(self, settings: Settings, prompt: LastQueries | None) -> None:
        super().__init__(settings)
        self._prompt = prompt
        self._layer = 0

    def select(self, layer: LayerQueries) -> list[NDArray[np.int64]]:
        """Return what each KV head holds when each query comes; see `SelectionPolicy`."""
        weights = self._weights_of_prompt(layer)
        self._layer += 1
        prompt = layer.first_length - 1
        held = torch.zeros(len(weights), len(layer.keys), dtype=torch.bool)
        kept = self._protected(weights.clone(), prompt)
        held.scatter_(1, kept[:, :prompt].topk(self.count(prompt), 1).indices, value=True)
        products = layer.inner_products()
        chosen = []
        for i, length in enumerate(layer.lengths):
            held[:, length - 1] = True
            chosen.append(held.nonzero()[:, 1].reshape(len(held), -1).numpy())
            own = products[:, :, i].masked_fill(~held[:, None], -torch.inf)
            weights += torch.softmax(own, -1).sum(1)
            if len(chosen[-1][0]) > self.count(length):
                light = self._protected(weights.masked_fill(~held, torch.inf), length)
                held.scatter_(1, light.argmin(1, keepdim=True), value=False)
        return chosen

    def _weights_of_prompt(self, layer: LayerQueries) -> torch.Tensor:
        """Return the summed weights of the prompt's last queries, (kv_heads, N)."""
        tokens, kv_heads, _ = layer.keys.shape
        prompt = layer.first_length - 1
        weights = torch.zeros(kv_heads, tokens)
        if self._prompt is None:
            weights[:, :prompt] = torch.arange(prompt) * 1e-30
            return weights
        asked = self._prompt.layers[self._layer][0].transpose(0, 1).float()
        seen = LayerQueries(asked, layer.keys[:prompt], self._prompt.scalings[self._layer])
        weights[:, :prompt] = torch.softmax(seen.inner_products(), -1).sum((1, 2))
        return weights

    def _protected(self, weights: torch.Tensor, length: int) -> torch.Tensor:
        """Return weights that no kept token of a length loses by."""
        weights[:, : self.settings.kept_sinks] = torch.inf
        weights[:, max(0, length - self.settings.kept_recent) : length] = torch.inf
        return weights
