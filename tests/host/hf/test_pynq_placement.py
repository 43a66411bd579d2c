# SPDX-License-Identifier: Apache-2.0
"""Which tokens come out does not depend on PYNQ scoring them, on an emulated card behind XRT.

Few tokens of a tiny model, because every launch goes through files.
"""

import os

import pytest
import torch
from emulated_cards import EmulatedCards
from generation_runs import bits
from placement_cases import ALL_HOT, Case, Placement
from tiny_models import TinyModel

from hillinfer.devices.opening import LaunchDevice
from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.errors import HillInferWarning
from hillinfer.model_shape import ModelShape
from hillinfer.settings import Settings
from hillinfer.system.processes import processes_in
from hillinfer_hw.emulation import Engine
from hillinfer_hw.toolchain import MissingToolError, find_pynq_python
from hillinfer_pynq.execution import PynqExecution
from hillinfer_pynq.front_process import FrontProcess

# The kernels of test_device_placement.py, which are built once.
TINY = TinyModel("llama", "gqa", torch.float16, head_dim=64)
SELECTION = {"alpha": 0.2, "kept_recent": 5, "kept_sinks": 2, "block_rows": 100}
# A sequence of two segments beside one of less than two groups.
CASE = Case(TINY, (1200, 90), 256, 3, SELECTION)

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


@pytest.fixture
def fronts(monkeypatch):
    """The folders of the fronts that a test starts, none of which may be left."""
    folders = []
    start = FrontProcess.__init__

    def started(self, *given):
        start(self, *given)
        folders.append(self.folder)

    monkeypatch.setattr(FrontProcess, "__init__", started)
    yield folders
    assert folders
    for folder in folders:
        assert not folder.exists()
        assert processes_in(folder) == []


@pytest.mark.parametrize("share", [None, 0.0])
def test_pynq_gives_the_same_bits(share, expected, pynq, fronts, cold_dir):
    model, plain, hot = expected
    placement = Placement(share, pynq).for_case(CASE, hot.kv_bytes)
    found, statistics = CASE.run(model, cold_dir, **placement)
    assert torch.equal(bits(found), bits(plain))
    assert 0 < statistics.device_scored_tokens < statistics.scored_tokens


def test_a_bit_of_some_exponents_flipped_on_the_way_to_the_card_changes_them(
    expected, pynq, fronts, cold_dir, monkeypatch
):
    """The twin: what the card scores is what is selected by."""
    model, plain, _ = expected
    score = LaunchDevice.score

    def flipped(self, scope, queries, segments):
        group = self._spec.group_beats
        # Contract, section 9: a group is a beat of exponents per KV head, then codes.
        self._memory[segments[0].slot * self._spec.segment_beats + group, 6:14] ^= 8
        return score(self, scope, queries, segments)

    monkeypatch.setattr(LaunchDevice, "score", flipped)
    found, statistics = CASE.run(model, cold_dir, dram_budget=ALL_HOT, **pynq)
    assert statistics.device_scored_tokens > 0
    assert not torch.equal(bits(found), bits(plain))


def test_a_front_that_dies_is_replaced_by_the_host(expected, pynq, fronts, cold_dir, monkeypatch):
    model, plain, _ = expected
    score, launches = PynqExecution.score, []

    def dies(self, *given):
        launches.append(self.front.pid)
        if len(launches) == 2:
            os.kill(self.front.pid, 9)
        return score(self, *given)

    monkeypatch.setattr(PynqExecution, "score", dies)
    with pytest.warns(HillInferWarning, match="PYNQ front could not run score_tokens: it has end"):
        found, statistics = CASE.run(model, cold_dir, dram_budget=ALL_HOT, **pynq)
    assert torch.equal(bits(found), bits(plain))
    assert len(launches) == 2
    assert statistics.device_scored_tokens > 0
