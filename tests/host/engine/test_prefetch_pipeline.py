# SPDX-License-Identifier: Apache-2.0
"""What is announced is selected and read ahead; what is not asked for leaves nothing behind."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from interrupts import interrupted, interrupted_at
from placement_matrix import Budget
from slow_promotions import slow_promotions
from waiting import until

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.landing import BlockState, LandingArea
from hillinfer.engine import selection
from hillinfer.engine.runtime import Runtime
from hillinfer.errors import CacheUseError, ColdPoolError
from hillinfer.kv import prefetch_buffer
from hillinfer.kv.pool_manager import RowLife
from hillinfer.kv.prefetch_buffer import PrefetchBuffer
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.scoring.scorer import ImportanceEvaluation
from hillinfer.settings import Settings

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from single_reads import SingleReads

TOKENS, LAYERS = 600, 3
SHAPE = ModelShape(
    layers=LAYERS,
    kv_heads=2,
    query_heads=4,
    head_dim=32,
    stored_type=StoredType.BFLOAT16,
    max_positions=4096,
)
CHOSEN = Settings().changed(alpha=0.3, kept_recent=4, block_rows=64)


class FailingCalls(SingleReads):
    """Every read fails once `broken` is set."""

    broken = False

    def preadv(self, *args):
        if self.broken:
            raise OSError(5, "Input/output error")
        return super().preadv(*args)

    def read_done(self, *args):
        if self.broken:
            raise OSError(5, "Input/output error")
        return super().read_done(*args)


def states(seed, tokens):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, SHAPE.kv_heads, tokens, SHAPE.head_dim, generator=generator).bfloat16()


def query(seed):
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.randn(SHAPE.query_heads, 1, SHAPE.head_dim, generator=generator).bfloat16()


class Filled:
    """A runtime with one sequence, almost nothing of it hot."""

    def __init__(
        self, cold_dir, calls=None, tokens=TOKENS, evaluate=ImportanceEvaluation, **changes
    ):
        settings = CHOSEN.changed(**changes)
        budget = Budget.LEAST.byte_count(SHAPE, settings, TOKENS + 100)
        self.runtime = Runtime(SHAPE, settings, budget, cold_dir, calls=calls, evaluate=evaluate)
        self.sequence = self.runtime.open_sequence()
        self.runtime.begin_step()
        for layer in range(LAYERS):
            keys, values = states(layer, tokens)
            self.runtime.append(layer, self.sequence, keys, values)
            self.runtime.code_full_segments(layer, self.sequence, keys)
            self.runtime.parts.store.settle_all(layer)

    def append(self, layer, step):
        keys, values = states(50 + 10 * step + layer, 1)
        self.runtime.append(layer, self.sequence, keys, values)
        return keys

    def attend(self, layer, keys, seed):
        scaling = SHAPE.head_dim**-0.5
        return self.runtime.attend_selected(layer, self.sequence, query(seed), keys, scaling)

    def announce(self, layer, seed):
        self.runtime.announce(layer, self.sequence, query(seed), SHAPE.head_dim**-0.5)

    def announced(self, layer):
        """What is known of a layer that was announced, once its rows are selected."""
        return self.runtime.parts.pipeline.announced(layer, self.sequence)

    def busy_thread(self):
        """Keep the scoring thread from all that is announced until an event is set."""
        gate = threading.Event()

        def select():
            assert gate.wait(30)
            return [np.arange(0)]

        self.runtime.parts.pipeline.announce(0, self.sequence, 0, select)
        return gate

    @property
    def blocks(self):
        self.runtime.statistics()
        # Blocks are given back behind a promotion, in the thread that promotes.
        self.runtime.parts.pools.promotions.finish()
        return {state.value for state in self.runtime.prefetch.landing.states()}


class Unhurried(ImportanceEvaluation):
    """Takes so long that another thread is to score."""

    is_fast = False


@pytest.fixture
def filled(cold_dir):
    made = Filled(cold_dir)
    yield made
    made.runtime.close()


@pytest.fixture
def cold_dir(tmp_path):
    return tmp_path


def test_rows_are_there_before_their_layer_begins(filled):
    filled.runtime.begin_step()
    filled.announce(1, seed=3)
    ahead = filled.announced(1)
    ahead.landed.reading.result()
    before = filled.runtime.counters.cold_reads
    assert before > 0
    filled.attend(1, filled.append(1, 0), seed=3)
    assert filled.runtime.counters.cold_reads == before
    assert filled.blocks == {"free"}


def test_output_is_that_of_rows_read_when_they_are_wanted(cold_dir):
    outputs = []
    for blocks in (0, 1, 4):
        (cold_dir / str(blocks)).mkdir()
        made = Filled(cold_dir / str(blocks), prefetch_blocks=blocks)
        made.runtime.begin_step()
        made.announce(2, seed=1)
        outputs.append(made.attend(2, made.append(2, 0), seed=1))
        made.runtime.close()
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_a_flipped_bit_where_a_row_landed_changes_the_output(cold_dir):
    outputs = []
    for flip in (0, 0x40):
        (cold_dir / str(flip)).mkdir()
        made = Filled(cold_dir / str(flip))
        made.runtime.begin_step()
        made.announce(2, seed=1)
        landed = made.announced(2).landed
        landed.reading.result()
        made.runtime.prefetch.rows[landed.places[0], 1] ^= flip
        outputs.append(made.attend(2, made.append(2, 0), seed=1))
        made.runtime.close()
    assert not torch.equal(*outputs)


def test_the_announced_query_selects_and_not_the_one_at_hand(cold_dir):
    outputs = []
    for announced in (1, 2):
        (cold_dir / str(announced)).mkdir()
        made = Filled(cold_dir / str(announced))
        made.runtime.begin_step()
        made.announce(2, seed=announced)
        outputs.append(made.attend(2, made.append(2, 0), seed=1))
        made.runtime.close()
    assert not torch.equal(*outputs)


@pytest.mark.parametrize("tokens", [TOKENS, 575, 576, 639, 640])
def test_when_the_scoring_thread_comes_round_to_it_changes_nothing(tokens, cold_dir):
    """Also where it does only after the new token is stored, which it must not see."""
    outputs = []
    for late in (False, True):
        (cold_dir / str(late)).mkdir()
        # So few tokens would be scored at once.
        made = Filled(cold_dir / str(late), tokens=tokens, evaluate=Unhurried)
        for step in range(3):
            made.runtime.begin_step()
            gate = made.busy_thread() if late else threading.Event()
            made.announce(1, seed=step)
            keys = made.append(1, step)
            gate.set()
            outputs.append(made.attend(1, keys, seed=step))
        made.runtime.close()
    assert all(map(torch.equal, outputs[:3], outputs[3:]))


def noting(threads, kind=ImportanceEvaluation):
    """Note which threads select."""

    class Noting(kind):
        def select(self, *given):
            threads.append(threading.current_thread())
            return super().select(*given)

    return Noting


@pytest.mark.parametrize("tokens", [TOKENS, 575, 576, 639, 640])
def test_who_scores_changes_nothing(tokens, cold_dir):
    """Little is scored by whoever announces it, at once; more by another thread."""
    outputs, threads = [], []
    for kind in (Unhurried, ImportanceEvaluation):
        (cold_dir / kind.__name__).mkdir()
        evaluate = noting(threads, kind)
        made = Filled(cold_dir / kind.__name__, tokens=tokens, evaluate=evaluate)
        for step in range(3):
            made.runtime.begin_step()
            made.announce(1, seed=step)
            outputs.append(made.attend(1, made.append(1, step), seed=step))
        made.runtime.close()
    assert all(map(torch.equal, outputs[:3], outputs[3:]))
    # The twin: another step has another query.
    assert not torch.equal(outputs[0], outputs[4])
    main = threading.current_thread()
    # At once means in the native library, once a segment has statistics: nobody is asked then.
    assert [one is main for one in threads] == [False] * 3 + [True]


def test_little_is_not_scored_beside_the_scoring_thread(cold_dir):
    """One after the other: rows are read in the order of layers, and nobody waits for a lock."""
    threads, main = [], threading.current_thread()
    made = Filled(cold_dir, evaluate=noting(threads))
    made.runtime.begin_step()
    gate = made.busy_thread()
    for layer in (1, 2):
        made.announce(layer, seed=layer)
    assert not threads
    gate.set()
    made.attend(1, made.append(1, 0), seed=1)
    made.runtime.begin_step()
    assert main not in threads
    asked = len(threads)
    made.announce(2, seed=2)
    # At once: by this thread, or in the native library, which asks nobody.
    assert threads[asked:] in ([], [main])
    assert made.runtime.parts.pipeline.is_idle
    assert made.announced(2) is not None
    made.runtime.close()


@pytest.mark.parametrize("event", ["call", "return"])
@pytest.mark.parametrize("function", [prefetch_buffer.LandingThread.submit, threading.Thread.start])
def test_an_interrupt_while_reading_begins_hangs_nobody(cold_dir, function, event):
    """Right before the thread that reads is given it, or is started for it, or right after."""
    made = Filled(cold_dir, prefetch_blocks=1)
    made.runtime.begin_step()
    interrupt = interrupted(function, event, prefetch_buffer.__file__)
    with pytest.raises(KeyboardInterrupt), interrupt:
        made.announce(1, seed=1)
    made.runtime.truncate(made.sequence, TOKENS)
    assert made.blocks == {"free"}
    made.announce(1, seed=1)
    made.attend(1, made.append(1, 0), seed=1)
    assert made.blocks == {"free"}
    made.runtime.close()


def test_what_an_interrupt_left_to_the_thread_that_scores_is_waited_for(cold_dir):
    """It looks at tables of the sequence, which may be cut short or given back next."""
    threads, gate = [], threading.Event()

    class Held(noting(threads, Unhurried)):
        def select(self, *given, **named):
            assert gate.wait(30)
            return super().select(*given, **named)

    made = Filled(cold_dir, evaluate=Held)
    made.runtime.begin_step()
    interrupt = interrupted(ThreadPoolExecutor.submit, "return", selection.__file__)
    with pytest.raises(KeyboardInterrupt), interrupt:
        made.announce(1, seed=1)
    threading.Timer(0.2, gate.set).start()
    made.runtime.truncate(made.sequence, TOKENS)
    assert len(threads) == 1
    assert made.blocks == {"free"}
    made.runtime.close()


@contextmanager
def no_more_threads():
    """Have the system start no thread of Python's in the block of code that this encloses."""
    # None has room for such a stack.
    before = threading.stack_size(1 << 56)
    try:
        yield
    finally:
        threading.stack_size(before)


