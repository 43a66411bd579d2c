# SPDX-License-Identifier: Apache-2.0
"""Forms that keep some tokens and drop the others for good, as EvicPress compresses.

Droppers are query-blind: none knows what will be asked. Scores are those of kvpress 0.5.5; each KV
head of each layer keeps a set of its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import rotate_half

from hillinfer.errors import SettingsError, UnsupportedFeatureError
from hillinfer.forms.form import (
    DocumentStates,
    Form,
    FormRates,
    FormSeconds,
    MadeForm,
    opened_cache,
)
from hillinfer.forms.whole import MadeStates, states_bytes
from hillinfer.kv.sequence import RowLayout
from hillinfer.model_shape import ModelShape

# --- Queries of a document's last tokens, which a store does not keep ---


@dataclass(frozen=True)
class LayerQueries:
    """Queries of one layer, of a document's last tokens.

    Parameters
    ----------
    plain
        Before they are turned by their positions, (query_heads, tokens, head_dim).
    turned
        As attention has them, of the same shape.
    """

    plain: torch.Tensor
    turned: torch.Tensor


def observed_queries(model: Any, states: DocumentStates, tokens: int) -> list[LayerQueries]:
    """Read a document's last tokens once more, and return the queries of each layer.

    Parameters
    ----------
    model
        With rotary positions: Llama, Mistral, Qwen2 or Qwen3.
    states
        Of the document.
    tokens
        How many of its last ones; all of it where it has no more.

    Raises
    ------
    UnsupportedFeatureError
        Where the model's queries are not made in that way.
    """
    before = max(0, states.tokens - tokens)
    layers = [
        (keys[:, :before].clone(), values[:, :before].clone()) for keys, values in states.layers
    ]
    cache = opened_cache(layers, before)
    ids = torch.tensor([states.ids[before:]], device=model.device)
    found: dict[int, LayerQueries] = {}
    with torch.no_grad(), _watched(model, found):
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return [found[layer] for layer in range(len(states.layers))]


@contextmanager
def _watched(model: Any, found: dict[int, LayerQueries]) -> Iterator[None]:
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None or not hasattr(model.model, "rotary_emb"):
        raise UnsupportedFeatureError(
            f"{type(model).__name__} has no rotary positions: its queries are not observed; drop "
            "tokens by knorm or keydiff instead"
        )
    handles = [
        layer.self_attn.register_forward_pre_hook(partial(_note, found), with_kwargs=True)
        for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note(
    found: dict[int, LayerQueries], attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    found[attention.layer_idx] = queries_of(attention, hidden, kwargs["position_embeddings"])


def queries_of(
    attention: Any, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
) -> LayerQueries:
    """Return the queries that an attention layer makes.

    Parameters
    ----------
    attention
        With `q_proj`, and `q_norm` where it has one.
    hidden
        What comes in, (1, tokens, hidden).
    rotary
        Cosines and sines of the tokens' positions, (1, tokens, head_dim) each.
    """
    query = attention.q_proj(hidden).view(*hidden.shape[:-1], -1, attention.head_dim)
    if hasattr(attention, "q_norm"):
        query = attention.q_norm(query)
    plain = query.transpose(1, 2)
    cosines, sines = (part.unsqueeze(1) for part in rotary)
    turned = plain * cosines + rotate_half(plain) * sines
    return LayerQueries(plain[0], turned[0])


# --- What tokens are worth ---


class Dropper(ABC):
    """Scores the tokens of a layer; those of the highest scores are kept.

    Attributes
    ----------
    observed
        How many of the document's last queries it looks at; 0 for none.
    """

    observed: int = 0

    @abstractmethod
    def score(
        self, keys: torch.Tensor, values: torch.Tensor, queries: LayerQueries | None, turn: Turn
    ) -> torch.Tensor:
        """Return scores, (kv_heads, tokens).

        Parameters
        ----------
        keys, values
            (kv_heads, tokens, head_dim).
        queries
            Of the last tokens; None where it observes none.
        turn
            Turns queries by positions.
        """


Turn = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From positions (n,) to the cosines and sines (n, head_dim) of the model's rotary positions."""


class KeyNorms(Dropper):
    """knorm: keeps tokens whose keys are short (arXiv 2406.11430).

    The paper of EvicPress says that low norms are dropped; kvpress and the paper of the method keep
    them.
    """

    def score(
        self, keys: torch.Tensor, values: torch.Tensor, queries: LayerQueries | None, turn: Turn
    ) -> torch.Tensor:
        """Return the negative norms."""
        kind = torch.promote_types(keys.dtype, torch.float32)
        norms: torch.Tensor = torch.linalg.vector_norm(keys, dim=-1, dtype=kind)
        return -norms


