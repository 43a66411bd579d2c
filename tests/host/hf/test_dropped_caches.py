# SPDX-License-Identifier: Apache-2.0
"""A cache that nobody closed is collected in whatever thread the collector runs in."""

import gc
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from generation_runs import SETTINGS
from test_cache_operations import feed, feed_singly, open_cold_files
from tiny_models import TinyModel, prompts

from hillinfer.hf.attach import Attachment
from hillinfer.hf.engine import RUNTIME_THREADS
from hillinfer.kv import hot_pool
from hillinfer.kv.pool_policies import PoolPolicy
from hillinfer.settings import Settings
from hillinfer.store.store import Store

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from single_reads import SingleReads

TINY = TinyModel()
IDS, _ = prompts([150])
# The most that anything waits, however busy the machine.
ENOUGH = 60


def ran(python, program, *arguments, patience=ENOUGH):
    """Run a program that lies beside this file to its end."""
    return subprocess.run(
        [*python, Path(__file__).with_name(program), *arguments],
        capture_output=True,
        text=True,
        timeout=patience,
        check=False,
    )


class Collector(SingleReads):
    """Runs the garbage collector in one of the runtime's threads, once it is let."""

    def __init__(self):
        self.thread = "none"
        self.entered = threading.Event()
        self.dropped = threading.Event()
        self.collected = threading.Event()
        self.after = lambda: None

    def collect(self):
        if threading.current_thread().name.startswith(self.thread):
            self.thread = "none"
            self.entered.set()
            assert self.dropped.wait(ENOUGH)
            gc.collect()
            self.after()
            self.collected.set()

    def pwrite(self, descriptor, data, offset):
        self.collect()
        return super().pwrite(descriptor, data, offset)

    def preadv(self, descriptor, into, offset):
        self.collect()
        return super().preadv(descriptor, into, offset)

    def read_done(self, descriptor, into, offset, result):
        self.collect()
        return super().read_done(descriptor, into, offset, result)


class CollectingPolicy(PoolPolicy):
    """Lets a collector collect while rows are ranked."""

    def __init__(self, collector):
        self.collector = collector

    def worth(self, rows):
        self.collector.collect()
        return super().worth(rows)


@pytest.fixture
def cold_dir(tmp_path):
    """Its own: other tests' files may be closed at any time."""
    return tmp_path


@pytest.fixture
def calls():
    gc.collect()
    gc.disable()
    yield Collector()
    gc.enable()


def attached(model, cold_dir, calls, **changes):
    settings = Settings().changed(cold_dir=cold_dir, **(SETTINGS | changes))
    return Attachment(model, settings, calls)


def make_cold(runtime):
    runtime.parts.pools.promotions.settle_all()
    for pool in runtime.parts.pools.layers:
        pool.forget(0, 128)


def in_the_pool_thread(model, cache, calls):
    make_cold(cache.engine.runtime)
    cache.engine.runtime.parts.pools.layers[-1].policy = CollectingPolicy(calls)
    calls.thread = "hillinfer-pool"
    feed_singly(model, cache, IDS[:, :1])


def in_the_gather_thread(model, cache, calls):
    make_cold(cache.engine.runtime)
    calls.thread = "hillinfer-gather"
    # Left in the middle, as by an error, with its second block still being gathered.
    sequence = cache.sequences[0]
    stream = cache.engine.runtime.gather.stream(0, sequence, torch.arange(100).numpy())
    next(stream)
    return stream


def in_the_writing_thread(model, cache, calls):
    # What was written before must not have one of both buffers still: this feed wants them.
    for layer in range(TINY.layers):
        cache.engine.runtime.parts.store.settle_all(layer)
    calls.thread = "hillinfer-write"
    feed(model, cache, IDS[:, :64])


WHERE = [in_the_pool_thread, in_the_gather_thread, in_the_writing_thread]


def runtime_threads():
    return {one for one in threading.enumerate() if one.name.startswith(RUNTIME_THREADS)}


