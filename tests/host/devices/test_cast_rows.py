# SPDX-License-Identifier: Apache-2.0
"""A device holds rows and casts their keys while it scores: the same output, and no codes here."""

import os
import resource
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
import torch
from device_cases import FlippedRows
from test_made_shadows import WHOLE, Heard, stored_keys
from told_runtime import FailingDevice, Told, same

from hillinfer.errors import HillInferWarning, SettingsError
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.scoring.native import NativeScorer
from hillinfer.settings import Settings
from hillinfer_model.choices import KeyMode, Scope

CAST = {"shadow": "fp16", "device": "csim", "budget": 8 << 20, "attends": False}


def story(told):
    """Prompt, decode, fork, rewind into a full segment, fill it again."""
    told.feed(2300)
    told.feed(1)
    fork = told.runtime.fork(told.sequence)
    told.runtime.truncate(fork, 1500)
    told.feed(1, fork)
    told.feed(700, fork)
    told.feed(1, fork)
    told.feed(1)
    return told.outputs


@pytest.fixture
def tell(tmp_path):
    with ExitStack() as told:
        yield lambda shape=WHOLE, **given: told.enter_context(
            closing(Told(tmp_path, shape=shape, **(CAST | given)))
        )


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What the host alone answers by its INT8 codes, for whole heads and for padded ones."""
    found = {}
    for name, shape in (("whole", WHOLE), ("padded", None)):
        given = {"slots": None, "shape": shape, "shadow": "int8", "budget": 8 << 20}
        with closing(Told(tmp_path_factory.mktemp("cold"), **given)) as told:
            found[name] = story(told)
    return found


# What is told, which answer it has, and whether the device reads rows on the drive by itself.
READINGS = {
    "rows": ({}, "whole", True),
    "rows of KV heads": ({"scope": "kv_head"}, None, True),
    "padded heads": ({"shape": None}, "padded", False),
    "sealed rows": ({"encrypt_cold_pool": "yes"}, "whole", False),
}


@pytest.mark.parametrize("reading", READINGS)
def test_keys_that_a_device_casts_change_no_output(tell, expected, reading, tmp_path_factory):
    given, name, on_drive = READINGS[reading]
    if name is None:
        alone = {"slots": None, "shape": WHOLE, "shadow": "int8", "budget": 8 << 20, **given}
        with closing(Told(tmp_path_factory.mktemp("cold"), **alone)) as told:
            answer = story(told)
    else:
        answer = expected[name]
    told = tell(wrap=Heard, attends=True, **given)
    assert told.spec.key_mode is KeyMode.FP16
    assert same(story(told), answer)
    assert not told.shadows.lost
    # It was given rows of whole segments, and no codes at all.
    assert told.device.made
    assert told.device.written == 0
    counts = told.runtime.statistics()
    assert counts.make_shadow_launches == 0
    assert counts.device_scored_tokens > 0
    taken = sum(size for launch in told.device.made for _, _, size in launch)
    assert counts.device_read_bytes == (taken if on_drive else 0)


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_rows_of_keys_that_end_within_a_beat_are_cast(tell, kv_heads):
    """Of 80 channels and an odd number of heads, half a beat is left: rows begin at beats."""
    shape = ModelShape(
        layers=2, kv_heads=kv_heads, query_heads=6, head_dim=80,
        stored_type=StoredType.BFLOAT16, max_positions=10_000,
    )  # fmt: skip
    told = tell(shape, wrap=Heard)
    answers = []
    # The host alone, with codes of its own.
    for one in (told, tell(shape, slots=None, shadow="int8", device="nvme")):
        one.feed(1300)
        one.feed(1)
        answers.append(one.outputs)
    assert same(*answers)
    # What is cut gets its codes from the device's rows.
    copy = told.runtime.fork(told.sequence)
    told.runtime.truncate(copy, 700)
    told.feed(1, copy)
    assert told.runtime.statistics().device_scored_tokens > 0
    assert not told.shadows.lost


@pytest.fixture
def no_more_files():
    """Return what lets this process open no more files, from when it is called."""
    limits, opened = resource.getrlimit(resource.RLIMIT_NOFILE), []

    def close():
        highest = max(int(one.name) for one in Path("/proc/self/fd").iterdir())
        while not opened or opened[-1] < highest:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened[-1] + 1, limits[1]))

    yield close
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for one in opened:
        os.close(one)


def test_keys_that_cannot_be_handed_over_lose_the_device(tell, expected, no_more_files):
    told = tell(None)
    no_more_files()
    with pytest.warns(HillInferWarning, match="cannot be handed over.*the host goes on scoring"):
        assert same(story(told), expected["padded"])
    assert told.shadows.lost


def test_other_keys_on_the_device_change_the_output(tell, expected):
    assert not same(story(tell(wrap=FlippedRows)), expected["whole"])


@pytest.mark.parametrize("shape", [WHOLE, None], ids=["whole", "padded"])
def test_the_host_keeps_no_codes_of_what_the_device_holds(tell, shape):
    told = tell(shape, wrap=Heard)
    told.feed(3500)
    told.feed(1)
    size = told.spec.segment_tokens
    bases = sorted(base for launch in told.device.made for _, base, _ in launch)
    assert bases == [base for base in range(0, 3 * size, size) for _ in range(2)]
    for number, segment in enumerate(told.sequence.segments[:3]):
        for layer, own in enumerate(segment.layers):
            assert (own.shadow, own.slot, own.resident.tokens) == (None, None, size)
            # Brought back they are what the host would have coded.
            cast, coded = np.zeros((2, told.spec.segment_beats, 64), np.uint8)
            assert told.shadows.read(own.resident, cast)
            keys = torch.cat([*stored_keys(told, layer, number * size, size)])
            NativeScorer(told.spec, Scope.LAYER).encode(keys, own.statistics, coded, 0)
            np.testing.assert_array_equal(cast, coded)


@pytest.mark.parametrize(
    ("name", "kind", "number"),
    [("whole", "make", 0), ("padded", "make", 2), ("padded", "score", 3), ("padded", "part", 2)],
)
def test_a_device_that_is_lost_changes_no_output(tell, expected, name, kind, number):
    shape = WHOLE if name == "whole" else None
    told = tell(shape, wrap=lambda device: FailingDevice(device, kind, number))
    with pytest.warns(HillInferWarning, match="the host goes on scoring"):
        assert same(story(told), expected[name])
    assert told.shadows.lost


def test_what_the_device_has_no_room_for_the_host_scores(tell, expected):
    """Their codes lie in DRAM, or on the drive, as on a plain machine."""
    told = tell(slots=3, limit=2)
    assert same(story(told), expected["whole"])
    counts = told.runtime.statistics()
    assert 0 < counts.device_scored_tokens < counts.scored_tokens
    assert counts.shadow_write_bytes > 0


@pytest.mark.parametrize("device", ["nvme", "core", "pynq"])
def test_devices_that_cast_nothing_are_refused_by_name(device):
    with pytest.raises(SettingsError, match=rf"csim or xrt, or with device={device} --shadow int8"):
        Settings().changed(shadow="fp16", device=device)


@pytest.mark.parametrize("device", ["golden", "csim", "xrt"])
def test_devices_that_cast_are_taken(device):
    chosen = Settings().changed(shadow="fp16", device=device, exact=0.1)
    assert chosen.key_mode is KeyMode.FP16
    # There are no codes that could be attended to.
    assert not chosen.has_coded_tokens
