# SPDX-License-Identifier: Apache-2.0
"""How often a cold layer with coded tokens calls the native library when its turn has come."""

import gc
import os
import sys
import threading
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path as FilePath

import numpy as np
import pytest
import torch
from coded_golden import SCALING, SETTINGS, SHAPE, Text
from interrupts import interrupted
from placement_matrix import Budget, Path, Way
from trace_events import check, load, spans

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.read_turns import ReadTurns
from hillinfer.engine.queries import LayerCalls
from hillinfer.engine.selection import PrefetchPipeline
from hillinfer.errors import ColdPoolError, HillInferWarning
from hillinfer.kv.hot_pools import HotPools
from hillinfer.native.library import NativeLibrary, native_library
from hillinfer.native.signatures import SIGNATURES
from hillinfer.scoring.scorer import ImportanceEvaluation
from hillinfer.shadow.values import SegmentValues
from hillinfer_model.channel_statistics import ChannelStatistics

TEXT = Text(prompt=1090, steps=4)
# Blocks whose reads ahead have a buffer of their own.
OWN = SETTINGS.changed(block_rows=256)
# What keeps rows for later layers and steps.
KEEPING = ("hillinfer_pool_", "hillinfer_promote", "hillinfer_sequence_")


@contextmanager
def counted():
    """Count this thread's calls of the native library by their names."""
    calls, library, own_thread = Counter(), native_library(), threading.get_ident()

    def counting(name, call):
        def called(*given):
            is_own = threading.get_ident() == own_thread
            calls[name] += is_own and not name.startswith(KEEPING)
            return call(*given)

        return called

    both = library.functions, library.tables
    before = [{name: getattr(one, name) for name in SIGNATURES} for one in both]
    try:
        # One after the other: other threads call them meanwhile.
        for one, own in zip(both, before, strict=True):
            vars(one).update({name: counting(name, call) for name, call in own.items()})
        yield calls
    finally:
        for one, own in zip(both, before, strict=True):
            vars(one).update(own)


class Turns:
    """Decodes a text with hardly any memory, and counts the calls of each layer's turn."""

    def __init__(
        self, cold_dir, forgotten=(), spoil=None, announced=True, own=OWN, way=None, **given
    ):
        self.calls, self.found, self.announced = [], [], announced
        way = way or Way(Budget.LEAST, path=Path.PREFETCHED if announced else Path.COLD)
        self.runtime = way.open(SHAPE, own, cold_dir, TEXT.prompt + TEXT.steps, **given)
        sequence = self.runtime.open_sequence()
        TEXT.read(self.runtime, sequence)
        # The open segment is coded when it is first ranked.
        self.found.append(TEXT.decode(self.runtime, sequence, 0, announced))
        groups = [sequence.groups[number] for number in forgotten]
        self.runtime.parts.codes_file.forget_groups(groups)
        if spoil is not None:
            spoil()
        before = self.runtime.statistics().coded_reads
        try:
            for step in range(1, TEXT.steps):
                self.found.append(self.step(sequence, step))
            self.statistics = self.runtime.statistics()
            self.coded_reads = self.statistics.coded_reads - before
        finally:
            self.runtime.close()

    def step(self, sequence, step):
        at, outs = slice(TEXT.prompt + step, TEXT.prompt + step + 1), []
        self.runtime.begin_step()
        for layer in range(SHAPE.layers):
            query = TEXT.queries[layer, step][:, None]
            if self.announced:
                self.runtime.announce(layer, sequence, query, SCALING)
            keys, values = TEXT.keys[layer, :, at], TEXT.values[layer, :, at]
            self.runtime.append(layer, sequence, keys, values)
            with counted() as calls:
                out = self.runtime.attend_selected(layer, sequence, query, keys, SCALING)
            outs.append(out[:, 0].numpy())
            self.calls.append({name: count for name, count in calls.items() if count})
        return np.stack(outs)


class Steps(Turns):
    """The same, and layers are announced while those before them compute; counts a step's calls."""

    def step(self, sequence, step):
        at, outs = slice(TEXT.prompt + step, TEXT.prompt + step + 1), []
        self.runtime.begin_step()
        with counted() as calls:
            for layer in range(SHAPE.layers):
                coming = layer + 1
                if coming < SHAPE.layers:
                    query = TEXT.queries[coming, step][:, None]
                    self.runtime.announce(coming, sequence, query, SCALING)
                query = TEXT.queries[layer, step][:, None]
                keys, values = TEXT.keys[layer, :, at], TEXT.values[layer, :, at]
                self.runtime.append(layer, sequence, keys, values)
                out = self.runtime.attend_selected(layer, sequence, query, keys, SCALING)
                outs.append(out[:, 0].numpy())
        self.calls.append(calls)
        return np.stack(outs)


@pytest.fixture(scope="module")
def ahead(cold_dir):
    return Turns(cold_dir)


