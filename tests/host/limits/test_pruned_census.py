# SPDX-License-Identifier: Apache-2.0
"""What the accountant counts is what reading in stages holds, at every stage of it."""

import gc
import threading
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch
from test_memory_census import SMALL, held_arrays
from tiny_models import TinyModel, prompts
from torch.overrides import TorchFunctionMode

from hillinfer.drive.calls import DriveCalls
from hillinfer.hf.attach import Attachment
from hillinfer.kv.hot_pool import SLOT_BYTES
from hillinfer.pruning.caches import CacheOnDrive
from hillinfer.pruning.passes import LaterTurns
from hillinfer.pruning.rankers import SoftmaxWeights, UnitScores
from hillinfer.pruning.reading import Pruning
from hillinfer.pruning.schedule import Schedule
from hillinfer.pruning.states import (
    BUFFER_BYTES,
    DecidingKeys,
    States,
    StatesFile,
    StatesInMemory,
)
from hillinfer.settings import Settings

# States of 1 KiB for each token.
TINY = TinyModel(layers=5, head_dim=64)
SCHEDULE, TOKENS, CHUNK, WINDOW = Schedule.parse("2:50%,4:25%"), 1400, 350, 40
IDS, _ = prompts([TOKENS], seed=3)
QUESTION, _ = prompts([WINDOW], seed=31)
KINDS = (StatesInMemory, StatesFile, DecidingKeys)
# Objects of Python, by which what is held may grow beside an array.
ODD_BYTES = 2 << 10


