# SPDX-License-Identifier: Apache-2.0
"""Rows with known bytes, and checks of where a runtime has them.

`known` are pairs of a sequence and, for each of its layers, the bytes of all its rows.
"""

import numpy as np
import torch

from hillinfer.drive.landing import WantedRows
from hillinfer.kv.hot_pool import SLOT_BYTES
from hillinfer.memory_budget import Part
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.settings import Settings

SHAPE = ModelShape(
    layers=2,
    kv_heads=2,
    query_heads=4,
    head_dim=6,
    stored_type=StoredType.FLOAT16,
    max_positions=100_000,
)
# By default codes would want buffers that grow with the context, and budgets of tests are tight.
SETTINGS = Settings().changed(alpha=0.1, exact=1, block_rows=40, io_threads=2)


def random_states(seed, tokens):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, SHAPE.layers, SHAPE.kv_heads, tokens, 6, generator=generator).half()


def rows_of(states, layer):
    """Return rows as the layout is specified: K of all heads, V of all heads, zeros up to 64."""
    tokens = states.shape[3]
    keys, values = states[:, layer].transpose(1, 2).reshape(2, tokens, -1)
    packed = torch.cat([keys, values], dim=1).view(torch.int16).numpy().view(np.uint8)
    return np.pad(packed, ((0, 0), (0, SHAPE.row_bytes - packed.shape[1])))


def fill(runtime, sequence, tokens, seed=1):
    """Append random rows in all layers and return their states."""
    states = random_states(seed, tokens)
    for layer in range(SHAPE.layers):
        runtime.append(layer, sequence, states[0, layer], states[1, layer])
    return states


def read(runtime, layer, sequence, positions):
    """Take a step that selects positions, promote what was cold, and return (position, row)s."""
    runtime.begin_step()
    fetched = runtime.gather.copied(layer, sequence, np.asarray(positions), runtime.step)
    return [(block.copy(), rows.copy()) for block, rows in fetched]


def on_drive(runtime, layer, numbers):
    """Return rows as the drive has them, uint8 (rows, row_bytes)."""
    out = np.zeros((len(numbers), SHAPE.row_bytes), np.uint8)
    runtime.parts.store.read_rows(WantedRows(layer, numbers, out, np.arange(len(numbers))))
    return out


def check_memory(runtime, sequences):
    """M0 holds, now and at its peak, and what the pools use is what is counted."""
    accountant = runtime.parts.accountant
    held = accountant.held()
    assert sum(held.values()) <= accountant.budget_bytes
    assert sum(accountant.peak().values()) <= accountant.budget_bytes
    used = sum(pool.used_rows for pool in runtime.parts.pools.layers)
    assert (
        held[Part.HOT] == used * (SHAPE.row_bytes + SLOT_BYTES) + sequences * 64 * SHAPE.token_bytes
    )


def check_tails(known):
    """The open groups hold the newest rows."""
    for sequence, rows in known:
        for layer, own in enumerate(rows):
            assert sequence.lengths[layer] == len(own)
            start = sequence.tail_start(layer)
            np.testing.assert_array_equal(sequence.tails[layer][: len(own) - start], own[start:])


def check_drive(runtime, known):
    """Every row of a full group, hot or cold, is on the drive bit for bit."""
    for sequence, rows in known:
        for layer, own in enumerate(rows):
            settled = sequence.tail_start(layer)
            if settled:
                numbers = sequence.rows(np.arange(settled))
                assert len(np.unique(numbers)) == settled
                np.testing.assert_array_equal(on_drive(runtime, layer, numbers), own[:settled])


def check_slots(runtime, known):
    """Each slot belongs to one row of someone's full group, and holds that row bit for bit."""
    runtime.parts.pools.promotions.settle_all()
    for layer, pool in enumerate(runtime.parts.pools.layers):
        hot = pool.hot_rows
        assert len(np.unique(hot)) == len(hot) <= pool.used_rows
        slots = pool.slots(hot)
        assert len(np.unique(slots)) == len(hot)
        assert ((slots >= 0) & (slots < pool.used_rows)).all()
        assert (pool.slot_of_row >= 0).sum() == len(hot), "rows that no slot knows of"
        owned = np.zeros(0, np.int64)
        for sequence, rows in known:
            settled = sequence.tail_start(layer)
            numbers = sequence.rows(np.arange(settled))
            owned = np.union1d(owned, numbers)
            slots = pool.slots(numbers)
            places = np.flatnonzero(slots >= 0)
            np.testing.assert_array_equal(pool.columns.data[slots[places]], rows[layer][places])
        assert np.isin(hot, owned).all(), "rows of groups that nobody owns are forgotten"


def check_hot(runtime, layer, sequence, positions):
    """These positions are not cold."""
    positions = np.asarray(sorted(positions), np.int64)
    settled = positions[positions < sequence.tail_start(layer)]
    slots = runtime.parts.pools.layers[layer].slots(sequence.rows(settled))
    assert (slots >= 0).all(), f"cold in layer {layer}: {settled[slots < 0].tolist()}"
