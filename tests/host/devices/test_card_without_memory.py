# SPDX-License-Identifier: Apache-2.0
"""A card that gives no memory is told and left; one that gives some is used."""

import shutil
from pathlib import Path

import made_xclbin
import pytest

from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.devices.opening import open_xrt
from hillinfer.devices.xrt.device import CHUNK_BYTES, XrtDevice
from hillinfer.devices.xrt.process import Deadlines, MemoryClaims, WorkerProcess
from hillinfer.devices.xrt.xclbin import HARDWARE
from hillinfer.drive.files import PAGE_BYTES, round_up
from hillinfer.errors import HillInferWarning, SettingsError, warn_of_loss
from hillinfer.settings import DeviceOptions
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import KernelSpec

SPEC = KernelSpec(64, 2, 1)
MEMORY = 1 << 30
STAND_IN = Path(__file__).parents[1] / "doctor" / "stand_in_pyxrt.py"


def worker_of(folder, fault=""):
    """A worker whose pyxrt is the stand-in."""
    modules = folder / "modules"
    modules.mkdir(exist_ok=True)
    shutil.copy(STAND_IN, modules / "pyxrt.py")
    lead = {
        "PYTHONPATH": str(modules), "TOLD": str(folder / "told"), "FAULT": fault,
        "SHELL_NAME": made_xclbin.PLATFORM,
    }  # fmt: skip
    return WorkerProcess(lead, 1 << 24, 30)


@pytest.fixture
def card(tmp_path):
    """Opens a card of mere memory, with one fault."""
    opened = []

    def of(fault=""):
        worker = worker_of(tmp_path, fault)
        worker.ask("open", 30, xclbin="any", index=0)
        claims = MemoryClaims(tmp_path / "cards", "card", MEMORY)
        device = XrtDevice(SPEC, worker, MEMORY, claims, Deadlines())
        opened.append(DeviceShadows(SPEC, device, 0.0, warn_of_loss))
        return opened[-1]

    yield of
    for shadows in opened:
        shadows.close()


def test_a_card_with_memory_takes_shadows(card):
    shadows = card()
    assert shadows.take(0) is not None
    assert not shadows.lost


def test_a_card_without_p2p_is_told_with_what_to_look_at(card):
    with pytest.warns(HillInferWarning, match="Operation not permitted.*hillinfer doctor"):
        shadows = card("no p2p")
    assert shadows.lost
    assert shadows.take(0) is None


def test_a_card_that_others_have_taken_is_told(card, tmp_path):
    assert MemoryClaims(tmp_path / "cards", "card", MEMORY).claim(MEMORY)
    with pytest.warns(HillInferWarning, match="other processes hold all of its memory"):
        shadows = card()
    assert shadows.lost


def test_two_share_a_card_by_what_fits(card, tmp_path):
    other = MemoryClaims(tmp_path / "cards", "card", MEMORY)
    assert other.claim(MEMORY - (200 << 20))
    shadows = card()
    slots = CHUNK_BYTES // round_up(SPEC.segment_bytes, PAGE_BYTES) * 3
    taken = [shadows.take(number) for number in range(slots + 5)]
    assert sum(one is not None for one in taken) == slots - len(shadows.staging)
    assert not shadows.lost
    # Who was refused asks again when something of its own came back.
    other.release()
    shadows.give(taken[0])
    assert [shadows.take(slots + number) is not None for number in range(2)] == [True, True]


def test_claims_out_of_reach_lose_the_card_and_not_the_run(card, tmp_path):
    shadows = card()
    shutil.rmtree(tmp_path / "cards")
    # A folder cannot be made where a file is.
    (tmp_path / "cards").write_text("")
    slots = CHUNK_BYTES // round_up(SPEC.segment_bytes, PAGE_BYTES)
    with pytest.warns(HillInferWarning, match="memory cannot be shared.*; the host goes on"):
        taken = [shadows.take(number) for number in range(slots + 1)]
    assert taken[0] is not None
    assert taken[-1] is None
    assert shadows.lost


def test_a_card_is_let_go_where_no_claims_can_be_kept(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    image = tmp_path / "kernels.xclbin"
    image.write_bytes(made_xclbin.make(SPEC, mode=HARDWARE).pack())
    worker = worker_of(tmp_path)
    with pytest.raises(SettingsError, match="set XDG_CACHE_HOME"):
        open_xrt(SPEC, Scope.LAYER, DeviceOptions(xclbin=image), start=lambda *given: worker)
    assert not worker.running
    assert not worker.folder.exists()
