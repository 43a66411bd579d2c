# SPDX-License-Identifier: Apache-2.0
"""A session goes from the drive to a device and back, and no bit of an answer changes."""

import shutil
import sys
import warnings
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from generation_runs import SETTINGS, attached
from session_runs import IDS, PROMPT, TINY, answer, feed, seal_checksums

from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.devices.opening import warn_of_loss
from hillinfer.devices.slots import LaunchDevice, RowsDevice
from hillinfer.engine.budget_plan import staging_bytes
from hillinfer.errors import HillInferWarning
from hillinfer.model_shape import ModelShape
from hillinfer.scoring.native import NativeScorer
from hillinfer.sessions.opening import SavedSession
from hillinfer.settings import Settings
from hillinfer_model.choices import KeyMode

sys.path.insert(0, str(Path(__file__).parent.parent / "devices"))
from told_runtime import FailingDevice, GoldenLaunches, Told

SELECTION = {"shadow": "int8", "alpha": 0.1}


class Loads(LaunchDevice):
    """Counts what it loads from files."""

    loads = 0

    def load(self, *given):
        self.loads += 1
        super().load(*given)


@pytest.fixture
def devices():
    """A device `csim` that scores with the golden model: what makes and holds it."""
    return Devices()


class Devices:
    """Opens devices of so many slots and lists them."""

    slots = 100
    flipped = None

    def __init__(self):
        self.opened = []
        self.wrap = lambda device: device

    @property
    def table(self):
        return {"csim": self.open}

    def open(self, spec, scope, options, recorder):
        kind = RowsDevice if spec.key_mode is KeyMode.FP16 else Loads
        device = kind(spec, GoldenLaunches(self.flipped), self.slots)
        self.opened.append(device)
        shadows = DeviceShadows(spec, self.wrap(device), options.beta, warn_of_loss)
        return DeviceScorer(NativeScorer(spec, scope), shadows, recorder)


def tight():
    """Return settings with which a cache of unknown length leaves no full shadow any DRAM.

    Much is read ahead, so that half the budget holds the buffers of streaming, too.
    """
    shape, ahead = ModelShape.from_config(TINY.config(), TINY.dtype), {"prefetch_blocks": 1024}
    staging = staging_bytes(shape, Settings().changed(**(SETTINGS | SELECTION | ahead)))
    return {**ahead, "dram_budget": 2 * staging}


def save(model, cold_dir, device, place, devices=None, **changes):
    """Save a session that a device helped to make; return its own answer."""
    table = devices and devices.table
    with attached(model, cold_dir, table, device=device, **(SELECTION | changes)) as hill:
        cache = hill.new_cache()
        feed(model, cache, IDS)
        # A step that scores, so that statistics of the open segment are taken.
        feed(model, cache, PROMPT[:, IDS.shape[1] :][:, :1])
        cache.save_session(place)
        found = answer(model, cache)
        cache.close()
    return found


def resume(model, cold_dir, device, place, devices, **changes):
    """Return the answer of a resumed session, and its statistics."""
    chosen = SELECTION | changes
    with attached(model, cold_dir, devices.table, device=device, **chosen) as hill:
        cache = hill.load_session(place)
        found = answer(model, cache)
        statistics = cache.statistics()
        cache.close()
    assert statistics.dram_peak_bytes <= statistics.dram_budget_bytes
    return found, statistics


@pytest.fixture(scope="module")
def plain(tiny_model, tmp_path_factory):
    """A session of the plain drive, and its answer."""
    place = tmp_path_factory.mktemp("plain") / "session"
    return place, save(tiny_model, tmp_path_factory.mktemp("cold"), "nvme", place)


@pytest.mark.parametrize(
    ("first", "second"), [("nvme", "csim"), ("csim", "nvme"), ("csim", "csim")]
)
def test_sessions_go_between_drive_and_device(
    tiny_model, cold_dir, tmp_path, devices, plain, first, second
):
    _, expected = plain
    place = tmp_path / "session"
    assert torch.equal(save(tiny_model, cold_dir, first, place, devices), expected)
    found, statistics = resume(tiny_model, cold_dir, second, place, devices)
    assert torch.equal(found, expected)
    assert (statistics.device_scored_tokens > 0) == (second == "csim")


def test_a_session_that_a_device_made_holds_the_same_shadow(
    tiny_model, cold_dir, tmp_path, devices, plain
):
    save(tiny_model, cold_dir, "csim", tmp_path / "session", devices)
    for name in ("shadow.bin", "statistics.bin", "coded.bin"):
        assert (tmp_path / "session" / name).read_bytes() == (plain[0] / name).read_bytes()


