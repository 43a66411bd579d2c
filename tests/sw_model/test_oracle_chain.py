# SPDX-License-Identifier: Apache-2.0
"""The golden model's whole chain against the oracle's, from FP16 keys to selected positions."""

import itertools

import numpy as np
import oracle
import oracle_layout
import oracle_scores
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_arrays import flipped, from_statistics, same

from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.golden import GoldenModel
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.key_codes import encode_keys
from hillinfer_model.offsets import offsets
from hillinfer_model.query_codes import encode_query
from hillinfer_model.scores import aligned_products, score_codes
from hillinfer_model.selection import kept_positions, select_positions, selected_count
from hillinfer_model.statistics import segment_statistics

CHOICES = list(itertools.product(KeyMode, Rule, Scope))


def golden_chain(keys, query, scaling, spec, scope):
    """Run golden step by step, each step on its own; return what the oracle's Result holds."""
    statistics, coded_keys, coded_queries, aligned = [], [], [], []
    preceding = None
    for first in range(0, len(keys), spec.segment_tokens):
        part = keys[first : first + spec.segment_tokens]
        preceding = segment_statistics(part, first, spec.segment_tokens, preceding)
        coded = encode_keys(part, preceding, spec.key_mode)
        heads = encode_query(query, preceding, scaling, spec)
        statistics.append(from_statistics(preceding))
        coded_keys += zip(coded.exponents.tolist(), coded.codes.tolist(), strict=True)
        coded_queries.append(
            list(
                zip(
                    heads.exponents.tolist(),
                    heads.codes.tolist(),
                    heads.corrections.tolist(),
                    strict=True,
                )
            )
        )
        aligned.append(aligned_products(heads, coded, spec))
    aligned = np.concatenate(aligned, axis=1)
    invalid = np.array([[t == 255 for t in exponents] for exponents, _ in coded_keys])
    found = offsets(aligned, invalid, spec, scope)
    codes = score_codes(aligned, found, invalid, spec, scope)
    return oracle.Result(
        statistics,
        coded_keys,
        coded_queries,
        aligned.tolist(),
        invalid.tolist(),
        found.tolist(),
        codes.tolist(),
    )


