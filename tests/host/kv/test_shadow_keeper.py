# SPDX-License-Identifier: Apache-2.0
"""The shadow of a growing, forked or rewound sequence is that of the contract, from its keys."""

import errno
import gc
import mmap

import numpy as np
import pytest
import torch
from resident_memory import run_taken

from hillinfer.devices.opening import GoldenScorer
from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.files import round_up
from hillinfer.engine.budget_plan import kernel_spec, staging_bytes
from hillinfer.engine.runtime import Runtime
from hillinfer.errors import BudgetError, ColdPoolError
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.scoring.layout import ProbeShadow, ShadowLayout, probe_bytes
from hillinfer.settings import Settings
from hillinfer.shadow.store import shadow_bytes
from hillinfer.system.kept_memory import HUGE_BYTES
from hillinfer_model.choices import Scope

SEGMENT = 1024
huge = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE"), reason="shadows are memory of their own here"
)
# Full shadows that DRAM has room for, of two layers.
PLACEMENTS = {"dram": 1000, "split": 3, "streamed": 0}


def shape_of(stored=StoredType.FLOAT16):
    return ModelShape(
        layers=2, kv_heads=2, query_heads=4, head_dim=6, stored_type=stored, max_positions=10_000
    )


class Story:
    """A runtime, one sequence and the keys it was given, for two layers."""

    def __init__(
        self,
        cold_dir,
        device="nvme",
        stored=StoredType.FLOAT16,
        shadow="int4",
        placement="dram",
        mib=2,
        scorer=None,
        calls=None,
    ):
        self.shape = shape_of(stored)
        self.settings = Settings().changed(
            device=device, shadow=shadow, block_rows=100, alpha=0.1, kept_recent=4
        )
        budget = staging_bytes(self.shape, self.settings) + (mib << 20)
        limit = PLACEMENTS[placement] * shadow_bytes(kernel_spec(self.shape, self.settings))
        self.runtime = Runtime(
            self.shape,
            self.settings,
            budget,
            cold_dir,
            shadow_limit_bytes=limit,
            scorer=scorer,
            calls=calls,
        )
        self.sequence = self.runtime.open_sequence()
        self.generator = torch.Generator().manual_seed(0)
        self.dtype = torch.bfloat16 if stored is StoredType.BFLOAT16 else torch.float16

    def feed(self, tokens, sequence=None):
        sequence = sequence or self.sequence
        states = torch.randn(3, 2, 2, tokens, 6, generator=self.generator).to(self.dtype)
        query = torch.randn(4, tokens, 6, generator=self.generator)
        self.runtime.begin_step()
        for layer in range(2):
            keys, values = states[0, layer], states[1, layer]
            self.runtime.append(layer, sequence, keys, values)
            if tokens > 1:
                self.runtime.attend_dense(layer, sequence, query, keys, values, 0.4)
            else:
                self.runtime.attend_selected(layer, sequence, query, keys, 0.4)
        sequence.token_ids.extend([0] * tokens)
        return states[0].transpose(1, 2)

    def expected(self, layer, keys, taken_at):
        """Code keys (tokens, kv_heads, d) by the golden model; statistics at the given lengths."""
        spec = kernel_spec(self.shape, self.settings)
        golden = GoldenScorer(spec, Scope.LAYER)
        shadows, before = [], None
        for number, base in enumerate(range(0, len(keys), SEGMENT)):
            own = keys[base : base + SEGMENT].half()
            before = golden.statistics(own[: taken_at[number] - base], base, before)
            shadow = np.zeros((spec.segment_beats, 64), np.uint8)
            golden.encode(own, before, shadow, 0)
            shadows.append((shadow, before))
        return shadows

    def check(self, layer, keys, taken_at, sequence=None):
        sequence = sequence or self.sequence
        expected = self.expected(layer, keys, taken_at)
        assert len(sequence.segments) == len(expected)
        found = self.runtime.parts.shadow.shadows(layer, sequence)
        for segment, (shadow, statistics) in zip(found, expected, strict=True):
            np.testing.assert_array_equal(segment.statistics.means, statistics.means)
            np.testing.assert_array_equal(segment.statistics.exponents, statistics.exponents)
            np.testing.assert_array_equal(segment.shadow, shadow)

    def shadow(self, number, layer, sequence=None):
        found = self.runtime.parts.shadow.shadows(layer, sequence or self.sequence)
        return found[number].shadow.copy()


def coded(sequence):
    return [[one.coded_tokens for one in segment.layers] for segment in sequence.segments]