def test_what_no_thread_was_started_for_is_not_read_later(cold_dir):
    """It stands in line all the same, and its blocks would never be given back."""
    made = Filled(cold_dir)
    # Those that select and stream are there already.
    made.busy_thread().set()
    for _ in made.runtime.gather.stream(0, made.sequence, np.arange(TOKENS)):
        pass
    made.runtime.begin_step()
    with no_more_threads():
        made.announce(1, seed=1)
        keys = made.append(1, 0)
        with pytest.raises(RuntimeError, match="new thread"):
            made.attend(1, keys, seed=1)
    # A thread is started for something else, and would read meanwhile what stands in line.
    made.runtime.prefetch.together(lambda: time.sleep(0.1))
    assert made.blocks == {"free"}
    made.runtime.close()


def test_what_was_announced_and_not_wanted_is_given_back(filled):
    for _ in range(3):
        filled.runtime.begin_step()
        filled.announce(1, seed=1)
        filled.announce(2, seed=2)
        filled.runtime.begin_step()
        assert filled.announced(1) is filled.announced(2) is None
        assert filled.blocks == {"free"}
    filled.announce(1, seed=1)
    filled.runtime.truncate(filled.sequence, TOKENS - 100)
    assert filled.blocks == {"free"}
    filled.announce(1, seed=1)
    filled.runtime.release(filled.sequence)
    assert filled.blocks == {"free"}