def test_what_was_read_ahead_is_awaited_and_attended_to_in_one_call(ahead):
    assert ahead.coded_reads > 0
    assert ahead.statistics.cold_rows_read > 0
    assert ahead.calls == [{"hillinfer_attend_split": 1}] * len(ahead.calls)


def test_tokens_without_codes_whose_rows_were_read_ahead_are_coded_in_that_call(ahead, cold_dir):
    rows = Turns(cold_dir, forgotten=range(17))
    assert rows.coded_reads == 0
    assert rows.calls == ahead.calls
    assert np.array_equal(np.stack(rows.found), np.stack(ahead.found))


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_what_is_cold_is_listed_by_the_call_that_chooses_or_ends_a_choice(threads, ahead, cold_dir):
    chosen = Steps(cold_dir)
    once = ["hillinfer_choose_split"]
    if threads > 1:
        once = ["hillinfer_choose_begin", "hillinfer_list_cold"]
    # The first layer is not predicted.
    predicted = SHAPE.layers - 1
    for calls in chosen.calls:
        assert [calls[name] for name in once] == [predicted] * len(once)
        assert calls["hillinfer_choose_end"] == 0
    assert np.array_equal(np.stack(chosen.found), np.stack(ahead.found))


@contextmanager
def heard(function):
    """Count this thread's calls of a function of Python's."""
    calls = []

    def note(frame, event, _):
        if event == "call" and frame.f_code is function.__code__:
            calls.append(event)

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


class Interrupted(Steps):
    """The same, and Ctrl-C comes at a function, before what is cold of a choice is listed."""

    def __init__(self, cold_dir, function):
        self.function = function
        super().__init__(cold_dir)

    def step(self, *given):
        with interrupted(self.function, "call"):
            return super().step(*given)


# It is not kept yet, waits for rows that move, or is about to be ended.
BEFORE = [PrefetchPipeline.keep, HotPools.wait_for, NativeLibrary.decode]


@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize("function", BEFORE)
def test_a_choice_is_ended_though_an_interrupt_comes_before(function, threads, cold_dir):
    """Its thread writes to memory that nobody else may have meanwhile."""
    with counted() as calls:
        # Nothing of the error is kept: what it left to nobody is gone behind the block.
        with suppress(KeyboardInterrupt):
            Interrupted(cold_dir, function)
        gc.collect()
    assert calls["hillinfer_choose_end"] == 1
    assert calls["hillinfer_choose_begin"] == 1


def test_a_demand_that_an_interrupt_left_keeps_nobody_from_reading_ahead(demanded, cold_dir):
    """Ctrl-C comes as it is taken back; attention of the next pass waits for rows read ahead."""
    way = Way(Budget.LEAST, path=Path.PREFETCHED)
    runtime = way.open(SHAPE, OWN, cold_dir, TEXT.prompt + TEXT.steps, calls=Seen())
    sequence = runtime.open_sequence()
    TEXT.read(runtime, sequence)
    with interrupted(ReadTurns.satisfy, "call"), pytest.raises(KeyboardInterrupt):
        TEXT.decode(runtime, sequence, 0)
    runtime.truncate(sequence, TEXT.prompt)
    found = []
    beside = threading.Thread(
        target=lambda: found.append(TEXT.decode(runtime, sequence, 0, announced=True)), daemon=True
    )
    beside.start()
    beside.join(60)
    assert not beside.is_alive(), "a thread waits for ever"
    assert np.array_equal(found[0], demanded.found[0])
    runtime.close()


# A call that looks, and one more where something was not read ahead; to begin takes a microsecond.
LANDED = {"hillinfer_decode_split": 1, "hillinfer_land_split": 1}
CODES = {"hillinfer_lander_begin_first": 1}
MORE = CODES | {"hillinfer_land_split": 1}


@pytest.fixture(scope="module")
def demanded(cold_dir):
    return Turns(cold_dir, announced=False)


def test_what_was_not_read_ahead_is_landed_and_attended_to_in_one_call_more(demanded):
    """Exact rows and codes of others."""
    assert demanded.coded_reads > 0
    assert demanded.calls == [LANDED | CODES] * len(demanded.calls)


@pytest.mark.parametrize("forgotten", [range(17), range(1, 17, 2)], ids=["all", "some"])
def test_rows_of_tokens_without_codes_are_landed_and_coded_in_that_call(
    forgotten, demanded, cold_dir
):
    rows = Turns(cold_dir, forgotten, announced=False)
    codes = CODES if len(forgotten) < 17 else {}
    assert rows.calls == [LANDED | codes] * len(rows.calls)
    assert (rows.coded_reads > 0) == bool(codes)
    assert np.array_equal(np.stack(rows.found), np.stack(demanded.found))
    assert rows.statistics.coded_arrivals == demanded.statistics.coded_arrivals