def on_drive(sequence):
    return [
        [one.shadow is None and one.slot is not None for one in segment.layers]
        for segment in sequence.segments
    ]


@pytest.fixture
def story(cold_dir):
    made = []

    def tell(**kwargs):
        made.append(Story(cold_dir, **kwargs))
        return made[-1]

    yield tell
    for one in made:
        one.runtime.close()


@pytest.mark.parametrize("device", ["nvme", "golden"])
@pytest.mark.parametrize("stored", StoredType)
@pytest.mark.parametrize("shadow", ["int8", "int4", "int2"])
def test_prefill_and_decode(story, device, stored, shadow):
    told = story(device=device, stored=stored, shadow=shadow)
    parts = [told.feed(500), told.feed(400)]
    assert told.sequence.segments == [], "nothing is coded before it is full or scored"
    parts += [told.feed(1) for _ in range(3)]
    keys = torch.cat(parts, dim=1)
    for layer in range(2):
        # The first step took the statistics of the 901 tokens there were.
        told.check(layer, keys[layer], [901])


def test_full_segments_are_coded_while_the_prompt_is_read(story):
    told = story()
    parts = [told.feed(900), told.feed(900)]
    assert coded(told.sequence) == [[1024, 1024]]
    for layer in range(2):
        told.check(layer, torch.cat(parts, dim=1)[layer, :1024], [1024])
    parts.append(told.feed(1))
    for layer in range(2):
        told.check(layer, torch.cat(parts, dim=1)[layer], [1024, 1801])


def test_decoding_over_the_end_of_a_segment(story):
    told = story()
    parts = [told.feed(1020), *(told.feed(1) for _ in range(8))]
    for layer in range(2):
        told.check(layer, torch.cat(parts, dim=1)[layer], [1021, 1025])


def test_a_second_turn_codes_what_the_first_left_open(story):
    told = story()
    parts = [told.feed(300), told.feed(1), told.feed(300), told.feed(1)]
    for layer in range(2):
        told.check(layer, torch.cat(parts, dim=1)[layer], [301])


def test_forks_code_for_themselves(story):
    told = story()
    common = [told.feed(1100), told.feed(1)]
    before = [told.shadow(1, layer) for layer in range(2)]
    fork = told.runtime.fork(told.sequence)
    assert fork.segments[1] is told.sequence.segments[1]
    own = [told.feed(1, fork) for _ in range(3)]
    assert fork.segments[0] is told.sequence.segments[0], "full segments stay shared"
    for layer in range(2):
        np.testing.assert_array_equal(told.shadow(1, layer), before[layer])
        told.check(layer, torch.cat(common + own, dim=1)[layer], [1024, 1101], fork)
    others = [told.feed(1) for _ in range(2)]
    for layer in range(2):
        told.check(layer, torch.cat(common + others, dim=1)[layer], [1024, 1101])
        told.check(layer, torch.cat(common + own, dim=1)[layer], [1024, 1101], fork)


def test_a_rewind_keeps_statistics_and_drops_codes(story):
    told = story()
    first = told.feed(600)
    told.feed(1)
    told.runtime.truncate(told.sequence, 400)
    assert coded(told.sequence) == [[400, 400]]
    parts = [first[:, :400], told.feed(50), told.feed(1)]
    keys = torch.cat(parts, dim=1)
    for layer in range(2):
        # Statistics are those of the 601 tokens before the rewind (contract, section 1).
        statistics = told.sequence.segments[0].layers[layer].statistics
        golden = GoldenScorer(kernel_spec(told.shape, told.settings), Scope.LAYER)
        fresh = golden.statistics(keys[layer].half(), 0, None)
        assert not np.array_equal(statistics.means, fresh.means)
        found = told.shadow(0, layer)
        shadow = np.zeros_like(found)
        golden.encode(keys[layer].half(), statistics, shadow, 0)
        # Codes behind the cut were written over up to 451 tokens.
        beats = 451 // 64 * kernel_spec(told.shape, told.settings).group_beats
        np.testing.assert_array_equal(found[:beats], shadow[:beats])
        assert coded(told.sequence)[0][layer] == 451


def test_a_rewind_of_one_fork_leaves_the_other(story):
    told = story()
    told.feed(1100)
    told.feed(1)
    fork = told.runtime.fork(told.sequence)
    before = coded(told.sequence)
    told.runtime.truncate(fork, 300)
    assert coded(told.sequence) == before
    assert coded(fork) == [[300, 300]]


