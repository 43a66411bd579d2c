# SPDX-License-Identifier: Apache-2.0
"""Rankers: rules of which blocks of a prompt stay, a small class each.

A rule overrides `Ranker.scores` and gets a line in `RANKERS` and in the tests' table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch

from hillinfer.errors import SettingsError
from hillinfer.pruning.schedule import BLOCK_TOKENS, Schedule

# Of a block's units, and the window of queries (SlimInfer section 3.2).
UNIT_TOKENS, PAPER_WINDOW = 8, 4
# Where nobody says where the question begins.
DEFAULT_WINDOW = 32


@dataclass(frozen=True)
class Deciding:
    """What the layer before a cut has of the tokens that are left.

    Parameters
    ----------
    keys
        (kv_heads, tokens, head_dim), as attention takes them, of any floating-point type.
    queries
        (query_heads, window, head_dim), of the prompt's last tokens.
    scaling
        What attention multiplies inner products with.
    seed
        Of the prompt, for rules that draw.
    """

    keys: torch.Tensor
    queries: torch.Tensor
    scaling: float
    seed: int = 0

    @property
    def tokens(self) -> int:
        """How many are left."""
        return self.keys.shape[1]

    @property
    def blocks(self) -> int:
        """In how many blocks, the last one perhaps not full."""
        return -(-self.tokens // BLOCK_TOKENS)


class Ranker(ABC):
    """Says how much a prompt's blocks matter to what comes.

    Attributes
    ----------
    adds_up
        Whether its scores are parts of one whole, none below 0, so that a cut may keep a share.
    unit_tokens
        Of how many tokens it makes one key in FP32, beside keys of the layer; None where it makes
        none.
    """

    adds_up: ClassVar[bool] = False
    unit_tokens: ClassVar[int | None] = None

    def window(self, question_tokens: int | None) -> int:
        """Return how many of the prompt's last queries it looks at.

        Parameters
        ----------
        question_tokens
            How many of the last tokens are the question; None where nobody knows.
        """
        return question_tokens or DEFAULT_WINDOW

    @abstractmethod
    def scores(self, deciding: Deciding) -> torch.Tensor:
        """Return a number for each block, float32 (blocks,): what is higher stays."""


class UnitScores(Ranker):
    """SlimInfer's rule: the best of a block's units by the mean query (equations 1 and 2).

    A unit's key is the mean of its 8 keys; neither softmax nor scaling.
    """

    unit_tokens = UNIT_TOKENS

    def window(self, question_tokens: int | None) -> int:
        """Return the paper's four queries."""
        return PAPER_WINDOW

    def scores(self, deciding: Deciding) -> torch.Tensor:
        """Return scores; see `Ranker`."""
        units = _means(deciding.keys, UNIT_TOKENS)
        return _blocks(_products(deciding, units), BLOCK_TOKENS // UNIT_TOKENS, torch.amax)


class AveragePooling(UnitScores):
    """A block's key is the mean of all its keys (SlimInfer's ablation)."""

    unit_tokens = BLOCK_TOKENS

    def scores(self, deciding: Deciding) -> torch.Tensor:
        """Return scores; see `Ranker`."""
        return _products(deciding, _means(deciding.keys, BLOCK_TOKENS))


class MaxPooling(UnitScores):
    """A block's key is the greatest number of each channel of its keys (SlimInfer's ablation)."""

    unit_tokens = BLOCK_TOKENS

    def scores(self, deciding: Deciding) -> torch.Tensor:
        """Return scores; see `Ranker`."""
        greatest = _units(deciding.keys, BLOCK_TOKENS)
        for own, into in zip(deciding.keys, greatest, strict=True):
            padded = _padded(own, BLOCK_TOKENS, -torch.inf)
            into[:] = padded.reshape(-1, BLOCK_TOKENS, own.shape[1]).amax(1)
        return _products(deciding, greatest)


class SoftmaxWeights(Ranker):
    """What attention of the window's queries gives to a block's tokens, over all heads."""

    adds_up = True

    def scores(self, deciding: Deciding) -> torch.Tensor:
        """Return scores; see `Ranker`."""
        return _blocks(token_weights(deciding), BLOCK_TOKENS, torch.sum)


class BestToken(Ranker):
    """The most that attention gives to any one token of a block, as LazyLLM ranks tokens."""

    def scores(self, deciding: Deciding) -> torch.Tensor:
        """Return scores; see `Ranker`."""
        return _blocks(token_weights(deciding), BLOCK_TOKENS, torch.amax)


class Recent(Ranker):
    """What came last."""

    def scores(self, deciding: Deciding) -> torch.Tensor:
        """Return scores; see `Ranker`."""
        return torch.arange(deciding.blocks, dtype=torch.float32)


class Random(Ranker):
    """Whatever is drawn, the same for the same prompt."""

    def scores(self, deciding: Deciding) -> torch.Tensor:
        """Return scores; see `Ranker`."""
        generator = torch.Generator().manual_seed(deciding.seed)
        return torch.rand(deciding.blocks, generator=generator)


RANKERS: MappingProxyType[str, Callable[[], Ranker]] = MappingProxyType(
    {
        "weights": SoftmaxWeights,
        "paper": UnitScores,
        "average": AveragePooling,
        "max": MaxPooling,
        "token": BestToken,
        "recent": Recent,
        "random": Random,
    }
)


def make_ranker(name: str) -> Ranker:
    """Return the rule of a name; raises SettingsError where there is none."""
    if name not in RANKERS:
        raise SettingsError(f"ranker={name!r}: choose one of {', '.join(RANKERS)}")
    return RANKERS[name]()


def unit_key_bytes(tokens: int, unit_tokens: int | None, channels: int) -> int:
    """Return what keys of units take, in FP32.

    Parameters
    ----------
    tokens
        How many there are.
    unit_tokens
        Of a unit; None where a rule makes no keys of its own.
    channels
        Of keys of all KV heads.
    """
    return 0 if unit_tokens is None else -(-tokens // unit_tokens) * channels * 4


def _name_of(ranker: Ranker) -> str:
    """Return what settings call a ranker; its class' name where it is of no table."""
    own = type(ranker)
    return next((name for name, made in RANKERS.items() if made is own), own.__name__)


def check_weights(schedule: Schedule, ranker: Ranker) -> None:
    """Refuse cuts by mass where scores are no weights; raises SettingsError."""
    weighing = [str(cut) for cut in schedule.cuts if cut.weighs]
    if weighing and not ranker.adds_up:
        fitting = " or ".join(name for name, made in RANKERS.items() if made().adds_up)
        raise SettingsError(
            f"prune={schedule}: {weighing[0]} keeps a share of attention's weights, and "
            f"ranker={_name_of(ranker)!r} gives scores that do not add up to any: choose blocks by "
            f"{fitting}, or keep a share of the blocks, such as 15:50%"
        )


def token_weights(deciding: Deciding) -> torch.Tensor:
    """Return what attention of the window gives to each token, float32 (tokens,).

    Summed over the window's queries and all heads; each query sees the tokens up to its own.
    """
    keys, queries = deciding.keys, deciding.queries.float() * deciding.scaling
    window, tokens, size = queries.shape[1], keys.shape[1], queries.shape[2]
    # Of the window's own tokens a query sees those up to itself, and all before them.
    later = torch.ones(window, window, dtype=torch.bool, device=keys.device).triu(1)
    weights = torch.zeros(tokens, device=keys.device)
    # Of one head after the other: weights of all are many times the keys.
    for own, heads in zip(keys, queries.reshape(len(keys), -1, size), strict=True):
        products = heads @ own.float().T
        last = products.view(-1, window, tokens)[..., tokens - window :]
        last.masked_fill_(later, -torch.inf)
        weights += products.softmax(-1).sum(0)
    return weights


def kept_blocks(
    scores: torch.Tensor,
    count: int,
    window_blocks: int,
    mass: float | None = None,
    first_blocks: int = 1,
) -> torch.Tensor:
    """Return the numbers of the blocks that stay, in order, int64.

    The first blocks and those of the window stay whatever their scores, and take no part in the
    choice among the others.

    Parameters
    ----------
    scores
        Of a ranker.
    count
        How many are to stay; more do where the forced ones are more.
    window_blocks
        How many of the last blocks the window reaches into.
    mass
        Of all scores, which then add up: fewer than `count` stay where they hold so much together
        with the forced ones. None, or 1, for no such bound.
    first_blocks
        How many of the first blocks stay in any case, one at least.
    """
    blocks = len(scores)
    forced = torch.zeros(blocks, dtype=torch.bool)
    forced[:first_blocks] = True
    forced[blocks - window_blocks :] = True
    left = max(0, count - int(forced.sum()))
    others = torch.where(forced, -torch.inf, scores.float().cpu())
    # Of equal scores the earlier block stays.
    best = torch.argsort(others, descending=True, stable=True)[:left]
    if mass is not None and mass < 1:
        weights = scores.double().cpu()
        before = weights[forced].sum() + weights[best].cumsum(0) - weights[best]
        # One stays where those before it hold too little.
        best = best[before < mass * weights.sum()]
    forced[best] = True
    return forced.nonzero().flatten()


def _products(deciding: Deciding, keys: torch.Tensor) -> torch.Tensor:
    """Return inner products of the mean query with keys (kv_heads, n, head_dim), over all heads."""
    mean = deciding.queries.float().mean(1).reshape(len(keys), -1, keys.shape[2])
    return torch.einsum("ghd,gnd->ghn", mean, keys.float()).mean((0, 1))


def _means(keys: torch.Tensor, size: int) -> torch.Tensor:
    """Return the means of each `size` keys; of the last one of those that there are."""
    count, means = keys.shape[1] // size, _units(keys, size)
    # One head after the other: keys of all in FP32 are twice what is counted of them.
    for own, into in zip(keys, means, strict=True):
        into[:count] = own[: count * size].float().reshape(count, size, -1).mean(1)
        if len(into) > count:
            into[count] = own[count * size :].float().mean(0)
    return means


def _units(keys: torch.Tensor, size: int) -> torch.Tensor:
    """Return room for one key of each `size`, float32."""
    heads, tokens, head_dim = keys.shape
    shape = (heads, -(-tokens // size), head_dim)
    return torch.empty(shape, dtype=torch.float32, device=keys.device)


def _padded(keys: torch.Tensor, size: int, value: float) -> torch.Tensor:
    """Return keys (tokens, head_dim) in FP32 with others behind them, up to whole blocks."""
    missing = -len(keys) % size
    return torch.nn.functional.pad(keys.float(), (0, 0, 0, missing), value=value)


def _blocks(numbers: torch.Tensor, size: int, reduce: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return one number for each `size` of them; the last for those that there are."""
    worst = -torch.inf if reduce is torch.amax else 0.0
    missing = -len(numbers) % size
    padded = torch.nn.functional.pad(numbers, (0, missing), value=worst)
    return reduce(padded.reshape(-1, size), dim=1)