def test_a_query_that_is_not_finite_is_told_when_its_layer_begins(filled):
    filled.runtime.begin_step()
    filled.runtime.announce(1, filled.sequence, query(1) * torch.nan, 0.1)
    keys = filled.append(1, 0)
    with pytest.raises(CacheUseError, match="layer 1 made a query that is not finite"):
        filled.attend(1, keys, seed=1)
    filled.runtime.truncate(filled.sequence, TOKENS)
    filled.attend(1, filled.append(1, 0), seed=1)


def test_a_drive_that_fails_is_told_when_its_layer_begins(cold_dir):
    calls = FailingCalls()
    made = Filled(cold_dir, calls)
    made.runtime.begin_step()
    made.announce(1, seed=1)
    made.attend(1, made.append(1, 0), seed=1)
    made.runtime.begin_step()
    calls.broken = True
    made.announce(1, seed=2)
    keys = made.append(1, 1)
    with pytest.raises(ColdPoolError):
        made.attend(1, keys, seed=1)
    calls.broken = False
    made.runtime.truncate(made.sequence, TOKENS)
    assert made.blocks == {"free"}
    made.runtime.begin_step()
    made.announce(1, seed=1)
    assert torch.isfinite(made.attend(1, made.append(1, 0), seed=1)).all()
    made.runtime.close()


def test_more_rows_than_blocks_are_read_when_they_are_wanted(cold_dir):
    made = Filled(cold_dir, prefetch_blocks=1)
    made.runtime.begin_step()
    made.announce(1, seed=1)
    ahead = made.announced(1)
    until(lambda: len(ahead.landed.positions))
    assert not ahead.landed.reading.done()
    assert len(ahead.landed.positions) == 64
    assert np.isin(ahead.landed.positions, ahead.sets[0]).all()
    before = made.runtime.counters.cold_reads
    made.attend(1, made.append(1, 0), seed=1)
    assert made.runtime.counters.cold_reads > before
    assert len(ahead.landed.positions) == 64
    assert made.blocks == {"free"}
    made.runtime.close()