class Census(DriveCalls):
    """Looks at what is held and counted, around whatever reading in stages asks memory for.

    Attributes
    ----------
    cache, forks
        What is known of these is held, too.
    stages
        How often it looked at each stage.
    """

    def __init__(self, model):
        # The drive's calls are the engine's, too.
        self._apart = [self, *model.parameters(), *model.buffers()]
        self.cache, self.forks, self.stages, self._buffers = None, [], {}, None
        gc.collect()
        # Of tests before, where something still has it.
        self._others = [one for one in gc.get_objects() if type(one) in KINDS]

    def _states(self):
        found = [one for one in gc.get_objects() if type(one) in KINDS]
        return [one for one in found if not any(one is other for other in self._others)]

    def excess(self, *more):
        """Return by how much what can be reached is more than what is counted."""
        runtime = self.cache.engine.runtime
        runtime.settle()
        # A buffer that a thread still has can be reached once the thread has put it back.
        runtime.parts.pools.promotions.settle_all()
        runtime.parts.shadow_memory.settle()
        for layer in range(runtime.shape.layers):
            runtime.parts.store.settle_all(layer)
        known = [one.notes for one in (self.cache, *self.forks)]
        slots = sum(pool.used_rows for pool in runtime.parts.pools.layers)
        reached = held_arrays([runtime, known, self._states(), more], self._apart)
        reached += slots * (runtime.shape.row_bytes + SLOT_BYTES)
        return reached - sum(runtime.parts.accountant.held().values())

    def check(self, stage):
        """Check that what is held is counted, and that what is known of caches is small."""
        self.stages[stage] = self.stages.get(stage, 0) + 1
        assert self.excess() <= SMALL, stage
        for one in (self.cache, *self.forks):
            document = one.notes
            if document is None:
                continue
            # Positions of each band and numbers of its blocks; what entered layers that decide.
            # What the prompt before left is kept until the one under way got through.
            cuts, tokens = len(SCHEDULE.cuts), one.get_seq_length()
            small = 2 * cuts * (8 * tokens + 8 * tokens // 64 + 1024 * WINDOW) + ODD_BYTES
            assert held_arrays(document, [self, *self._states()]) <= small, stage

    def around(self, stage, act):
        """Do something; all that is held behind it beside what was before is counted."""
        self.stages[stage] = self.stages.get(stage, 0) + 1
        before = self.excess()
        found = act()
        assert self.excess(found) <= before + ODD_BYTES, stage
        return found

    def through_a_buffer(self, act):
        """Do something that goes through a buffer, which is counted while the drive has it."""
        self._buffers = threading.get_ident(), self.excess()
        try:
            return act()
        finally:
            self._buffers = None

    def pwrite(self, descriptor, data, offset):
        self._look_at("writes states", data)
        return super().pwrite(descriptor, data, offset)

    def preadv(self, descriptor, into, offset):
        self._look_at("reads states", into)
        return super().preadv(descriptor, into, offset)

    @property
    def is_through_a_buffer(self):
        """Whether this thread does something that goes through a buffer."""
        return self._buffers is not None and self._buffers[0] == threading.get_ident()

    def _look_at(self, stage, data):
        if self.is_through_a_buffer:
            _, before = self._buffers
            self.stages[stage] = self.stages.get(stage, 0) + 1
            assert 0 < held_arrays(data) <= BUFFER_BYTES
            assert self.excess(data) <= before + ODD_BYTES, stage


class Forgetful(Census):
    """Takes what is counted at one stage out of the count, as if nobody had counted it."""

    def __init__(self, model, stage):
        super().__init__(model)
        self._stage = stage

    @property
    def _accountant(self):
        return self.cache.engine.runtime.parts.accountant

    @contextmanager
    def _forgotten(self, before):
        """Forget what is counted since, in the block of code that this encloses."""
        held = self._accountant.held()
        more = {part: size - before[part] for part, size in held.items() if size > before[part]}
        for part, size in more.items():
            self._accountant.give(part, size)
        try:
            yield
        finally:
            for part, size in more.items():
                self._accountant.take(part, size)

    def around(self, stage, act):
        if stage != self._stage:
            return super().around(stage, act)
        with ExitStack() as forgotten:

            def act_and_forget():
                before = self._accountant.held()
                found = act()
                forgotten.enter_context(self._forgotten(before))
                return found

            return super().around(stage, act_and_forget)

    def through_a_buffer(self, act):
        self._before = self._accountant.held()
        return super().through_a_buffer(act)

    def pwrite(self, descriptor, data, offset):
        if self._stage != "writes states" or not self.is_through_a_buffer:
            return super().pwrite(descriptor, data, offset)
        with self._forgotten(self._before):
            return super().pwrite(descriptor, data, offset)


class WatchedStates(States):
    """States that a census looks at while they are read."""

    def __init__(self, census, own):
        self._census, self._own = census, own
        self.tokens, self.byte_count = own.tokens, own.byte_count

    def take(self, places):
        return self._census.through_a_buffer(partial(self._own.take, places))

    def first(self, tokens):
        return WatchedStates(self._census, self._own.first(tokens))


class WatchedCache(CacheOnDrive):
    """Lets a census look around all that asks memory for states and for keys that decide."""

    def __init__(self, census, cache):
        super().__init__(cache)
        self._census = census

    def wait_with(self, states):
        return self._waits("waits at the cut", super().wait_with, states)

    def wait_between(self, states):
        return self._waits("waits between bands", super().wait_between, states)

    def _waits(self, stage, wait, states):
        act = partial(self._census.through_a_buffer, partial(wait, states))
        return WatchedStates(self._census, self._census.around(stage, act))

    def expect_keys(self, layer, tokens):
        self._census.around("expects keys", partial(super().expect_keys, layer, tokens))

    @contextmanager
    def keys(self, layer, unit_tokens=None):
        census = self._census
        census.deciding = before = census.excess()
        with super().keys(layer, unit_tokens) as found:
            assert census.excess(found) <= before + ODD_BYTES
            yield found
        assert census.excess() <= before + ODD_BYTES


class Looking(SoftmaxWeights):
    """Lets a census look while keys that decide are there."""

    def __init__(self, census):
        self._census = census

    def scores(self, deciding):
        self._census.check("chooses")
        return super().scores(deciding)


class LookingAtUnits(Looking, UnitScores):
    """The same by the paper's rule, and once keys of units are there, too."""

    unit_tokens = UnitScores.unit_tokens

    def window(self, question_tokens):
        return UnitScores.window(self, question_tokens)

    def scores(self, deciding):
        self._census.check("chooses")
        with ProductsSeen(self._census, deciding):
            return UnitScores.scores(self, deciding)


class ProductsSeen(TorchFunctionMode):
    """Lets a census look whenever products are asked for: what they are of is there then."""

    def __init__(self, census, deciding):
        super().__init__()
        self._census, self._deciding = census, deciding

    def __torch_function__(self, called, types, args=(), kwargs=None):
        if called is torch.einsum:
            most = self._census.deciding + ODD_BYTES
            assert self._census.excess(self._deciding.keys, args) <= most
        return called(*args, **(kwargs or {}))


class UnitsUnsaid(LookingAtUnits):
    """Makes keys of units, and does not say so."""

    unit_tokens = None


class LongWindow(Looking):
    """Keeps queries of many more tokens than the question has."""

    def window(self, question_tokens):
        return 10 * WINDOW


def read(model, cold_dir, rows=1, ranker=Looking, census=Census, **changes):
    """Read a prompt, answer, ask a fork anew, crop and complete; return how often was looked."""
    settings = Settings().changed(cold_dir=cold_dir, alpha=0.2, dram_budget="12MiB", **changes)
    census = census(model)
    known = {"know_cache": lambda cache, _: WatchedCache(census, cache)}
    pruning = Pruning(model, SCHEDULE, ranker(census), LaterTurns.ANEW, chunk_tokens=200, **known)
    with Attachment(model, settings, census) as hill, pruning, torch.no_grad():
        census.cache = cache = hill.new_cache()
        with pruning.prompt(TOKENS, WINDOW):
            for part in IDS.expand(rows, -1).split(CHUNK, 1):
                model(part, past_key_values=cache, logits_to_keep=1)
                census.check("has read a chunk")
        for _ in range(3):
            model(QUESTION[:, :1].expand(rows, -1), past_key_values=cache)
            census.check("decodes")
        census.forks.append(cache.fork())
        census.check("is forked")
        with pruning.prompt(TOKENS + 3 + WINDOW, WINDOW):
            model(QUESTION.expand(rows, -1), past_key_values=census.forks[0], logits_to_keep=1)
        census.check("is asked anew")
        census.forks.pop().close()
        census.check("lost a fork")
        if rows == 1:
            cache.crop(-400)
            census.check("is cropped")
            pruning.complete(cache, lambda: bool(census.check("completes")), piece_tokens=200)
            census.check("is whole")
        cache.notes = None
        gc.collect()
        census.check("is forgotten")
    return census.stages


@pytest.fixture
def model():
    return TINY.build()


# Four chunks of the prompt, tokens and a question: 1,400 and then 1,443 tokens come to the first
# cut, and 4 pieces of what stays to the second.
STAGES = {
    "waits at the cut": 8, "expects keys": 2, "chooses": 4, "waits between bands": 8,
    "has read a chunk": 4, "decodes": 3, "is forked": 1, "is asked anew": 1, "lost a fork": 1,
}  # fmt: skip
ALONE = {"is cropped": 1, "completes": 6, "is whole": 1}


def test_states_in_memory_are_counted_at_every_stage(model, cold_dir):
    stages = read(model, cold_dir, encrypt_cold_pool="yes")
    assert stages == STAGES | ALONE | {"is forgotten": 1}


def test_states_on_the_drive_leave_nothing_uncounted_at_any_stage(model, cold_dir):
    stages = read(model, cold_dir)
    # What waits is of several pieces, and what is completed is read once more.
    assert stages.pop("writes states") > 16
    assert stages.pop("reads states") > 16
    assert stages == STAGES | ALONE | {"is forgotten": 1}


def test_rows_of_a_batch_keep_the_states_of_one(model, cold_dir):
    stages = read(model, cold_dir, rows=2, encrypt_cold_pool="yes")
    assert stages == STAGES | {"is forgotten": 1}


def test_keys_of_units_are_counted(model, cold_dir):
    stages = read(model, cold_dir, ranker=LookingAtUnits, encrypt_cold_pool="yes")
    assert stages == STAGES | ALONE | {"is forgotten": 1}
    with pytest.raises(AssertionError, match="excess"):
        read(model, cold_dir, ranker=UnitsUnsaid, encrypt_cold_pool="yes")


@pytest.mark.parametrize(
    ("encryption", "stage"),
    [
        ("yes", "waits at the cut"),
        ("yes", "expects keys"),
        ("no", "expects keys"),
        ("no", "writes states"),
    ],
)
def test_what_is_left_out_of_the_count_is_found(encryption, stage, model, cold_dir):
    census = partial(Forgetful, stage=stage)
    with pytest.raises(AssertionError, match=stage):
        read(model, cold_dir, census=census, encrypt_cold_pool=encryption)


def test_queries_that_nobody_needs_are_found(model, cold_dir):
    with pytest.raises(AssertionError, match="has read a chunk"):
        read(model, cold_dir, ranker=LongWindow)
