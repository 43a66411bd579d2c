# SPDX-License-Identifier: Apache-2.0
"""What a rival reads ahead is waited for in its own turn, and not in another system's."""

import time
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
    """Has the cache's rival do a step, and notes whether another system reads meanwhile."""

    def __init__(self, systems):
        self._shape = systems.shape
        self._drives = list(zip(systems.opened, systems.drives, strict=True))
        self.leaked = []

    def __call__(self, past_key_values, **_):
        others = [drive for one, drive in self._drives if one.cache is not past_key_values]
        self.leaked += [drive.reading > 0 for drive in others if drive.slow_reads]
        rival, shape = past_key_values.rival, self._shape
        one = torch.zeros(shape.kv_heads, 1, shape.head_dim, dtype=rival.layout.stored_type)
        rival.begin_step()
        for layer in range(shape.layers):
            rival.append(layer, 0, one, one)
            rival.attend(layer, 0, torch.zeros(shape.query_heads, 1, shape.head_dim), 1.0)
        return SimpleNamespace(logits=torch.zeros(1, 1, 4))


class SlowReads(DriveCalls):
    """A drive that takes its time to read while it is slow."""

    is_slow = False
    slow_reads = reading = 0

    def read_many(self, *given):
        if not self.is_slow:
            return super().read_many(*given)
        self.slow_reads += 1
        self.reading += 1
        try:
            time.sleep(0.02)
            return super().read_many(*given)
        finally:
            self.reading -= 1


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
    for system in opened:
        system.close()


def leaks(systems):
    model = _Model(systems)
    take_steps(model, systems.opened, systems.source, 0, STEPS, TURN)
    assert model.leaked
    return any(model.leaked)


def test_no_system_reads_ahead_in_anothers_turn(systems):
    assert not leaks(systems)


class Unsettled:
    """A system that waits for nothing after its turn."""

    def __init__(self, system):
        self._system = system

    def __getattr__(self, name):
        return getattr(self._system, name)

    def settle(self):
        pass


def test_without_waiting_it_would(systems):
    systems.opened[:] = map(Unsettled, systems.opened)
    assert leaks(systems)
