# SPDX-License-Identifier: Apache-2.0
"""Which tokens come out does not depend on PYNQ scoring them, on an emulated card behind XRT.

Few tokens of a tiny model, because every launch goes through files.
"""

import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from device_cases import Through, Wrapped
from emulated_cards import EmulatedCards
from generation_runs import CODED, bits
from placement_cases import ALL_HOT, Case, Placement
from tiny_models import TinyModel

from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.errors import HillInferWarning
from hillinfer.model_shape import ModelShape
from hillinfer.settings import Settings
from hillinfer.system.processes import processes_in
from hillinfer_hw.emulation import Engine
from hillinfer_hw.toolchain import MissingToolError, find_pynq_python

# The kernels of test_device_placement.py, which are built once.
TINY = TinyModel("llama", "gqa", torch.float16, head_dim=64, hidden=64)
SELECTION = {"alpha": 0.2, "kept_recent": 5, "kept_sinks": 2, "block_rows": 100}
# A sequence of two segments, the second of which fills a group while tokens are made, beside one of
# less than two groups.
CASE = Case(TINY, (1087, 90), 256, 3, SELECTION)

pytestmark = pytest.mark.xdist_group("device-placement")


def _spec():
    shape = ModelShape.from_config(TINY.config(), TINY.dtype)
    return kernel_spec(shape, Settings().changed(**SELECTION))


@pytest.fixture(scope="module")
def pynq(tmp_path_factory):
    """The settings that choose PYNQ in front of the emulated RTL."""
    try:
        python = find_pynq_python()
    except MissingToolError as missing:
        # All of it can be installed, and the project's CI does so.
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(missing))
    with pytest.MonkeyPatch.context() as patch:
        xclbin = EmulatedCards(_spec(), tmp_path_factory.mktemp, patch.setenv)(Engine.RTL).xclbin
        yield {"device": "pynq", "xclbin": xclbin, "pynq_python": python}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The model and what comes out with the plain drive and all rows hot."""
    model = TINY.build()
    return model, *CASE.run(model, tmp_path_factory.mktemp("plain"), dram_budget=ALL_HOT)


class AtFront(Through):
    """A device of PYNQ's, with the folder and the process that its front has."""

    def __init__(self, device):
        super().__init__(device)
        ((self.folder, self.front),) = own_fronts()


def own_fronts():
    """Return folder and number of each front that this process has started and not closed."""
    found = []
    for folder in Path("/tmp").glob("hillinfer-pynq-*"):
        for pid in processes_in(folder):
            # The state and the parent come behind the name, which may hold anything; a process of
            # other tests may have ended meanwhile.
            with suppress(FileNotFoundError, ProcessLookupError):
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if int(stat[1]) == os.getpid():
                    found.append((folder, pid))
    return found


@pytest.fixture
def card():
    """Return what makes devices of PYNQ's and wraps them; nothing of their fronts may be left."""
    made = []

    def wrapped(wrap=AtFront):
        made.append(Wrapped("pynq", wrap))
        return made[-1]

    yield wrapped
    opened = [device for one in made for device in one.opened]
    assert opened
    for device in opened:
        assert not device.folder.exists()
        assert processes_in(device.folder) == []


def test_pynq_gives_the_same_bits(expected, pynq, card, cold_dir):
    """With the least budget; with all rows hot two cases below launch it."""
    model, plain, hot = expected
    placement = Placement(0.0, pynq).for_case(CASE, hot.kv_bytes)
    found, statistics = CASE.run(model, cold_dir, card().table, **placement)
    assert torch.equal(bits(found), bits(plain))
    assert 0 < statistics.device_scored_tokens < statistics.scored_tokens


class Flipping(AtFront):
    """Gets other exponents of the second group than the host wrote."""

    def write(self, slot, first_beat, beats):
        wrong = beats.copy()
        # Contract, section 9: a group is a beat of exponents per KV head, then codes.
        at = _spec().group_beats - first_beat
        if 0 <= at < len(beats):
            wrong[at, 6:14] ^= 8
        self.device.write(slot, first_beat, wrong)


def test_a_bit_of_some_exponents_flipped_on_the_way_to_the_card_changes_them(
    expected, pynq, card, cold_dir
):
    """The twin: what the card scores is what is selected by."""
    model, plain, _ = expected
    flipping = card(Flipping).table
    found, statistics = CASE.run(model, cold_dir, flipping, dram_budget=ALL_HOT, **pynq)
    assert statistics.device_scored_tokens > 0
    assert not torch.equal(bits(found), bits(plain))


def test_pynq_gives_the_same_bits_of_coded_steps(expected, pynq, card, cold_dir):
    """Coded tokens are those that the card's scores rank behind the exact ones."""
    model = expected[0]
    case = replace(CASE, selection=SELECTION | CODED)
    plain, hot = case.run(model, cold_dir, dram_budget=ALL_HOT)
    placement = Placement(0.0, pynq).for_case(case, hot.kv_bytes)
    found, statistics = case.run(model, cold_dir, card().table, **placement)
    assert torch.equal(bits(found), bits(plain))
    assert 0 < statistics.coded_tokens == hot.coded_tokens
    assert 0 < statistics.device_scored_tokens < statistics.scored_tokens
    # The twin: other scores, other tokens.
    found, _ = case.run(model, cold_dir, card(Flipping).table, dram_budget=ALL_HOT, **pynq)
    assert not torch.equal(bits(found), bits(plain))


class Dying(AtFront):
    """Its front dies when the second launch begins."""

    launches = 0

    def score(self, *given):
        self.launches += 1
        if self.launches == 2:
            os.kill(self.front, signal.SIGKILL)
        return self.device.score(*given)


def test_a_front_that_dies_is_replaced_by_the_host(expected, pynq, card, cold_dir):
    model, plain, _ = expected
    dying = card(Dying)
    with pytest.warns(HillInferWarning, match="PYNQ front could not run score_tokens: it has end"):
        found, statistics = CASE.run(model, cold_dir, dying.table, dram_budget=ALL_HOT, **pynq)
    assert torch.equal(bits(found), bits(plain))
    assert [one.launches for one in dying.opened] == [2]
    assert statistics.device_scored_tokens > 0
