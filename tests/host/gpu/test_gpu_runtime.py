# SPDX-License-Identifier: Apache-2.0
"""Rows copied by a lane, early, late and in adverse order, give the bits of rows that lie at hand.

The lanes are threads of the host, so all of this runs without a GPU; see `copy_lanes.py`.
"""

import gc
import time
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from copy_lanes import (
    FailingLane,
    ForgottenLane,
    ForgottenRowsLane,
    GatedLane,
    HastyLane,
    HostLane,
    LateLane,
    UnlockableLane,
    UnwaitedLane,
)
from waiting import until

from hillinfer.engine.budget_plan import BudgetPlan, staging_bytes, widened_bytes
from hillinfer.engine.runtime import Runtime
from hillinfer.errors import CacheUseError, SetupWarning
from hillinfer.gpu.copies import packed_rows
from hillinfer.gpu.staging import CudaLane, lane_of
from hillinfer.kv.gather import Gather
from hillinfer.kv.hot_pools import HotPools
from hillinfer.kv.sequence import RowLayout
from hillinfer.memory_budget import Part
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.scoring.scorer import ImportanceEvaluation
from hillinfer.settings import Settings

TOKENS, LAYERS, STEPS = 600, 4, 4
SHAPE = ModelShape(
    layers=LAYERS,
    kv_heads=2,
    query_heads=4,
    head_dim=32,
    stored_type=StoredType.BFLOAT16,
    max_positions=4096,
)
CHOSEN = Settings().changed(alpha=0.3, kept_recent=4, block_rows=64)
SCALING = SHAPE.head_dim**-0.5


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Steps:
    """A runtime with one sequence that takes decode steps; layers from 2 on are announced."""

    def __init__(
        self, cold_dir, lane=None, tokens=TOKENS, budget=None, evaluate=ImportanceEvaluation,
        **changes,
    ):  # fmt: skip
        cold_dir.mkdir(exist_ok=True, parents=True)
        settings = CHOSEN.changed(**changes)
        plan = BudgetPlan.with_whole_shadow(SHAPE, settings, TOKENS + 100)
        # Almost nothing is hot; truncation brings a group back.
        budget = plan.required_bytes + (96 << 10) if budget is None else budget
        self.runtime = Runtime(SHAPE, settings, budget, cold_dir, lane=lane, evaluate=evaluate)
        if lane is None:
            # In one block by torch, as the lane's side computes.
            self.runtime.decode = None
        self.sequence = self.runtime.open_sequence()
        self.runtime.begin_step()
        for layer in range(LAYERS):
            keys, values = random(layer, 2, SHAPE.kv_heads, tokens, SHAPE.head_dim)
            self.runtime.append(layer, self.sequence, keys, values)
            self.runtime.code_full_segments(layer, self.sequence, keys)
            self.runtime.parts.store.settle_all(layer)

    def announce(self, layer, step):
        query = random(1000 + 10 * step + layer, SHAPE.query_heads, 1, SHAPE.head_dim)
        self.runtime.announce(layer, self.sequence, query, SCALING)

    def settle(self):
        """Wait until all that was announced is selected, and sent as far as it is there."""
        parts = self.runtime.parts
        deadline = time.monotonic() + 30
        while not parts.pipeline.is_idle:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        parts.gpu.ahead.settle()

    def attend(self, layer, step):
        keys, values = random(100 + 10 * step + layer, 2, SHAPE.kv_heads, 1, SHAPE.head_dim)
        self.runtime.append(layer, self.sequence, keys, values)
        query = random(2000 + 10 * step + layer, SHAPE.query_heads, 1, SHAPE.head_dim)
        return self.runtime.attend_selected(layer, self.sequence, query, keys, SCALING)

    def step(self, step):
        self.runtime.begin_step()
        out = []
        for layer in range(LAYERS):
            if 2 <= layer + 1 < LAYERS:
                self.announce(layer + 1, step)
            out.append(self.attend(layer, step))
        return torch.stack(out)

    def run(self, steps=STEPS):
        out = torch.stack([self.step(step) for step in range(steps)])
        self.runtime.truncate(self.sequence, TOKENS - 30)
        out = torch.cat([out, self.step(50)[None]])
        self.runtime.begin_step()
        self.stored = self.sequence.tails.copy()
        self.statistics = self.runtime.statistics()
        self.runtime.close()
        return out.view(torch.int16)


