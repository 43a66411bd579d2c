# SPDX-License-Identifier: Apache-2.0
"""What is swept attends as the timed rivals do, and a cache of few bits as KIVI says."""

from dataclasses import replace

import pytest
import torch
from rivals.rival_cases import SCALING, SHAPE, make_setup

from hillinfer_bench.frontier.four_bit import CodedCache, row_share
from hillinfer_bench.frontier.swept import SWEPT, spilled_tokens
from hillinfer_bench.quality.forced_reading import attend_masked, seen_tokens
from hillinfer_bench.quality.policies import LayerQueries
from hillinfer_bench.rivals.table import make_rival
from hillinfer_bench.systems.kv_source import LastQueries

PROMPT, STEPS, OBSERVED = 700, 70, 8
RULES = ("h2o-all-keys", "infinigen", "leoam", "quest", "h2o-drop")


@pytest.fixture(scope="module")
def states():
    """Queries, keys and values of every layer, in which neighbours resemble each other."""
    generator = torch.Generator().manual_seed(3)
    size = (SHAPE.layers, SHAPE.kv_heads, PROMPT + STEPS, SHAPE.head_dim)
    drift = torch.randn(size, generator=generator).cumsum(2) * 0.15
    keys = (torch.randn(size, generator=generator) + drift).half()
    values = torch.randn(size, generator=generator).half()
    heads = (SHAPE.layers, SHAPE.query_heads, PROMPT + STEPS, SHAPE.head_dim)
    return torch.randn(heads, generator=generator), keys, values


def of_rival(name, cold_dir, alpha, states):
    """Decode with the rival, no query predicted; (layers, steps, query heads, head_dim)."""
    queries, keys, values = states
    setup = make_setup(cold_dir, batch=1, alpha=alpha, context=PROMPT + STEPS)
    found = []
    with make_rival(name, setup) as rival:
        for layer in range(SHAPE.layers):
            rival.fill(layer, 0, keys[layer, :, :PROMPT], values[layer, :, :PROMPT])
            rival.observe(layer, 0, queries[layer, :, PROMPT - OBSERVED : PROMPT], SCALING)
        for at in range(PROMPT, PROMPT + STEPS):
            new = slice(at, at + 1)
            rival.begin_step()
            for layer in range(SHAPE.layers):
                rival.append(layer, 0, keys[layer, :, new], values[layer, :, new])
                found.append(rival.attend(layer, 0, queries[layer, :, new], SCALING)[:, 0])
    return torch.stack(found).unflatten(0, (STEPS, -1)).transpose(0, 1)


def of_rule(name, alpha, states):
    """Attend to all steps at once by the rule that is swept; shaped as `of_rival`."""
    queries, keys, values = states
    asked = [queries[layer, None, :, PROMPT - OBSERVED : PROMPT] for layer in range(SHAPE.layers)]
    policy = SWEPT[name].policy(alpha, SHAPE, LastQueries(asked, [SCALING] * SHAPE.layers))
    found = []
    for layer in range(SHAPE.layers):
        own = queries[layer, :, PROMPT:]
        given = LayerQueries(own.transpose(0, 1), keys[layer].transpose(0, 1), SCALING)
        seen = seen_tokens(policy, given)
        out = attend_masked(own, keys[layer], values[layer], seen, SCALING)
        found.append(out.transpose(0, 1))
    return torch.stack(found)


@pytest.mark.parametrize(
    ("name", "alpha"),
    [(name, alpha) for place, name in enumerate(RULES) for alpha in (0.1, (0.25, 0.6)[place % 2])],
)
def test_a_rule_attends_as_its_rival(name, alpha, states, cold_dir):
    expected = of_rival(name, cold_dir, alpha, states)
    assert (of_rule(name, alpha, states) - expected).abs().max() < 1e-3
    # The twin: a little more of the knob attends to something else.
    assert (of_rule(name, alpha + 0.02, states) - expected).abs().max() > 1e-2


def test_every_rule_selects_in_a_way_of_its_own(states):
    outputs = {name: of_rule(name, 0.1, states) for name in RULES}
    for name in RULES:
        for other in RULES:
            assert (name == other) == torch.equal(outputs[name], outputs[other])


@pytest.mark.parametrize(
    ("length", "spilled"), [(1, 0), (96, 0), (97, 64), (160, 64), (161, 128), (1000, 960)]
)
def test_a_tail_has_33_to_96_tokens(length, spilled):
    assert spilled_tokens(length, 32) == spilled


# Codes


def coded(bits, states, layer=0):
    queries, keys, values = (one[layer] for one in states)
    own = queries[:, PROMPT:]
    given = LayerQueries(own.transpose(0, 1), keys.transpose(0, 1), SCALING)
    return CodedCache(bits).attend(given, values.transpose(0, 1))


def full(states, layer=0):
    queries, keys, values = (one[layer] for one in states)
    seen = torch.ones(1, STEPS, PROMPT + STEPS, dtype=torch.bool).tril(PROMPT)
    return attend_masked(queries[:, PROMPT:], keys, values, seen, SCALING)


