# SPDX-License-Identifier: Apache-2.0
"""What the accountant counts is what a runtime holds: every array that can be reached from it."""

import ctypes
import gc
import mmap
import tracemalloc
import types
from contextlib import closing, suppress

import numpy as np
import pytest
import torch
from copy_lanes import HostLane
from resident_memory import run_taken

from hillinfer.engine.joined_step import STEPS_REFUSED
from hillinfer.engine.runtime import Runtime
from hillinfer.errors import BudgetError
from hillinfer.kv.hot_pool import SLOT_BYTES, Candidates, HotPool, PoolMoment
from hillinfer.kv.pool_policies import LeastRecentlyUsed
from hillinfer.memory_budget import Part
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.native.tables import PoolTables
from hillinfer.settings import Settings
from hillinfer.shadow.arena import HugeRun

SHAPE = ModelShape(
    layers=3,
    kv_heads=2,
    query_heads=4,
    head_dim=32,
    stored_type=StoredType.FLOAT16,
    max_positions=10_000,
)
# Small things: index arrays of the last gather, a future's result, one query.
SMALL = 64 << 10
_LEFT_OUT = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.FrameType,
    types.CodeType,
    PoolTables,
)


def held_arrays(root, apart=()):
    """Return the bytes of every array, mapping and tensor that can be reached from `root`.

    What is `apart`, and what can be reached through it alone, is no part of them.
    """
    sizes, seen, queue = {}, {id(one) for one in apart}, [root]
    runs = [run.addresses for run in gc.get_objects() if type(run) is HugeRun]
    while queue:
        one = queue.pop()
        if id(one) in seen or isinstance(one, _LEFT_OUT):
            continue
        seen.add(id(one))
        if isinstance(one, np.ndarray):
            memory = one
            while isinstance(memory.base, np.ndarray):
                memory = memory.base
            root = memory if memory.base is None else memory.base
            root = root.obj if isinstance(root, memoryview) else root
            if isinstance(root, ctypes.Array):
                # Of the native library's; several look at it.
                sizes[ctypes.addressof(root)] = ctypes.sizeof(root)
            elif isinstance(root, torch.Tensor):
                # Counted as such, with all that look at its memory.
                pass
            elif any(memory.ctypes.data in addresses for addresses in runs):
                # Address space, which is memory where arrays lie and nowhere else.
                sizes[memory.ctypes.data] = memory.nbytes
            else:
                sizes[id(root)] = len(root) if isinstance(root, mmap.mmap) else root.nbytes
            queue.append(root)
        elif isinstance(one, torch.Tensor) and one.is_meta:
            # A shape, without memory.
            pass
        elif isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        else:
            queue.extend(gc.get_referents(one))
    return sum(sizes.values())