def test_memory_of_segments_is_given_back(story):
    told = story()
    accountant = told.runtime.parts.accountant
    before = accountant.held()
    told.feed(1100)
    told.feed(1)
    spec = kernel_spec(told.shape, told.settings)
    one, copy = shadow_bytes(spec), probe_bytes(spec, 1)
    assert accountant.held()["shadow"] == 2 * (2 * one + copy)
    fork = told.runtime.fork(told.sequence)
    assert accountant.held()["shadow"] == 2 * (2 * one + copy)
    told.feed(1, fork)
    assert accountant.held()["shadow"] == 2 * (3 * one + copy)
    told.runtime.release(fork)
    told.runtime.truncate(told.sequence, 1024)
    assert accountant.held()["shadow"] == 2 * (one + copy)
    told.runtime.release(told.sequence)
    assert accountant.held()["shadow"] == before["shadow"] == 0


def copies(told, layer, sequence=None):
    found = told.runtime.parts.shadow.shadows(layer, sequence or told.sequence)
    return [one.probe_copy for one in found]


def test_a_full_shadow_in_dram_has_its_probe_tokens_beside_it(story):
    told = story()
    told.feed(2100)
    told.feed(1)
    layout = ShadowLayout(kernel_spec(told.shape, told.settings))
    for layer in range(2):
        *full, last = copies(told, layer)
        assert last is None, "an open segment grows"
        for number, copy in enumerate(full):
            expected = ProbeShadow.of(layout, 1, told.shadow(number, layer)).shadow
            np.testing.assert_array_equal(copy.shadow, expected)
            flipped = told.shadow(number, layer)
            flipped[3, 4] ^= 1
            assert (ProbeShadow.of(layout, 1, flipped).shadow != copy.shadow).any()


def test_no_probe_token_outlives_a_cut(story):
    told = story()
    told.feed(2100)
    told.feed(1)
    fork = told.runtime.fork(told.sequence)
    held = told.runtime.parts.accountant.held()["shadow"]
    told.runtime.truncate(fork, 1500)
    assert [copy is None for copy in copies(told, 0, fork)] == [False, True]
    assert [copy is None for copy in copies(told, 0)] == [False, False, True]
    told.feed(600, fork)
    assert [copy is None for copy in copies(told, 0, fork)] == [False, False]
    spec = kernel_spec(told.shape, told.settings)
    again = 2 * (shadow_bytes(spec) + probe_bytes(spec, 1))
    assert told.runtime.parts.accountant.held()["shadow"] == held + again


def addresses(told, layer, sequence=None):
    own = [segment.layers[layer].shadow for segment in (sequence or told.sequence).segments]
    return [None if one is None else one.ctypes.data for one in own]


def runs_of(told):
    found = [run for one in told.sequence.segments[0].layers for run in one.arena.runs]
    assert found
    return found


@huge
def test_shadows_of_a_layer_lie_side_by_side(story):
    told = story()
    for tokens in (1024, 1024, 1500, 1):
        told.feed(tokens)
    step = shadow_bytes(kernel_spec(told.shape, told.settings))
    for layer in range(2):
        own = addresses(told, layer)
        assert own == [own[0] + number * step for number in range(4)]


@huge
def test_what_left_for_the_drive_makes_room_for_the_next(story):
    told = story(placement="streamed")
    for _ in range(6):
        told.feed(1024)
        told.runtime.parts.shadow_memory.settle()
    told.feed(1)
    for run, layer in zip(runs_of(told), range(2), strict=True):
        assert addresses(told, layer)[:-1] == [None] * 6
        one = shadow_bytes(kernel_spec(told.shape, told.settings))
        # The first place is where the first huge page begins.
        place = (addresses(told, layer)[-1] - round_up(run.addresses.start, HUGE_BYTES)) // one
        assert 0 <= place < 2, "the same place again and again"
        assert run.taken_bytes == one
        assert run_taken(run) <= run.taken_bytes


