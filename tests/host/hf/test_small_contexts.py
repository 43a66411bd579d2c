# SPDX-License-Identifier: Apache-2.0
"""Short contexts with the default settings, of known and unknown length."""

import warnings
from itertools import product

import numpy as np
import pytest
import torch
from generation_runs import bits, run
from tiny_models import TinyModel, prompts

import hillinfer
from hillinfer.errors import BudgetError, SettingsError, SetupWarning

NEW = 3
# Around groups of 64, segments of 1,024, and the 36 tokens that are always selected.
BORDERS = (1, 2, 3, 16, 17, 36, 37, 63, 64, 65, 128, 129)
LONGER = (1023, 1025, 2049)


@pytest.fixture(scope="module")
def model():
    return TinyModel().build()


def answer(hill, cache, lengths, new_tokens=NEW):
    """Generate, check that M0 was kept, and return the bits of the logits and the statistics."""
    ids, mask = prompts(lengths, seed=sum(lengths))
    found = run(hill.model, cache, ids, mask, new_tokens, prefill_chunk_size=256)
    statistics = cache.statistics()
    assert statistics.dram_peak_bytes <= statistics.dram_budget_bytes
    return bits(found), statistics


@pytest.mark.parametrize("tokens", BORDERS + LONGER)
def test_the_defaults_work_and_the_length_says_nothing_about_the_answer(model, cold_dir, tokens):
    with hillinfer.attach(model, cold_dir=cold_dir) as hill, warnings.catch_warnings():
        warnings.simplefilter("error", SetupWarning)
        found = []
        for expected in (None, 1, tokens + NEW):
            cache = hill.new_cache(expected)
            found.append(answer(hill, cache, [tokens])[0])
            cache.close()
    assert all(torch.equal(one, found[0]) for one in found[1:])


@pytest.mark.parametrize(
    ("tokens", "new_tokens"), [(1, 1), (1, 64), (5, 29), (36, 29), (64, 1), (64, 64), (200, 29)]
)
def test_short_prompts_and_answers(model, cold_dir, tokens, new_tokens):
    with hillinfer.attach(model, cold_dir=cold_dir) as hill:
        cache = hill.new_cache()
        found, _ = answer(hill, cache, [tokens], new_tokens)
        assert len(found) == new_tokens
        cache.close()


@pytest.mark.parametrize(
    ("shadow", "rule", "scope", "device"),
    [
        *product(("int8", "int4", "int2"), ("weight_sum", "raw_sum"), ("layer",), ("nvme",)),
        ("int4", "weight_sum", "kv_head", "nvme"),
        ("int2", "raw_sum", "kv_head", "golden"),
        ("int4", "weight_sum", "layer", "golden"),
        ("int4", "weight_sum", "layer", "core"),
    ],
)
def test_every_way_of_selecting(model, cold_dir, shadow, rule, scope, device):
    chosen = {"shadow": shadow, "rule": rule, "scope": scope, "device": device}
    with hillinfer.attach(model, cold_dir=cold_dir, **chosen) as hill:
        for tokens, expected in ((1, None), (36, 1), (65, None), (130, 1)):
            cache = hill.new_cache(expected)
            answer(hill, cache, [tokens])
            cache.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"alpha": 1e-9},
        {"alpha": 1e-300, "kept_sinks": 0, "kept_recent": 1},
        {"kept_recent": 5000},
        {"max_selected": 1},
        {"dram_budget": "0.0001%"},
        {"dram_budget": "1000%"},
        {"pool_policy": "paper"},
        {"pool_sizes": "misses"},
        {"query": "predicted"},
        {"block_rows": 1, "prefetch_blocks": 0},
    ],
    ids=str,
)
def test_settings_at_their_ends(model, cold_dir, changes):
    with hillinfer.attach(model, cold_dir=cold_dir, **changes) as hill:
        for tokens, expected in ((1, None), (5, 5), (70, None)):
            cache = hill.new_cache(expected)
            answer(hill, cache, [tokens], 5)
            cache.close()


@pytest.mark.parametrize("expected", [None, 1, 9])
def test_batches_forks_and_turns_outgrow_what_was_expected(model, cold_dir, expected):
    with hillinfer.attach(model, cold_dir=cold_dir) as hill:
        batch = hill.new_cache(expected, sequences=3)
        answer(hill, batch, [5, 1, 70])
        crowd = hill.new_cache(expected)
        answer(hill, crowd, [3, 2, 130, 1])
        trunk = hill.new_cache(expected)
        answer(hill, trunk, [5])
        forks = [trunk.fork() for _ in range(3)]
        more, _ = prompts([200], seed=1)
        for fork in forks:
            ids = torch.cat([torch.tensor(fork.token_ids), more], dim=1)
            run(model, fork, ids, torch.ones_like(ids), NEW)
        statistics = trunk.statistics()
        assert statistics.dram_peak_bytes <= statistics.dram_budget_bytes
        for cache in (batch, crowd, trunk, *forks):
            cache.close()


