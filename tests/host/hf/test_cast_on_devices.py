# SPDX-License-Identifier: Apache-2.0
"""Which tokens come out does not depend on who casts FP16 keys, kernels and cards included."""

from dataclasses import replace

import pytest
import torch
from device_cases import FlippedRows, Wrapped
from emulated_cards import EmulatedCards
from generation_runs import bits
from placement_cases import ALL_HOT, Case, Placement
from tiny_models import TinyModel

from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.model_shape import ModelShape
from hillinfer.settings import Settings
from hillinfer_hw.emulation import Engine

SELECTION = {"alpha": 0.2, "kept_recent": 5, "kept_sinks": 2, "block_rows": 100}
# Rows that a kernel reads as they are, and rows whose keys the host hands over.
MODELS = {
    "rows": TinyModel("llama", "gqa", head_dim=64, hidden=64),
    "keys": TinyModel("llama", "gqa", torch.bfloat16, head_dim=64, hidden=64),
}
# Two segments, and a group that fills while tokens are made.
CASES = {name: Case(tiny, (1087, 90), 256, 3, SELECTION) for name, tiny in MODELS.items()}

# One process makes each kernel once. A card that is lost would be replaced, and nothing tried.
pytestmark = [
    pytest.mark.xdist_group("device-placement"),
    pytest.mark.filterwarnings("error::hillinfer.errors.HillInferWarning"),
]


@pytest.fixture(scope="module")
def cards(tmp_path_factory):
    shape = ModelShape.from_config(MODELS["rows"].config(), torch.float32)
    spec = kernel_spec(shape, Settings().changed(**SELECTION, shadow="fp16", device="xrt"))
    with pytest.MonkeyPatch.context() as patch:
        yield EmulatedCards(spec, tmp_path_factory.mktemp, patch.setenv)


# What casts, and the settings that choose it: one line each.
DEVICES = {
    "csim": lambda _: {"device": "csim"},
    "xrt-rtl": lambda cards: {"device": "xrt", "xclbin": cards(Engine.RTL).xclbin},
    "xrt-hls": lambda cards: {"device": "xrt", "xclbin": cards(Engine.HLS).xclbin},
}
_LONG = [
    pytest.param(name, marks=pytest.mark.kernels if name.startswith("xrt") else ())
    for name in DEVICES
]


@pytest.fixture(scope="module", params=MODELS)
def expected(request, tmp_path_factory):
    """A case, its model, and what comes out of the host's INT8 codes with all rows hot."""
    case = CASES[request.param]
    model = case.tiny.build()
    place = tmp_path_factory.mktemp("hot")
    return request.param, case, model, case.run(model, place, dram_budget=ALL_HOT, shadow="int8")


@pytest.mark.parametrize("share", [None, 0.0])
@pytest.mark.parametrize("device", _LONG)
def test_keys_cast_anywhere_give_the_same_bits(device, share, expected, cards, cold_dir):
    name, case, model, (wanted, hot) = expected
    placement = Placement(share, {"shadow": "fp16", **DEVICES[device](cards)})
    found, statistics = case.run(model, cold_dir, **placement.for_case(case, hot.kv_bytes))
    assert torch.equal(bits(found), bits(wanted))
    assert statistics.device_scored_tokens > 0
    assert (statistics.device_read_bytes > 0) == (name == "rows")
    assert statistics.make_shadow_launches == 0


def test_keys_cast_by_the_host_give_the_same_bits(expected, cold_dir):
    _, case, model, (wanted, hot) = expected
    placement = Placement(0.0, {"shadow": "fp16", "device": "golden"})
    found, statistics = case.run(model, cold_dir, **placement.for_case(case, hot.kv_bytes))
    assert torch.equal(bits(found), bits(wanted))
    assert statistics.device_scored_tokens == statistics.device_read_bytes == 0


@pytest.mark.parametrize("device", _LONG)
def test_flipped_bits_of_keys_on_a_device_show(device, expected, cards, cold_dir):
    """The twin: what the device holds decides."""
    _, case, model, (wanted, _) = expected
    settings = {"shadow": "fp16", **DEVICES[device](cards)}
    flipping = Wrapped(settings["device"], FlippedRows)
    found, _ = case.run(model, cold_dir, flipping.table, dram_budget=ALL_HOT, **settings)
    assert flipping.opened
    assert not torch.equal(bits(found), bits(wanted))


@pytest.mark.parametrize("expected", ["rows"], indirect=True)
@pytest.mark.parametrize("device", _LONG[:1])
def test_a_scope_of_heads_is_cast_alike(device, expected, cards, cold_dir):
    _, case, model, _ = expected
    own = replace(case, selection=SELECTION | {"scope": "kv_head"})
    wanted, _ = own.run(model, cold_dir, dram_budget=ALL_HOT, shadow="int8")
    settings = {"shadow": "fp16", **DEVICES[device](cards)}
    found, statistics = own.run(model, cold_dir, dram_budget=ALL_HOT, **settings)
    assert torch.equal(bits(found), bits(wanted))
    assert statistics.device_scored_tokens > 0
