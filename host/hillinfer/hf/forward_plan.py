# SPDX-License-Identifier: Apache-2.0
"""The plan of a forward pass: how many tokens it brings to each sequence and layer."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from hillinfer.errors import CacheUseError, UnsupportedFeatureError
from hillinfer.kv.sequence import Sequence
from hillinfer.model_shape import ModelShape


class Notes(Protocol):
    """What somebody knows of a cache; it goes when its tokens do."""

    def fork(self) -> Notes:
        """Return what is known of a fork of the cache."""


@dataclass(frozen=True)
class SequenceShare:
    """One distinct sequence of a batch.

    Parameters
    ----------
    batch_rows
        Rows of the batch that hold it; more than one where prompts or beams are identical.
    tokens
        Real tokens this forward brings, the last ones of the batch row; padding comes before.
    """

    sequence: Sequence
    batch_rows: tuple[int, ...]
    tokens: int

    def newest(self, states: torch.Tensor) -> torch.Tensor:
        """Return its tokens of (batch, heads, columns, head_dim) without the batch, a view."""
        own = states[self.batch_rows[0]]
        return own if self.tokens == own.shape[1] else own[:, own.shape[1] - self.tokens :]


@dataclass(frozen=True)
class ForwardPlan:
    """One forward pass.

    Parameters
    ----------
    start
        Index of its first token, padding included.
    tokens
        Tokens of each batch row, padding included.
    others
        Rows of other caches that take the pass too: products of all rows round together.
    """

    start: int
    tokens: int
    batch: int
    shares: tuple[SequenceShare, ...]
    others: int = 0

    def check_states(
        self, shape: ModelShape, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Refuse keys and values that are not what the config promises.

        Raises
        ------
        UnsupportedFeatureError
            Naming what is wrong with them.
        """
        if keys.requires_grad:
            raise UnsupportedFeatureError(
                "gradients do not pass through a cache on a drive: use torch.no_grad()"
            )
        if keys.shape != values.shape:
            raise UnsupportedFeatureError(
                f"keys {tuple(keys.shape)} and values {tuple(values.shape)} differ in shape "
                "(latent attention): this model needs its ordinary cache"
            )
        expected = (self.batch, shape.kv_heads, self.tokens, shape.head_dim)
        if keys.shape != expected:
            raise UnsupportedFeatureError(
                f"layer {layer} has keys of shape {tuple(keys.shape)} where the config says "
                f"{expected}: layers of different shapes need the ordinary cache"
            )