@pytest.mark.parametrize("forks", [0, 1])
@pytest.mark.parametrize("where", WHERE)
def test_the_last_cache_is_collected_in_a_thread_of_its_own(where, forks, cold_dir, calls):
    model = TINY.build()
    before = runtime_threads()
    with attached(model, cold_dir, calls) as hill:
        cache = hill.new_cache()
        feed(model, cache, IDS)
        left = where(model, cache, calls)
        assert calls.entered.wait(ENOUGH)
        cache.cycle = [cache, *(cache.fork() for _ in range(forks))]
        del cache
        calls.dropped.set()
        assert calls.collected.wait(ENOUGH), "the thread waits for itself"
        deadline = time.monotonic() + ENOUGH
        while open_cold_files(cold_dir) or runtime_threads() - before:
            assert time.monotonic() < deadline, runtime_threads()
            time.sleep(0.01)
    del left


def test_all_threads_of_a_runtime_are_known_by_their_names(cold_dir, calls):
    model = TINY.build()
    before = set(threading.enumerate())
    with attached(model, cold_dir, calls, alpha=0.5, io="threads") as hill:
        cache = hill.new_cache()
        feed(model, cache, IDS)
        make_cold(cache.engine.runtime)
        feed_singly(model, cache, IDS[:, :2])
        # Few rows are promoted by whoever offers them.
        cache.engine.runtime.parts.pools.promotions.finish()
        shadows = cache.engine.runtime.parts.shadow_store
        slot, shadow = shadows.take(), shadows.buffer()
        shadows.write(slot, shadow).result()
        shadows.read(slot, shadow).result()
        new = set(threading.enumerate()) - before
        kinds = {one.name.rpartition("_")[0].removeprefix(RUNTIME_THREADS) for one in new}
        assert kinds == {"pool", "gather", "write", "shadow-read", "shadow-write"}
        cache.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("where", ["hillinfer-gather", "hillinfer-pool"])
def test_a_dropped_fork_is_freed_by_the_thread_that_uses_its_sibling(where, cold_dir, calls):
    model = TINY.build()
    way, _ = prompts([70], seed=5)

    def held(runtime):
        """Return the bytes of everything but hot rows, whose number depends on what was read."""
        parts = runtime.parts.accountant.held()
        return {**parts, "hot": runtime.parts.pools.tails_bytes}

    def read():
        cache = hill.new_cache()
        feed(model, cache, IDS)
        return cache

    def go_on(cache):
        """Yield the logits of the first step, which reads from the drive, and of the others."""
        make_cold(cache.engine.runtime)
        yield feed_singly(model, cache, way[:, :1])
        yield feed_singly(model, cache, way[:, 1:])

    with attached(model, cold_dir, calls, alpha=0.5) as hill:
        undisturbed = read()
        expected = list(go_on(undisturbed))
        without_fork = held(undisturbed.engine.runtime)
        undisturbed.close()
        cache = read()
        runtime = cache.engine.runtime

        def in_use():
            return runtime.parts.groups.parts_in_use, len(runtime.parts.rows.sequences)

        fork = cache.fork()
        feed(model, fork, way)
        assert held(runtime) != without_fork
        seen = []
        calls.after = lambda: seen.append(in_use())
        for pool in runtime.parts.pools.layers:
            pool.policy = CollectingPolicy(calls)
        steps = go_on(cache)
        # What is dropped in the middle of a forward pass is collected there.
        fork.itself = fork
        fork_of = [fork]
        del fork

        def drop(*ignored):
            fork_of.clear()
            calls.dropped.set()
            calls.thread = where

        hook = model.model.layers[0].self_attn.q_proj.register_forward_hook(drop)
        found = [next(steps)]
        hook.remove()
        assert calls.collected.wait(ENOUGH), "the thread waits for itself"
        calls.thread = "none"
        assert seen == [(3, 2)], "only the thread that uses the sibling frees"
        found.append(next(steps))
        assert in_use() == (3, 1), "two of the document's groups, one of this way"
        assert held(runtime) == without_fork
        cache.close()
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(found[1].flip(0), expected[1])
    assert open_cold_files(cold_dir) == []


def use_by_forward(model, cache):
    feed(model, cache, IDS[:, :1])


def use_by_fork(model, cache):
    cache.fork().close()


def use_by_close(model, cache):
    # The third goes on.
    cache.cousin = cache.fork()
    cache.close()