def test_a_session_of_keys_that_a_device_casts_is_one_of_int8(
    tiny_model, cold_dir, tmp_path, devices, plain
):
    cast, place = {"shadow": "fp16"}, tmp_path / "session"
    assert torch.equal(save(tiny_model, cold_dir, "csim", place, devices, **cast), plain[1])
    for name in ("shadow.bin", "statistics.bin", "coded.bin"):
        assert (place / name).read_bytes() == (plain[0] / name).read_bytes()
    # Each goes on as the other.
    for device, own, changes in (("nvme", place, {}), ("csim", plain[0], cast)):
        found, statistics = resume(tiny_model, cold_dir, device, own, devices, **changes)
        assert torch.equal(found, plain[1])
        assert (statistics.device_scored_tokens > 0) == (device == "csim")


def test_a_session_of_cast_keys_fits_a_tight_budget(tiny_model, cold_dir, devices, plain):
    """Segments whose codes DRAM has no room for stay on the drive, where the host scores them."""
    place, expected = plain
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = {"shadow": "fp16", **tight()}
        found, statistics = resume(tiny_model, cold_dir, "csim", place, devices, **given)
    assert torch.equal(found, expected)
    assert statistics.shadow_read_bytes > 0


@pytest.mark.parametrize("tokens", [2112, 1500])
def test_segments_that_wait_for_rows_give_their_room_back(cold_dir, plain, tokens):
    """However often a session is resumed, the device gets what it got the first time."""
    shape, budget = ModelShape.from_config(TINY.config(), TINY.dtype), 16 << 20
    given = {"shape": shape, "shadow": "fp16", "device": "csim", "budget": budget, "limit": 4}
    scored = [0]
    with closing(Told(cold_dir, **given)) as told:
        for fed in (True, False, True, True):
            with SavedSession(plain[0]) as saved:
                sequence = told.runtime.resume(saved, tokens)
            # One that is let go of before a step still waits.
            if fed:
                told.feed(1, sequence)
                scored.append(told.runtime.statistics().device_scored_tokens)
            told.runtime.release(sequence)
    assert scored == [scored[1] * count for count in range(4)]
    assert scored[1] > 0


# With room for all, for some and for none, beside as many slots to load into.
@pytest.mark.parametrize(("slots", "loads"), [(100, False), (6, True), (4, True), (1, False)])
def test_a_tight_budget_does_not_leave_the_device_idle(
    tiny_model, cold_dir, devices, plain, slots, loads
):
    place, expected = plain
    devices.slots = slots
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, statistics = resume(tiny_model, cold_dir, "csim", place, devices, **tight())
    assert torch.equal(found, expected)
    assert bool(devices.opened[-1].loads) == loads
    # Two full segments, in each of two layers and at each of ten steps, wherever they lie.
    full = 2 * 2 * 1024 * 9
    if slots > 1:
        assert statistics.device_scored_tokens >= full


@pytest.mark.parametrize(("kind", "number"), [("write", 1), ("load", 0), ("load", 5), ("part", 7)])
def test_a_device_lost_while_it_serves_a_session_changes_nothing(
    tiny_model, cold_dir, devices, plain, kind, number
):
    place, expected = plain
    devices.slots = 4
    devices.wrap = lambda device: FailingDevice(device, kind, number)
    with pytest.warns(HillInferWarning, match=f"{kind} failed; the host goes on"):
        found, _ = resume(tiny_model, cold_dir, "csim", place, devices, **tight())
    assert torch.equal(found, expected)


def test_a_flipped_score_shows(tiny_model, cold_dir, devices, plain):
    place, expected = plain
    devices.flipped = 3
    found, _ = resume(tiny_model, cold_dir, "csim", place, devices)
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("slots", [100, 4])
def test_flipped_codes_of_a_session_show_on_the_device(
    tiny_model, cold_dir, tmp_path, devices, plain, slots
):
    place, expected = plain
    shutil.copytree(place, tmp_path / "session")
    shadow = np.fromfile(tmp_path / "session" / "shadow.bin", np.uint8)
    shadow[0::3] ^= 0x11
    (tmp_path / "session" / "shadow.bin").write_bytes(shadow.tobytes())
    seal_checksums(tmp_path / "session")
    devices.slots = slots
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, _ = resume(tiny_model, cold_dir, "csim", tmp_path / "session", devices, **tight())
    assert not torch.equal(found, expected)