@huge
def test_places_come_back_with_forks_cuts_and_ends(story):
    told = story()
    told.feed(3000)
    told.feed(1)
    runs, one = runs_of(told), shadow_bytes(kernel_spec(told.shape, told.settings))
    assert [run.taken_bytes for run in runs] == [3 * one] * 2
    fork = told.runtime.fork(told.sequence)
    told.feed(1, fork)
    assert [run.taken_bytes for run in runs] == [4 * one] * 2, "a copy of the open segment"
    told.runtime.truncate(told.sequence, 2000)
    assert [run.taken_bytes for run in runs] == [4 * one] * 2, "one copied, one gone"
    again = addresses(told, 0, fork)[-1]
    told.runtime.release(fork)
    assert [run.taken_bytes for run in runs] == [2 * one] * 2
    told.feed(1500)
    told.feed(1)
    assert again > addresses(told, 0)[-1], "the first that is free"
    told.runtime.release(told.sequence)
    gc.collect()
    assert [run.taken_bytes for run in runs] == [0, 0]
    assert [run_taken(run) for run in runs] == [0, 0]


@huge
def test_whoever_looks_at_a_shadow_keeps_its_place(story):
    told = story()
    told.feed(2000)
    told.feed(1)
    looked = told.runtime.parts.shadow.shadows(0, told.sequence)[0]
    before = looked.shadow.copy()
    run, other = runs_of(told)
    told.runtime.release(told.sequence)
    told.sequence = told.runtime.open_sequence()
    told.feed(3000)
    one = shadow_bytes(kernel_spec(told.shape, told.settings))
    assert (run.taken_bytes, other.taken_bytes) == (one, 0)
    np.testing.assert_array_equal(looked.shadow, before)
    del looked
    assert run.taken_bytes == 0


