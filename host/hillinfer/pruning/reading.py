# SPDX-License-Identifier: Apache-2.0
"""Reads a prompt in stages on an unmodified model: deeper layers see fewer of its tokens.

Chunks wait at the first cut as boundary states, hidden states that enter its layer. With the last
chunk the layer before it decides which blocks stay, and what stays goes through the deeper layers,
chunk by chunk, up to the next cut. SlimInfer, section 3, which drops blocks for good; here a later
turn may choose anew from the boundary states.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from hillinfer.errors import UnsupportedFeatureError
from hillinfer.hf.hooks import Guard, named, predictor_of
from hillinfer.pruning.rankers import Deciding, Ranker, kept_blocks
from hillinfer.pruning.schedule import BLOCK_TOKENS, LayerWork, Schedule
from hillinfer.settings import QuerySource


class LaterTurns(StrEnum):
    """What is done when a prompt goes on behind an answer."""

    # The new tokens meet what was kept.
    KEEP = "keep"
    # All of it is chosen anew from boundary states, which stay in memory.
    ANEW = "anew"


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
    choosing_seconds, deep_seconds
        Choosing blocks, and taking what stayed through the layers behind the first cut.
    boundary_bytes
        Of boundary states, at most.
    """

    tokens: list[int]
    kept: list[torch.Tensor]
    flop_limit: float
    choosing_seconds: float
    deep_seconds: float
    boundary_bytes: int


@dataclass
class _Document:
    """What is known of one cache.

    Parameters
    ----------
    length
        Tokens of the first layer.
    states
        Boundary states (1, tokens, hidden_size) of all tokens; empty once nobody needs them.
    window
        What enters the deciding layer, of the last tokens.
    positions
        Of the tokens in each band behind the first cut, those of answers included.
    read
        Of the last prompt; None where nothing was pruned.
    """

    length: int = 0
    states: list[torch.Tensor] = field(default_factory=list)
    window: torch.Tensor | None = None
    positions: list[torch.Tensor] = field(default_factory=list)
    read: PrunedRead | None = None


@dataclass
class _Pass:
    """A forward pass under way.

    Parameters
    ----------
    document
        Of its cache.
    before, tokens
        What the cache held, and what comes.
    whole
        Tokens that the prompt has at its end, where it is one; what comes behind it is none.
    is_prompt
        Whether these are tokens of a prompt, and not one that was just decoded.
    deeper
        Whether layers behind the first cut are still to run: not where a chunk waits, nor where
        all of them were run at once.
    """

    document: _Document
    before: int
    tokens: int
    whole: int
    is_prompt: bool
    deeper: bool = True


_expected: ContextVar[int | None] = ContextVar("hillinfer_expected_prompt", default=None)


