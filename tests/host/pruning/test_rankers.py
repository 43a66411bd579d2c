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
    check_weights,
    kept_blocks,
    make_ranker,
)
from hillinfer.pruning.schedule import Schedule

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


@pytest.mark.parametrize(
    ("scores", "count", "window", "mass", "kept"),
    [
        # Forced ones hold 50 of 100, so 30 are missing.
        ([30, 5, 20, 10, 15, 20], 6, 1, 0.8, [0, 2, 4, 5]),
        # Just so much is enough.
        ([30, 5, 20, 10, 15, 20], 6, 1, 0.7, [0, 2, 5]),
        ([30, 5, 20, 10, 15, 20], 6, 1, 0.71, [0, 2, 4, 5]),
        # What is forced holds it.
        ([30, 5, 20, 10, 15, 20], 6, 1, 0.5, [0, 5]),
        ([30, 5, 20, 10, 15, 20], 6, 2, 0.6, [0, 4, 5]),
        # Never more than are to stay.
        ([30, 5, 20, 10, 15, 20], 3, 1, 0.99, [0, 2, 5]),
        # All of it is all blocks, of no weight, too.
        ([50, 0, 20, 0, 10, 20], 6, 1, 1.0, [0, 1, 2, 3, 4, 5]),
        ([50, 0, 20, 0, 10, 20], 6, 1, 0.999, [0, 2, 4, 5]),
        ([1], 1, 1, 0.5, [0]),
        ([1, 1], 2, 1, 0.5, [0, 1]),
    ],
)
def test_the_choice_by_mass(scores, count, window, mass, kept):
    assert kept_blocks(torch.tensor(scores), count, window, mass).tolist() == kept
    assert by_mass(scores, count, window, mass) == kept


def by_mass(scores, count, window, mass):
    """Take the heaviest until together with the forced ones they are heavy enough."""
    blocks = range(len(scores))
    kept = {0, *blocks[len(scores) - window :]}
    for block in sorted(set(blocks) - kept, key=lambda one: (-scores[one], one)):
        is_enough = mass < 1 and sum(scores[one] for one in kept) >= mass * sum(scores)
        if len(kept) < count and not is_enough:
            kept.add(block)
    return sorted(kept)


def test_what_stays_by_mass_is_what_the_restatement_keeps():
    counts = set()
    for seed, mass in enumerate((0.2, 0.4, 0.5, 0.6, 0.7, 0.9)):
        scores = make_ranker("weights").scores(made(900, seed=seed))
        kept = kept_blocks(scores, 12, 2, mass).tolist()
        assert kept == by_mass(scores.tolist(), 12, 2, mass)
        counts.add(len(kept))
    assert len(counts) >= 4


@pytest.mark.parametrize("name", RANKERS)
def test_only_weights_are_kept_by_mass(name):
    """Those whose scores are parts of one whole: of all that the window's queries give."""
    deciding, ranker = made(253), make_ranker(name)
    whole = deciding.queries.shape[0] * deciding.queries.shape[1]
    adds_up = float(ranker.scores(deciding).sum()) == pytest.approx(whole, rel=1e-5)
    for text in ("3:50%", "3:mass=100%", "3:128"):
        check_weights(Schedule.parse(text), ranker)
    weighing = Schedule.parse("3:50%,5:mass=90%")
    if adds_up:
        check_weights(weighing, ranker)
        return
    said = f"5:mass=90% keeps .* and ranker='{name}' gives .* by weights"
    with pytest.raises(SettingsError, match=said):
        check_weights(weighing, ranker)
