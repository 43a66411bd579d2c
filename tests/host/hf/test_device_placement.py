# SPDX-License-Identifier: Apache-2.0
"""Which tokens come out does not depend on what scores them, kernels and cards included.

The devices of the table below run behind whole models: prefill, decode, several sequences and
segments, forks, beams and cuts, budgets from the least to all hot.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from device_cases import Noting, Through, Wrapped, plant
from emulated_cards import EmulatedCards
from generation_runs import CODED, SETTINGS, bits
from placement_cases import ALL_HOT, Case, Placement
from test_placement_invariance import BEAMS, beams_and_turns
from test_shadow_placement import go
from tiny_models import TinyModel

import hillinfer
from hillinfer.devices.opening import open_xrt
from hillinfer.engine.budget_growth import AUTO_FORMATS
from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.model_shape import ModelShape
from hillinfer.rates.kept_rates import KeptRates, Rates
from hillinfer.settings import ModelName, Settings
from hillinfer_hw.emulation import Engine

# Heads as wide as kernels are built for, and two KV heads of two query heads each.
# Rows of FP32 models are FP16; models of FP16 take twice as long: test_pynq_placement.py has one.
TINY = TinyModel("llama", "gqa", head_dim=64, hidden=64)
SELECTION = {"alpha": 0.2, "kept_recent": 5, "kept_sinks": 2, "block_rows": 100}
# A long sequence of two segments, the second of which fills a group while tokens are made, beside
# one of less than two groups.
LONG = Case(TINY, (1087, 90), 256, 3, SELECTION)
# The long one by itself, where nothing depends on how many there are.
ALONE = replace(LONG, lengths=LONG.lengths[:1])

# One process makes each kernel once. A card that is lost would be replaced, and nothing tried.
pytestmark = [
    pytest.mark.xdist_group("device-placement"),
    pytest.mark.filterwarnings("error::hillinfer.errors.HillInferWarning"),
]


def _spec():
    shape = ModelShape.from_config(TINY.config(), TINY.dtype)
    return kernel_spec(shape, Settings().changed(**SELECTION))


@pytest.fixture(scope="module")
def cards(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield EmulatedCards(_spec(), tmp_path_factory.mktemp, patch.setenv)


# What scores, and the settings that choose it: one line each.
DEVICES = {
    "golden": lambda _: {"device": "golden"},
    "nvme": lambda _: {"device": "nvme"},
    "core": lambda _: {"device": "core", "beta": 0.0},
    "csim": lambda _: {"device": "csim"},
    "xrt-rtl": lambda cards: {"device": "xrt", "xclbin": cards(Engine.RTL).xclbin},
    "xrt-hls": lambda cards: {"device": "xrt", "xclbin": cards(Engine.HLS).xclbin},
}
CARDS = ("core", "csim", "xrt-rtl", "xrt-hls")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The model and what comes out with the plain drive and all rows hot."""
    model = TINY.build()
    long = LONG.run(model, tmp_path_factory.mktemp("long"), dram_budget=ALL_HOT)
    case = replace(BEAMS, tiny=TINY)
    beams = beams_and_turns(model, tmp_path_factory.mktemp("beams"), dram_budget=ALL_HOT)
    return model, long, case, beams


@pytest.fixture(scope="module")
def alone(expected, tmp_path_factory):
    """The model, and what comes out of the long sequence by itself."""
    place = tmp_path_factory.mktemp("alone")
    return expected[0], *ALONE.run(expected[0], place, dram_budget=ALL_HOT)


# A card holds the same wherever rows lie; with all of them hot each has cases of its own below.
SHARES = [*((device, 0.0) for device in DEVICES), ("core", 0.2), ("csim", 0.2), ("golden", None)]


@pytest.mark.parametrize(("device", "share"), SHARES)
def test_every_device_gives_the_same_bits(device, share, expected, cards, cold_dir):
    model, (long, hot), _, _ = expected
    placement = Placement(share, DEVICES[device](cards))
    found, statistics = LONG.run(model, cold_dir, **placement.for_case(LONG, hot.kv_bytes))
    assert torch.equal(bits(found), bits(long))
    assert (statistics.device_scored_tokens > 0) == (device in CARDS)


