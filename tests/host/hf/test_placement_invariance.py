# SPDX-License-Identifier: Apache-2.0
"""Which tokens come out does not depend on where rows lie nor on what scored them.

Everything that may change the output is drawn at random and kept; budget, pool policy, device,
score blocks and reads in flight vary, and every bit of every logit must stay.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from generation_runs import attached, bits, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from placement_cases import ALL_HOT, PLACEMENTS, Case
from tiny_models import DTYPES, FAMILIES, TinyModel, prompts


@st.composite
def cases(draw):
    family = draw(st.sampled_from(FAMILIES))
    tiny = TinyModel(
        family=family,
        heads="mha" if family == "opt" else draw(st.sampled_from(["mha", "gqa", "mqa"])),
        dtype=draw(st.sampled_from(DTYPES)),
        # Rows of 64 to 384 bytes, padded or not.
        head_dim=draw(st.sampled_from([4, 6, 8, 12, 16])),
        # Layers from the third on may take a predicted query.
        layers=draw(st.sampled_from([2, 4])),
        seed=draw(st.integers(0, 1000)),
    )
    batch = draw(st.sampled_from([1, 4]))
    lengths = [draw(st.integers(140, 260))]
    lengths += [draw(st.integers(1, lengths[0])) for _ in range(batch - 1)]
    return Case(
        tiny=tiny,
        lengths=tuple(lengths),
        chunk=draw(st.sampled_from([None, 50, 64, 100])),
        new_tokens=draw(st.integers(2, 7)),
        selection={
            "rule": draw(st.sampled_from(["weight_sum", "raw_sum"])),
            "scope": draw(st.sampled_from(["layer", "kv_head"])),
            "query": draw(st.sampled_from(["true", "predicted"])),
            "shadow": draw(st.sampled_from(["int8", "int4", "int2"])),
            "alpha": draw(st.sampled_from([0.02, 0.1, 0.25, 0.5, 0.9, 1.0])),
            "kept_sinks": draw(st.integers(0, 5)),
            "kept_recent": draw(st.integers(1, 9)),
            "max_selected": draw(st.sampled_from([None, None, 1, 40])),
            "exact": draw(st.sampled_from([1, 0.1, 0.03, 0])),
            "exact_floor": draw(st.sampled_from([0, 12])),
            "block_rows": draw(st.sampled_from([16, 37, 64, 100])),
        },
    )


def rows_written(statistics):
    """Return the bytes of rows alone: codes are not written where rows are sealed."""
    return statistics.cold_write_bytes - statistics.code_write_bytes


@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases(), others=st.permutations(list(PLACEMENTS)), share=st.floats(0, 1))
def test_every_placement_gives_the_same_bits(case, others, share, cold_dir):
    """Some of the placements each time, and one with a budget anywhere in between."""
    model = case.tiny.build()
    expected, hot = case.run(model, cold_dir, dram_budget=ALL_HOT)
    assert hot.cold_read_bytes == 0
    drawn = {name: PLACEMENTS[name] for name in others[:3]}
    anywhere = replace(PLACEMENTS[others[-1]], share=share)
    for name, placement in (drawn | {f"{others[-1]} at {share}": anywhere}).items():
        found, statistics = case.run(model, cold_dir, **placement.for_case(case, hot.kv_bytes))
        assert torch.equal(found.sequences, expected.sequences), name
        assert torch.equal(bits(found), bits(expected)), name
        assert rows_written(statistics) == rows_written(hot)
        assert statistics.selected_tokens == hot.selected_tokens
        assert statistics.coded_tokens == hot.coded_tokens
        assert (statistics.hot_rows_read + statistics.cold_rows_read) == (
            hot.hot_rows_read + hot.cold_rows_read
        )
        assert statistics.demoted_rows <= statistics.promoted_rows <= statistics.cold_rows_read


LONG = Case(
    tiny=TinyModel("qwen3", "gqa", torch.bfloat16, head_dim=12),
    lengths=(1087, 1060),
    chunk=256,
    new_tokens=3,
    selection={"alpha": 0.3, "kept_recent": 6, "block_rows": 100},
)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """The model and what comes out while all rows are hot."""
    model = LONG.tiny.build()
    return model, *LONG.run(model, tmp_path_factory.mktemp("long"), dram_budget=ALL_HOT)


@pytest.mark.parametrize("name", ["golden-least", "lru", "decayed-misses", "paper"])
def test_two_segments_and_almost_nothing_hot(name, long_run, cold_dir):
    model, expected, hot = long_run
    least = replace(PLACEMENTS[name], share=0.0)
    found, statistics = LONG.run(model, cold_dir, **least.for_case(LONG, hot.kv_bytes))
    assert torch.equal(bits(found), bits(expected))
    # Selected rows really came from the drive, not only the past that prefill streams.
    assert statistics.cold_rows_read > statistics.hot_rows_read > 0


@pytest.mark.parametrize("name", ["lru", "decayed", "paper-misses"])
def test_pools_that_hold_half_move_rows_and_change_no_bit(name, long_run, cold_dir):
    model, expected, hot = long_run
    half = replace(PLACEMENTS[name], share=0.3)
    found, statistics = LONG.run(model, cold_dir, **half.for_case(LONG, hot.kv_bytes))
    assert torch.equal(bits(found), bits(expected))
    assert statistics.cold_rows_read > 0
    assert statistics.demoted_rows > 0


@pytest.mark.parametrize(
    ("name", "prefetch_blocks"),
    [
        *(("lru", blocks) for blocks in (0, 1, 8)),
        ("golden-least", 8),
        ("decayed-misses", 1),
        ("paper", 8),
    ],
)
def test_rows_read_ahead_change_no_bit(name, prefetch_blocks, ahead_run, cold_dir):
    model, expected, hot = ahead_run
    least = replace(PLACEMENTS[name], share=0.05)
    placement = least.for_case(AHEAD, hot.kv_bytes) | {"prefetch_blocks": prefetch_blocks}
    found, statistics = AHEAD.run(model, cold_dir, **placement)
    assert torch.equal(bits(found), bits(expected))
    assert statistics.cold_rows_read > 0


@pytest.fixture(scope="module")
def hot_run(tmp_path_factory):
    """Return what gives the model of a case and what comes out while all is hot, once for each."""
    made = cache(TinyModel.build)

    @cache
    def run_of(name):
        case = CASES[name]
        model = made(case.tiny)
        place = tmp_path_factory.mktemp("hot")
        return case, model, *case.run(model, place, dram_budget=ALL_HOT)

    return run_of


# Far more is cold than a buffer of 64 rows holds, so sets come in runs that cut their tiles.
OWN_SETS = Case(
    tiny=TinyModel("llama", "gqa", torch.float32, layers=4),
    lengths=(500, 350),
    chunk=256,
    new_tokens=3,
    selection={"alpha": 0.3, "kept_recent": 6, "block_rows": 16, "scope": "kv_head"},
)


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("true", "golden-least"),
        ("true", "decayed-misses"),
        ("predicted", "lru"),
        ("predicted", "golden-least"),
    ],
)
def test_a_set_per_head_wherever_rows_lie(query, name, hot_run, cold_dir):
    case, model, expected, hot = hot_run(query)
    found, statistics = case.run(model, cold_dir, **PLACEMENTS[name].for_case(case, hot.kv_bytes))
    assert torch.equal(bits(found), bits(expected))
    assert statistics.cold_rows_read > 0
    assert statistics.selected_tokens == hot.selected_tokens


# A group is filled, and a segment begun, while queries are predicted.
AHEAD = Case(
    tiny=TinyModel("llama", "gqa", torch.float32, layers=5),
    lengths=(1021, 700),
    chunk=256,
    new_tokens=6,
    selection={"alpha": 0.3, "kept_recent": 6, "block_rows": 64, "query": "predicted"},
)


@pytest.fixture(scope="module")
def ahead_run(tmp_path_factory):
    """The model and what comes out while all rows are hot."""
    model = AHEAD.tiny.build()
    return model, *AHEAD.run(model, tmp_path_factory.mktemp("ahead"), dram_budget=ALL_HOT)


def test_a_predicted_query_selects_other_tokens_than_the_true_one(ahead_run, cold_dir):
    model, expected, _ = ahead_run
    true = replace(AHEAD, selection=AHEAD.selection | {"query": "true"})
    found, _ = true.run(model, cold_dir, dram_budget=ALL_HOT)
    assert not torch.equal(bits(found), bits(expected))


BEAMS = Case(
    TinyModel("qwen2", layers=4),
    (300,) * 8,
    64,
    10,
    {"alpha": 0.2, "block_rows": 37, "kept_recent": 5, "query": "predicted"},
)


def beams_and_turns(model, cold_dir, devices=None, **placement):
    """Return what comes out of sequences that fork, are cut, are reordered and go on."""
    ids, mask = prompts([200, 130])
    question, _ = prompts([30, 30], seed=2)
    with attached(model, cold_dir, devices, **BEAMS.selection, **placement) as hill:
        cache = hill.new_cache()
        first = run(model, cache, ids, mask, 4)
        talk = torch.cat([first.sequences, question], dim=1)
        longer = torch.cat([mask, mask.new_ones(2, 34)], dim=1)
        branch = cache.fork()
        second = run(model, cache, talk, longer, 4)
        branch.crop(-7)
        branch.batch_repeat_interleave(3)
        beams = run(model, branch, talk, longer, num_beams=3, output_scores=True, new_tokens=5)
        statistics = cache.statistics()
        assert statistics.dram_peak_bytes <= statistics.dram_budget_bytes
        cache.close()
        branch.close()
    return bits(first), bits(second), beams.sequences, beams.sequences_scores


@pytest.fixture(scope="module")
def beams_run(tmp_path_factory):
    """The model and what comes out while all rows are hot."""
    model = BEAMS.tiny.build()
    return model, beams_and_turns(model, tmp_path_factory.mktemp("beams"), dram_budget=ALL_HOT)


# Each policy, both ways to size pools, and what else says of itself how forks and cuts lie.
FORKED = (
    *("golden-least", "lru", "lru-misses", "decayed", "paper-misses", "counts", "sealed"),
    "recent-misses",
)


@pytest.mark.parametrize("name", FORKED)
def test_beams_and_turns_wherever_rows_lie(name, beams_run, cold_dir):
    model, expected = beams_run
    placement = PLACEMENTS[name].for_case(BEAMS, 100_000)
    found = beams_and_turns(model, cold_dir, **placement)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


CODED = {
    "alone": replace(
        LONG, selection=LONG.selection | {"exact": 0.03, "exact_floor": 16, "query": "true"}
    ),
    "ahead": replace(AHEAD, selection=AHEAD.selection | {"exact": 0.03, "exact_floor": 16}),
    "own sets": replace(OWN_SETS, selection=OWN_SETS.selection | {"exact": 0.05, "exact_floor": 0}),
}
# Those in which each KV head has a set are named by their query.
CASES = CODED | {
    query: replace(OWN_SETS, selection=OWN_SETS.selection | {"query": query})
    for query in ("true", "predicted")
}


# No codes are written where rows are sealed, so each case has that.
@pytest.mark.parametrize(
    ("case", "name"),
    [
        *(("alone", name) for name in ("sealed", "golden-least", "recent-misses")),
        *(("ahead", name) for name in ("sealed", "lru")),
        *(("own sets", name) for name in ("sealed", "decayed")),
    ],
)
def test_coded_tokens_wherever_rows_and_codes_lie(case, name, hot_run, cold_dir):
    case, model, expected, hot = hot_run(case)
    found, statistics = case.run(model, cold_dir, **PLACEMENTS[name].for_case(case, hot.kv_bytes))
    assert torch.equal(bits(found), bits(expected))
    assert statistics.coded_tokens == hot.coded_tokens > 0


def test_coded_tokens_of_beams_and_turns(beams_run, cold_dir, tmp_path_factory):
    """Forks, cuts and beams take value statistics of their own; placement changes no bit."""
    model, plain = beams_run
    chosen = {"exact": 0.05, "exact_floor": 8}
    coded = replace(BEAMS, selection=BEAMS.selection | chosen)
    everywhere = tmp_path_factory.mktemp("coded-beams")
    expected = beams_and_turns(model, everywhere, dram_budget=ALL_HOT, **chosen)
    assert not torch.equal(plain[0], expected[0])
    for name in ("golden-least", "decayed"):
        placement = PLACEMENTS[name].for_case(coded, 100_000)
        found = beams_and_turns(model, cold_dir, **(placement | chosen))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), name


def test_other_selections_give_other_bits(cold_dir):
    """What invariance is worth: each setting that may change the output does change it here."""
    case = Case(TinyModel(), (250,), 64, 5, {"alpha": 0.2, "kept_sinks": 2, "kept_recent": 4})
    model = case.tiny.build()
    expected, _ = case.run(model, cold_dir, dram_budget=ALL_HOT)
    for changes in (
        {"alpha": 0.3},
        {"rule": "raw_sum"},
        {"scope": "kv_head"},
        {"shadow": "int2"},
        {"kept_sinks": 20},
        {"kept_recent": 30},
        {"max_selected": 20},
        {"exact": 0.1, "exact_floor": 0},
    ):
        other = Case(case.tiny, case.lengths, 64, 5, case.selection | changes)
        found, _ = other.run(model, cold_dir, dram_budget=ALL_HOT)
        assert not torch.equal(bits(found), bits(expected)), changes
