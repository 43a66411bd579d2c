# SPDX-License-Identifier: Apache-2.0
"""Attention over rows in tail, hot pool and drive, against float64 in one shot."""

import numpy as np
import pytest
import torch
from exact_attention import causal, exact_attention, random_states
from placement_matrix import Budget
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hillinfer.engine.runtime import Runtime
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.scoring.scorer import ImportanceEvaluation
from hillinfer.settings import HOST_DEVICES, Settings

SHAPE = ModelShape(
    layers=1,
    kv_heads=2,
    query_heads=4,
    head_dim=8,
    stored_type=StoredType.FLOAT16,
    max_positions=10_000,
)
TOKENS = 300


@pytest.fixture(params=[Budget.ALL_HOT, Budget.LEAST])
def make_runtime(request, cold_dir):
    made = []

    def make(evaluate=ImportanceEvaluation, observe_selected=None, **changes):
        settings = Settings().changed(
            **({"alpha": 0.2, "block_rows": 40, "kept_sinks": 2, "kept_recent": 5} | changes)
        )
        budget = request.param.byte_count(SHAPE, settings, TOKENS)
        given = {"evaluate": evaluate, "observe_selected": observe_selected}
        runtime = Runtime(SHAPE, settings, budget, cold_dir, **given)
        made.append(runtime)
        return runtime

    yield make
    for runtime in made:
        runtime.close()


def states(seed=0, tokens=TOKENS, queries=None):
    query, keys, values = random_states(seed, 4, 2, queries or tokens, tokens, 8)
    # Stored in 16 bits; the exact reference sees what was stored.
    return query, keys.half(), values.half()


@pytest.mark.parametrize("chunks", [[300], [100, 100, 100], [7, 64, 129, 2, 98], [299, 1]])
def test_chunks_attend_to_everything_before_them(make_runtime, chunks):
    runtime = make_runtime()
    query, keys, values = states()
    sequence = runtime.open_sequence()
    start = 0
    for tokens in chunks:
        new = slice(start, start + tokens)
        runtime.begin_step()
        runtime.append(0, sequence, keys[:, new], values[:, new])
        found = runtime.attend_dense(0, sequence, query[:, new], keys[:, new], values[:, new], 0.4)
        start += tokens
        expected, _ = exact_attention(
            query[:, new], keys[:, :start], values[:, :start], 0.4, causal(tokens, start)
        )
        assert (found.double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("scope", ["layer", "kv_head"])
@pytest.mark.parametrize("device", sorted(HOST_DEVICES))
def test_a_step_attends_to_its_selected_set_and_nothing_else(make_runtime, scope, device):
    chosen = []
    runtime = make_runtime(
        observe_selected=lambda layer, length, sets: chosen.append(sets), scope=scope, device=device
    )
    query, keys, values = states()
    sequence = runtime.open_sequence()
    runtime.append(0, sequence, keys[:, :250], values[:, :250])
    for position in range(250, 256):
        new = slice(position, position + 1)
        runtime.begin_step()
        runtime.append(0, sequence, keys[:, new], values[:, new])
        found = runtime.attend_selected(0, sequence, query[:, new], keys[:, new], 0.4)
        visible = torch.zeros(4, 1, position + 1, dtype=torch.bool)
        sets = chosen[-1] if scope == "kv_head" else chosen[-1] * 2
        for head, positions in enumerate(sets):
            # Two query heads share a KV head.
            visible[2 * head : 2 * head + 2, 0, torch.from_numpy(positions)] = True
        expected, _ = exact_attention(
            query[:, new], keys[:, : position + 1], values[:, : position + 1], 0.4, visible
        )
        assert (found.double() - expected).abs().max() < 1e-5
        everything, _ = exact_attention(
            query[:, new], keys[:, : position + 1], values[:, : position + 1], 0.4
        )
        assert (found.double() - everything).abs().max() > 1e-4
    if scope == "kv_head":
        assert any(not np.array_equal(*sets) for sets in chosen)


class LargestTensor(TorchDispatchMode):
    """Notes the most items that any tensor had while it was active."""

    def __init__(self):
        super().__init__()
        self.items = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.items = max(self.items, tensor.numel())
        return made


def test_a_long_chunk_makes_nothing_of_queries_times_keys(make_runtime):
    runtime = make_runtime()
    query, keys, values = states(tokens=2 * TOKENS)
    sequence = runtime.open_sequence()
    for start in (0, TOKENS):
        new = slice(start, start + TOKENS)
        runtime.append(0, sequence, keys[:, new], values[:, new])
        with LargestTensor() as largest:
            runtime.attend_dense(0, sequence, query[:, new], keys[:, new], values[:, new], 0.4)
        # The output itself; a matrix of queries and keys would have 90,000 items or more.
        assert largest.items == 4 * TOKENS * 8
    with LargestTensor() as largest:
        torch.ones(TOKENS, TOKENS)
    assert largest.items == TOKENS**2


def test_attending_counts_hot_and_cold_rows(make_runtime, request):
    runtime = make_runtime()
    query, keys, values = states()
    sequence = runtime.open_sequence()
    runtime.append(0, sequence, keys[:, :299], values[:, :299])
    runtime.append(0, sequence, keys[:, 299:], values[:, 299:])
    runtime.attend_selected(0, sequence, query[:, 299:], keys[:, 299:], 0.4)
    counters = runtime.counters
    assert counters.hot_rows_read + counters.cold_rows_read == counters.selected_tokens == 60
    if Budget.LEAST in request.node.name:
        assert counters.cold_rows_read > 0
        assert counters.cold_useful_bytes >= counters.cold_rows_read * 64
        assert counters.cold_read_bytes >= counters.cold_useful_bytes
    else:
        assert counters.cold_rows_read == counters.cold_read_bytes == 0
