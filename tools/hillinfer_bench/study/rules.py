# SPDX-License-Identifier: Apache-2.0
"""How the paper's rivals choose what a query attends to, as policies of the quality study.

What they read and when is the matter of `hillinfer_bench.rivals`; here only the choice counts.
InfiniGen's rule is that of `hillinfer_bench.frontier`. The others differ from it: texts come in
several calls here, k tokens are taken and no whole pages, and other tokens of a quantised cache are
recent.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.settings import Settings
from hillinfer_bench.frontier.rival_rules import CANDIDATES
from hillinfer_bench.precision.value_forms import Groups
from hillinfer_bench.quality.policies import (
    PAGE_TOKENS,
    Attending,
    LayerQueries,
    SelectionPolicy,
    page_bounds,
    running_bounds,
)
from hillinfer_bench.rivals.paged import CHUNK_TOKENS

# --- H2O ---

OBSERVED = 64
"""Last tokens of a prompt whose queries weigh what is kept of it, as for the rival."""


class HeavyHitters(SelectionPolicy):
    """Keeps the tokens with the largest summed weights, per KV head, and drops others for good.

    The first queries after a beginning see everything: they are the prompt's last ones, and their
    weights decide what stays. A call that goes on where the last one ended goes on with what is
    held, so each layer needs an object of its own where a text is read in several calls.

    Parameters
    ----------
    settings
        α, kept tokens and the upper bound.
    observed
        Queries that see everything.
    """

    def __init__(self, settings: Settings, observed: int = OBSERVED) -> None:
        super().__init__(settings)
        self._observed = observed
        self._length = self._queries = 0
        self._held = torch.empty(0, 0, dtype=torch.bool)
        self._weights = torch.empty(0, 0)

    def select(self, layer: LayerQueries) -> list[NDArray[np.int64]]:
        """Attend to what is held, then drop the lightest; see `SelectionPolicy`."""
        tokens, heads, _ = layer.keys.shape
        if layer.first_length != self._length + 1:
            self._held = torch.ones(heads, layer.first_length - 1, dtype=torch.bool)
            self._weights = torch.zeros(heads, layer.first_length - 1)
            self._queries = 0
        more = tokens - self._held.shape[1]
        self._held = torch.cat([self._held, torch.zeros(heads, more, dtype=torch.bool)], 1)
        self._weights = torch.cat([self._weights, torch.zeros(heads, more)], 1)
        products = layer.inner_products()
        chosen = []
        for i, length in enumerate(layer.lengths):
            held = self._held[:, :length]
            held[:, -1] = True
            own = products[:, :, i, :length].masked_fill(~held[:, None], -torch.inf)
            self._weights[:, :length] += torch.softmax(own, -1).sum(1)
            chosen.append(held.nonzero()[:, 1].view(heads, -1).numpy())
            self._queries += 1
            if self._queries >= self._observed:
                self._drop(length)
        self._length = tokens
        return chosen

    def _drop(self, length: int) -> None:
        """Keep k of what is held: the kept tokens and the heaviest others."""
        ranked = self._weights[:, :length].masked_fill(~self._held[:, :length], -torch.inf)
        best = torch.from_numpy(self.best(ranked))
        kept = torch.zeros_like(ranked, dtype=torch.bool)
        self._held[:, :length] = kept.scatter_(1, best, value=True)


# --- LeoAM ---

_SPLIT = CHUNK_TOKENS // PAGE_TOKENS


class Chunks(SelectionPolicy):
    """Ranks chunks of 64 tokens by their abstracts, splits the best and takes pages of 16 of them.

    An abstract is the least and the largest key of each channel. Scores are softmax weights over
    bounds, summed over query heads: one set per layer, as for the rival.
    """

    def select(self, layer: LayerQueries) -> list[NDArray[np.int64]]:
        """Rank chunks, then pages; see `SelectionPolicy`."""
        coarse, fine = _bounds_of(layer, CHUNK_TOKENS), _bounds_of(layer, PAGE_TOKENS)
        chosen = []
        for chunks, pages, length in zip(coarse, fine, layer.lengths, strict=True):
            wanted = -(-self.count(length) // PAGE_TOKENS)
            split = min(-(-CANDIDATES * wanted // _SPLIT), chunks.shape[-1])
            best = torch.softmax(chunks, -1).sum(0).topk(split).indices
            parts = (best[:, None] * _SPLIT + torch.arange(_SPLIT)).flatten()
            parts = parts[parts < pages.shape[-1]]
            scores = torch.full((pages.shape[-1],), -torch.inf)
            scores[parts] = torch.softmax(pages[:, parts], -1).sum(0)
            chosen.append(self.best(scores.repeat_interleave(PAGE_TOKENS)[None, :length]))
        return chosen


def _bounds_of(layer: LayerQueries, page_tokens: int) -> list[torch.Tensor]:
    """Return for each query the bounds of its pages' inner products, (query_heads, pages)."""
    group = layer.queries.shape[1] // layer.keys.shape[1]
    queries = layer.queries * layer.scaling
    rising, falling = queries.clamp(min=0), queries.clamp(max=0)
    running = running_bounds(layer.keys.float(), page_tokens)
    least, largest = (one.repeat_interleave(group, 1) for one in running)
    ends = slice(page_tokens - 1, None, page_tokens)
    scores = page_bounds(rising, falling, least[ends], largest[ends])
    found = []
    for i, length in enumerate(layer.lengths):
        own = scores[i, :, : -(-length // page_tokens)].clone()
        # The page of the query's own token holds what has come of it so far.
        query, last = slice(i, i + 1), slice(length - 1, length)
        own[:, -1:] = page_bounds(rising[query], falling[query], least[last], largest[last])[0]
        found.append(own)
    return found


# --- A quantised cache ---

GROUP_TOKENS = 32


class QuantisedCache(Attending):
    """Attends to all tokens, coded but for the most recent: the plain alternative (as KIVI does).

    Keys are coded per channel over groups of 32 tokens, values per token over groups of 32
    channels of all heads, each with a least value and a step in 16 bits.

    Parameters
    ----------
    settings
        How many recent tokens stay in 16 bits at least; a group is coded once all of it is older.
    bits
        Of one code.
    """

    def __init__(self, settings: Settings, bits: int) -> None:
        self._recent = settings.kept_recent
        self._form = Groups(bits)

    def attend(self, layer: LayerQueries, values: torch.Tensor) -> torch.Tensor:
        """Attend with one softmax over coded and recent tokens; see `Attending`."""
        tokens, heads, head_dim = layer.keys.shape
        coded = torch.zeros(len(layer.queries), tokens, dtype=torch.bool)
        for i, length in enumerate(layer.lengths):
            coded[i, : max(0, length - self._recent) // GROUP_TOKENS * GROUP_TOKENS] = True
        whole = tokens // GROUP_TOKENS * GROUP_TOKENS
        keys = layer.keys.float().clone()
        # The groups of a form lie along the last axis: tokens of a channel, as keys are coded.
        turned = keys[:whole].permute(1, 2, 0).reshape(1, heads * head_dim, whole)
        keys[:whole] = self._form.coded(turned).view(heads, head_dim, whole).permute(2, 0, 1)
        products = torch.where(
            coded, replace(layer, keys=keys).inner_products(), layer.inner_products()
        )
        weights = torch.softmax(products, dim=-1)
        rows = values.float()
        kinds = ((coded, self._form.coded(rows.flatten(1)).view_as(rows)), (~coded, rows))
        out = sum((weights * seen) @ one.transpose(0, 1)[:, None] for seen, one in kinds)
        assert isinstance(out, torch.Tensor)
        return out.flatten(0, 1)