def test_every_bit_brings_codes_nearer_to_the_full_cache(states):
    expected = full(states)
    errors = [float((coded(bits, states) - expected).square().mean()) for bits in (2, 3, 4, 6, 8)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 16 * errors[2] > 0
    assert errors[-1] < 1e-5


def plain(bits, states, layer=0):
    """The same for one query after the other, group by group."""
    queries, keys, values = (one[layer].float() for one in states)
    out = []

    def code(group):
        least = group.amin().half().float()
        step = max(float(((group.amax() - group.amin()) / (2**bits - 1)).half()), 1e-7)
        return least + torch.round((group - least) / step).clamp(0, 2**bits - 1) * step

    # Codes of whole groups are the same whichever query looks at them.
    coded_keys, coded_values = keys.clone(), values.clone()
    for head in range(SHAPE.kv_heads):
        for start in range(0, (PROMPT + STEPS) // 32 * 32, 32):
            for channel in range(SHAPE.head_dim):
                part = (head, slice(start, start + 32), channel)
                coded_keys[part] = code(keys[part])
        for token in range(PROMPT + STEPS):
            coded_values[head, token] = code(values[head, token])
    for i in range(STEPS):
        length = PROMPT + i + 1
        whole, old = (length - 1) // 128 * 128, length - 128
        own = torch.cat([coded_keys[:, :whole], keys[:, whole:length]], 1)
        seen = torch.cat([coded_values[:, :old], values[:, old:length]], 1)
        every = torch.ones(1, 1, length, dtype=torch.bool)
        out.append(
            attend_masked(queries[:, PROMPT + i : PROMPT + i + 1], own, seen, every, SCALING)
        )
    return torch.cat(out, 1)


def test_codes_are_those_of_groups_and_the_newest_tokens_are_rows(states):
    expected = plain(3, states)
    assert (coded(3, states) - expected).abs().max() < 1e-4
    assert (coded(4, states) - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("bits", "length", "share"),
    [
        # 128 keys and 128 values are rows, the others have 5 bits an item.
        (4, 4096, (128 + 3968 * 5 / 16) / 4096),
        (4, 4097, ((1 + 128) / 2 + (4097 - 64.5) * 5 / 16) / 4097),
        (8, 4096, (128 + 3968 * 9 / 16) / 4096),
        (4, 100, 1.0),
    ],
)
def test_bytes_of_codes_by_hand(bits, length, share):
    assert row_share(bits, length) == pytest.approx(share)


# Bytes of a step

LONG = replace(SHAPE, head_dim=64)


@pytest.mark.parametrize(
    ("name", "value", "share", "ranked"),
    [
        ("hillinfer", 0.1, 410 / 4096, 33 / 256),
        # 128 rows of 256 bytes and 691 codes of 33.
        ("hillinfer-coded", 0.2, (128 * 256 + 691 * 33) / (4096 * 256), 33 / 256),
        ("h2o-all-keys", 0.1, (1 + 410 / 4096) / 2, 0),
        ("h2o-drop", 0.1, 410 / 4096, 0),
        ("infinigen", 0.1, 410 / 4096, 19 / 128),
        # A tail of 64 tokens and 22 pages; bounds of 16 tokens, and of 64 and 16.
        ("quest", 0.1, (64 + 22 * 16) / 4096, 1 / 16),
        ("leoam", 0.1, (64 + 22 * 16) / 4096, 5 / 64),
        ("four-bit", 4, (128 + 3968 * 5 / 16) / 4096, 0),
    ],
)
def test_bytes_of_a_step_by_hand(name, value, share, ranked):
    system = SWEPT[name]
    assert system.row_share(value, 4096, LONG) == pytest.approx(share)
    assert system.ranked_share(LONG) == pytest.approx(ranked)
    # The twin: another setting has other bytes.
    assert system.row_share(system.values[-1], 4096, LONG) != pytest.approx(share)


@pytest.mark.parametrize(
    ("name", "rows", "budget", "drive"),
    [
        # The key shadow takes 33/256 of the KV; a tenth of the rows lies beside it.
        ("hillinfer", 0.1, 33 / 256 + 0.1, 0.09),
        ("hillinfer", 0.1, 0.05, 0.1),
        ("infinigen", 0.1, 2.0, 0.0),
        # All codes lie in memory and no row: 0.02 of them are read.
        ("hillinfer-coded", 0.05, 66 / 256, 0.02),
        ("hillinfer-coded", 0.05, 33 / 256, 0.05),
        ("hillinfer-coded", 0.05, 66 / 256 + 0.5, 0.01),
        # Keys come first; with half of the KV all are there, with 0.75 half of the values too.
        ("h2o-all-keys", 0.55, 0.2, 0.3 + 0.05),
        ("h2o-all-keys", 0.55, 0.5, 0.05),
        ("h2o-all-keys", 0.55, 0.75, 0.025),
        ("h2o-drop", 0.5, 0.1, 0.0),
        ("four-bit", 0.34, 0.2, 0.14),
        ("four-bit", 0.34, 0.5, 0.0),
    ],
)
def test_modelled_bytes_from_the_drive(name, rows, budget, drive):
    assert SWEPT[name].drive_share(rows, budget, LONG) == pytest.approx(drive)


def test_settings_are_ranked_by_what_they_cost():
    for system in SWEPT.values():
        shares = [system.row_share(value, 4096, LONG) for value in system.values]
        assert shares == sorted(shares)
        assert len({system.label(value) for value in system.values}) == len(shares)
