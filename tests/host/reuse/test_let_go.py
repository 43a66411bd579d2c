# SPDX-License-Identifier: Apache-2.0
"""Chunks of a store may go again when a prompt could not be opened, whatever the reason was."""

import pytest
import torch
from generation_runs import attached
from tiny_models import TinyModel, prompts

from hillinfer.drive.files import aligned_buffer
from hillinfer.errors import BudgetError
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.store.store import Store

MIB = 1 << 20
# Of a prompt; more of them than the budget holds at a time.
TOKENS, STORED, MOST = 2000, 1984, 24


@pytest.fixture
def store(tmp_path):
    Store.create(tmp_path / "store", 64 * MIB)
    with Store(tmp_path / "store") as opened:
        yield opened


def put(store, space, ids):
    """Store a prompt of zeros, without shadows."""
    writer = store.writer(space, ids)
    size = STORED * space.row_bytes
    for layer in range(space.layers):
        writer.write(layer, 0, aligned_buffer(size)[:size].reshape(STORED, -1))
    writer.publish(STORED)
    writer.close()


@pytest.mark.parametrize("rows", [1, 2])
@torch.no_grad()
def test_what_the_budget_refuses_keeps_no_chunk(store, cold_dir, rows):
    model = TinyModel().build()
    space = StoredPrompts(store, model).namespace
    batches = [prompts([TOKENS] * rows, seed)[0] for seed in range(MOST // rows)]
    for batch in batches:
        for ids in batch.tolist():
            put(store, space, ids)
    caches = []

    def open_all(hill):
        for batch in batches:
            caches.append(hill.new_cache())
            assert caches[-1].look_up(batch) == STORED

    with attached(model, cold_dir, store=store, dram_budget="1400KiB") as hill:
        with pytest.raises(BudgetError):
            open_all(hill)
        # The twin: caches that are open keep theirs.
        assert store.statistics()["leases"] > 0
        for cache in caches:
            cache.close()
        assert store.statistics()["leases"] == 0
