# SPDX-License-Identifier: Apache-2.0
"""What a rival reads ahead is waited for in its own turn, and not in another system's."""

import time
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from hillinfer.drive.calls import DriveCalls
from hillinfer_bench.decode.measuring import take_steps
from hillinfer_bench.systems.case import BenchSetting, Case
from hillinfer_bench.systems.kv_source import RandomKV
from hillinfer_bench.systems.shapes import SHAPES
from hillinfer_bench.systems.table import make_system

CONTEXT, STEPS, TURN = 16_384, 4, 2
STREAMING = ["full-drive", "h2o-all-keys"]


class _Model:
    """Has the cache's rival do a step, and leaves what it reads ahead under way."""

    def __init__(self, systems):
        self._shape = systems.shape
        self._drives = dict(zip((one.cache for one in systems.opened), systems.drives, strict=True))

    def __call__(self, past_key_values, **_):
        rival, shape = past_key_values.rival, self._shape
        one = torch.zeros(shape.kv_heads, 1, shape.head_dim, dtype=rival.layout.stored_type)
        drive = self._drives[past_key_values]
        drive.needed.set()
        rival.begin_step()
        for layer in range(shape.layers):
            rival.append(layer, 0, one, one)
            rival.attend(layer, 0, torch.zeros(shape.query_heads, 1, shape.head_dim), 1.0)
        drive.needed.clear()
        return SimpleNamespace(logits=torch.zeros(1, 1, 4))


class SlowReads(DriveCalls):
    """A drive that, while it is slow, ends a read once somebody needs it.

    A read that took a fixed time would be over before the next turn where this process is held up.
    """

    is_slow = False
    reading = 0

    def __init__(self):
        super().__init__()
        self.needed = Event()

    def read_many(self, *given):
        if not self.is_slow:
            return super().read_many(*given)
        self.reading += 1
        try:
            time.sleep(0.02)
            assert self.needed.wait(60)
            return super().read_many(*given)
        finally:
            self.reading -= 1


class Waiting:
    """A system whose reads are needed as soon as somebody waits for them."""

    def __init__(self, system, drive):
        self._system, self._drive = system, drive

    def __getattr__(self, name):
        return getattr(self._system, name)

    def settle(self):
        self._drive.needed.set()
        self._system.settle()


class Unsettled(Waiting):
    """A system that waits for nothing after its turn."""

    def settle(self):
        pass


@pytest.fixture
def systems(cold_dir):
    """Both rivals that stream, filled, on a drive that is slow from now on."""
    shape = SHAPES["tiny"].kv_shape(CONTEXT + STEPS, torch.float32)
    case = Case("tiny", CONTEXT, tuple(STREAMING), steps=STEPS, warm_up=0)
    # More than buffers, less than keys.
    budget = 5 << 19
    drives = [SlowReads() for _ in STREAMING]
    settings = [
        BenchSetting(case, None, shape, budget, cold_dir, None, calls=drive) for drive in drives
    ]
    source = RandomKV(shape, CONTEXT, 1)
    opened = [
        make_system(name).open(setting) for name, setting in zip(STREAMING, settings, strict=True)
    ]
    for system in opened:
        for chunk in source.chunks():
            system.fill(chunk)
    for drive in drives:
        drive.is_slow = True
    yield SimpleNamespace(opened=opened, drives=drives, shape=shape, source=source)
    for system, drive in zip(opened, drives, strict=True):
        drive.needed.set()
        system.close()


def leaks(systems, kind):
    """Say whether a turn began while the other system still read."""
    opened = list(map(kind, systems.opened, systems.drives))
    noted = []

    def between():
        noted.append(any(drive.reading for drive in systems.drives))
        for drive in systems.drives:
            drive.needed.set()

    take_steps(_Model(systems), opened, systems.source, 0, STEPS, TURN, between=between)
    assert len(noted) > len(opened)
    return any(noted)


def test_no_system_reads_ahead_in_anothers_turn(systems):
    assert not leaks(systems, Waiting)


def test_without_waiting_it_would(systems):
    assert leaks(systems, Unsettled)