@pytest.mark.parametrize(
    "use", [use_by_forward, use_by_fork, use_by_close, lambda model, cache: cache.reset()]
)
def test_the_next_use_frees_what_was_dropped(use, cold_dir, calls):
    model = TINY.build()
    with attached(model, cold_dir, calls) as hill:
        cache = hill.new_cache()
        feed(model, cache, IDS)
        runtime = cache.engine.runtime
        fork = cache.fork()
        own = fork.sequences[0]
        feed(model, fork, IDS)
        assert runtime.parts.groups.parts_in_use == 4
        del fork
        assert own in runtime.parts.rows.sequences
        use(model, cache)
        assert own not in runtime.parts.rows.sequences
        assert runtime.parts.groups.parts_in_use <= 2
        cache.close()


def test_a_program_may_end_while_a_runtimes_thread_collects_its_last_cache(
    warm_python, cold_dir, tmp_path
):
    timeline = tmp_path / "timeline.csv"
    done = ran(warm_python, "dropped_at_exit.py", cold_dir, timeline, patience=4 * ENOUGH)
    assert (done.returncode, done.stdout, done.stderr) == (0, "collected True\n", "")
    # What was observed reaches the file when the runtime is closed.
    assert len(timeline.read_text().splitlines()) == 1 + TINY.layers


def test_a_program_ends_that_a_prompt_breaks_off_in(warm_python, cold_dir):
    """A thread of Python's waits for room for rows that nobody will ask for."""
    done = ran(warm_python, "broken_prompt.py", cold_dir)
    assert (done.returncode, done.stdout, done.stderr) == (0, "broke off\n", "")


def test_a_program_that_ends_with_a_cache_open_lets_its_store_go(warm_python, cold_dir, tmp_path):
    Store.create(tmp_path / "store", 64 << 20)
    done = ran(warm_python, "store_at_exit.py", cold_dir, tmp_path / "store")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    # Who opens the store removes what an ended process left there.
    with closing(sqlite3.connect(tmp_path / "store" / "index.sqlite")) as index:
        assert index.execute("SELECT COUNT(*) FROM owner").fetchone() == (0,)


def test_a_last_cache_that_is_collected_within_its_store_stops_nobody(
    warm_python, cold_dir, tmp_path
):
    Store.create(tmp_path / "store", 64 << 20)
    done = ran(warm_python, "dropped_in_store.py", cold_dir, tmp_path / "store")
    told = "leased True\ngiven back\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, told, "")


def test_garbage_that_is_collected_while_threads_are_looked_at_stops_nobody(warm_python):
    """It may be a cache, whose memory the library frees while another thread begins one."""
    done = ran(warm_python, "collected_while_looking.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "looked\n", "")


class InPython(PoolPolicy):
    def worth(self, rows):
        return super().worth(rows)


class Noted(ThreadPoolExecutor):
    """Threads that say what they were given last, and which were made last."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        Noted.made = self

    def submit(self, *given):
        self.last = super().submit(*given)
        return self.last


def test_statistics_after_close(cold_dir, calls, monkeypatch):
    monkeypatch.setattr(hot_pool, "ThreadPoolExecutor", Noted)
    model = TINY.build()
    with attached(model, cold_dir, calls) as hill:
        cache = hill.new_cache()
        feed(model, cache, IDS)
        runtime = cache.engine.runtime
        runtime.parts.pools.promotions.settle_all()
        # Nothing is promoted in the first layer, which the second would wait for.
        runtime.parts.pools.layers[1].forget(0, 128)
        # What Python ranks, however few, the thread promotes.
        runtime.parts.pools.layers[1].policy = InPython()
        Noted.made.submit(calls.dropped.wait, ENOUGH)
        feed_singly(model, cache, IDS[:, :1])
        under_way = Noted.made.last
        # The thread gets to it only after it was called off.
        under_way.add_done_callback(lambda _: calls.dropped.set())
        runtime.close()
        assert under_way.cancelled()
        found = []
        asking = threading.Thread(target=lambda: found.append(cache.statistics()), daemon=True)
        asking.start()
        asking.join(ENOUGH)
        assert found, "it waits for what nobody will do"
        cache.close()