def without_invalid(result, group_size, rule):
    """Blank L' of invalid tokens, which the contract leaves undefined."""
    per_kv = 1 if rule is Rule.RAW_SUM else group_size
    result.aligned = [
        [None if result.invalid[p][h // per_kv] else value for p, value in enumerate(row)]
        for h, row in enumerate(result.aligned)
    ]
    return result


def chains(keys, query, scaling, spec, scope, golden_keys=None, golden_query=None):
    """Return the oracle's and golden's results."""
    expected = oracle.run(keys.tolist(), query.tolist(), scaling, spec, scope)
    found = golden_chain(
        keys if golden_keys is None else golden_keys,
        query if golden_query is None else golden_query,
        scaling,
        spec,
        scope,
    )
    return (
        without_invalid(expected, spec.group_size, spec.rule),
        without_invalid(found, spec.group_size, spec.rule),
    )


def random_case(seed, tokens, spec, bad=0.0):
    """Return keys and a query of a plausible size, with channel means, and some odd keys."""
    generator = np.random.default_rng(seed)
    shape = (tokens, spec.kv_heads, spec.head_dim)
    scale = 2.0 ** generator.integers(-3, 4, shape[1:])
    mean = generator.standard_normal(shape[1:]) * 5 * scale
    keys = (generator.standard_normal(shape) * scale + mean).astype(np.float16).view(np.uint16)
    chosen = generator.random(shape) < bad
    keys[chosen] = generator.choice([0x7E00, 0xFDEF, 0x0001, 0x8000], chosen.sum())
    query = generator.standard_normal((spec.query_heads, spec.head_dim)) * 3
    return keys, query.astype(np.float32)


@pytest.mark.parametrize(("mode", "rule", "scope"), CHOICES)
@pytest.mark.parametrize(("tokens", "bad"), [(5, 0.0), (60, 0.02), (290, 0.002)])
def test_chain(mode, rule, scope, tokens, bad):
    spec = KernelSpec(3, 2, 3, key_mode=mode, rule=rule, segment_tokens=512)
    keys, query = random_case(tokens, tokens, spec, bad)
    expected, found = chains(keys, query, 0.125, spec, scope)
    assert found == expected


@pytest.mark.parametrize(("mode", "rule", "scope"), CHOICES)
def test_chain_with_infinite_keys(mode, rule, scope):
    # They make their channels' exponents large, in their own segment only.
    spec = KernelSpec(3, 2, 1, key_mode=mode, rule=rule, segment_tokens=512)
    keys, query = random_case(2, 45, spec)
    keys[2, 0, 0], keys[20, 1, 2], keys[21, 0, 0] = 0x7C00, 0x7C00, 0xFC00
    expected, found = chains(keys, query, 0.125, spec, scope)
    assert found == expected
    expected, found = chains(keys, query, 0.125, spec, scope, golden_keys=flipped(keys, 125, 15))
    assert found != expected


@pytest.mark.parametrize(("mode", "rule"), list(itertools.product(KeyMode, Rule)))
@pytest.mark.parametrize("tokens", [512 + 40, 512 + 300])
def test_chain_over_two_segments(mode, rule, tokens):
    spec = KernelSpec(2, 1, 2, key_mode=mode, rule=rule, segment_tokens=512)
    keys, query = random_case(tokens, tokens, spec, 0.001)
    expected, found = chains(keys, query, 0.3, spec, Scope.LAYER)
    assert found == expected
    assert (found.statistics[0] == found.statistics[1]) == (tokens == 552)


@pytest.mark.parametrize(("mode", "rule", "scope"), CHOICES)
def test_chain_notices_a_flipped_bit(mode, rule, scope):
    spec = KernelSpec(3, 2, 2, key_mode=mode, rule=rule, segment_tokens=512)
    keys, query = random_case(1, 50, spec)
    expected, found = chains(keys, query, 0.125, spec, scope)
    assert found == expected
    expected, found = chains(keys, query, 0.125, spec, scope, golden_keys=flipped(keys, 200, 14))
    assert found.keys != expected.keys
    assert found.aligned != expected.aligned
    assert found.codes != expected.codes
    expected, found = chains(keys, query, 0.125, spec, scope, golden_query=flipped(query, 0, 31))
    assert found.keys == expected.keys
    assert found.queries != expected.queries
    assert found.offsets != expected.offsets
    assert found.codes != expected.codes


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_chain(data):
    mode, rule, scope = data.draw(st.sampled_from(CHOICES))
    kv, group, d = (data.draw(st.integers(1, top)) for top in (2, 3, 3))
    tokens = data.draw(st.sampled_from([1, 2, 3, 4, 5, 20, 35, 36, 37, 44]))
    spec = KernelSpec(d, kv, group, key_mode=mode, rule=rule, segment_tokens=512)
    size = tokens * kv * d
    # Few distinct keys give ties, all codes give every exponent, NaN and infinity.
    code = data.draw(
        st.sampled_from(
            [st.integers(0, 65535), st.sampled_from([0x3C00, 0xBC00, 0x4248, 0, 0x7E00])]
        )
    )
    keys = np.array(data.draw(st.lists(code, min_size=size, max_size=size)), dtype=np.uint16)
    value = st.floats(-(2.0**60), 2.0**60, width=32)
    numbers = st.lists(value, min_size=kv * group * d, max_size=kv * group * d)
    query = np.array(data.draw(numbers), dtype=np.float32).reshape(kv * group, d)
    scaling = data.draw(st.sampled_from([0.125, 1.0, 3.0**-0.5]))
    expected, found = chains(keys.reshape(tokens, kv, d), query, scaling, spec, scope)
    assert found == expected


# The golden model as a whole


@pytest.mark.parametrize(("mode", "rule", "scope"), CHOICES)
@pytest.mark.parametrize("tokens", [3, 70, 560])
def test_golden_model(mode, rule, scope, tokens):
    spec = KernelSpec(2, 2, 2, key_mode=mode, rule=rule, segment_tokens=512, block_tokens=16)
    keys, query = random_case(tokens, tokens, spec, 0.003)
    expected = oracle.run(keys.tolist(), query.tolist(), 0.125, spec, scope)
    model = GoldenModel(spec, scope)
    segments = model.encode_sequence(keys)
    codes = model.score(query, 0.125, segments)
    assert same(codes, np.uint16, expected.codes)
    assert not same(flipped(codes), np.uint16, expected.codes)
    blocks = list(model.score_blocks(query, 0.125, segments))
    for g, row in enumerate(expected.codes):
        tuples = [t for b in blocks if b.kv_head == g for t in b.tuples.tolist()]
        assert tuples == [oracle_layout.score_tuple(c, p) for p, c in enumerate(row)]
    wrong = model.encode_sequence(flipped(keys, 4 * min(40, tokens - 1), 14))
    assert not same(model.score(query, 0.125, wrong), np.uint16, expected.codes)


@pytest.mark.parametrize(("mode", "rule", "scope"), CHOICES)
def test_selected_positions(mode, rule, scope):
    spec = KernelSpec(2, 2, 2, key_mode=mode, rule=rule, segment_tokens=512)
    keys, query = random_case(9, 120, spec, 0.01)
    expected = oracle.run(keys.tolist(), query.tolist(), 0.125, spec, scope)
    found = golden_chain(keys, query, 0.125, spec, scope)
    kept = kept_positions(120, 4, 32)
    count = selected_count(120, 0.5, 36, 4096)
    assert count == oracle_scores.selected_count(120, 0.5, 36, 4096) == 60
    for mine, theirs in zip(expected.codes, found.codes, strict=True):
        chosen = select_positions(np.array(theirs, dtype=np.uint16), count, kept)
        wanted = oracle_scores.select(mine, count, oracle_scores.kept_positions(120, 4, 32))
        assert same(chosen, np.int64, wanted)
        assert not same(flipped(chosen, 30), np.int64, wanted)
        best = next(p for p in wanted if p not in set(kept.tolist()))
        spoiled = np.array(theirs, dtype=np.uint16)
        spoiled[best] = 0
        assert not same(select_positions(spoiled, count, kept), np.int64, wanted)