def test_scorers_are_told_of_a_full_shadow_once(story):
    told = story()
    told.feed(2100)
    told.feed(1)
    first = told.runtime.parts.shadow.shadows(0, told.sequence)
    again = told.runtime.parts.shadow.shadows(0, told.sequence)
    assert [a is b for a, b in zip(first, again, strict=True)] == [True, True, False]
    told.runtime.truncate(told.sequence, 2000)
    told.feed(48)
    told.feed(1)
    later = told.runtime.parts.shadow.shadows(0, told.sequence)
    assert [a is b for a, b in zip(first, later, strict=True)] == [True, False, False]
    for one in later:
        assert one.shadow is told.sequence.segments[one.base_position // SEGMENT].layers[0].shadow


def test_what_is_on_the_drive_has_no_copy_for_the_host(story):
    told = story(placement="streamed")
    told.feed(2100)
    told.feed(1)
    told.runtime.parts.shadow_memory.settle()
    assert copies(told, 0) == [None] * 3


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("device", ["nvme", "golden"])
def test_full_segments_are_the_same_wherever_they_lie(story, placement, device):
    told = story(device=device, placement=placement)
    parts = [told.feed(2500), told.feed(700)]
    told.runtime.parts.shadow_memory.settle()
    parts += [told.feed(1) for _ in range(3)]
    keys = torch.cat(parts, dim=1)
    for layer in range(2):
        told.check(layer, keys[layer], [1024, 2048, 3072, 3201])
    room = PLACEMENTS[placement]
    # Layers become full one after the other, both segments of the first chunk in the first layer.
    full = {1000: [[0, 0]] * 3, 3: [[0, 0], [0, 1], [1, 1]], 0: [[1, 1]] * 3}[room]
    assert on_drive(told.sequence) == [*full, [0, 0]], "an open segment is always in DRAM"
    counters = told.runtime.counters
    one = shadow_bytes(kernel_spec(told.shape, told.settings))
    on = sum(map(sum, full))
    assert counters.shadow_write_bytes == on * one, "each is written once"
    # Each step has read what is on the drive, and so have the checks.
    assert counters.shadow_read_bytes == 4 * on * one


def test_a_flipped_bit_on_the_drive_shows(story):
    told = story(placement="streamed")
    parts = [told.feed(2048), told.feed(1)]
    keys = torch.cat(parts, dim=1)
    told.runtime.parts.shadow_memory.settle()
    store = told.runtime.parts.shadow_store
    slot = told.sequence.segments[1].layers[0].slot
    flipped = store.buffer()
    store.read(slot, flipped).result()
    flipped[5, 7] ^= 16
    store.write(slot, flipped).result()
    told.check(1, keys[1], [1024, 2048, 2049])
    with pytest.raises(AssertionError, match="not equal"):
        told.check(0, keys[0], [1024, 2048, 2049])


@pytest.mark.parametrize("placement", ["split", "streamed"])
def test_rewinds_and_forks_of_shadows_on_the_drive(story, placement):
    told = story(placement=placement)
    accountant = told.runtime.parts.accountant
    first = told.feed(3000)
    told.feed(1)
    fork = told.runtime.fork(told.sequence)
    told.runtime.truncate(fork, 1500)
    own = [told.feed(1000, fork), told.feed(1, fork)]
    keys = torch.cat([first[:, :1500], *own], dim=1)
    for layer in range(2):
        # The cut segment keeps the statistics that it took when it was full.
        statistics = fork.segments[1].layers[layer].statistics
        spec = kernel_spec(told.shape, told.settings)
        shadow = np.zeros((spec.segment_beats, 64), np.uint8)
        GoldenScorer(spec, Scope.LAYER).encode(keys[layer, 1024:2048].half(), statistics, shadow, 0)
        np.testing.assert_array_equal(told.shadow(1, layer, fork), shadow)
        told.check(layer, first[layer, :2048], [1024, 2048], _Cut(told, 2))
    told.runtime.release(fork)
    told.runtime.release(told.sequence)
    assert accountant.held()["shadow"] == 0
    assert told.runtime.parts.shadow_memory.full_bytes == 0
    store = told.runtime.parts.shadow_store
    # Nobody has a slot: all come again, the lowest first.
    assert [store.take() for _ in range(16)] == list(range(16))


class _Cut:
    """The first segments of a story's sequence."""

    def __init__(self, told, segments):
        self.segments = told.sequence.segments[:segments]


class FailingShadows(DriveCalls):
    """A drive that takes rows, and no shadows while it is full or opens no more files."""

    def __init__(self):
        self.is_full = self.opens_none = False
        self.rows = set()

    def open(self, path, flags, mode=0o600):
        if self.opens_none:
            raise OSError(errno.EMFILE, "no more files")
        return super().open(path, flags, mode)

    def pwrite(self, descriptor, data, offset):
        if self.is_full and descriptor not in self.rows:
            raise OSError(errno.ENOSPC, "no space")
        return super().pwrite(descriptor, data, offset)


def test_a_failed_write_stays_in_memory_and_is_told(story):
    calls = FailingShadows()
    told = story(placement="streamed", calls=calls)
    told.feed(1000)
    calls.rows = {file.descriptor for file in told.runtime.parts.store.files}
    calls.is_full = True

    def fill():
        told.feed(1024)
        told.runtime.parts.shadow_memory.settle()

    with pytest.raises(ColdPoolError, match="no space"):
        fill()
    assert not any(on_drive(told.sequence)[0])
    told.runtime.release(told.sequence)
    assert told.runtime.parts.accountant.held()["shadow"] == 0


def test_a_file_that_cannot_be_opened_once_leaves_no_slot_that_was_never_written(story):
    calls = FailingShadows()
    told = story(placement="streamed", calls=calls)
    first = told.feed(1000)
    store = told.runtime.parts.shadow_store
    calls.opens_none = True
    with pytest.raises(ColdPoolError, match="no more files"):
        told.feed(1024)
    calls.opens_none = False
    # Somebody else makes the file longer meanwhile: what was never written would read as zeros.
    for _ in range(3):
        store.write(store.take(), store.buffer()).result()
    told.runtime.truncate(told.sequence, 1000)
    parts = [first, told.feed(1024), told.feed(1)]
    keys = torch.cat(parts, dim=1)
    for layer in range(2):
        golden = GoldenScorer(kernel_spec(told.shape, told.settings), Scope.LAYER)
        statistics = told.sequence.segments[0].layers[layer].statistics
        expected = np.zeros_like(told.shadow(0, layer))
        golden.encode(keys[layer, :1024].half(), statistics, expected, 0)
        np.testing.assert_array_equal(told.shadow(0, layer), expected)
    told.runtime.parts.shadow_memory.settle()
    told.runtime.release(told.sequence)
    assert told.runtime.parts.accountant.held()["shadow"] == 0


def test_a_budget_too_small_for_an_open_shadow_is_an_error_that_leaves_counts_right(cold_dir):
    told = Story(cold_dir)
    told.runtime.close()
    budget = staging_bytes(told.shape, told.settings) + 60_000
    told.runtime = Runtime(told.shape, told.settings, budget, cold_dir)
    told.sequence = told.runtime.open_sequence()
    told.feed(50)
    before = told.runtime.parts.accountant.held()
    for _ in range(2):
        with pytest.raises(BudgetError, match=r"more for (shadow|other)\); raise --dram-budget"):
            told.feed(1)
        told.runtime.truncate(told.sequence, 50)
    held = told.runtime.parts.accountant.held()
    assert held["shadow"] == before["shadow"] == 0
    assert sum(held.values()) <= budget
    told.runtime.close()
