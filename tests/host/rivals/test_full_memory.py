# SPDX-License-Identifier: Apache-2.0
"""The whole cache in memory: right in every kernel and type, and counted."""

from dataclasses import replace

import pytest
import torch
from rival_cases import MULTI_HEAD, SHAPE, Run, make_setup

from hillinfer.model_shape import StoredType
from hillinfer.rivals.full_memory import KERNELS, FullMemory
from hillinfer.rivals.table import make_rival


@pytest.mark.parametrize("shape", [SHAPE, MULTI_HEAD])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_every_kernel_attends_to_everything(cold_dir, monkeypatch, shape, kernel, kind):
    stored = StoredType.BFLOAT16 if kind == torch.bfloat16 else StoredType.FLOAT16
    monkeypatch.setattr(FullMemory, "_fastest", lambda self: (kernel, kind))
    run = Run("full-memory", make_setup(cold_dir, replace(shape, stored_type=stored)), 200)
    limit = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}[kind]
    for _ in range(3):
        assert run.error(run.step()) < limit


def test_a_flipped_bit_is_seen(cold_dir):
    run = Run("full-memory", make_setup(cold_dir), 200)
    run.rival._values[0, 0, 0, 150, 3] += 40
    assert run.error(run.step()) > 5e-2


def test_bytes_held_are_the_cache(cold_dir):
    for context, batch in ((300, 1), (1000, 3)):
        rival = make_rival("full-memory", make_setup(cold_dir, context=context, batch=batch))
        items = 2 * SHAPE.layers * batch * SHAPE.kv_heads * context * SHAPE.head_dim
        assert rival.traffic().dram_bytes == items * rival.cache_type.itemsize
        assert rival.traffic().dram_bytes == rival.traffic().dram_peak_bytes
        assert rival.traffic().drive_read_bytes == rival.traffic().drive_write_bytes == 0
        rival.close()
        assert rival.traffic().dram_bytes == 0


def test_the_trial_takes_the_fastest(cold_dir, monkeypatch):
    slow = dict.fromkeys(KERNELS, 2.0) | {"eager": 1.0}
    names = {kernel: name for name, kernel in KERNELS.items()}
    monkeypatch.setattr(
        "hillinfer.rivals.full_memory._least_seconds",
        lambda kernel, query, keys, values: slow[names[kernel]] + (keys.dtype == torch.float32),
    )
    rival = make_rival("full-memory", make_setup(cold_dir))
    assert rival.describe() == "eager over float16"
