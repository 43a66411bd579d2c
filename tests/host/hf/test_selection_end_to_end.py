# SPDX-License-Identifier: Apache-2.0
"""How many tokens a decode step selects, and which ones it must."""

import math

import pytest
import torch
from generation_runs import LOGIT_TOLERANCE, SelectionLog, attached, logits, ordinary, run
from tiny_models import TinyModel, prompts

TINY = TinyModel()


def expected_count(length, alpha, kept, most):
    wanted = math.floor(alpha * length + 0.5)
    if most is not None:
        wanted = min(most, wanted)
    return min(length, max(kept + 1, wanted))


def selections(cold_dir, prompt_length, new_tokens, **changes):
    model = TINY.build()
    ids, _ = prompts([prompt_length])
    log = SelectionLog()
    with log.attached(model, cold_dir, **changes) as hill:
        cache = hill.new_cache()
        run(model, cache, ids, new_tokens=new_tokens)
        statistics = cache.statistics()
        cache.close()
    return log, statistics


@pytest.mark.parametrize(
    ("alpha", "sinks", "recent", "most"),
    [
        (0.1, 2, 6, None),
        (0.5, 0, 1, None),  # Halves round up: .5 · 81 selects 41.
        (0.035, 4, 32, None),  # Fewer than the kept tokens and one.
        (0.9, 1, 1, 20),
        (0.9, 8, 40, 5),  # The bound gives way to the kept tokens and one.
        (1.0, 2, 6, None),
    ],
)
def test_the_number_of_selected_tokens(alpha, sinks, recent, most, cold_dir):
    log, statistics = selections(
        cold_dir,
        80,
        6,
        alpha=alpha,
        kept_sinks=sinks,
        kept_recent=recent,
        max_selected=most,
    )
    assert log.lengths == [80 + step for step in range(1, 6) for _ in range(TINY.layers)]
    counts = [expected_count(length, alpha, sinks + recent, most) for length in log.lengths]
    assert [len(sets[0]) for sets in log.sets] == counts
    assert statistics.selected_tokens == sum(counts)
    assert statistics.scored_tokens == sum(log.lengths)


def test_short_contexts_select_everything_there_is(cold_dir):
    log, _ = selections(cold_dir, 3, 4, alpha=0.01, kept_sinks=4, kept_recent=32)
    assert [sets[0] for sets in log.sets] == [list(range(length)) for length in (4, 4, 5, 5, 6, 6)]


def test_a_prompt_of_one_token(cold_dir):
    model = TINY.build()
    ids, _ = prompts([1])
    with attached(model, cold_dir) as hill:
        cache = hill.new_cache()
        found = run(model, cache, ids, new_tokens=4)
        cache.close()
    assert torch.equal(found.sequences, ordinary(model, ids, new_tokens=4).sequences)


@pytest.mark.parametrize("rule", ["weight_sum", "raw_sum"])
@pytest.mark.parametrize("scope", ["layer", "kv_head"])
def test_kept_tokens_are_in_every_set(rule, scope, cold_dir):
    log, statistics = selections(
        cold_dir, 150, 5, alpha=0.1, kept_sinks=3, kept_recent=5, rule=rule, scope=scope
    )
    for sets, length in zip(log.sets, log.lengths, strict=True):
        assert len(sets) == (1 if scope == "layer" else 2)
        for positions in sets:
            assert positions == sorted(set(positions))
            assert {0, 1, 2} < set(positions)
            assert set(range(length - 5, length)) < set(positions)
            assert len(positions) == 15
    if scope == "kv_head":
        # Each KV head has a set of its own.
        assert any(sets[0] != sets[1] for sets in log.sets)
        assert statistics.selected_tokens == sum(len(one) for sets in log.sets for one in sets)


def test_sets_are_not_merely_the_kept_tokens_and_their_neighbours(cold_dir):
    log, _ = selections(cold_dir, 150, 5, alpha=0.2, kept_sinks=2, kept_recent=6)
    far = [position for sets in log.sets for position in sets[0] if 10 < position < 130]
    assert len(set(far)) > 20
    assert log.sets[0] != log.sets[1]


def test_two_tokens_at_once_attend_to_everything(cold_dir):
    """Only a forward of a single token selects."""
    model = TINY.build()
    ids, _ = prompts([150])
    further, _ = prompts([2], seed=3)
    log = SelectionLog()
    with log.attached(model, cold_dir, alpha=0.02) as hill, torch.no_grad():
        cache = hill.new_cache()
        for part in (*torch.split(ids, 64, dim=1), further):
            found = model(part, past_key_values=cache).logits
        cache.close()
    assert log.sets == []
    whole = torch.cat([ids, further], dim=1)
    with torch.no_grad():
        expected = model(whole).logits[:, -2:]
    assert (found - expected).abs().max() < 5e-3


def test_the_ranking_is_that_of_true_attention_weights(cold_dir):
    """With an INT8 shadow the selected tokens carry nearly the mass that the best ones could."""
    model = TINY.build()
    model.set_attn_implementation("eager")
    ids, _ = prompts([150])
    step, _ = prompts([1], seed=3)
    with torch.no_grad():
        weights = model(torch.cat([ids, step], dim=1), output_attentions=True).attentions[0]
    mass = weights[0, :, -1].sum(0).double()
    log = SelectionLog()
    with log.attached(model, cold_dir, alpha=0.2, shadow="int8") as hill, torch.no_grad():
        cache = hill.new_cache()
        model(ids, past_key_values=cache)
        model(step, past_key_values=cache)
        cache.close()
    chosen = log.sets[0][0]
    best = mass.sort(descending=True).values[: len(chosen)].sum()
    assert mass[chosen].sum() > 0.9 * best
    assert mass[-len(chosen) :].sum() < 0.7 * best


def test_alpha_nearly_one_is_nearly_the_ordinary_cache(cold_dir):
    model = TINY.build()
    ids, _ = prompts([150])
    with attached(model, cold_dir, alpha=0.98) as hill:
        cache = hill.new_cache()
        found = run(model, cache, ids, new_tokens=3)
        cache.close()
    expected = ordinary(model, ids, new_tokens=3)
    difference = (logits(found) - logits(expected)).abs().max()
    assert LOGIT_TOLERANCE[torch.float32] / 100 < difference < 0.5
