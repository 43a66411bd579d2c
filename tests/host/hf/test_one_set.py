# SPDX-License-Identifier: Apache-2.0
"""A question's chunk attends to one selected set per layer, and reads no more than that."""

import numpy as np
import pytest
import torch
from generation_runs import LOGIT_TOLERANCE, attached
from tiny_models import TinyModel, prompts

from hillinfer.attention.row_attention import code_weights
from hillinfer.errors import CacheUseError
from hillinfer.generate.answering import Generation
from hillinfer.generate.tokens import Sampling
from hillinfer.store.store import Store
from hillinfer_model.scores import mag

TINY = TinyModel()
# Whose rows do not fit the least budget.
WIDE = TinyModel("llama", "gqa", torch.float32, head_dim=64, layers=2)
DOCUMENT, QUESTION = 1200, [5, 9, 2, 31, 7, 40, 3, 17, 22, 8, 11, 6]


def behind(cold_dir, way, tiny=TINY, question=QUESTION, **changes):
    """Return the last logits, the answer and what was counted of a question read in some way."""
    model = tiny.build()
    ids = prompts([DOCUMENT])[0][0].tolist()
    with attached(model, cold_dir, **({"dram_budget": "3MiB"} | changes)) as hill:
        cache = hill.new_cache()
        generation = Generation(model, cache, 256)
        generation.read(ids)
        before = cache.statistics()
        getattr(generation, way)(question)
        counted = cache.statistics().minus(before)
        logits = generation.logits.clone()
        answer = list(generation.decode(Sampling(), 6, frozenset()))
        dense = cache.dense_tokens
        cache.close()
    return logits, answer, counted, dense


def test_everything_selected_is_as_dense(cold_dir):
    logits, answer, _, _ = behind(cold_dir, "read", alpha=1.0)
    own, same, _, _ = behind(cold_dir, "read_by_one_set", alpha=1.0)
    assert (logits - own).abs().max() <= LOGIT_TOLERANCE[torch.float32]
    assert answer == same
    # The twin: a hundredth is not.
    few, _, _, _ = behind(cold_dir, "read_by_one_set", alpha=0.01)
    assert (logits - few).abs().max() > LOGIT_TOLERANCE[torch.float32]


@pytest.mark.parametrize("scope", ["layer", "kv_head"])
def test_fewer_rows_are_read_than_by_either_other_way(cold_dir, least_budget, scope):
    rows = {}
    budget = least_budget(WIDE, DOCUMENT + 32, shadow="int4", scope=scope) + (1 << 18)
    for way in ("read", "read_singly", "read_by_one_set"):
        changes = {"alpha": 0.1, "scope": scope, "shadow": "int4", "dram_budget": budget}
        _, _, counted, _ = behind(cold_dir, way, WIDE, **changes)
        rows[way] = counted.cold_read_bytes
    # What any head selects is read, in whole pages: of a few heads that is nearly all.
    assert rows["read_by_one_set"] <= rows["read"]
    if scope == "layer":
        assert rows["read_by_one_set"] < min(rows["read_singly"], rows["read"])


def test_the_set_is_that_of_a_single_query_where_there_is_one(cold_dir):
    # A pass of one token selects by itself, with the token among those that count.
    one = behind(cold_dir, "read_by_one_set", question=QUESTION[:1], alpha=0.1)
    alone = behind(cold_dir, "read_singly", question=QUESTION[:1], alpha=0.1)
    assert one[1] == alone[1]
    torch.testing.assert_close(one[0], alone[0])


@pytest.mark.parametrize("rule", ["weight_sum", "raw_sum"])
def test_devices_choose_alike(cold_dir, rule):
    expected = behind(cold_dir, "read_by_one_set", alpha=0.1, rule=rule, shadow="int8")
    found = behind(
        cold_dir, "read_by_one_set", alpha=0.1, rule=rule, shadow="int8", device="golden"
    )
    assert torch.equal(expected[0], found[0])
    assert expected[1] == found[1]


def test_what_is_read_so_is_not_stored(cold_dir, tmp_path):
    model = TINY.build()
    ids = prompts([DOCUMENT])[0][0].tolist()
    question = prompts([200], seed=3)[0][0].tolist()
    for way, stored in (("read_by_one_set", 1152), ("read", 1344)):
        place = tmp_path / way
        Store.create(place, 64 << 20)
        with attached(model, cold_dir, store=place, dram_budget="8MiB") as hill:
            cache = hill.new_cache()
            generation = Generation(model, cache, 256)
            generation.read(ids)
            dense = cache.dense_tokens
            assert dense == DOCUMENT
            getattr(generation, way)(question)
            assert cache.dense_tokens == (DOCUMENT if way == "read_by_one_set" else 1400)
            cache.close()
        with attached(model, cold_dir, store=place, dram_budget="8MiB") as hill:
            cache = hill.new_cache()
            Generation(model, cache, 256).read([*ids, *question, 1, 2])
            assert cache.read_from_store.found_tokens <= stored
            cache.close()


def broken(cache):
    with cache.one_set():
        assert cache.takes_one_set
        raise KeyError


def test_the_mode_ends_with_its_block_whatever_ends_it(cold_dir):
    model = TINY.build()
    with attached(model, cold_dir) as hill:
        cache = hill.new_cache()
        with pytest.raises(KeyError):
            broken(cache)
        assert not cache.takes_one_set
        cache.close()


def test_a_query_that_is_not_finite_is_told_with_its_layer(cold_dir):
    model = TINY.build()
    layer = model.config.num_hidden_layers - 1
    with attached(model, cold_dir, alpha=0.1, dram_budget="3MiB") as hill:
        cache = hill.new_cache()
        generation = Generation(model, cache, 256)
        generation.read(prompts([DOCUMENT])[0][0].tolist())
        with torch.no_grad():
            model.get_submodule(f"model.layers.{layer}.self_attn.q_proj").weight.fill_(torch.inf)
        with pytest.raises(CacheUseError, match=f"layer {layer} made a query that is not finite"):
            generation.read_by_one_set(QUESTION)
        assert cache.get_seq_length() == DOCUMENT
        cache.close()


def test_weights_of_codes_are_those_that_were_coded():
    values = np.array([0, 1, 1023, 1024, 1025, 2047, 2048, 3 << 20, (1 << 48) - 1], np.int64)
    codes = (mag(values) + 1).astype(np.uint16)
    weights = code_weights(codes)
    assert (weights <= values).all()
    assert (values - weights <= values / 1024).all()
    assert weights[:6].tolist() == values[:6].tolist()
    assert code_weights(np.array([0], np.uint16)).tolist() == [0.0]
