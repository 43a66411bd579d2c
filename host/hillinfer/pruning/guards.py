# SPDX-License-Identifier: Apache-2.0
"""What keeps a pruned model true: wrappers around it, and state that follows its caches."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hillinfer.errors import HillInferWarning, SettingsError, UnsupportedFeatureError
from hillinfer.hf.features import NAME, Guard
from hillinfer.hf.hooks import QueryPredictor, named, predictor_of
from hillinfer.hf.joined_cache import JoinedCache
from hillinfer.pruning.passes import (
    ComingPrompt,
    Document,
    LaterTurns,
    Pass,
    StagedCache,
    coming_prompt,
)
from hillinfer.pruning.schedule import Schedule
from hillinfer.settings import QuerySource

if TYPE_CHECKING:
    from hillinfer.pruning.decoding import BlockManager
    from hillinfer.pruning.reading import Pruning

# --- Wrappers around a model and its layers ---


class PromptGuard(Guard):
    """Wraps `generate`, which alone knows how long a prompt is that it cuts into chunks."""

    _name = "generate"

    def __init__(self, model: PreTrainedModel, schedule: Schedule) -> None:
        self._schedule = schedule
        super().__init__(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate; forward passes learn how many tokens the prompt has.

        Raises UnsupportedFeatureError where tokens are to be taken back at every step.
        """
        given = named(self._guarded, args, kwargs)
        for name in ("assistant_model", "prompt_lookup_num_tokens"):
            if given.get(name) is not None:
                raise UnsupportedFeatureError(
                    f"prune: {name} asks for logits of tokens that are dropped: call generate "
                    "without it"
                )
        ids, mask = given.get("input_ids", given.get("inputs")), given.get("attention_mask")
        if coming_prompt.get() is not None or not isinstance(ids, torch.Tensor):
            return self._guarded(*args, **kwargs)
        # Ids may be those of new tokens alone; the mask then covers all.
        of_mask = mask.shape[-1] if isinstance(mask, torch.Tensor) else 0
        tokens = max(ids.shape[1], of_mask)
        if isinstance(given.get("past_key_values"), JoinedCache) and self._schedule.prunes(tokens):
            raise UnsupportedFeatureError(
                "prune: a prompt is read in stages into a DynamicCache, or a cache of new_cache(), "
                "not a JoinedCache: read it into the cache itself, without prune where it is joined"
            )
        token = coming_prompt.set(ComingPrompt(tokens))
        try:
            return self._guarded(*args, **kwargs)
        finally:
            coming_prompt.reset(token)


class LayerGuard(Guard):
    """Wraps a decoder layer's `forward`."""

    _name = "forward"

    def __init__(self, pruning: Pruning, number: int, layer: nn.Module) -> None:
        self._pruning, self._number = pruning, number
        super().__init__(layer)

    @property
    def parameters(self) -> frozenset[str]:
        """The names of what the layer takes."""
        return frozenset(inspect.signature(self._guarded).parameters)

    def dense(self, hidden: torch.Tensor, given: dict[str, Any]) -> Any:
        """Do what the layer does."""
        return self._guarded(hidden, **given)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take hidden states through the layer as far as they go."""
        given = named(self._guarded, args, kwargs)
        hidden = given.pop("hidden_states")
        return self._pruning.run(self._number, self, hidden, given)


def warn_of_pieces(document: Document, before: int, tokens: int) -> None:
    """Say that a pass may be a part of the prompt that was taken for all of it.

    Parameters
    ----------
    document
        What is known of the cache, of a prompt whose length nobody said.
    before, tokens
        What the cache holds, and how many come.
    """
    if document.is_new and document.length == before and tokens > 1:
        warnings.warn(
            f"prune: {tokens} tokens come right behind a prompt of {before} that was read in "
            "stages, and meet what it kept: where both are one prompt, say so with "
            "pruning.prompt(tokens) around its passes",
            HillInferWarning,
            stacklevel=2,
        )


def check_outputs(config: Any, given: dict[str, Any]) -> None:
    """Refuse a pass in stages that is to tell what each layer made of all tokens.

    Parameters
    ----------
    config
        Of the model; layers are not told where a call takes back what it says.
    given
        What the pass gives to layers.

    Raises
    ------
    UnsupportedFeatureError
        Where hidden states or attention weights are asked for.
    """
    for name in ("output_hidden_states", "output_attentions"):
        if given.get(name) or getattr(config, name, False):
            raise UnsupportedFeatureError(
                f"prune: {name}=True asks for all tokens in every layer, and deeper layers see "
                "fewer: read the prompt without it, or without prune"
            )


def predictor_for(model: PreTrainedModel) -> QueryPredictor:
    """Return what makes queries of a model's layers; refuse what cannot be read in stages."""
    kind = model.config._attn_implementation
    if kind not in ("sdpa", "eager", NAME):
        raise UnsupportedFeatureError(
            f"prune: the model's attention is {kind!r}, and each band needs a mask of its own: "
            "call model.set_attn_implementation('sdpa')"
        )
    if any(
        isinstance(one.__dict__.get("forward"), LayerGuard) for one in model.get_decoder().layers
    ):
        raise UnsupportedFeatureError(
            "prune: the model is pruned already: end that one with .remove() first"
        )
    try:
        predictor = predictor_of(model.config.model_type, QuerySource.PREDICTED)
    except SettingsError as error:
        raise SettingsError(
            f"prune: nothing makes the queries of {model.config.model_type} models: take one of "
            "Llama, Mistral, Qwen2, Qwen3 or OPT"
        ) from error
    assert predictor is not None
    return predictor