def test_more_rows_than_buffers_hold_are_landed_one_buffer_after_the_other(demanded, cold_dir):
    few = Turns(cold_dir, range(17), announced=False, own=SETTINGS)
    assert all("hillinfer_land_split" not in one for one in few.calls)
    assert np.array_equal(np.stack(few.found), np.stack(demanded.found))


class Opening(DriveCalls):
    """The operating system, and the files that it opened."""

    def __init__(self):
        self.descriptors = []

    def open(self, *given):
        self.descriptors.append(super().open(*given))
        return self.descriptors[-1]

    def clear(self, *numbers):
        """Have zeros in files that were opened with these numbers."""
        for descriptor in (self.descriptors[number] for number in numbers):
            size = os.fstat(descriptor).st_size
            os.ftruncate(descriptor, 0)
            os.ftruncate(descriptor, size)


def opened(descriptor):
    return FilePath(f"/proc/self/fd/{descriptor}")


class Late(Opening):
    """The operating system, and files that are empty until Python asks for what did not come."""

    def __init__(self):
        super().__init__()
        self.contents = {}

    def empty(self, *numbers):
        """Have files that were opened with these numbers be empty for now."""
        for descriptor in (self.descriptors[number] for number in numbers):
            self.contents[descriptor] = opened(descriptor).read_bytes()
            os.ftruncate(descriptor, 0)

    def preadv(self, descriptor, *given):
        if descriptor in self.contents:
            opened(descriptor).write_bytes(self.contents.pop(descriptor))
        return super().preadv(descriptor, *given)


def test_hits_are_noted_once_where_what_was_read_ahead_has_to_be_read_again(ahead, cold_dir):
    calls = Late()
    layers = range(-1 - SHAPE.layers, -1)
    with heard(LayerCalls.note_hits) as once:
        Turns(cold_dir)
    with heard(LayerCalls.note_hits) as noted:
        again = Turns(cold_dir, (), lambda: calls.empty(*layers), calls=calls)
    assert not calls.contents
    counts = [one["hillinfer_attend_split"] for one in again.calls]
    assert counts == [2] * SHAPE.layers + [1] * (len(counts) - SHAPE.layers)
    assert len(noted) == len(once) > 0
    assert np.array_equal(np.stack(again.found), np.stack(ahead.found))


@pytest.mark.parametrize("announced", [True, False])
def test_rows_that_changed_are_an_error(announced, cold_dir):
    calls = Opening()
    layers = range(-1 - SHAPE.layers, -1)
    with pytest.raises(ColdPoolError, match="rows of layer 0"):
        Turns(cold_dir, (), lambda: calls.clear(*layers), announced, calls=calls)


@pytest.mark.parametrize("announced", [True, False])
def test_instead_of_codes_that_changed_rows_are_read(announced, ahead, demanded, cold_dir):
    calls = Opening()
    with pytest.warns(HillInferWarning, match="read as rows from here on"):
        rows = Turns(cold_dir, (), lambda: calls.clear(-1), announced, calls=calls)
    assert rows.coded_reads == 0
    as_before = ahead if announced else demanded
    assert np.array_equal(np.stack(rows.found), np.stack(as_before.found))


class Seen(DriveCalls):
    """The operating system, and somebody who looks at each landing."""

    def land(self, *given):
        return super().land(*given)


