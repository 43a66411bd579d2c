# SPDX-License-Identifier: Apache-2.0
"""A device makes shadows of rows on the drive: the same bytes and output."""

from contextlib import ExitStack, closing

import numpy as np
import pytest
import torch
from told_runtime import FailingDevice, LookedAfter, Told, long_story, same

from hillinfer.devices.device import DeviceSegment, StoredShadow
from hillinfer.devices.opening import CoreDevice
from hillinfer.drive.regions import Placement
from hillinfer.errors import HillInferWarning
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.scoring.native import NativeScorer
from hillinfer.shadow.segments import RowPlaces
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec
from hillinfer_model.launch_shape import query_beats

# Heads that a kernel reads from rows as they are.
WHOLE = ModelShape(
    layers=2, kv_heads=2, query_heads=4, head_dim=64, stored_type=StoredType.FLOAT16,
    max_positions=10_000,
)  # fmt: skip


class Heard(LookedAfter):
    """Keeps what it is given of shadows: beats, or rows to make them of."""

    def __init__(self, device):
        super().__init__(device)
        self.made, self.written = [], 0

    def make(self, rows):
        self.made.append([(one.slot, one.base_position, one.byte_count) for one in rows])
        return self.device.make(rows)

    def write(self, slot, first_beat, beats):
        self.written += len(beats)
        self.device.write(slot, first_beat, beats)


class Wrong(LookedAfter):
    """Leaves zeros in the codes of what it makes, behind the exponents of two KV heads."""

    def make(self, rows):
        done = self.device.make(rows)
        for one in rows:
            self.device.write(one.slot, 2, np.zeros((16, 64), np.uint8))
        return done


@pytest.fixture
def tell(tmp_path):
    with ExitStack() as told:
        yield lambda shape=WHOLE, attends=False, **given: told.enter_context(
            closing(Told(tmp_path, shape=shape, attends=attends, **given))
        )


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    with closing(Told(tmp_path_factory.mktemp("cold"), slots=None, shape=WHOLE)) as told:
        return long_story(told)


def test_what_a_device_makes_of_rows_changes_no_output(tell, expected):
    told = tell(wrap=Heard, makes=True, attends=True)
    assert same(long_story(told), expected)
    assert told.shadows.making_launches == len(told.device.made) > 0
    sizes = {size for launch in told.device.made for _, _, size in launch}
    assert sizes == {told.spec.segment_tokens * WHOLE.row_bytes}
    assert told.shadows.read_bytes == sum(
        size for launch in told.device.made for _, _, size in launch
    )
    statistics = told.runtime.statistics()
    assert statistics.make_shadow_launches == len(told.device.made)
    assert statistics.device_read_bytes == told.shadows.read_bytes
    assert not told.shadows.lost


def test_shadows_made_wrong_change_the_output(tell, expected):
    assert not same(long_story(tell(wrap=Wrong, makes=True)), expected)