@pytest.mark.parametrize(
    ("device", "beta"),
    [("core", 0.0), ("core", 1.0), ("csim", 1.0), ("xrt-rtl", 0.0), ("xrt-hls", 1.0)],
)
def test_what_the_host_shares_with_a_card_changes_no_bit(device, beta, alone, cards, cold_dir):
    model, wanted, _ = alone
    found, statistics = ALONE.run(
        model, cold_dir, dram_budget=ALL_HOT, **{**DEVICES[device](cards), "beta": beta}
    )
    assert torch.equal(bits(found), bits(wanted))
    assert 0 < statistics.device_scored_tokens < statistics.scored_tokens


@pytest.fixture(scope="module")
def coded(expected, tmp_path_factory):
    """The model, the case and what comes out where most of the selected tokens are coded."""
    case = replace(ALONE, selection=SELECTION | CODED)
    found, statistics = case.run(expected[0], tmp_path_factory.mktemp("coded"), dram_budget=ALL_HOT)
    assert 0 < statistics.coded_tokens < statistics.selected_tokens
    return expected[0], case, found, statistics


@pytest.mark.parametrize(
    ("device", "share"), [*((device, 0.0) for device in DEVICES), ("core", 0.2), ("csim", None)]
)
def test_coded_steps_have_the_same_bits_on_every_device(device, share, coded, cards, cold_dir):
    """Which tokens are coded follows from their ranks, whatever scores them."""
    model, case, wanted, hot = coded
    placement = Placement(share, DEVICES[device](cards)).for_case(case, hot.kv_bytes)
    found, statistics = case.run(model, cold_dir, **placement)
    assert torch.equal(bits(found), bits(wanted))
    assert statistics.coded_tokens == hot.coded_tokens
    assert (statistics.device_scored_tokens > 0) == (device in CARDS)


@pytest.fixture(scope="module")
def of_bands(alone, tmp_path_factory):
    """What comes out of a prompt that was read in stages, with the plain drive and all rows hot."""
    model, whole, statistics = alone
    with hillinfer.prune(model, "1:50%"):
        found, _ = ALONE.run(model, tmp_path_factory.mktemp("bands"), dram_budget=ALL_HOT)
    # Other bits than without: layers of the deeper band have half of the rows.
    assert not torch.equal(bits(found), bits(whole))
    return model, found, statistics.kv_bytes


@pytest.mark.parametrize(
    ("device", "share"), [*((device, 0.0) for device in DEVICES), ("core", 0.2)]
)
def test_bands_have_the_same_bits_on_every_device(device, share, of_bands, cards, cold_dir):
    """Layers with fewer rows than the first have shadows, and slots of a card, of their own."""
    model, expected, kv_bytes = of_bands
    placement = Placement(share, DEVICES[device](cards))
    # Beside what any sequence needs there are the keys that decide, for a while.
    shape = ModelShape.from_config(TINY.config(), TINY.dtype)
    deciding = ALONE.lengths[0] * shape.kv_heads * shape.head_dim * 2
    given = placement.settings(ALONE.least_bytes(**placement.changes) + deciding, kv_bytes)
    with hillinfer.prune(model, "1:50%"):
        found, statistics = ALONE.run(model, cold_dir, **given)
    assert torch.equal(bits(found), bits(expected))
    assert (statistics.device_scored_tokens > 0) == (device in CARDS)
    assert statistics.kv_bytes < kv_bytes