# --- What is known of a cache, after crops, broken passes and tokens read unpruned ---


class DocumentTracker:
    """Brings what is known of a cache, and its deeper layers, to what became of the cache.

    Parameters
    ----------
    bands
        The layers of each band behind the first cut.
    blocks
        Moves blocks while tokens are decoded.
    later
        What a turn behind an answer does.
    """

    def __init__(self, bands: Sequence[range], blocks: BlockManager, later: LaterTurns) -> None:
        self._bands, self._blocks, self._later = bands, blocks, later

    def empty(self, document: Document, cache: StagedCache) -> None:
        """Forget what deeper layers were brought: they are read anew by what comes."""
        brought = document.boundary.brought
        document.positions, document.read, document.completed = [], None, brought
        document.swapping, document.is_new = None, False
        for band in self._bands:
            cache.restart(band, brought)

    @staticmethod
    def is_as_left(document: Document, cache: StagedCache) -> bool:
        """Whether no pass went into a cache but those of ours, as far as anybody counts them."""
        return cache.passes in (None, document.passes, (document.passes or 0) + 1)

    def cut_back(self, document: Document, cache: StagedCache, length: int) -> None:
        """Learn what became of a cache since its last pass, in the deeper layers, too."""
        if not self.is_as_left(document, cache):
            # Others used it: tokens that came are in every band, and their states are not here.
            document.boundary, document.windows = document.boundary.forgotten(), {}
            # Nobody knows what each of them attended to.
            document.dense = 0
            # Rows of the prompt count, whatever was cut: somebody went on behind them.
            document.is_new = False
            self._follow(document, cache, length)
        elif length > document.length:
            raise UnsupportedFeatureError(
                f"prune: the cache has {length} tokens, of which {document.length} were read in "
                "stages: use it with this model alone, or begin with an empty one"
            )
        document.boundary = document.boundary.first(length)
        if document.is_new and self._later is LaterTurns.KEEP and length < document.length:
            # The prompt's last pass did not count, nor does what it chose.
            self.empty(document, cache)
        document.is_new = False
        if length < document.completed:
            self.empty(document, cache)
        self._blocks.cut_back(document, length)
        if any(_lies_apart(one, length) for one in document.positions):
            # Rows of blocks that entered lay behind what was cut, and went with it.
            self.empty(document, cache)
        needed = self._later.chooses or document.is_pending
        if not needed and document.swapping is None:
            document.boundary = document.boundary.forgotten()
        document.length, document.dense = length, min(document.dense, length)
        for number, (positions, layers) in enumerate(
            zip(document.positions, self._bands, strict=False)
        ):
            document.positions[number] = left = positions[positions < length]
            if min(map(cache.length, layers)) < len(left):
                self._lose(document, length)
                return
            cache.shorten(layers, len(left))

    @staticmethod
    def _follow(document: Document, cache: StagedCache, length: int) -> None:
        """Learn which tokens bands have where others cropped the cache, or went on with it."""
        known = cache.kept(length) if document.positions else None
        if known is None:
            return
        positions, uncut = known
        document.positions = [
            one.to(old.device) for one, old in zip(positions, document.positions, strict=True)
        ]
        if document.swapping is not None and uncut < document.swapping.tokens:
            # As where the cache is cropped into its prompt here.
            document.swapping = None

    def _lose(self, document: Document, length: int) -> None:
        """Go on where a cache was cropped, which takes as many rows from layers that have fewer."""
        if self._later is LaterTurns.KEEP:
            raise UnsupportedFeatureError(
                f"prune: the cache was cropped to {length} tokens, and its deeper layers lost as "
                'many rows, of tokens that are still there: use later="anew", which reads them '
                "again, or begin with an empty cache"
            )
        # Whatever comes next, they are read anew.
        document.positions, document.read = [], None

    def undo(self, now: Pass) -> None:
        """Leave a cache as it was before a pass that broke off."""
        document, held = now.document, now.held
        document.length, document.waits = now.before, held.waits
        document.boundary = held.boundary
        document.positions, document.dense = held.positions, held.dense
        document.windows, document.is_new = held.windows, held.is_new
        if document.passes is not None:
            # This one will not be counted: whichever is counted next is of others.
            document.passes -= 1
        self._blocks.undo(now)
        now.cache.undo(range(self._bands[0].start), now.before)
        if now.emptied or not document.positions:
            # Deeper layers have nothing any more; they are read anew by what comes.
            document.waits = document.waits and not now.emptied
            self.empty(document, now.cache)
            return
        for layers, positions in zip(self._bands, document.positions, strict=True):
            now.cache.undo(layers, len(positions))


def _lies_apart(positions: torch.Tensor, length: int) -> bool:
    """Whether tokens from `length` on have rows before those of earlier tokens."""
    left = positions[positions < length]
    return not torch.equal(left, positions[: len(left)])