def test_blocks_that_become_free_are_filled_for_the_layer_that_comes(cold_dir):
    """Two layers are announced, and there is room for little more than the first one's rows."""
    made = Filled(cold_dir, prefetch_blocks=3)
    made.runtime.begin_step()
    made.announce(1, seed=1)
    made.announce(2, seed=2)
    first, second = (made.announced(layer) for layer in (1, 2))
    first.landed.reading.result()
    landing = made.runtime.prefetch.landing
    until(lambda: BlockState.FREE not in landing.states())
    until(lambda: BlockState.FILLING not in landing.states())
    had = len(second.landed.positions)
    assert not second.landed.reading.done()
    made.attend(1, made.append(1, 0), seed=1)
    until(lambda: len(second.landed.positions) > had)
    second.landed.reading.result()
    before = made.runtime.counters.cold_reads
    made.attend(2, made.append(2, 0), seed=2)
    assert made.runtime.counters.cold_reads == before
    assert made.blocks == {"free"}
    made.runtime.close()


@pytest.mark.parametrize("end", ["drop", "close"])
def test_nobody_waits_for_room_for_ever(cold_dir, end):
    made = Filled(cold_dir, prefetch_blocks=1)
    made.runtime.begin_step()
    for layer in (1, 2):
        made.announce(layer, seed=layer)
    two = [made.announced(layer) for layer in (1, 2)]
    until(lambda: len(two[0].landed.positions))
    assert not any(ahead.landed.reading.done() for ahead in two)
    if end == "drop":
        made.runtime.truncate(made.sequence, TOKENS)
        assert made.blocks == {"free"}
    made.runtime.close()
    assert all(ahead.landed.reading.done() for ahead in two)


def test_the_layer_that_attends_does_not_wait_for_room_that_an_earlier_one_has(cold_dir):
    made = Filled(cold_dir, prefetch_blocks=1)
    made.runtime.begin_step()
    for layer in (1, 2):
        made.announce(layer, seed=layer)
    # Layer 1 never comes, and holds the only block.
    made.attend(2, made.append(2, 0), seed=2)
    made.runtime.truncate(made.sequence, TOKENS)
    assert made.blocks == {"free"}
    made.runtime.close()


def test_an_interrupt_between_a_note_and_its_call_hangs_nobody(cold_dir):
    made = Filled(cold_dir, prefetch_blocks=1)
    made.runtime.begin_step()
    made.announce(1, seed=1)
    landed = made.announced(1).landed
    until(lambda: len(landed.positions))
    landed.is_wanted = True
    made.runtime.truncate(made.sequence, TOKENS)
    assert made.blocks == {"free"}
    made.runtime.close()


def test_blocks_that_were_given_are_not_given_again(cold_dir):
    """An interrupt came after the blocks were given and before that was noted."""
    made = Filled(cold_dir)
    made.runtime.begin_step()
    made.announce(1, seed=1)
    landed = made.announced(1).landed
    made.runtime.prefetch.let_go(landed)
    made.runtime.truncate(made.sequence, TOKENS)
    assert made.blocks == {"free"}
    made.runtime.close()


# What lands by a thread of the library's, and by one of Python's, where somebody looks at reads.
@pytest.mark.parametrize("calls", [DriveCalls, SingleReads])
@pytest.mark.parametrize("function", [PrefetchBuffer.begin, LandingArea.take, RowLife.take])
def test_an_interrupt_at_any_moment_leaves_no_block_taken(cold_dir, function, calls):
    made = Filled(cold_dir, calls=calls())

    def step(seed):
        made.announce(1, seed)
        made.attend(1, made.append(1, 0), seed)

    # The first one codes keys, too.
    step(999)
    number, has_come = 0, True
    while has_come:
        made.runtime.truncate(made.sequence, TOKENS)
        made.runtime.begin_step()
        # Each time other rows are cold.
        with interrupted_at(function, number) as interrupt, suppress(KeyboardInterrupt):
            step(number)
        has_come, number = interrupt.left < 0, number + 1
        made.runtime.truncate(made.sequence, TOKENS)
        assert made.blocks == {"free"}, number
    made.runtime.close()
    assert number > 10


def test_an_interrupt_while_a_promotion_begins_waits_for_it(cold_dir, monkeypatch):
    """Its rows lie in blocks that another layer may fill at once."""
    # A promotion goes on when the main thread waits, and not before.
    slow_promotions(monkeypatch)
    made = Filled(cold_dir)
    made.runtime.begin_step()
    made.announce(1, seed=1)
    keys = made.append(1, 0)
    pools, manager = made.runtime.parts.pools, made.runtime.parts.manager
    before, settled = pools.layers[1].used_rows, []
    with pytest.raises(KeyboardInterrupt), interrupted(type(manager).offer_missed):
        made.attend(1, keys, seed=1)
    # Called at once where nothing is under way.
    pools.promotions.when_settled(1, lambda: settled.append(threading.current_thread()))
    assert settled == [threading.current_thread()]
    assert made.runtime.counters.promoted_rows + pools.layers[1].used_rows > before
    made.runtime.close()