# fc, fs, Bc and Bs, and whether the device then scores something, whatever the model.
MADE_RATES = {
    "device-never": (Rates(1.0, 0.0, 1.0, 1.0), False),
    "alike": (Rates(1.0, 1.0, 1e3, 1.0), None),
    "device-fast": (Rates(1.0, 1e9, 1.0, 1e9), True),
}


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """The rates of a user who has measured nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return KeptRates.of_user()


@pytest.mark.parametrize(
    ("rates", "model_name"),
    [
        *(("alike", name) for name in ModelName),
        *((rates, Settings().beta_model) for rates in MADE_RATES if rates != "alike"),
    ],
)
def test_an_automatic_beta_changes_no_bit(rates, model_name, alone, cold_dir, kept):
    model, wanted, _ = alone
    made, scores = MADE_RATES[rates]
    shape = ModelShape.from_config(TINY.config(), TINY.dtype)
    # Whichever format the budget has room for.
    for shadow in AUTO_FORMATS:
        chosen = Settings().changed(**(SETTINGS | SELECTION), shadow=shadow)
        plant(made, shape, chosen, cold_dir, "core")
    planted = kept.all()
    found, statistics = ALONE.run(
        model, cold_dir, dram_budget=ALL_HOT, device="core", beta="auto", beta_model=model_name
    )
    assert kept.all() == planted, "it was measured"
    assert torch.equal(bits(found), bits(wanted))
    assert statistics.scored_tokens > 0
    if scores is not None:
        assert (statistics.device_scored_tokens > 0) == scores


@pytest.mark.parametrize("device", ["csim", "xrt-rtl"])
def test_an_emulated_device_is_not_measured_and_gets_everything(
    device, alone, cards, cold_dir, kept
):
    model, wanted, _ = alone
    found, statistics = ALONE.run(
        model, cold_dir, dram_budget=ALL_HOT, **{**DEVICES[device](cards), "beta": "auto"}
    )
    assert kept.all() == []
    assert torch.equal(bits(found), bits(wanted))
    assert statistics.device_scored_tokens > 0


@pytest.mark.parametrize("device", DEVICES)
def test_beams_and_turns_on_every_device(device, expected, cards, cold_dir):
    model, _, case, beams = expected
    settings = DEVICES[device](cards)
    placement = Placement(0.1, settings).for_case(case, 1_000_000)
    noted = Wrapped(settings["device"])
    found = beams_and_turns(model, cold_dir, devices=noted.table, **placement)
    for one, other in zip(found, beams, strict=True):
        assert torch.equal(one, other)
    # Losing one is an error in these tests.
    assert any(one.launches for one in noted.opened) == (device in CARDS)


class Flipping(Through):
    """Gets other codes than the host wrote."""

    def write(self, slot, first_beat, beats):
        wrong = beats.copy()
        wrong[max(_spec().kv_heads - first_beat, 0) :] ^= 0x11
        self.device.write(slot, first_beat, wrong)


@pytest.mark.parametrize("device", CARDS)
def test_a_flipped_bit_on_a_card_changes_what_comes_out(device, alone, cards, cold_dir):
    """The twin: what the card holds decides."""
    model, wanted, _ = alone
    assert not torch.equal(bits(flipped(ALONE, device, model, cards, cold_dir)), bits(wanted))


def test_a_flipped_bit_on_a_card_changes_coded_steps(coded, cards, cold_dir):
    model, case, wanted, _ = coded
    assert not torch.equal(bits(flipped(case, "core", model, cards, cold_dir)), bits(wanted))


def flipped(case, device, model, cards, cold_dir):
    """Return what comes out of a case where a device flips bits of what it gets."""
    settings = DEVICES[device](cards)
    flipping = Wrapped(settings["device"], Flipping)
    found, _ = case.run(model, cold_dir, devices=flipping.table, dram_budget=ALL_HOT, **settings)
    assert flipping.opened
    return found


def test_shadows_that_a_small_card_has_no_room_for(expected, cards, cold_dir):
    """Some segments stay on the card, others are read from the drive for every launch."""
    model = expected[0]
    wanted, in_dram = go(model, cold_dir, 100)
    chunk = 2 * _spec().segment_bytes
    small = partial(open_xrt, chunk_bytes=chunk, reserved_bytes=(4 << 30) - 3 * chunk)
    card = Wrapped("xrt", Noting, small)
    # What a card holds and is sent is the host's doing, whatever scores behind XRT.
    found, streamed = go(model, cold_dir, 0, {"devices": card.table}, **DEVICES["xrt-hls"](cards))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert any(one.loads for one in card.opened)
    assert streamed.device_scored_tokens > 0
    assert streamed.shadow_write_bytes > 0 == in_dram.shadow_write_bytes
