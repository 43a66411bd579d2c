# SPDX-License-Identifier: Apache-2.0
"""What packed projections take is known before weights are, and checked before they are loaded."""

import pytest
import torch
from tiny_models import FAMILIES, TinyModel
from transformers import AutoModelForCausalLM

from hillinfer.errors import UnsupportedFeatureError
from hillinfer.projections.attachment import PackingBytes, ProjectionAttachment
from hillinfer.projections.ways import PROJECTIONS, make_projections

CHANGING = [name for name in PROJECTIONS if name not in ("steps", "stock")]


def tiny(family, dtype=torch.float32):
    return TinyModel(family, "mha" if family == "opt" else "gqa", dtype, head_dim=16)


def outline(model):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model.config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_will_be_held_is_held(family, name, dtype):
    model = tiny(family, dtype).build()
    told = PackingBytes.of(outline(model), make_projections(name), dtype.itemsize)
    try:
        attached = ProjectionAttachment(model, make_projections(name))
    except UnsupportedFeatureError as error:
        pytest.skip(str(error))
    with attached:
        assert told.held == attached.held_bytes
    assert told.most >= max(0, told.held)
    assert told.most > 0


def test_a_wider_type_holds_more_where_weights_keep_their_type():
    model = outline(tiny("llama").build())
    sizes = {
        name: [PackingBytes.of(model, make_projections(name), size) for size in (2, 4)]
        for name in PROJECTIONS
    }
    assert sizes["stock"] == [PackingBytes(0, 0)] * 2
    assert sizes["fused"][0].most < sizes["fused"][1].most
    assert sizes["int8"][0].held < sizes["fp16"][0].held == sizes["fp16"][1].held
