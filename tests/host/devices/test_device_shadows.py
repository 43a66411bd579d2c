# SPDX-License-Identifier: Apache-2.0
"""What a device holds and scores changes no token: not its share, its room, nor its loss."""

import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.devices.errors import DeviceError
from hillinfer.devices.launch_device import LaunchDevice
from hillinfer.devices.loss_warning import warn_of_loss
from hillinfer.errors import HillInferWarning
from hillinfer.hie.torch_scorer import TorchScorer
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.pools.budget_plan import kernel_spec, staging_bytes
from hillinfer.runtime import Runtime
from hillinfer.settings import Settings
from hillinfer.storage.shadow_store import shadow_bytes
from hillinfer_model.choices import Rule, Scope
from hillinfer_model.golden_launch import run_score_launch

SHAPE = ModelShape(
    layers=2, kv_heads=2, query_heads=4, head_dim=6, stored_type=StoredType.FLOAT16,
    max_positions=10_000,
)  # fmt: skip


@dataclass
class GoldenLaunches:
    """The golden model as an execution; flips a bit of the given byte of what a launch leaves."""

    flipped_byte: int | None = None

    def score(self, spec, launch):
        result = run_score_launch(spec, launch)
        if self.flipped_byte is not None:
            result.output[5, self.flipped_byte] ^= 0x40
        return result

    def close(self):
        pass


SCORE_BYTE, POSITION_BYTE = 3, 0


class FailingDevice:
    """A device that fails at its call of some number, for one kind of call."""

    def __init__(self, device, kind, number):
        self._device = device
        self._kind = kind
        self._left = number
        self.closed = False
        self.slots = device.slots

    def has_room(self, slot):
        return self._device.has_room(slot)

    def write(self, *given):
        self._count("write")
        self._device.write(*given)

    def load(self, *given):
        self._count("load")
        self._device.load(*given)

    def read(self, *given):
        self._count("read")
        self._device.read(*given)

    def score(self, *given):
        self._count("score")
        return self._scored(self._device.score(*given))

    def close(self):
        self.closed = True

    def _scored(self, parts):
        for part in parts:
            self._count("part")
            yield part

    def _count(self, kind):
        assert not self.closed, "a lost device is left alone"
        if kind == self._kind:
            self._left -= 1
            if self._left < 0:
                raise DeviceError(f"{kind} failed")


class Told:
    """A runtime over a device, with what its attention gave."""

    def __init__(
        self, cold_dir, wrap=lambda device: device, slots=100, flip=None, limit=100, **changes
    ):
        settings = Settings().changed(block_rows=100, alpha=0.1, kept_recent=4, **changes)
        spec = kernel_spec(SHAPE, settings)
        self.spec = spec
        scorer = None
        if slots is not None:
            device = wrap(LaunchDevice(spec, GoldenLaunches(flip), slots))
            self.shadows = DeviceShadows(spec, device, settings.beta, warn_of_loss)
            scorer = DeviceScorer(TorchScorer(spec, settings.scope), self.shadows)
        budget = staging_bytes(SHAPE, settings) + (2 << 20)
        self.runtime = Runtime(
            SHAPE, settings, budget, cold_dir, scorer=scorer,
            shadow_limit_bytes=limit * shadow_bytes(spec),
        )  # fmt: skip
        self.sequence = self.runtime.open_sequence()
        self.generator = torch.Generator().manual_seed(0)
        self.outputs = []

    def feed(self, tokens, sequence=None):
        sequence = sequence or self.sequence
        states = torch.randn(2, 2, 2, tokens, 6, generator=self.generator).half()
        query = torch.randn(2, 4, tokens, 6, generator=self.generator).half()
        self.runtime.begin_step()
        for layer in range(2):
            keys, values = states[0, layer], states[1, layer]
            self.runtime.append(layer, sequence, keys, values)
            if tokens > 1:
                self.runtime.attend_dense(layer, sequence, query[layer], keys, values, 0.4)
            else:
                self.outputs.append(
                    self.runtime.attend_selected(layer, sequence, query[layer], keys, 0.4).clone()
                )
        sequence.token_ids.extend([0] * tokens)


@pytest.fixture
def tell(cold_dir):
    made = []

    def make(**given):
        made.append(Told(cold_dir, **given))
        return made[-1]

    yield make
    for one in made:
        one.runtime.close()


def long_story(told):
    """Prompt, decode over the end of a segment, fork, rewind into full segments, more tokens."""
    told.feed(2500)
    told.feed(1)
    told.feed(570)
    for _ in range(3):
        told.feed(1)
    fork = told.runtime.fork(told.sequence)
    told.feed(1, fork)
    told.runtime.truncate(fork, 1500)
    told.feed(1, fork)
    told.feed(800, fork)
    told.feed(1, fork)
    told.runtime.truncate(told.sequence, 2048)
    told.feed(1)
    told.runtime.release(fork)
    told.feed(1100)
    told.feed(1)
    told.feed(1)
    return told.outputs


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    kept = {}

    def of(**changes):
        key = tuple(sorted(changes.items()))
        if key not in kept:
            told = Told(tmp_path_factory.mktemp("cold"), slots=None, **changes)
            kept[key] = long_story(told)
            told.runtime.close()
        return kept[key]

    return of


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("scope", Scope)
def test_a_device_changes_no_output(tell, expected, rule, scope):
    told = tell(rule=rule, scope=scope)
    assert same(long_story(told), expected(rule=rule, scope=scope))
    assert told.shadows.launches == len(told.outputs)
    assert not told.shadows.lost