class KeyDifferences(Dropper):
    """keydiff: keeps tokens whose keys are unlike the mean of all (arXiv 2504.15364)."""

    def score(
        self, keys: torch.Tensor, values: torch.Tensor, queries: LayerQueries | None, turn: Turn
    ) -> torch.Tensor:
        """Return the negative cosine between each key and the mean direction."""
        anchor = functional.normalize(keys, p=2, dim=-1).mean(dim=1, keepdim=True)
        return -functional.cosine_similarity(keys, anchor, dim=-1)


class WindowAttention(Dropper):
    """snapkv: keeps what the last 64 tokens attend to, and those tokens (arXiv 2404.14469)."""

    observed = 64
    _kernel = 5

    def score(
        self, keys: torch.Tensor, values: torch.Tensor, queries: LayerQueries | None, turn: Turn
    ) -> torch.Tensor:
        """Return mean attention weights, smoothed over five tokens."""
        assert queries is not None, "it observes queries"
        kv_heads, tokens, head_dim = keys.shape
        window, group = self.observed, len(queries.turned) // kv_heads
        products = _wide(queries.turned) @ _wide(keys).repeat_interleave(group, 0).transpose(1, 2)
        products = products / math.sqrt(head_dim)
        hidden = torch.full_like(products, -math.inf).triu(diagonal=tokens - window + 1)
        weights = functional.softmax(products + hidden, dim=-1, dtype=torch.float32)
        scores = weights.to(keys.dtype)[..., :-window].mean(dim=-2)
        scores = functional.avg_pool1d(scores, self._kernel, padding=self._kernel // 2, stride=1)
        scores = scores.view(kv_heads, group, tokens - window).mean(1)
        return functional.pad(scores, (0, window), value=float(scores.max()) + 1)


class ExpectedAttention(Dropper):
    """expected: keeps what queries to come are likely to attend to, by the size of their values.

    Queries are taken to be normal, with mean and covariance as in the document, turned by the mean
    rotation of the next 512 positions. The first four tokens are always kept.

    Attributes
    ----------
    coming
        Positions that queries are taken to come at.
    """

    # All that there are.
    observed = 1 << 30
    _sinks = 4
    coming = 512

    def score(
        self, keys: torch.Tensor, values: torch.Tensor, queries: LayerQueries | None, turn: Turn
    ) -> torch.Tensor:
        """Return expected attention weights times norms of values."""
        assert queries is not None, "it observes queries"
        kv_heads, tokens, head_dim = keys.shape
        keys, values, plain = map(_wide, (keys, values, queries.plain[:, self._sinks :]))
        mean = plain.mean(dim=1, keepdim=True)
        apart = plain - mean
        spread = torch.einsum("hti,htj->hij", apart, apart) / plain.shape[1]
        rotation = self._mean_rotation(turn, tokens, keys)
        mean = mean.squeeze(1) @ rotation.T
        spread = rotation @ (spread @ rotation.T)
        group = len(plain) // kv_heads
        ours = keys[:, self._sinks :].repeat_interleave(group, 0).transpose(1, 2)
        scores = (mean.unsqueeze(1) @ ours).squeeze(1) / math.sqrt(head_dim)
        scores = scores + torch.einsum("hin,hij,hjn->hn", ours, spread, ours) / head_dim / 2
        scores = functional.softmax(scores, dim=-1)
        scores = scores.view(kv_heads, group, tokens - self._sinks).mean(dim=1)
        scores = scores * values[:, self._sinks :].norm(dim=-1)
        return functional.pad(scores, (self._sinks, 0), value=float(scores.max()) + 1)

    def _mean_rotation(self, turn: Turn, tokens: int, like: torch.Tensor) -> torch.Tensor:
        """Return the mean of the rotations of the positions to come, (head_dim, head_dim)."""
        positions = torch.arange(tokens, tokens + self.coming, device=like.device)
        cosines, sines = (part.to(like.dtype) for part in turn(positions))
        head_dim = like.shape[-1]
        one = torch.eye(head_dim, dtype=cosines.dtype, device=like.device)
        # What `rotate_half` does, as a matrix.
        half = torch.eye(head_dim // 2, dtype=cosines.dtype, device=like.device)
        turned = torch.zeros_like(one)
        turned[head_dim // 2 :, : head_dim // 2] = half
        turned[: head_dim // 2, head_dim // 2 :] = -half
        return (cosines.unsqueeze(1) * one + sines.unsqueeze(1) * turned).mean(dim=0)


def _wide(numbers: torch.Tensor) -> torch.Tensor:
    """Return FP16 numbers in FP32: sums of their products may pass what FP16 has."""
    return numbers.float() if numbers.dtype is torch.float16 else numbers


DROPPERS: Mapping[str, Callable[[], Dropper]] = MappingProxyType(
    {
        "knorm": KeyNorms,
        "keydiff": KeyDifferences,
        "snapkv": WindowAttention,
        "expected": ExpectedAttention,
    }
)

# --- The form ---


def kept_tokens(tokens: int, kept: float) -> int:
    """Return how many of a document's tokens are kept: one at least, as kvpress rounds."""
    # kvpress is told which part to remove, and computes with that.
    return max(1, int(tokens * (1 - (1 - kept))))


def kept_positions(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the positions of the highest scores, ascending, int64 (kv_heads, count)."""
    return scores.topk(count, dim=-1).indices.sort(dim=-1).values


class DroppedForm(Form):
    """Some tokens' keys and values in 16 bits, a set for each KV head and layer.

    Parameters
    ----------
    dropper
        Name of what scores tokens.
    kept
        Share of the tokens that is kept, above 0 and up to 1. The paper's ratio is this one in
        footnote 2 and Algorithm 1, and the share that goes in its examples.
    """

    def __init__(self, dropper: str, kept: float) -> None:
        if dropper not in DROPPERS:
            raise SettingsError(
                f"dropper={dropper!r} is unknown: choose one of {', '.join(DROPPERS)}"
            )
        if not 0 < kept <= 1:
            raise SettingsError(f"kept={kept} is not above 0 and up to 1")
        self._dropper, self._kept = dropper, kept

    @property
    def name(self) -> str:
        """Like `snapkv-0.5`."""
        return f"{self._dropper}-{self._kept:g}"

    def byte_count(self, shape: ModelShape, tokens: int) -> int:
        """Return the 16-bit bytes of what is kept."""
        return states_bytes(shape, kept_tokens(tokens, self._kept))

    def make(self, model: Any, states: DocumentStates) -> MadeForm:
        """Copy what is kept."""
        layout = RowLayout(ModelShape.from_config(model.config, model.dtype))
        layers = []
        for (keys, values), positions in zip(
            states.layers, self.positions(model, states), strict=True
        ):
            chosen = positions[..., None].expand(-1, -1, keys.shape[-1])
            layers.append(
                (
                    layout.round(keys.gather(1, chosen))[0],
                    layout.round(values.gather(1, chosen))[0],
                )
            )
        return MadeStates(layers, states.tokens, model.dtype)

    def positions(self, model: Any, states: DocumentStates) -> list[torch.Tensor]:
        """Return what is kept of each layer, ascending, int64 (kv_heads, kept).

        Raises
        ------
        SettingsError
            Where the document is too short for what it observes.
        """
        dropper = DROPPERS[self._dropper]()
        if states.tokens <= min(dropper.observed, 64):
            raise SettingsError(
                f"{self.name} of {states.tokens} tokens: it observes {dropper.observed} of them, "
                "and there must be more"
            )
        if self._dropper not in states.scores:
            states.scores[self._dropper] = self._scores(model, states, dropper)
        count = kept_tokens(states.tokens, self._kept)
        return [kept_positions(scores, count) for scores in states.scores[self._dropper]]

    def _scores(self, model: Any, states: DocumentStates, dropper: Dropper) -> list[torch.Tensor]:
        queries: list[LayerQueries | None] = [None] * len(states.layers)
        if dropper.observed:
            queries = [*observed_queries(model, states, dropper.observed)]

        def turn(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            cosines, sines = model.model.rotary_emb(states.layers[0][0], positions[None])
            return cosines[0], sines[0]

        return [
            dropper.score(keys, values, own, turn)
            for (keys, values), own in zip(states.layers, queries, strict=True)
        ]

    def seconds(self, rates: FormRates, shape: ModelShape, tokens: int) -> FormSeconds:
        """Return the time that reading what is kept takes, and steps over fewer tokens."""
        reading = self.byte_count(shape, tokens) / rates.tier_bytes
        return FormSeconds(reading, rates.token_seconds)