@pytest.mark.parametrize("announced", [True, False])
def test_where_somebody_looks_at_reads_more_calls_do_the_same(announced, ahead, demanded, cold_dir):
    """The twin: what is counted is seen."""
    seen = Turns(cold_dir, (), None, announced, calls=Seen())
    as_before = ahead if announced else demanded
    assert all(one.get("hillinfer_end_split") == 1 for one in seen.calls)
    assert np.array_equal(np.stack(seen.found), np.stack(as_before.found))
    names = "cold_reads", "cold_rows_read", "promoted_rows", "coded_reads", "coded_arrivals"
    counts = [[getattr(one.statistics, name) for name in names] for one in (as_before, seen)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("announced", [True, False])
def test_a_traced_run_makes_the_same_calls_and_says_what_they_did(
    announced, ahead, demanded, cold_dir, tmp_path
):
    """Rows and codes that threads bring at once have a line each."""
    as_before = ahead if announced else demanded
    traced = Turns(cold_dir, announced=announced, own=OWN.changed(trace=tmp_path / "t.json"))
    assert traced.calls == as_before.calls
    assert np.array_equal(np.stack(traced.found), np.stack(as_before.found))
    events = load(tmp_path / "t.json")
    check(events)
    for layer in range(SHAPE.layers):
        own = {one["name"] for one in spans(events, "reads") if one["args"].get("layer") == layer}
        assert {"rows", "codes"} <= own
    # It looks for rows and codes, and attends; where something is missing that is apart.
    once = 1 if announced else 2
    steps = [one["args"]["step"] for one in spans(events, "compute", "attention")]
    # All but those that read the prompt, and the first that decodes.
    counted = [one for one in steps if one > max(steps) - (TEXT.steps - 1)]
    assert len(counted) == once * len(traced.calls)
    read = sum(one["args"].get("reads", 0) for one in spans(events, "reads"))
    assert read == traced.statistics.cold_reads == as_before.statistics.cold_reads


class Streamed(Way):
    """Shadows are streamed, so that a thread scores, and rows and codes are read ahead."""

    def settings(self, chosen):
        return super().settings(chosen).changed(prefetch_blocks=4)


STREAMED = Streamed(Budget.LEAST, path=Path.STREAMED)


@pytest.mark.parametrize("announced", [True, False])
def test_where_another_thread_scores_the_same_calls_do_it(announced, ahead, demanded, cold_dir):
    """It looks for codes of the next layer, and those of the one that attends stay."""
    scored = Turns(cold_dir, announced=announced, way=STREAMED)
    as_before = ahead if announced else demanded
    once = {"hillinfer_attend_split": 1} | ({} if announced else MORE)
    apart = {*MORE, "hillinfer_lander_wait", "hillinfer_land", "hillinfer_end_split"} - set(once)
    assert scored.coded_reads > 0
    for calls in scored.calls:
        assert {name: calls.get(name) for name in once} == once
        assert not apart & set(calls)
    assert np.array_equal(np.stack(scored.found), np.stack(as_before.found))


def test_where_another_thread_scores_somebody_may_look_at_reads(ahead, cold_dir):
    """The twin: what takes more calls is seen there, too."""
    seen = Turns(cold_dir, way=STREAMED, calls=Seen())
    assert seen.coded_reads > 0
    assert all(one.get("hillinfer_end_split") == 1 for one in seen.calls)
    assert np.array_equal(np.stack(seen.found), np.stack(ahead.found))


def test_a_thread_that_scores_goes_on_while_a_layer_waits_and_attends(ahead, cold_dir):
    beside = Steps(cold_dir, way=STREAMED)
    for calls in beside.calls[1:]:
        # The first layer is not predicted; of the others all was read ahead.
        assert calls["hillinfer_attend_split"] == SHAPE.layers
        assert calls["hillinfer_land_split"] == 1
        assert calls["hillinfer_lander_wait"] == calls["hillinfer_end_split"] == 0
    assert beside.coded_reads > 0
    assert np.array_equal(np.stack(beside.found), np.stack(ahead.found))


class Lacking(Turns):
    """Values of some segment, of whoever, are without codes: one is coded at each turn."""

    def step(self, sequence, step):
        codes, shape = self.runtime.parts.shadow.codes, (SHAPE.kv_heads, SHAPE.head_dim)
        # Kept here: what nobody has any more lacks nothing.
        self.other = SegmentValues(
            ChannelStatistics(np.zeros(shape, np.int8), np.zeros(shape, np.int32)), 1 << 20
        )
        codes.lack(self.other)
        assert codes.completes
        return super().step(sequence, step)


def test_what_lacks_codes_somewhere_keeps_no_layer_from_its_tables(ahead, cold_dir):
    lacking = Lacking(cold_dir)
    assert lacking.calls == ahead.calls
    assert np.array_equal(np.stack(lacking.found), np.stack(ahead.found))


def test_a_layer_attends_while_another_thread_scores_the_next_one(ahead, cold_dir):
    attended, begun = threading.Event(), threading.Event()
    attended.set()

    class Late(ImportanceEvaluation):
        is_fast = False

        def chosen(self, *given):
            begun.set()
            assert attended.wait(30)
            return super().chosen(*given)

    class Beside(Turns):
        def step(self, sequence, step):
            at, outs = slice(TEXT.prompt + step, TEXT.prompt + step + 1), []
            queries = [TEXT.queries[layer, step][:, None] for layer in range(SHAPE.layers)]
            self.runtime.begin_step()
            self.runtime.announce(0, sequence, queries[0], SCALING)
            assert self.runtime.parts.pipeline.announced(0, sequence) is not None
            attended.clear()
            begun.clear()
            self.runtime.announce(1, sequence, queries[1], SCALING)
            assert begun.wait(30)
            for layer, query in enumerate(queries):
                keys, values = TEXT.keys[layer, :, at], TEXT.values[layer, :, at]
                self.runtime.append(layer, sequence, keys, values)
                out = self.runtime.attend_selected(layer, sequence, query, keys, SCALING)
                outs.append(out[:, 0].numpy())
                attended.set()
            return np.stack(outs)

    beside = Beside(cold_dir, evaluate=Late)
    assert beside.coded_reads > 0
    assert np.array_equal(np.stack(beside.found), np.stack(ahead.found))