_EXPECTED = {}


@pytest.fixture
def expected(tmp_path):
    """Return the bits without a lane, computed once."""

    def of(tokens=TOKENS, steps=STEPS, **changes):
        key = (tokens, steps, *changes.items())
        if key not in _EXPECTED:
            made = Steps(tmp_path / "expected", tokens=tokens, **changes | {"block_rows": 1024})
            _EXPECTED[key] = made.run(steps), made.stored
        return _EXPECTED[key]

    return of


LATE = {
    "at once": {},
    "late there": {"to_gpu": [0.003]},
    "late back": {"from_gpu": [0.01]},
    "now and then": {"to_gpu": [0, 0.004, 0, 0, 0.001], "from_gpu": [0.006, 0, 0]},
}


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("scope", ["layer", "kv_head"])
def test_however_late_copies_are_output_and_rows_are_the_same(late, scope, tmp_path, expected):
    made = Steps(tmp_path / "lane", LateLane(**LATE[late]), scope=scope)
    out, stored = expected(scope=scope)
    assert torch.equal(made.run(), out)
    np.testing.assert_array_equal(made.stored, stored)


@pytest.mark.parametrize("tokens", [575, 576, 638, 639, 640])
def test_where_a_group_fills_or_opens_in_between(tokens, tmp_path, expected):
    made = Steps(tmp_path / "lane", LateLane([0.001], [0.003, 0]), tokens=tokens)
    out, stored = expected(tokens)
    assert torch.equal(made.run(), out)
    np.testing.assert_array_equal(made.stored, stored)


@pytest.mark.parametrize(
    "changes",
    [
        {"prefetch_blocks": 0},
        {"prefetch_blocks": 1},
        {"block_rows": 1},
        {"block_rows": 17},
        {"budget": 64 << 20},
    ],
    ids=str,
)
def test_what_was_sent_ahead_and_what_was_not(changes, tmp_path, expected):
    # Rows that go one by one take their time.
    singly = changes.get("block_rows") == 1
    late, steps = (LateLane(), 2) if singly else (LateLane([0, 0.001], [0.002]), STEPS)
    made = Steps(tmp_path / "lane", late, **changes)
    assert torch.equal(made.run(steps), expected(steps=steps)[0])
    assert made.statistics.dram_peak_bytes <= made.statistics.dram_budget_bytes