def test_a_flipped_score_changes_the_output(tell, expected):
    told = tell(flip=SCORE_BYTE)
    assert not same(long_story(told), expected())


@pytest.mark.parametrize("beta", [0.3, 1.0, 50.0])
@pytest.mark.parametrize("slots", [100, 3, 1])
def test_neither_its_share_nor_its_room_changes_the_output(tell, expected, beta, slots):
    told = tell(beta=beta, slots=slots)
    assert same(long_story(told), expected())
    if beta == 50.0:
        assert told.shadows.launches == 0
    else:
        assert told.shadows.launches > 0


@pytest.mark.parametrize("slots", [1, 2, 3, 6])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_shadows_that_do_not_fit_on_the_device_are_streamed_to_it(tell, expected, slots, beta):
    told = tell(slots=slots, limit=0, beta=beta)
    loads = []
    load = told.shadows._device.load

    def counted(*given):
        loads.append(given)
        load(*given)

    told.shadows._device.load = counted
    assert same(long_story(told), expected())
    # Two layers of three segments, of which the open one is always resident where it can be.
    assert bool(loads) == (slots in (2, 3, 6)), loads
    told.runtime.release(told.sequence)
    assert told.runtime._accountant.held()["shadow"] == 0
    assert told.runtime._shadow._memory._full_bytes == 0


@pytest.mark.parametrize("number", [0, 1, 5])
def test_a_device_that_cannot_load_is_replaced(tell, expected, number):
    told = tell(wrap=lambda device: FailingDevice(device, "load", number), slots=2, limit=0)
    with pytest.warns(HillInferWarning, match="load failed; the host goes on"):
        outputs = long_story(told)
    assert same(outputs, expected())


def test_the_device_scores_every_full_group_and_the_host_keeps_the_probes(tell):
    told = tell()
    told.feed(2500)
    told.feed(1)
    assert told.shadows.scored_tokens == 2 * (2501 // 64 * 64)
    told.feed(400)
    told.feed(1)
    held = [[one.shadow is not None for one in each.layers] for each in told.sequence.segments]
    # The newest 256 of 2,902 tokens lie in the open segment.
    assert held == [[False] * 2, [False] * 2, [True] * 2]
    probes = told.shadows.probe_bytes
    room = told.runtime._accountant.held()["shadow"]
    segment = told.spec.segment_bytes
    assert room - 2 * (3 * probes) < 2 * (segment + 4096)


def test_memory_and_slots_are_given_back(tell):
    told = tell()
    long_story(told)
    told.runtime.release(told.sequence)
    assert told.runtime._accountant.held()["shadow"] == 0
    assert told.runtime._shadow._memory._full_bytes == 0
    taken = range(told.shadows.staging.stop, told.shadows._fresh)
    assert sorted(told.shadows._free) == list(taken)
    assert taken


@pytest.mark.parametrize(
    ("kind", "number"),
    [("write", 0), ("write", 1), ("write", 7), ("write", 12), ("read", 0), ("read", 1),
     ("score", 0), ("score", 1), ("score", 9), ("part", 0), ("part", 1), ("part", 7),
     ("part", 20)],
)  # fmt: skip
def test_a_device_that_fails_is_reported_and_no_output_changes(tell, expected, kind, number):
    told = tell(wrap=lambda device: FailingDevice(device, kind, number))
    with pytest.warns(HillInferWarning, match=f"{kind} failed; the host goes on"):
        outputs = long_story(told)
    assert same(outputs, expected())
    assert told.shadows.lost
    assert told.shadows._device.closed
    told.runtime.release(told.sequence)
    assert told.runtime._accountant.held()["shadow"] == 0
    assert told.runtime._shadow._memory._full_bytes == 0


def test_a_lost_shadow_is_the_same_when_it_is_coded_again(tell):
    told = tell()
    told.feed(2500)
    told.feed(1)
    before = [
        [one.shadow.copy() for one in told.runtime._shadow.shadows(layer, told.sequence)]
        for layer in range(2)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told.shadows.lose(DeviceError("gone"))
    for layer in range(2):
        after = told.runtime._shadow.shadows(layer, told.sequence)
        for one, other in zip(after, before[layer], strict=True):
            beats = one.tokens // 64 * told.spec.group_beats
            np.testing.assert_array_equal(one.shadow[:beats], other[:beats])


def test_a_device_that_leaves_no_scores_is_replaced(tell, expected):
    told = tell(flip=POSITION_BYTE)
    with pytest.warns(HillInferWarning, match="left no scores of tokens 0 to.* the host goes on"):
        outputs = long_story(told)
    assert same(outputs, expected())
    assert told.shadows.lost


def test_a_flipped_bit_on_the_device_shows(tell, expected):
    told = tell()
    write = told.shadows._device.write

    def flipped(slot, first_beat, beats):
        wrong = beats.copy()
        wrong[told.spec.kv_heads :, :] ^= 0x11
        write(slot, first_beat, wrong)

    told.shadows._device.write = flipped
    assert not same(long_story(told), expected())
