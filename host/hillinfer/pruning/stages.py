# SPDX-License-Identifier: Apache-2.0
"""Chooses tokens at a cut, and takes them through the layers behind it, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from hillinfer.hf.hooks import QueryPredictor
from hillinfer.pruning.guards import LayerGuard
from hillinfer.pruning.passes import Document, PrunedRead, StagedCache
from hillinfer.pruning.rankers import Deciding, Ranker, kept_blocks
from hillinfer.pruning.schedule import BLOCK_TOKENS, LayerWork, Schedule
from hillinfer.pruning.states import ChosenStates, StatesInMemory


class Stages:
    """The layers of a model's decoder in the bands of a schedule.

    Parameters
    ----------
    decoder
        The model's, unmodified.
    layers
        What stands around its layers.
    predictor
        Makes the queries of a layer from what enters it.
    ranker
        Chooses blocks.
    schedule
        Which layers lose tokens.
    chunk
        Tokens that go through a band at once.

    Attributes
    ----------
    bands
        The layers of each band behind the first cut.
    """

    def __init__(
        self,
        decoder: Any,
        layers: list[LayerGuard],
        predictor: QueryPredictor,
        ranker: Ranker,
        schedule: Schedule,
        chunk: int,
    ) -> None:
        self._decoder, self._layers, self._predictor = decoder, layers, predictor
        self._ranker, self._schedule, self.chunk = ranker, schedule, chunk
        bounds = [*(cut.layer for cut in schedule.cuts), len(layers)]
        self.bands = [range(*two) for two in pairwise(bounds)]

    def whole(
        self, states: torch.Tensor, first: int, tokens: int, cache: StagedCache, given: Any
    ) -> None:
        """Take tokens through all bands, whether they were to be dropped or not.

        Parameters
        ----------
        states
            Boundary states (batch, tokens, hidden_size).
        first
            The position of the first of them, behind what all bands have.
        tokens
            Of the whole document.
        cache
            As reading in stages knows it.
        given
            What it is to the model's layers.
        """
        positions = torch.arange(first, first + states.shape[1], device=states.device)
        known = self._layers[self.bands[0].start].parameters
        # `through` puts the positions of each piece in the place of the last two.
        own = {"past_key_values": given, "use_cache": True}
        last = positions.new_tensor([[tokens - 1]])
        placed = {"position_ids": last, "position_embeddings": True}
        own |= {name: one for name, one in placed.items() if name in known}
        every = torch.arange(len(positions))
        for band in self.bands:
            came: list[torch.Tensor] = []
            entering = ChosenStates([StatesInMemory(states)], every)
            self.through(entering, positions, band, cache, own, 1, came.append)
            states = torch.cat(came, 1)

    def chosen(
        self,
        cache: StagedCache,
        number: int,
        window: torch.Tensor,
        active: torch.Tensor,
        tokens: int,
        brought: int = 0,
    ) -> torch.Tensor:
        """Return the places among the active tokens of those that a cut keeps.

        Parameters
        ----------
        cache
            Whose layer before the cut decides.
        number
            Of the cut.
        window
            (1, tokens, hidden_size), what entered that layer of the last active tokens.
        active
            int64, positions of the tokens that are left.
        tokens
            Of the whole prompt.
        brought
            How many of its first tokens stay in any case; the cut keeps its share of the others.
        """
        cut, first = self._schedule.cuts[number], -(-brought // BLOCK_TOKENS)
        read = max(0, tokens - first * BLOCK_TOKENS)
        count = first + self._schedule.kept_blocks(read)[number]
        scores = self.scores(cache, number, window, active)
        # Whole blocks go, so what is left of them lies together.
        numbers, places = torch.unique_consecutive(blocks_of(active), return_inverse=True)
        reached = int(places[-1] - places[len(active) - window.shape[1]]) + 1
        stay = kept_blocks(scores, count, reached, cut.mass, max(1, first))
        assert len(numbers) == len(scores)
        return torch.isin(places, stay.to(places.device)).nonzero().flatten()

    def scores(
        self, cache: StagedCache, number: int, window: torch.Tensor, active: torch.Tensor
    ) -> torch.Tensor:
        """Return what the layer before a cut says of the active tokens' blocks, float32 (blocks,).

        Parameters are those of `chosen`.
        """
        layer = self.bands[number].start - 1
        positions = active[-window.shape[1] :]
        block = self._decoder.layers[layer]
        queries = self._predictor.predict(block, window, self._rotary(window, positions))[0]
        scaling = self._predictor.scaling(block)
        with cache.keys(layer, self._ranker.unit_tokens) as keys:
            deciding = Deciding(keys, queries.to(keys.device), scaling, seed=keys.shape[1])
            return self._ranker.scores(deciding)

    def enter(
        self,
        states: torch.Tensor,
        positions: torch.Tensor,
        held: torch.Tensor,
        band: range,
        given: dict[str, Any],
    ) -> torch.Tensor:
        """Take tokens through a band that has tokens behind them, too; return their states.

        Each sees the band's tokens and those that enter with it, up to its own position. Their
        rows come behind those that the band has.

        Parameters
        ----------
        states
            (1, tokens, hidden_size), what enters the band.
        positions
            int64 (tokens,), theirs, ascending.
        held
            int64, of the tokens that the band has, in the order of its rows.
        band
            Its layers.
        given
            What the pass under way gives to layers.
        """
        out = []
        for start, stop in _pieces(states.shape[1], self.chunk):
            hidden, places = states[:, start:stop], positions[start:stop]
            held = torch.cat([held, places])
            lowest = torch.finfo(hidden.dtype).min
            mask = hidden.new_zeros(len(places), len(held))
            mask.masked_fill_(held > places[:, None], lowest)
            own = self._placed(given, hidden, places) | {"attention_mask": mask[None, None]}
            for number in band:
                hidden = self._layers[number].dense(hidden, own)
            out.append(hidden)
        return torch.cat(out, 1)

    def enter_behind(
        self,
        states: torch.Tensor,
        positions: torch.Tensor,
        band: range,
        cache: StagedCache,
        given: dict[str, Any],
    ) -> None:
        """Take a block through a band whose rows only come behind each other; see `enter`.

        What it sees besides itself, `StagedCache.attend_to` was told.
        """
        own = self._placed(given, states, positions) | {"attention_mask": None}
        with cache.piece(band, len(positions)):
            for number in band:
                states = self._layers[number].dense(states, own)

    def renew(
        self,
        cache: DynamicCache,
        held: torch.Tensor,
        chosen: torch.Tensor,
        take: Callable[[torch.Tensor], torch.Tensor],
        band: range,
        given: dict[str, Any],
    ) -> torch.Tensor:
        """Let a band have other tokens, of which those that it has already are not computed again.

        Parameters
        ----------
        cache
            Whose rows of that band are those of `held`, in that order.
        held, chosen
            int64, ascending, positions of the tokens that it has, and that it is to have.
        take
            Gives states (1, positions, hidden_size) that enter the band.
        band, given
            As in `enter`.

        Returns
        -------
        States (1, tokens, hidden_size) behind the band, of the tokens that entered.
        """
        layers: list[Any] = cache.layers[band.start : band.stop]
        stay = torch.isin(held, chosen).nonzero().flatten()
        entering = chosen[~torch.isin(chosen, held)]
        for layer in layers:
            layer.keys, layer.values = layer.keys[..., stay, :], layer.values[..., stay, :]
        out = self.enter(take(entering), entering, held[stay], band, given)
        order = torch.cat([held[stay], entering]).argsort()
        for layer in layers:
            layer.keys, layer.values = layer.keys[..., order, :], layer.values[..., order, :]
        return out

    def through(
        self,
        states: ChosenStates,
        positions: torch.Tensor,
        band: range,
        cache: StagedCache,
        given: dict[str, Any],
        wanted: int,
        leave: Callable[[torch.Tensor], None],
    ) -> torch.Tensor:
        """Take tokens through a band's layers, chunk by chunk; return its last layer's window.

        Parameters
        ----------
        states
            That enter the band.
        positions
            int64 (tokens,), theirs.
        band
            Its layers.
        cache, given
            As reading in stages knows the cache, and what the pass gives to layers.
        wanted
            Tokens of the window.
        leave
            Takes the states (batch, tokens, hidden_size) of each chunk behind the band.
        """
        windows: list[torch.Tensor] = []
        for start, stop in _pieces(len(positions), self.chunk):
            hidden, places = states.part(start, stop), positions[start:stop]
            own = self._placed(given, hidden, places) | self.mask(cache, band.start, hidden)
            with cache.piece(band, stop - start):
                for number in band:
                    if number == band[-1]:
                        windows.append(hidden[:, -wanted:])
                    hidden = self._layers[number].dense(hidden, own)
            leave(hidden)
            # No more than the last ones: chunks of a long prompt have many.
            windows = [torch.cat(windows, 1)[:, -wanted:].clone()]
        return windows[0]

    def _placed(
        self, given: dict[str, Any], hidden: torch.Tensor, places: torch.Tensor
    ) -> dict[str, Any]:
        """Return what layers get, with other tokens' positions."""
        own = dict(given)
        if "position_ids" in given:
            own["position_ids"] = places.unsqueeze(0)
        if given.get("position_embeddings") is not None:
            # Scaled positions may turn by the length of the text, which no piece says by itself.
            last = given["position_ids"].flatten()[-1:].to(places)
            cosines, sines = self._rotary(hidden, torch.cat([places, last]))
            own["position_embeddings"] = cosines[:, :-1], sines[:, :-1]
        return own

    def _rotary(self, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
        """Return cosines and sines, (1, tokens, head_dim) each; None in models without them."""
        rotary = getattr(self._decoder, "rotary_emb", None)
        return None if rotary is None else rotary(hidden, position_ids=positions.unsqueeze(0))

    def mask(self, cache: StagedCache, layer: int, hidden: torch.Tensor) -> dict[str, Any]:
        """Return the mask of tokens that come to a layer; none where none is needed."""
        tokens, held = hidden.shape[1], cache.length(layer)
        # SDPA is causal by itself where as many keys come as queries.
        causal = held == 0 and self._decoder.config._attn_implementation != "eager"
        if tokens == 1 or cache.is_causal or causal:
            return {"attention_mask": None}
        lowest = torch.finfo(hidden.dtype).min
        mask = hidden.new_full((tokens, held + tokens), lowest)
        return {"attention_mask": mask.triu(held + 1)[None, None]}


def _pieces(tokens: int, chunk: int) -> list[tuple[int, int]]:
    """Return where pieces of so many tokens begin and end, none of several with a single one.

    It would read all rows for itself alone.
    """
    starts = [*range(0, tokens, max(2, chunk))]
    if len(starts) > 1 and tokens - starts[-1] == 1:
        del starts[-1]
    return [*zip(starts, [*starts[1:], tokens], strict=True)]


def blocks_of(positions: torch.Tensor) -> torch.Tensor:
    """Return the block of each position, int64 like `positions`."""
    return positions.div(BLOCK_TOKENS, rounding_mode="floor")


def layer_work(decoder: Any) -> LayerWork:
    """Return what a layer of a model's decoder computes."""
    linear = [one for one in decoder.layers[0].modules() if isinstance(one, nn.Linear)]
    weights, config = sum(one.weight.numel() for one in linear), decoder.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return LayerWork(weights, heads * head_dim)


def pruned_read(
    decoder: Any,
    bands: Sequence[range],
    document: Document,
    choosing: float,
    through: list[float],
    entered: int | None,
) -> PrunedRead:
    """Return what a prompt lost, by what is known of its cache now.

    Parameters
    ----------
    decoder, bands
        The model's, and the layers behind each cut.
    document
        Of the cache, its positions those that each cut kept.
    choosing, through
        Seconds of choosing, and of each band.
    entered
        See `PrunedRead`.
    """
    tokens, brought = document.boundary.tokens, document.boundary.brought
    per_layer = [tokens] * bands[0].start
    for band, positions in zip(bands, document.positions, strict=True):
        per_layer += [len(positions)] * len(band)
    work = layer_work(decoder)
    spared = work.flops([brought] * len(per_layer))
    whole = work.flops([tokens] * len(per_layer)) - spared
    return PrunedRead(
        tokens=per_layer,
        kept=[torch.unique_consecutive(blocks_of(one)) for one in document.positions],
        flop_limit=whole / (work.flops(per_layer) - spared),
        choosing_seconds=choosing,
        band_seconds=through,
        boundary_bytes=document.boundary.byte_count,
        brought=brought,
        entered=entered,
    )