def test_a_budget_in_percent_follows_the_context(model, cold_dir):
    share, token_bytes = 40, 2 * 64
    with hillinfer.attach(model, cold_dir=cold_dir, dram_budget=f"{share}00%") as hill:
        cache = hill.new_cache()
        grown = []
        for tokens in (5, 1500, 2500):
            cache.reset()
            grown.append(answer(hill, cache, [tokens])[1].dram_budget_bytes)
        cache.close()
    # In steps of 1,024 tokens; never less than the buffers need.
    assert grown[0] >= share * 1024 * token_bytes
    assert grown[1:] == [share * steps * 1024 * token_bytes for steps in (2, 3)]


def test_a_budget_in_bytes_does_not_follow(model, cold_dir):
    with hillinfer.attach(model, cold_dir=cold_dir, dram_budget="512KiB") as hill:
        for expected in (None, 5):
            with pytest.raises(BudgetError, match=r"budget of 512\.0 KiB is too small"):
                hill.new_cache(expected)
    with hillinfer.attach(model, cold_dir=cold_dir, dram_budget="6MiB") as hill:
        cache = hill.new_cache(5)
        _, statistics = answer(hill, cache, [300])
        assert statistics.dram_budget_bytes == 6 << 20
        cache.close()


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, None), (1, 500), (5, 1), (70, None), (70, 1), (70, 500)]
)
def test_sessions_of_short_documents(model, cold_dir, tmp_path, tokens, expected):
    more, _ = prompts([9], seed=2)
    with hillinfer.attach(model, cold_dir=cold_dir) as hill:
        cache = hill.new_cache(expected)
        answer(hill, cache, [tokens])
        cache.save_session(tmp_path / "session")
        resumed = hill.load_session(tmp_path / "session", expected)
        ids = torch.cat([torch.tensor(cache.token_ids), more], dim=1)
        found = [bits(run(model, one, ids, torch.ones_like(ids))) for one in (cache, resumed)]
        assert torch.equal(*found)
        statistics = resumed.statistics()
        assert statistics.dram_peak_bytes <= statistics.dram_budget_bytes
        resumed.close()
        cache.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"expected_tokens": 0}, "expected_tokens=0 must be at least 1"),
        ({"expected_tokens": -5}, "expected_tokens=-5 must be at least 1"),
        ({"expected_tokens": 10.0}, r"expected_tokens=10\.0 must be a whole number"),
        ({"expected_tokens": "10"}, "expected_tokens='10' must be a whole number"),
        ({"expected_tokens": True}, "expected_tokens=True must be a whole number"),
        ({"sequences": 0}, "sequences=0 must be at least 1"),
        ({"sequences": 1.5}, r"sequences=1\.5 must be a whole number"),
    ],
    ids=str,
)
def test_counts_that_mean_nothing(model, cold_dir, given, message):
    with hillinfer.attach(model, cold_dir=cold_dir) as hill:
        with pytest.raises(SettingsError, match=message):
            hill.new_cache(**given)
        # Whatever Python takes for an index is one here.
        cache = hill.new_cache(np.int64(10), torch.tensor(2))
        answer(hill, cache, [5, 6])
        cache.close()


def test_a_length_beyond_the_model_is_said_once_and_planned_for_as_far_as_it_goes(model, cold_dir):
    with hillinfer.attach(model, cold_dir=cold_dir) as hill:
        whole = hill.new_cache(4096)
        for beyond in (4097, 10**9):
            with pytest.warns(
                SetupWarning, match=rf"{beyond} is more than .* 4096 positions"
            ) as said:
                cache = hill.new_cache(beyond)
            assert len(said) == 1
            assert said[0].filename == __file__
            found, statistics = answer(hill, cache, [70])
            assert statistics.dram_budget_bytes == whole.statistics().dram_budget_bytes
            cache.close()
        assert torch.equal(found, answer(hill, whole, [70])[0])
        whole.close()


def test_a_session_checks_its_length_too(model, cold_dir, tmp_path):
    with hillinfer.attach(model, cold_dir=cold_dir) as hill:
        cache = hill.new_cache()
        answer(hill, cache, [5])
        cache.save_session(tmp_path / "session")
        cache.close()
        with pytest.raises(SettingsError, match="expected_tokens=0 must be at least 1"):
            hill.load_session(tmp_path / "session", 0)