def test_the_device_makes_what_the_host_codes(tell):
    told = tell(wrap=Heard, makes=True)
    told.feed(5000)
    told.feed(1)
    size = told.spec.segment_tokens
    # Of each layer all full segments; several in one launch.
    assert sorted(base for launch in told.device.made for _, base, _ in launch) == [
        base for base in range(0, 4 * size, size) for _ in range(2)
    ]
    assert max(map(len, told.device.made)) > 1
    # What is left of the last one is sent.
    assert told.device.written == 2 * ((5001 - 4 * size) // GROUP_TOKENS) * told.spec.group_beats
    for number, segment in enumerate(told.sequence.segments[:4]):
        for layer, own in enumerate(segment.layers):
            assert own.resident.tokens == size
            made, coded = np.zeros((2, told.spec.segment_beats, 64), np.uint8)
            assert told.shadows.read(own.resident, made)
            keys = torch.cat([*stored_keys(told, layer, number * size, size)])
            NativeScorer(told.spec, Scope.LAYER).encode(keys, own.statistics, coded, 0)
            np.testing.assert_array_equal(made, coded)


def stored_keys(told, layer, start, tokens):
    parts = told.runtime.parts
    for rows in parts.gather.from_drive(layer, told.sequence, start, start + tokens):
        yield parts.layout.keys(torch.from_numpy(rows)).clone()


def test_rows_lie_where_the_drive_has_them():
    """Groups in a row are one piece; those in a file of others are not found."""
    asked, placement, coming = [], Placement(2), []

    def settle(*given):
        asked.append(given)
        for group in coming:
            placement.place(slice(1, 2), np.array([group]), 5, np.zeros((1, 1), np.int64))

    places = RowPlaces(placement, lambda layer: 10 + layer, settle, 4096)
    groups = np.array([3, 4, 7, 8, 9, 2])
    assert places.of(1, groups) == [(11, 12288, 8192), (11, 28672, 12288), (11, 8192, 4096)]
    ((layer, settled),) = asked
    assert layer == 1
    np.testing.assert_array_equal(settled, groups)
    # One that was still to be written, and is written to another file.
    coming.append(8)
    assert places.of(1, groups) is None
    assert places.of(0, groups) is not None


class AheadWatched(LookedAfter):
    """Keeps what is scored and what is loaded meanwhile, launch by launch."""

    def __init__(self, device):
        super().__init__(device)
        self.scored, self.ahead = [], []

    def score(self, scope, queries, segments, ahead):
        self.scored.append({one.slot for one in segments})
        self.ahead.append({one.slot for one in ahead})
        return self.device.score(scope, queries, segments, ahead)


def test_what_comes_from_the_drive_is_loaded_beside_scoring(tell, expected):
    told = tell(wrap=AheadWatched, slots=4, limit=0)
    assert same(long_story(told), expected)
    assert any(told.device.ahead)
    for scored, ahead in zip(told.device.scored, told.device.ahead, strict=True):
        assert not scored & ahead
    # What was loaded ahead is what is scored next.
    for ahead, scored in zip(told.device.ahead, told.device.scored[1:], strict=False):
        assert not ahead or ahead == scored


def test_a_core_loads_beside_scoring(tmp_path):
    spec = KernelSpec(64, 2, 1, segment_tokens=512)
    shadow = np.random.default_rng(0).integers(0, 256, (spec.segment_beats, 64), np.uint8)
    path = tmp_path / "shadows"
    path.write_bytes(shadow.tobytes())
    queries = np.zeros((query_beats(spec), 64), np.uint8)
    with closing(CoreDevice(spec)) as device, path.open("rb") as file:
        ahead = [StoredShadow(1, file.fileno(), 0)]
        own = [DeviceSegment(0, 0, 512)]
        (part,) = device.score(Scope.LAYER, queries, own, ahead)
        assert part.tuples.shape == (1, 512)
        into = np.zeros_like(shadow)
        device.read(1, into)
    np.testing.assert_array_equal(into, shadow)


class WithoutRoom(Heard):
    """Has no room for rows."""

    def make(self, rows):
        self.made.append(rows)
        return False


def test_a_device_without_room_for_rows_is_sent_shadows(tell, expected):
    told = tell(wrap=WithoutRoom, makes=True)
    assert same(long_story(told), expected)
    assert told.device.made
    assert told.shadows.making_launches == told.shadows.read_bytes == 0
    assert not told.shadows.lost


@pytest.mark.parametrize("number", [0, 1])
def test_a_device_that_is_lost_while_it_makes_shadows_changes_no_output(tell, expected, number):
    told = tell(wrap=lambda device: FailingDevice(device, "make", number), makes=True)
    with pytest.warns(HillInferWarning, match="the host goes on scoring"):
        assert same(long_story(told), expected)
    assert told.shadows.lost


@pytest.mark.parametrize("reason", ["padded heads", "sealed rows", "no kernel"])
def test_where_rows_suit_no_kernel_the_host_sends_shadows(tell, reason):
    given = {
        "padded heads": {"shape": None, "makes": True},
        "sealed rows": {"makes": True, "encrypt_cold_pool": "yes"},
        "no kernel": {},
    }[reason]
    told = tell(wrap=Heard, **given)
    told.feed(2500)
    told.feed(1)
    assert told.device.made == []
    assert told.device.written == 2 * (2501 // GROUP_TOKENS) * told.spec.group_beats