class Pruning:
    """Makes a model read prompts in stages, with ordinary caches; a context manager that ends it.

    One sequence at a time, without padding. A prompt is a forward pass of several tokens, all
    chunks of a call of `generate`, or what `prompt` says.

    Parameters
    ----------
    model
        A decoder-only model of a family whose queries are known, unmodified.
    schedule
        Which layers lose tokens.
    ranker
        Chooses blocks.
    later
        What a turn behind an answer does.
    chunk_tokens
        Tokens that go through the deeper layers at once.

    Raises
    ------
    SettingsError
        Where the schedule has layers that the model has not, or the family is unknown.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        schedule: Schedule,
        ranker: Ranker,
        later: LaterTurns = LaterTurns.KEEP,
        chunk_tokens: int = 1024,
    ) -> None:
        decoder = model.get_decoder()
        schedule.check_layers(len(decoder.layers))
        predictor = predictor_of(model.config.model_type, QuerySource.PREDICTED)
        assert predictor is not None
        self.schedule = schedule
        self._ranker, self._later, self._chunk = ranker, later, chunk_tokens
        self._predictor, self._decoder = predictor, decoder
        self._documents: weakref.WeakKeyDictionary[Any, _Document] = weakref.WeakKeyDictionary()
        self._pass: _Pass | None = None
        self._question: int | None = None
        self._guards: list[Guard] = [_Generate(model)]
        self.layers = [_Layer(self, number, one) for number, one in enumerate(decoder.layers)]
        self._guards += self.layers

    def __enter__(self) -> Pruning:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Give the model back as it was."""
        while self._guards:
            self._guards.pop().remove()

    @contextmanager
    def prompt(self, tokens: int, question_tokens: int | None = None) -> Iterator[None]:
        """Say how long the prompt is that forward passes in a block of code bring, in any chunks.

        Parameters
        ----------
        tokens
            At its end, with all that the cache held before.
        question_tokens
            How many of the last ones are the question, by whose queries blocks are chosen.
        """
        token, self._question = _expected.set(tokens), question_tokens
        try:
            yield
        finally:
            _expected.reset(token)
            self._question = None

    def read_of(self, cache: Any) -> PrunedRead | None:
        """Return what the last prompt of a cache lost; None where it lost nothing."""
        document = self._documents.get(cache)
        return None if document is None else document.read

    # --- a forward pass ---

    def run(self, number: int, layer: _Layer, hidden: torch.Tensor, given: dict[str, Any]) -> Any:
        """Take hidden states (1, tokens, hidden_size) through one layer, or see that they wait."""
        cache = given.get("past_key_values")
        if cache is None:
            return layer.dense(hidden, given)
        if number == 0:
            self._pass = self._begin(cache, hidden, given)
        now = self._pass
        if now is None:
            return layer.dense(hidden, given)
        first = self.schedule.cuts[0].layer
        if number == first - 1:
            self._note_window(now, hidden)
        if number < first:
            return layer.dense(hidden, given)
        if number == first:
            hidden = self._reach_cut(now, cache, hidden, given)
        if not now.deeper:
            return hidden
        # Decoded tokens, and new ones behind what was kept, see what their own layer has.
        held = cache.get_seq_length(number)
        return layer.dense(hidden, given | self._mask(given, hidden, held))

    def _begin(self, cache: Any, hidden: torch.Tensor, given: dict[str, Any]) -> _Pass | None:
        """Return what a pass brings; None where it is none of ours."""
        tokens, before = hidden.shape[1], cache.get_seq_length()
        document = self._documents.get(cache)
        expected = _expected.get() or 0
        whole = max(expected, before + tokens)
        if document is None:
            if before or not self.schedule.prunes(whole):
                return None
            document = self._documents.setdefault(cache, _Document())
        self._check(cache, hidden, given)
        self._cut_back(document, cache, before)
        return _Pass(document, before, tokens, whole, before < expected or tokens > 1)

    def _check(self, cache: Any, hidden: torch.Tensor, given: dict[str, Any]) -> None:
        if not isinstance(cache, DynamicCache):
            raise UnsupportedFeatureError(
                f"prune: a prompt is read in stages into a DynamicCache, not a "
                f"{type(cache).__name__}: pass past_key_values=DynamicCache(config=model.config)"
            )
        if hidden.shape[0] != 1:
            raise UnsupportedFeatureError(
                f"prune: {hidden.shape[0]} sequences at once would each keep other tokens: read "
                "one at a time"
            )
        mask = given.get("attention_mask")
        if mask is not None and mask.ndim == 4:
            last = mask[0, 0, -1]
            if not bool((last if mask.dtype == torch.bool else last == 0).all()):
                raise UnsupportedFeatureError(
                    "prune: the prompt is padded, and padding has no place among blocks: pass it "
                    "without padding"
                )

    def _cut_back(self, document: _Document, cache: Any, length: int) -> None:
        """Forget what was cut off the first layer since the last pass, in the deeper ones, too."""
        if length == document.length:
            return
        if length > document.length:
            raise UnsupportedFeatureError(
                f"prune: the cache has {length} tokens, of which {document.length} were read in "
                "stages: use it with this model alone, or begin with an empty one"
            )
        if document.states:
            document.states = [torch.cat(document.states, 1)[:, :length]]
        bounds = [*(cut.layer for cut in self.schedule.cuts), len(self.layers)]
        for band, positions in enumerate(document.positions):
            document.positions[band] = positions[positions < length]
            for layer in range(bounds[band], bounds[band + 1]):
                _shorten(cache.layers[layer], len(document.positions[band]))
        document.length = length

    def _note_window(self, now: _Pass, hidden: torch.Tensor) -> None:
        wanted = self._ranker.window(self._question)
        before = now.document.window if now.before else None
        joined = hidden if before is None else torch.cat([before, hidden], 1)
        now.document.window = joined[:, -wanted:].clone()

    def _reach_cut(
        self, now: _Pass, cache: Any, hidden: torch.Tensor, given: dict[str, Any]
    ) -> torch.Tensor:
        """Let a chunk wait, or take the whole prompt through the deeper layers."""
        document, length = now.document, now.before + now.tokens
        keeps = self._later is LaterTurns.ANEW
        is_first = not document.positions
        if is_first or keeps:
            document.states.append(hidden)
        document.length = length
        if not is_first and not (now.is_prompt and keeps):
            # Their rows come behind those that were kept.
            new = torch.arange(now.before, length)
            document.positions = [torch.cat([one, new]) for one in document.positions]
            return hidden
        now.deeper = False
        if length < now.whole:
            return hidden
        held = document.states
        try:
            return self._deepen(document, cache, given)
        except BaseException:
            # As before this pass; whatever comes next, the deeper layers are read anew.
            first = self.schedule.cuts[0].layer
            for number, layer in enumerate(cache.layers):
                _shorten(layer, now.before if number < first else 0)
            document.states = [torch.cat(held, 1)[:, : now.before]]
            document.positions, document.length, document.read = [], now.before, None
            raise

    def _deepen(self, document: _Document, cache: Any, given: dict[str, Any]) -> torch.Tensor:
        """Choose, and take what stays through band after band; return the last chunk's end."""
        states = torch.cat(document.states, 1)
        boundary_bytes = states.nbytes
        document.states = [states] if self._later is LaterTurns.ANEW else []
        tokens, cuts = states.shape[1], self.schedule.cuts
        bounds = [*(cut.layer for cut in cuts), len(self.layers)]
        for layer in range(bounds[0], bounds[-1]):
            _shorten(cache.layers[layer], 0)
        active, window = torch.arange(tokens), document.window
        document.positions, kept, spent = [], [], [0.0, 0.0]
        out = states
        for band, count in enumerate(self.schedule.kept_blocks(tokens)):
            began = time.perf_counter()
            assert window is not None
            chosen = self._chosen(cache, bounds[band] - 1, window, active, count)
            states, active = states[:, chosen], active[chosen]
            kept.append(torch.unique_consecutive(_blocks_of(active)))
            document.positions.append(active)
            decided = time.perf_counter()
            out, window = self._through(
                states, active, range(bounds[band], bounds[band + 1]), cache, given
            )
            states = out
            spent[0] += decided - began
            spent[1] += time.perf_counter() - decided
        per_layer = [tokens] * bounds[0]
        for band, positions in enumerate(document.positions):
            per_layer += [len(positions)] * (bounds[band + 1] - bounds[band])
        work = layer_work(self._decoder)
        limit = work.flops([tokens] * len(self.layers)) / work.flops(per_layer)
        document.read = PrunedRead(
            tokens=per_layer,
            kept=kept,
            flop_limit=limit,
            choosing_seconds=spent[0],
            deep_seconds=spent[1],
            boundary_bytes=boundary_bytes,
        )
        return out[:, -self._chunk :]

    def _chosen(
        self, cache: Any, layer: int, window: torch.Tensor, active: torch.Tensor, count: int
    ) -> torch.Tensor:
        """Return the places among the active tokens of those that stay."""
        keys = cache.layers[layer].keys[0]
        positions = active[-window.shape[1] :]
        block = self._decoder.layers[layer]
        queries = self._predictor.predict(block, window, self._rotary(window, positions))
        deciding = Deciding(keys, queries[0], self._predictor.scaling(block), seed=keys.shape[1])
        # Whole blocks go, so what is left of them lies together.
        numbers, places = torch.unique_consecutive(_blocks_of(active), return_inverse=True)
        reached = int(places[-1] - places[len(active) - window.shape[1]]) + 1
        stay = kept_blocks(self._ranker.scores(deciding), count, reached)
        assert len(numbers) == deciding.blocks
        return torch.isin(places, stay).nonzero().flatten()

    def _through(
        self,
        states: torch.Tensor,
        positions: torch.Tensor,
        band: range,
        cache: Any,
        given: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take tokens through a band's layers; return their states and its last layer's window."""
        out, windows = [], []
        wanted = self._ranker.window(self._question)
        for start in range(0, states.shape[1], self._chunk):
            hidden, places = (
                states[:, start : start + self._chunk],
                positions[start:][: self._chunk],
            )
            own = dict(given)
            if "position_ids" in given:
                own["position_ids"] = places.unsqueeze(0)
            if given.get("position_embeddings") is not None:
                own["position_embeddings"] = self._rotary(hidden, places)
            own |= self._mask(given, hidden, start)
            for number in band:
                if number == band[-1]:
                    windows.append(hidden[:, -wanted:])
                hidden = self.layers[number].dense(hidden, own)
            out.append(hidden)
        return torch.cat(out, 1), torch.cat(windows, 1)[:, -wanted:]

    def _rotary(
        self, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        rotary = getattr(self._decoder, "rotary_emb", None)
        return None if rotary is None else rotary(hidden, position_ids=positions.unsqueeze(0))

    def _mask(self, given: dict[str, Any], hidden: torch.Tensor, held: int) -> dict[str, Any]:
        """Return the mask of tokens that come behind `held` of their layer; none where none is."""
        tokens = hidden.shape[1]
        if tokens == 1 or (held == 0 and self._decoder.config._attn_implementation == "sdpa"):
            # SDPA is causal by itself where as many keys come as queries.
            return {"attention_mask": None}
        lowest = torch.finfo(hidden.dtype).min
        mask = torch.full((tokens, held + tokens), lowest, dtype=hidden.dtype)
        return {"attention_mask": mask.triu(held + 1)[None, None]}


class _Generate(Guard):
    """Wraps `generate`, which alone knows how long a prompt is that it cuts into chunks."""

    _name = "generate"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate; forward passes learn how many tokens the prompt has."""
        given = named(self._guarded, args, kwargs)
        ids = given.get("input_ids", given.get("inputs"))
        if _expected.get() is not None or not isinstance(ids, torch.Tensor):
            return self._guarded(*args, **kwargs)
        token = _expected.set(ids.shape[1])
        try:
            return self._guarded(*args, **kwargs)
        finally:
            _expected.reset(token)


class _Layer(Guard):
    """Wraps a decoder layer's `forward`."""

    _name = "forward"

    def __init__(self, pruning: Pruning, number: int, layer: nn.Module) -> None:
        self._pruning, self._number = weakref.proxy(pruning), number
        super().__init__(layer)

    def dense(self, hidden: torch.Tensor, given: dict[str, Any]) -> Any:
        """Do what the layer does."""
        return self._guarded(hidden, **given)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take hidden states through the layer as far as they go."""
        given = named(self._guarded, args, kwargs)
        hidden = given.pop("hidden_states")
        return self._pruning.run(self._number, self, hidden, given)


def _shorten(layer: Any, tokens: int) -> None:
    """Leave the first tokens in a layer of a cache, on which versions of transformers disagree."""
    if layer.is_initialized:
        layer.keys, layer.values = layer.keys[..., :tokens, :], layer.values[..., :tokens, :]


def _blocks_of(positions: torch.Tensor) -> torch.Tensor:
    return positions.div(BLOCK_TOKENS, rounding_mode="floor")


def layer_work(decoder: Any) -> LayerWork:
    """Return what a layer of a model's decoder computes."""
    linear = [one for one in decoder.layers[0].modules() if isinstance(one, nn.Linear)]
    weights, config = sum(one.weight.numel() for one in linear), decoder.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return LayerWork(weights, heads * head_dim)