@pytest.mark.parametrize(
    ("wrong", "late"),
    [
        (UnwaitedLane, {"to_gpu": [0.02]}),
        (ForgottenLane, {"from_gpu": [0.02]}),
        (ForgottenRowsLane, {"from_gpu": [0.02]}),
        (HastyLane, {"to_gpu": [0.002]}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wait_that_is_left_out_is_found_out(wrong, late, tmp_path, expected):
    """The twins: each leaves out one wait, and bits differ or the NaN in their place is refused."""
    made = Steps(tmp_path / "lane", wrong(**late), block_rows=17 if wrong is HastyLane else 64)
    found = None
    with suppress(CacheUseError):
        found = torch.stack([made.step(step) for step in range(2)]).view(torch.int16)
    made.runtime.close()
    assert found is None or not torch.equal(found, expected()[0][:2])


def test_one_flipped_bit_of_what_was_sent_ahead_changes_the_output(tmp_path, expected):
    class Flipping(LateLane):
        flips = 0

        def to_gpu(self, target, source):
            copy = super().to_gpu(target, source)
            if not self.flips and len(source) > 3:
                copy.wait()
                target[2, 1] ^= 0x40
                self.flips += 1
            return copy

    assert not torch.equal(Steps(tmp_path / "lane", Flipping()).run(), expected()[0])


def test_rows_of_a_predicted_layer_are_sent_while_the_one_before_has_not_begun(tmp_path):
    lane = LateLane()
    made = Steps(tmp_path / "lane", lane)
    made.runtime.begin_step()
    made.announce(3, 0)
    made.settle()
    sent = lane.rows_sent
    made.attend(3, 0)
    assert lane.rows_sent == sent, "nothing is sent twice"
    # Hot, landed and in the open group: everything but the token that is coming.
    assert sent == made.runtime.statistics().selected_tokens - 1 > 100
    made.runtime.close()


def test_a_step_goes_on_while_its_keys_and_values_are_not_back(tmp_path):
    lane = GatedLane()
    made = Steps(tmp_path / "lane", lane)
    made.runtime.begin_step()
    made.announce(2, 0)
    made.announce(3, 0)
    # Both selections are known; from here on nothing comes back.
    made.settle()
    lane.gate.clear()
    place = TOKENS % 64
    before = made.sequence.tails[2:, place].copy()
    for layer in (2, 3):
        assert torch.isfinite(made.attend(layer, 0)).all()
        assert made.sequence.lengths[layer] == TOKENS + 1
    np.testing.assert_array_equal(made.sequence.tails[2:, place], before)
    lane.gate.set()
    made.runtime.begin_step()
    assert (made.sequence.tails[2:, place] != before).any(axis=1).all()
    made.runtime.close()


def test_what_was_announced_and_not_wanted_leaves_every_buffer_free(tmp_path):
    made = Steps(tmp_path / "lane", LateLane([0.002], [0.005]))
    for _ in range(4):
        made.runtime.begin_step()
        made.announce(1, 0)
        made.announce(2, 0)
        made.announce(3, 0)
    made.runtime.begin_step()
    rows, *others = made.runtime.parts.gpu.rings
    for ring in others:
        assert {state.value for state in ring.states()} == {"free"}
    assert {state.value for state in rows.states()} <= {"free", "leaving"}
    made.step(0)
    made.runtime.close()
    for ring in made.runtime.parts.gpu.rings:
        assert {state.value for state in ring.states()} == {"free"}


def test_more_sequences_than_buffers_take_turns(tmp_path):
    outputs = []
    for name, lane in (("without", None), ("lane", LateLane([0.001], [0.002, 0]))):
        rows = 1024 if lane is None else 64
        made = Steps(tmp_path / name, lane, block_rows=rows, budget=16 << 20)
        forks = [made.runtime.fork(made.sequence) for _ in range(7)]
        out = []
        for step in range(2):
            made.runtime.begin_step()
            for layer in range(2, LAYERS):
                for number, made.sequence in enumerate(forks):
                    made.announce(layer, 10 * number + step)
                for number, made.sequence in enumerate(forks):
                    out.append(made.attend(layer, 10 * number + step))
        outputs.append(torch.stack(out))
        for sequence in forks:
            made.runtime.release(sequence)
        made.runtime.close()
    assert torch.equal(outputs[0].view(torch.int16), outputs[1].view(torch.int16))


class SlowToCopy(Gather):
    """Dawdles between the look at the slots and the copy out of them, where it runs ahead."""

    def copy_held(self, *given):
        slots = self._pools.layers[given[0]].slots

        def looked_up(rows):
            found = slots(rows)
            time.sleep(0.02)
            return found

        self._pools.layers[given[0]].slots = looked_up
        try:
            return super().copy_held(*given)
        finally:
            del self._pools.layers[given[0]].slots


def pair_outputs(tmp_path):
    """The bits of two sequences without a lane, and with one that dawdles while it copies."""
    outputs = []
    for name in ("without", "lane"):
        lane = None if name == "without" else LateLane([0.001], [0])
        # Little is hot beside a lane, so that rows give way to others.
        plan = BudgetPlan.with_whole_shadow(SHAPE, CHOSEN, 2 * (TOKENS + 100))
        budget = 16 << 20 if lane is None else plan.required_bytes + (200 << 10)
        rows = 1024 if lane is None else 64
        made = Steps(tmp_path / name, lane, block_rows=rows, budget=budget)
        if lane is not None:
            made.runtime.gather.__class__ = SlowToCopy
        pair = [made.sequence, made.runtime.fork(made.sequence)]
        out = []
        for step in range(6):
            made.runtime.begin_step()
            for layer in range(2, LAYERS):
                for number, made.sequence in enumerate(pair):
                    made.announce(layer, 100 * number + step)
                for number, made.sequence in enumerate(pair):
                    out.append(made.attend(layer, 100 * number + step))
        outputs.append(torch.stack(out).view(torch.int16))
        made.runtime.close()
    return outputs


@pytest.mark.parametrize("waits", [True, False])
def test_what_one_sequence_promotes_does_not_move_what_another_copies(tmp_path, waits, monkeypatch):
    """The second sequence's rows are copied out while the first one's are exchanged."""
    # Few rows, too, are promoted in the background.
    monkeypatch.setattr(HotPools, "quick_bytes", 0)
    if not waits:
        monkeypatch.setattr(HotPools, "wait_for", lambda *_: None)
    # Without the wait it is luck which of them is first: some of many times a row has moved.
    runs = (pair_outputs(tmp_path / str(run)) for run in range(1 if waits else 20))
    assert all(torch.equal(*outputs) for outputs in runs) == waits


def test_rows_that_a_layer_attended_to_do_not_stay_in_the_gpus_memory(tmp_path):
    lane = LateLane([0.001], [0])
    made = Steps(tmp_path / "lane", lane)
    made.step(0)
    gc.collect()
    # The thread that copied lets go of its target a moment after it said so.
    until(lambda: len(lane.targets) <= 1)
    made.runtime.close()


def test_an_interrupt_while_a_row_comes_back_loses_it_not(tmp_path, expected):
    class Interrupted(LateLane):
        left = 3

        def from_gpu(self, place, source):
            copy = super().from_gpu(place, source)
            wait = copy.wait

            def interrupted():
                self.left -= 1
                if self.left == 0:
                    raise KeyboardInterrupt
                return wait()

            return SimpleNamespace(wait=interrupted)

    made = Steps(tmp_path / "lane", Interrupted([0], [0.002]))
    row = random(3, 1, SHAPE.row_bytes // 2).view(torch.uint8)
    place = np.zeros(SHAPE.row_bytes, np.uint8)
    arrivals = made.runtime.parts.gpu.arrivals
    for layer in range(3):
        arrivals.begin(layer, made.sequence, row, place)
    with pytest.raises(KeyboardInterrupt):
        arrivals.settle()
    place[:] = 0
    arrivals.settle()
    np.testing.assert_array_equal(place, row[0].numpy())
    made.runtime.close()


def test_a_copy_that_fails_is_told_and_the_next_step_is_as_ever(tmp_path, expected):
    lane = FailingLane()
    made = Steps(tmp_path / "lane", lane)
    outputs = [made.step(0)]
    made.runtime.begin_step()
    lane.broken = True
    made.announce(2, 1)
    with pytest.raises(RuntimeError, match="size of tensor"):
        made.attend(2, 1)
    lane.broken = False
    made.runtime.truncate(made.sequence, TOKENS + 1)
    outputs += [made.step(step) for step in range(1, STEPS)]
    made.runtime.close()
    assert torch.equal(torch.stack(outputs).view(torch.int16), expected()[0][:STEPS])


def test_a_row_that_never_came_back_is_told_from_then_on(tmp_path):
    lane = FailingLane()
    made = Steps(tmp_path / "lane", lane)
    made.step(0)
    lane.broken_back = True
    made.runtime.begin_step()
    made.announce(3, 1)
    made.settle()
    made.attend(3, 1)
    lane.broken_back = False
    for _ in range(2):
        with pytest.raises(CacheUseError, match="did not come back from the GPU"):
            made.runtime.begin_step()
    made.runtime.release(made.sequence)
    made.runtime.close()


class WithoutTheNewest(ImportanceEvaluation):
    """Selects, of all that was asked for, old tokens only."""

    def select(self, *given):
        return [np.arange(40, TOKENS - 3, 7)]


def test_a_selection_without_the_newest_token_does_not_get_it(tmp_path):
    outputs = []
    for name, lane in (("without", None), ("lane", LateLane([0.001], [0.005]))):
        rows = 1024 if lane is None else 64
        made = Steps(tmp_path / name, lane, block_rows=rows, evaluate=WithoutTheNewest)
        made.runtime.begin_step()
        made.announce(3, 0)
        outputs.append(made.attend(3, 0))
        made.runtime.close()
    assert torch.equal(*outputs)


def test_memory_that_cannot_be_locked_is_told_and_gives_the_same_bits(tmp_path, expected):
    with pytest.warns(SetupWarning, match="could not be page-locked"):
        made = Steps(tmp_path / "lane", UnlockableLane())
    assert torch.equal(made.run(), expected()[0])
    assert made.statistics.gpu_staging == "pageable"


def test_staging_is_counted_and_takes_the_place_of_what_a_processor_widens_in(tmp_path):
    for block_rows, more in ((64, False), (1, True)):
        lane = LateLane()
        made = Steps(tmp_path / "lane", lane, block_rows=block_rows)
        settings = CHOSEN.changed(block_rows=block_rows)
        counted = made.runtime.parts.accountant.held()[Part.STAGING] - staging_bytes(
            SHAPE, settings
        )
        statistics = made.runtime.statistics()
        assert statistics.gpu_staging_bytes == sum(lane.locked.values())
        made.runtime.close()
        room = widened_bytes(SHAPE, settings)
        assert counted == max(0, statistics.gpu_staging_bytes - room)
        assert (counted > 0) is more
        assert statistics.gpu_staging == "pinned"
        assert not lane.locked, "unlocked at the end"


def test_on_a_processor_nothing_is_staged(tmp_path):
    assert lane_of({torch.device("cpu")}) is None
    assert lane_of({torch.device("cuda:0"), torch.device("cuda:1")}) is None
    assert lane_of({torch.device("cuda:0"), torch.device("cpu")}) is None
    made = Steps(tmp_path / "cpu")
    statistics = made.runtime.statistics()
    assert (statistics.gpu_staging, statistics.gpu_staging_bytes) == ("none", 0)
    assert made.runtime.parts.accountant.held()[Part.STAGING] == staging_bytes(SHAPE, CHOSEN)
    made.runtime.close()


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_packed_beside_the_model_are_the_host_s(tokens, dtype):
    shape = ModelShape(
        layers=1,
        kv_heads=3,
        query_heads=3,
        head_dim=6,
        stored_type=StoredType.FLOAT16 if dtype == torch.float16 else StoredType.BFLOAT16,
        max_positions=10,
    )
    keys, values = random(1, 2, 3, tokens, 6).to(dtype)
    out = np.ones((tokens, shape.row_bytes), np.uint8)
    RowLayout(shape).pack(keys, values, out)
    assert np.array_equal(packed_rows(keys, values, shape.row_bytes).numpy(), out)
    assert not np.array_equal(packed_rows(values, keys, shape.row_bytes).numpy(), out)


def test_both_lanes_have_the_same_methods():
    def public(lane):
        return {name for name in vars(lane) if not name.startswith("_")}

    assert public(HostLane) == public(CudaLane)
