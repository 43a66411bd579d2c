# SPDX-License-Identifier: Apache-2.0
"""A small runtime over a device that scores with the golden model, and stories to tell it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.devices.opening import CoreDevice
from hillinfer.devices.slots import LaunchDevice, RowsDevice
from hillinfer.engine.budget_plan import kernel_spec, staging_bytes
from hillinfer.engine.runtime import Runtime
from hillinfer.errors import DeviceError, warn_of_loss
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.scoring.native import NativeScorer
from hillinfer.settings import Settings
from hillinfer.shadow.store import shadow_bytes
from hillinfer.trace.recorder import SILENT
from hillinfer_model.choices import KeyMode
from hillinfer_model.golden_launch import run_score_launch, run_shadow_launch

SHAPE = ModelShape(
    layers=2, kv_heads=2, query_heads=4, head_dim=6, stored_type=StoredType.FLOAT16,
    max_positions=10_000,
)  # fmt: skip
DTYPES = {StoredType.FLOAT16: torch.float16, StoredType.BFLOAT16: torch.bfloat16}


def told_settings(**changes):
    return Settings().changed(**({"block_rows": 100, "alpha": 0.1, "kept_recent": 4} | changes))


@dataclass
class GoldenLaunches:
    """The golden model as an execution; flips a bit of the given byte of what a launch leaves."""

    flipped_byte: int | None = None

    def score(self, spec, launch):
        result = run_score_launch(spec, launch)
        if self.flipped_byte is not None:
            result.output[5, self.flipped_byte] ^= 0x40
        return result

    def make_shadow(self, spec, launch):
        return run_shadow_launch(spec, launch)

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

    @property
    def rows_together(self):
        return self._device.rows_together

    @property
    def queries_together(self):
        return self._device.queries_together

    def make(self, *given):
        self._count("make")
        return self._device.make(*given)

    def score(self, scope, queries, segments, ahead):
        self._count("score")
        if ahead:
            self._count("load")
        return self._scored(self._device.score(scope, queries, segments, ahead))

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


class LookedAfter:
    """A device all the same; subclasses change or count what they are about."""

    def __init__(self, device):
        self.device = device

    def __getattr__(self, name):
        return getattr(self.device, name)


class CountingLoads(LookedAfter):
    """Counts how often it is given shadows from the drive."""

    loads = 0

    def load(self, *given):
        self.loads += 1
        self.device.load(*given)

    def score(self, scope, queries, segments, ahead):
        self.loads += bool(ahead)
        return self.device.score(scope, queries, segments, ahead)


class Forgetful(LookedAfter):
    """Keeps other bits than those it is given."""

    def write(self, slot, first_beat, beats):
        wrong = beats.copy()
        # Behind the exponents of two KV heads.
        wrong[2:] ^= 0x11
        self.device.write(slot, first_beat, wrong)


class Told:
    """A runtime over a device, with what its attention gave to single tokens.

    Prompts are only coded where nothing `attends` to them: what that would give is not looked at,
    and takes most of a story's time.
    """

    def __init__(
        self, cold_dir, wrap=lambda device: device, slots=100, flip=None, limit=100, budget=None,
        host=NativeScorer, core=False, recorder=SILENT, shape=None, makes=False,
        attends=True, **changes,
    ):  # fmt: skip
        self.shape = shape = shape or SHAPE
        settings = told_settings(**changes)
        spec = kernel_spec(shape, settings)
        self.spec = spec
        scorer = None
        if slots is not None:
            golden = GoldenLaunches(flip)
            if core:
                device = CoreDevice(spec)
            elif spec.key_mode is KeyMode.FP16:
                device = RowsDevice(spec, golden, slots)
            else:
                device = LaunchDevice(spec, golden, slots, golden if makes else None)
            self.device = device = wrap(device)
            self.shadows = DeviceShadows(spec, device, settings.beta, warn_of_loss)
            scorer = DeviceScorer(host(spec, settings.scope), self.shadows, recorder)
        self.runtime = Runtime(
            shape, settings, budget or staging_bytes(shape, settings) + (2 << 20), cold_dir,
            scorer=scorer,
            shadow_limit_bytes=limit * shadow_bytes(spec),
        )  # fmt: skip
        self.sequence = self.runtime.open_sequence()
        self.generator = torch.Generator().manual_seed(0)
        self.attends = attends
        self.outputs = []

    def close(self):
        self.runtime.close()

    def feed(self, tokens, sequence=None):
        sequence = sequence or self.sequence
        shape = self.shape
        heads, width, dtype = shape.kv_heads, shape.head_dim, DTYPES[shape.stored_type]
        states = torch.randn(2, 2, heads, tokens, width, generator=self.generator).to(dtype)
        query = torch.randn(2, shape.query_heads, tokens, width, generator=self.generator).to(dtype)
        self.runtime.begin_step()
        for layer in range(2):
            keys, values = states[0, layer], states[1, layer]
            self.runtime.append(layer, sequence, keys, values)
            if tokens > 1 and self.attends:
                self.runtime.attend_dense(layer, sequence, query[layer], keys, values, 0.4)
            elif tokens > 1:
                self.runtime.code_full_segments(layer, sequence, keys, values)
            else:
                self.outputs.append(
                    self.runtime.attend_selected(layer, sequence, query[layer], keys, 0.4).clone()
                )
        sequence.token_ids.extend([0] * tokens)


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
