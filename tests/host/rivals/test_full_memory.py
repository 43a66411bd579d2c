# SPDX-License-Identifier: Apache-2.0
"""The whole cache in memory: right in every kernel and form, and counted."""

from dataclasses import replace

import pytest
import torch
from rival_cases import MULTI_HEAD, SHAPE, Run, full_memory, make_setup

from hillinfer.attention.native import host_attention
from hillinfer.model_shape import StoredType
from hillinfer_bench.rivals.full import KERNELS, FullMemory

FORMS = [
    *(f"{kernel} over {kind}" for kernel in KERNELS for kind in ("float32", "float16", "bfloat16")),
    "native over rows",
]
LIMITS = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2, "rows": 1e-5}


@pytest.fixture(params=FORMS)
def form(request):
    if request.param.startswith("native") and host_attention(SHAPE) is None:
        pytest.skip("no native library: build it with `python tools/build_native.py`")
    return request.param


@pytest.mark.parametrize("shape", [SHAPE, MULTI_HEAD])
def test_every_kernel_attends_to_everything(cold_dir, form, shape):
    stored = StoredType.BFLOAT16 if form.endswith("bfloat16") else StoredType.FLOAT16
    setup = make_setup(cold_dir, replace(shape, stored_type=stored))
    run = Run("full-memory", setup, 200, rival=full_memory(setup, form))
    assert run.rival.describe() == form
    for _ in range(3):
        assert run.error(run.step()) < LIMITS[form.split()[-1]]


@pytest.mark.parametrize("where", ["planes", "rows"])
def test_a_changed_value_is_seen(cold_dir, where):
    if where == "rows" and host_attention(SHAPE) is None:
        pytest.skip("no native library: build it with `python tools/build_native.py`")
    setup = make_setup(cold_dir)
    rival = full_memory(setup, "native over rows" if where == "rows" else "sdpa over float32")
    run = Run("full-memory", setup, 200, rival=rival)
    if where == "rows":
        run.rival.cache.rows[0, 0, 150, SHAPE.row_bytes // 2 + 1] ^= 0x40
    else:
        run.rival.cache.values[0, 0, 0, 150, 3] += 40
    found = run.step()
    assert run.wrong(found, 0, 0)
    assert not run.wrong(found, 0, 1)


@pytest.mark.parametrize(("context", "batch"), [(300, 1), (1000, 3)])
def test_bytes_held_are_the_cache(cold_dir, context, batch):
    items = 2 * SHAPE.layers * batch * SHAPE.kv_heads * context * SHAPE.head_dim
    for form, item_bytes in (("sdpa over float32", 4), ("eager over float16", 2)):
        rival = full_memory(make_setup(cold_dir, context=context, batch=batch), form)
        assert rival.traffic().dram_bytes == items * item_bytes
        assert rival.traffic().dram_bytes == rival.traffic().dram_peak_bytes
        assert rival.traffic().drive_read_bytes == rival.traffic().drive_write_bytes == 0
        rival.close()
        assert rival.traffic().dram_bytes == 0


def test_bytes_read_are_those_of_the_form_that_won(cold_dir):
    token = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim
    forms = {"sdpa over float32": 4, "eager over float16": 2, "native over rows": 2}
    if host_attention(SHAPE) is None:
        del forms["native over rows"]
    for form, item_bytes in forms.items():
        with full_memory(make_setup(cold_dir), form) as rival:
            assert rival.attended_token_bytes() == token * item_bytes


def test_the_trial_takes_the_fastest(cold_dir):
    tried = []
    FullMemory(make_setup(cold_dir), lambda form, attend: tried.append(form) or 1.0)
    assert len(tried) == len(set(tried)) >= 2 * len(KERNELS)
    for form in tried:
        assert full_memory(make_setup(cold_dir), form).describe() == form


def test_the_trial_really_attends(cold_dir):
    found = []
    setup = make_setup(cold_dir, context=100)
    FullMemory(setup, lambda form, attend: found.append(attend().float()) or 1.0)
    assert len(found) >= 2 * len(KERNELS)
    for one in found:
        assert torch.allclose(one, found[0], atol=2e-2)