class LayerLengths:
    """The tokens of each layer of a cache, padding included, and those it is due in a pass.

    Layers from some layer on may wait in a pass, while the others get its tokens, and get tokens of
    a stage of their own in its place.

    Attributes
    ----------
    now
        Of each layer, what it has been brought, of the pass under way too; to be looked at.
    """

    def __init__(self, layers: int) -> None:
        self.now = [0] * layers
        self._before = [0] * layers
        self._due = [0] * layers
        self._waits_from = self._lacking_from = layers
        self._stage: ForwardPlan | None = None
        self._staged = range(0)

    def set(self, lengths: Iterable[int], lacking_from: int) -> None:
        """Say what each layer has, outside of passes.

        Parameters
        ----------
        lengths
            Tokens of each layer.
        lacking_from
            The first layer for which tokens wait that it should have; behind the last for none.
        """
        self.now, self._lacking_from = list(lengths), lacking_from
        self._before = list(self.now)
        self._waits_from = len(self.now)
        self.end_stage()

    def before(self, layer: int) -> int:
        """Return what a layer had before the pass under way."""
        return self._before[layer]

    def begin(self, tokens: int) -> None:
        """Begin a pass that brings every layer so many tokens."""
        self._before = list(self.now)
        self._due = [length + tokens for length in self.now]
        self._waits_from = len(self.now)

    def waits(self, layer: int) -> bool:
        """Whether a layer does not get the tokens of the pass under way."""
        return layer >= self._waits_from

    def wait(self, first: int) -> None:
        """Let the layers from `first` on get nothing of the pass but what stages bring."""
        self._waits_from = first
        self._due[first:] = self.now[first:]

    def leave(self, layers: range, tokens: int) -> None:
        """Learn that layers that wait have the first tokens alone."""
        for layer in layers:
            self.now[layer] = self._due[layer] = tokens

    def begin_stage(self, layers: range, shares: tuple[SequenceShare, ...], batch: int) -> None:
        """Begin to bring layers that wait the same tokens, those of the shares."""
        tokens = shares[0].tokens
        self._stage = ForwardPlan(self.now[layers.start], tokens, batch, shares)
        self._staged = layers
        for layer in layers:
            self._due[layer] += tokens

    def end_stage(self) -> None:
        """Learn that they have them."""
        self._stage, self._staged = None, range(0)

    def enter(self, layers: range) -> None:
        """Learn that layers got other tokens, and that those of the pass under way still come."""
        for layer in layers:
            self._before[layer] = self.now[layer]

    def is_staged(self, layer: int) -> bool:
        """Whether a stage brings a layer what comes to it now, however few tokens they are."""
        return self._stage is not None and layer in self._staged

    def plan(self, layer: int, of_pass: ForwardPlan) -> ForwardPlan:
        """Return what a layer is brought now: what the pass brings, or a stage.

        Raises
        ------
        CacheUseError
            Where it is brought the same twice, or tokens before these wait for the layer.
        """
        if self._stage is not None and layer in self._staged:
            return self._stage
        if layer >= self._lacking_from:
            raise CacheUseError(
                f"the {self._before[0]} tokens of this cache wait to be read by deeper layers: go "
                "on with the pruning that read them, or begin with an empty cache"
            )
        if self.now[layer] != self._before[layer] or self.waits(layer):
            raise CacheUseError(
                f"layer {layer} brings keys and values twice in one forward pass: each layer needs "
                "a number (layer_idx) of its own"
            )
        return of_pass

    def attending(self, layer: int, of_pass: ForwardPlan) -> ForwardPlan:
        """Return what a layer was brought, to which it attends now."""
        if self._stage is not None and layer in self._staged:
            return self._stage
        return of_pass

    def check_attended(self, stored: Collection[int]) -> None:
        """Refuse a pass, which is through, where some layer made it without its cache.

        Parameters
        ----------
        stored
            Layers that stored keys and values and did not attend to them.

        Raises
        ------
        CacheUseError
            Naming the first layer.
        """
        for layer, (length, due) in enumerate(zip(self.now, self._due, strict=True)):
            if length != due:
                raise CacheUseError(
                    f"layer {layer} brought the cache no keys and values: a model that skips "
                    "layers needs its ordinary cache"
                )
        if stored:
            raise CacheUseError(
                f"layer {min(stored)} attended without the cache that its keys and values are in, "
                "so its answer is wrong: leave the attention implementation of all layers as "
                "hillinfer.attach set it, or detach first"
            )


# Of each layer: stored keys and values of every share that are not attended to, stored type,
# (kv_heads, tokens, head_dim); None where the open group alone has them.
Fresh = dict[int, list[tuple[torch.Tensor, torch.Tensor] | None]]


@dataclass(frozen=True)
class LoneToken:
    """The one token that a pass brings the one row of a cache, which others store and attend to.

    Parameters
    ----------
    plan, lengths, fresh
        Of the cache, which learns what was done.
    """

    sequence: Sequence
    plan: ForwardPlan
    lengths: LayerLengths
    fresh: Fresh

    @classmethod
    def of(cls, plan: ForwardPlan | None, lengths: LayerLengths, fresh: Fresh) -> LoneToken | None:
        """Return it; None for a pass that brings more, and where layers have different tokens."""
        if plan is None or plan.batch != 1 or plan.tokens != 1 or not plan.shares[0].tokens:
            return None
        sequence = plan.shares[0].sequence
        return None if sequence.deeper else cls(sequence, plan, lengths, fresh)

    def store(self, layer: int) -> None:
        """Learn that others store it in a layer; they, or the cache, attend to it then.

        Raises
        ------
        CacheUseError
            Where the layer has it already.
        """
        self.lengths.plan(layer, self.plan)
        self.fresh[layer] = [None]
        self.lengths.now[layer] += 1

    def attend(self, layer: int) -> None:
        """Learn that others attended to it."""
        del self.fresh[layer]
