# SPDX-License-Identifier: Apache-2.0
"""Every rule beside a plain restatement of it, and the choice among blocks."""

import math

import pytest
import torch

from hillinfer.errors import SettingsError
from hillinfer.pruning.rankers import (
    DEFAULT_WINDOW,
    RANKERS,
    Deciding,
    kept_blocks,
    make_ranker,
)

BLOCK, UNIT = 64, 8


def made(tokens, window=5, kv_heads=2, group=3, head_dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(kv_heads, tokens, head_dim, generator=generator)
    queries = torch.randn(kv_heads * group, window, head_dim, generator=generator)
    return Deciding(keys, queries, 0.3, seed=7)


def pieces(tokens, size):
    return [range(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def product(deciding, key_of):
    """Mean over query heads of the mean query's inner product with a key of its KV head."""
    heads, group = len(deciding.queries), len(deciding.queries) // len(deciding.keys)
    found = 0.0
    for head in range(heads):
        query = deciding.queries[head].mean(0)
        found += float(query @ key_of(deciding.keys[head // group])) / heads
    return found


def of_units(deciding):
    return [
        max(
            product(deciding, lambda keys, unit=unit: keys[list(unit)].mean(0))
            for unit in pieces(deciding.tokens, UNIT)
            if unit[0] in block
        )
        for block in pieces(deciding.tokens, BLOCK)
    ]


def of_means(deciding):
    return [
        product(deciding, lambda keys, block=block: keys[list(block)].mean(0))
        for block in pieces(deciding.tokens, BLOCK)
    ]


def of_greatest(deciding):
    return [
        product(deciding, lambda keys, block=block: keys[list(block)].amax(0))
        for block in pieces(deciding.tokens, BLOCK)
    ]


def weights(deciding):
    tokens, window = deciding.tokens, deciding.queries.shape[1]
    group = len(deciding.queries) // len(deciding.keys)
    found = [0.0] * tokens
    for head, queries in enumerate(deciding.queries):
        keys = deciding.keys[head // group]
        for at, query in enumerate(queries):
            seen = tokens - window + at + 1
            products = [math.exp(deciding.scaling * float(query @ keys[i])) for i in range(seen)]
            for i, one in enumerate(products):
                found[i] += one / sum(products)
    return found


def of_weights(deciding):
    found = weights(deciding)
    return [sum(found[i] for i in block) for block in pieces(deciding.tokens, BLOCK)]


def of_best_token(deciding):
    found = weights(deciding)
    return [max(found[i] for i in block) for block in pieces(deciding.tokens, BLOCK)]


def of_recency(deciding):
    return list(range(deciding.blocks))


def of_chance(deciding):
    """Drawn: the same for the same prompt, others for another one."""
    ranker = make_ranker("random")
    other = Deciding(deciding.keys, deciding.queries, deciding.scaling, seed=8)
    assert not torch.equal(ranker.scores(deciding), ranker.scores(other))
    return ranker.scores(deciding).tolist()


PLAIN = {
    "weights": of_weights,
    "paper": of_units,
    "average": of_means,
    "max": of_greatest,
    "token": of_best_token,
    "recent": of_recency,
    "random": of_chance,
}


def test_every_rule_has_a_restatement():
    assert PLAIN.keys() == RANKERS.keys()


@pytest.mark.parametrize("tokens", [192, 200, 253])
@pytest.mark.parametrize("name", PLAIN)
def test_scores_are_those_of_the_restatement(name, tokens):
    deciding = made(tokens)
    scores = make_ranker(name).scores(deciding)
    assert scores.shape == (deciding.blocks,)
    assert scores.tolist() == pytest.approx(PLAIN[name](deciding), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", [name for name in PLAIN if name not in ("recent", "random")])
def test_another_key_gives_other_scores(name):
    deciding = made(192)
    before = make_ranker(name).scores(deciding)
    deciding.keys[:, 70] += 3
    assert not torch.equal(before, make_ranker(name).scores(deciding))


def test_windows():
    assert make_ranker("paper").window(50) == 4
    assert make_ranker("weights").window(50) == 50
    assert make_ranker("weights").window(None) == DEFAULT_WINDOW


def test_an_unknown_rule_is_refused_with_those_that_there_are():
    with pytest.raises(SettingsError, match="choose one of weights, paper"):
        make_ranker("best")


@pytest.mark.parametrize(
    ("scores", "count", "window", "kept"),
    [
        # The first block and the window's stay; the others compete for what is left.
        ([0, 1, 3, 2, 0], 3, 1, [0, 2, 4]),
        ([0, 1, 3, 2, 0], 4, 1, [0, 2, 3, 4]),
        ([9, 9, 1, 2, 9], 4, 1, [0, 1, 3, 4]),
        # Of equal ones the earlier.
        ([0, 1, 1, 1, 0], 3, 1, [0, 1, 4]),
        # More are forced than are to stay.
        ([5, 4, 3, 2, 1], 1, 2, [0, 3, 4]),
        ([5, 4, 3, 2, 1], 5, 1, [0, 1, 2, 3, 4]),
        ([1], 1, 1, [0]),
    ],
)
def test_the_choice_among_blocks(scores, count, window, kept):
    assert kept_blocks(torch.tensor(scores), count, window).tolist() == kept
