# SPDX-License-Identifier: Apache-2.0
"""The whole cache in memory: right in every kernel and form, and counted."""

from dataclasses import replace

import pytest
import torch
from rival_cases import MULTI_HEAD, SHAPE, Run, make_setup

from hillinfer.attention.kernels import host_attention
from hillinfer.errors import SettingsError
from hillinfer.model_shape import StoredType
from hillinfer_bench.rivals.full import KERNELS, FullMemory
from hillinfer_bench.rivals.table import make_rival

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
    run = Run(
        "full-memory", make_setup(cold_dir, replace(shape, stored_type=stored), form=form), 200
    )
    for _ in range(3):
        assert run.error(run.step()) < LIMITS[form.split()[-1]]


@pytest.mark.parametrize("where", ["planes", "rows"])
def test_a_changed_value_is_seen(cold_dir, where):
    if where == "rows" and host_attention(SHAPE) is None:
        pytest.skip("no native library: build it with `python tools/build_native.py`")
    form = "native over rows" if where == "rows" else "sdpa over float32"
    run = Run("full-memory", make_setup(cold_dir, form=form), 200)
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
        setup = make_setup(cold_dir, context=context, batch=batch, form=form)
        rival = make_rival("full-memory", setup)
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
        with make_rival("full-memory", make_setup(cold_dir, form=form)) as rival:
            assert rival.attended_token_bytes() == token * item_bytes


def test_the_trial_takes_the_fastest(cold_dir):
    forms = FullMemory(make_setup(cold_dir), lambda attend: 1.0).forms
    for number, form in enumerate(forms):
        seconds = iter([1.0 if i == number else 2.0 for i in range(len(forms))])
        rival = FullMemory(make_setup(cold_dir), lambda attend, s=seconds: next(s))
        assert rival.describe() == form


def test_the_trial_really_attends(cold_dir):
    found = []
    FullMemory(
        make_setup(cold_dir, context=100), lambda attend: found.append(attend().float()) or 1.0
    )
    assert len(found) >= 2 * len(KERNELS)
    for one in found:
        assert torch.allclose(one, found[0], atol=2e-2)


def test_a_form_that_there_is_not_is_refused(cold_dir):
    with pytest.raises(SettingsError, match="form='sdpa': choose one of sdpa over float16"):
        make_rival("full-memory", make_setup(cold_dir, form="sdpa"))