def feed(runtime, sequence, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(2, SHAPE.layers, 2, tokens, 32, generator=generator).half()
    query = torch.randn(4, tokens, 32, generator=generator)
    runtime.begin_step()
    for layer in range(SHAPE.layers):
        keys, values = states[0, layer], states[1, layer]
        runtime.append(layer, sequence, keys, values)
        if tokens > 1:
            runtime.attend_dense(layer, sequence, query, keys, values, 0.2)
        else:
            runtime.attend_selected(layer, sequence, query, keys, 0.2)
    sequence.token_ids.extend([0] * tokens)


@pytest.fixture(
    params=[
        ("lru", None),
        ("paper", None),
        ("lru", HostLane),
        ("paper", None, "yes"),
        ("lru", None, "no", 0.02),
    ],
    ids=str,
)
def runtime(request, cold_dir):
    policy, lane, encryption, exact = (*request.param, *("no", 1.0)[len(request.param) - 2 :])
    settings = Settings().changed(
        alpha=0.1,
        block_rows=100,
        pool_policy=policy,
        io_threads=2,
        encrypt_cold_pool=encryption,
        exact=exact,
        exact_floor=64,
    )
    limit = 4 * 70_000
    made = Runtime(
        SHAPE, settings, 12 << 20, cold_dir, shadow_limit_bytes=limit, lane=lane and lane()
    )
    yield made
    made.close()


def check(runtime):
    runtime.parts.pools.promotions.settle_all()
    runtime.parts.shadow_memory.settle()
    held = runtime.parts.accountant.held()
    pools = runtime.parts.pools.layers
    slots = sum(pool.used_rows for pool in pools) * (SHAPE.row_bytes + SLOT_BYTES)
    tails = sum(sequence.tails.nbytes for sequence in runtime.parts.rows.sequences)
    values = runtime.parts.values
    codes = 0 if values is None else values.held_bytes
    assert held[Part.HOT] == slots + tails + codes
    segments = {
        id(segment): segment for one in runtime.parts.rows.sequences for segment in one.segments
    }.values()
    layers = [one for each in segments for one in each.layers]
    shadows = sum(one.shadow is not None for one in layers)
    copies = sum(one.probes.shadow.nbytes for one in layers if one.probes is not None)
    assert held[Part.SHADOW] == shadows * runtime.parts.shadow_store.slot_bytes + copies
    runs = {id(run): run for one in layers for run in one.arena.runs}.values()
    places = sum(run.taken_bytes for run in runs)
    assert places == shadows * runtime.parts.shadow_store.slot_bytes
    assert sum(run_taken(run) for run in runs) <= places
    # Everything else that can be reached, buffers and tables of all kinds.
    reached = held_arrays(runtime) + slots
    assert reached <= sum(held.values()) + SMALL
    return reached, sum(held.values())


def test_nothing_is_held_that_is_not_counted(runtime):
    sequence = runtime.open_sequence()
    for seed, tokens in enumerate([700, 2500, 1, 1, 1]):
        feed(runtime, sequence, tokens, seed)
        check(runtime)
    fork = runtime.fork(sequence)
    for seed in range(3):
        feed(runtime, fork, 1, seed)
    check(runtime)
    runtime.truncate(fork, 1500)
    check(runtime)
    runtime.release(sequence)
    reached, counted = check(runtime)
    # What is counted is there: scratch that comes and goes is most of the rest.
    assert reached > counted / 3
    assert runtime.statistics().dram_peak_bytes <= 12 << 20


# Of caches that take steps together; no group begins or becomes full meanwhile.
TOGETHER = (1500, 710, 1100, 1300, 900, 1160, 850, 970)


def step_together(runtime, sequences, seed):
    """Take a step, and return the batch rows that went together."""
    generator = torch.Generator().manual_seed(seed)
    count = len(sequences)
    runtime.begin_step()
    taken = runtime.joined.begin(list(enumerate(sequences)), runtime.step, None)
    out = torch.empty(count, 1, 4, 32)
    for layer in range(SHAPE.layers if taken else 0):
        query, *states = (
            torch.randn(count, heads, 1, 32, generator=generator) for heads in (4, 2, 2)
        )
        runtime.joined.store(layer, *states)
        assert not runtime.joined.attend(layer, query, 0.2, out)
    return taken


@pytest.fixture(params=[("layer", 0.02), ("kv_head", 1.0)], ids=str)
def joined(request, cold_dir):
    """A runtime and eight sequences, each of which decoded by itself."""
    scope, exact = request.param
    settings = Settings().changed(
        block_rows=100, io_threads=2, scope=scope, exact=exact, exact_floor=64
    )
    with closing(
        Runtime(SHAPE, settings, 32 << 20, cold_dir, shadow_limit_bytes=32 * 70_000)
    ) as made:
        sequences = []
        for seed, tokens in enumerate(TOGETHER):
            sequences.append(made.open_sequence())
            for count in (tokens, 1, 1):
                feed(made, sequences[-1], count, seed)
        yield made, sequences


def test_steps_together_hold_nothing_that_is_not_counted(joined):
    """Growth alone is compared: what is counted for work that comes and goes would hide some."""
    runtime, sequences = joined
    before = check(runtime)
    assert step_together(runtime, sequences, 1) == list(range(len(sequences)))
    reached, counted = np.subtract(check(runtime), before)
    assert 0 < reached <= counted
    # Later steps work in the same memory, and so does a batch of less.
    after = check(runtime)
    assert step_together(runtime, sequences, 2) == list(range(len(sequences)))
    assert step_together(runtime, sequences[:3], 3) == [0, 1, 2]
    assert check(runtime)[1] == after[1]
    assert (runtime.statistics().coded_tokens > 0) == (runtime.parts.values is not None)
    assert runtime.statistics().dram_peak_bytes <= 32 << 20


def test_an_array_of_a_step_together_that_nobody_counted_is_found(joined):
    runtime, sequences = joined
    before = check(runtime)
    step_together(runtime, sequences, 1)
    sequences[3].hidden = np.zeros(100_000, np.uint8)
    reached, counted = np.subtract(check(runtime), before)
    assert reached > counted


def test_without_memory_for_them_sequences_go_by_themselves(joined):
    runtime, sequences = joined
    accountant, taken = runtime.parts.accountant, 0
    for size in (1 << 20, 1 << 15, 1 << 10):
        with suppress(BudgetError):
            while True:
                accountant.take(Part.OTHER, size)
                taken += size
    # A step of one sequence may take a few bytes more than the one before.
    accountant.give(Part.OTHER, 1 << 12)
    taken -= 1 << 12
    assert step_together(runtime, sequences, 1) == []
    refused_at = runtime.step
    # They can, and there is room again.
    for seed, sequence in enumerate(sequences):
        feed(runtime, sequence, 1, seed)
    accountant.give(Part.OTHER, taken)
    # Each time they ask for it hot rows are given up, so they do not ask at every step.
    assert step_together(runtime, sequences, 1) == []
    while runtime.step < refused_at + STEPS_REFUSED - 1:
        runtime.begin_step()
    assert step_together(runtime, sequences, 1) == list(range(len(sequences)))


def test_an_array_that_nobody_counted_is_found(runtime):
    sequence = runtime.open_sequence()
    feed(runtime, sequence, 700, 0)
    check(runtime)
    sequence.hidden = {"list": [np.zeros(16 << 20, np.uint8)]}
    with pytest.raises(AssertionError):
        check(runtime)


def test_a_place_that_nobody_counted_is_found(runtime):
    sequence = runtime.open_sequence()
    feed(runtime, sequence, 2500, 0)
    check(runtime)
    hidden = sequence.segments[0].layers[0].arena.take()
    with pytest.raises(AssertionError):
        check(runtime)
    del hidden
    check(runtime)


def test_a_pool_that_shrinks_takes_next_to_nothing_for_it():
    pool = HotPool(4096, 4000, LeastRecentlyUsed())
    pool.cover(4000)
    pool.grow(4000)
    source = np.zeros((1, 4096), np.uint8)
    rows = np.arange(4000)
    moment = PoolMoment(1, 4000, 0.1, 0, 1)
    pool.promote(
        Candidates(
            rows, rows.astype(np.int32), np.zeros(4000, np.uint16), source, np.zeros(4000, np.int64)
        ),
        moment,
        2,
    )
    tracemalloc.start()
    try:
        pool.shrink(2000, PoolMoment(2, 4000, 0.1, 0, 1))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 2,000 rows are 8 MB; index arrays and 64 rows at a time are some hundred KB.
    assert peak < 1 << 20
