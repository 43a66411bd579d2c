# SPDX-License-Identifier: Apache-2.0
"""All caches of an attachment share one engine: files, threads, buffers and one budget."""

import dataclasses
import gc
import json
import subprocess
import threading
import weakref
from pathlib import Path

import pytest
import torch
from generation_runs import attached, bits, run
from interrupts import interrupted
from test_cache_operations import feed, feed_singly, open_cold_files
from tiny_models import TinyModel, prompts

import hillinfer
from hillinfer.errors import BudgetError
from hillinfer.hf.batch import CacheFamily
from hillinfer.hf.cache import HillInferCache
from hillinfer.hf.engine import Engine
from hillinfer.statistics import Counters

TINY = TinyModel(layers=3)
# The most that anything waits, however busy the machine.
ENOUGH = 60
COUNTED = [one.name for one in dataclasses.fields(Counters)]
# What depends on which rows are hot, and so on what the others do, or on time.
DEPENDS = {
    *("drive_wait_seconds", "hot_rows_read", "cold_rows_read", "promoted_rows", "demoted_rows"),
    *("cold_reads", "cold_read_bytes", "cold_useful_bytes"),
    *("bubble_seconds", "slack_seconds", "deferred_writes", "slack_write_bytes"),
}
# Of its own process, so that no other test's files and threads count.
CHILD = """
import json, os, resource, sys, threading
sys.path[:0] = [sys.argv[1]]
import torch
from generation_runs import attached, run
from tiny_models import TinyModel, prompts

torch.set_num_threads(1)
resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
model = TinyModel(layers=8).build()
documents = [prompts([70], seed)[0] for seed in range(30)]


def count():
    return len(os.listdir("/proc/self/fd")), threading.active_count()


told = {"answers": [], "alone": [], "counts": []}
with attached(model, sys.argv[2], dram_budget="25%") as hill:
    caches = []
    for document in documents:
        caches.append(hill.new_cache(80))
        run(model, caches[-1], document, new_tokens=1)
        told["counts"].append(count())
    for cache, document in zip(caches, documents):
        again = torch.cat([torch.tensor(cache.token_ids), document[:, :1]], 1)
        told["answers"].append(run(model, cache, again, new_tokens=2).sequences[0, -2:].tolist())
    statistics = hill.statistics()
    told["held"] = statistics.dram_peak_bytes <= statistics.dram_budget_bytes
    for cache in caches:
        cache.close()
    told["after"] = count()
    for document in documents[:3]:
        cache = hill.new_cache(80)
        run(model, cache, document, new_tokens=1)
        again = torch.cat([torch.tensor(cache.token_ids), document[:, :1]], 1)
        told["alone"].append(run(model, cache, again, new_tokens=2).sequences[0, -2:].tolist())
        cache.close()
print(json.dumps(told))
"""


@pytest.fixture
def cold_dir(tmp_path):
    """Its own, so that open files are those of these caches."""
    return tmp_path


def test_thirty_documents_take_the_threads_and_files_of_one(cold_dir, warm_python):
    done = subprocess.run(
        [*warm_python, "-c", CHILD, str(Path(__file__).parents[1]), str(cold_dir)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    files, threads = zip(*told["counts"], strict=True)
    # Threads of a pool start as work comes.
    assert max(files) <= files[0] + 8
    assert max(threads) <= threads[0] + 2
    assert told["held"]
    assert told["after"][0] <= files[0] - 8, "the last that is closed closes the files"
    assert told["answers"][:3] == told["alone"]


def talks(hill, cache, document, steps=6):
    """Yield the logits of a document's last token, and of steps that go on from it."""
    yield feed(hill.model, cache, document)[-1:]
    for step in range(steps):
        yield feed_singly(hill.model, cache, document[:, step : step + 1])


def test_caches_that_take_turns_answer_and_count_as_they_would_alone(cold_dir):
    documents = [prompts([length], seed=length)[0] for length in (150, 1100, 40)]
    with attached(TINY.build(), cold_dir, alpha=0.3) as hill:
        alone, counted = [], []
        for document in documents:
            cache = hill.new_cache()
            alone.append(list(talks(hill, cache, document)))
            counted.append(cache.statistics())
            cache.close()
        caches = [hill.new_cache() for _ in documents]
        going_on = [talks(hill, one, ids) for one, ids in zip(caches, documents, strict=True)]
        found = list(zip(*zip(*going_on, strict=True), strict=True))
        statistics = [cache.statistics() for cache in caches]
        whole = hill.statistics()
        for cache in caches:
            cache.close()
    for own, expected in zip(found, alone, strict=True):
        assert all(map(torch.equal, own, expected))
    assert not torch.equal(found[0][0].flip(-1), alone[0][0])
    for name in COUNTED:
        shares = [getattr(one, name) for one in statistics]
        assert sum(shares) == pytest.approx(getattr(whole, name)), name
        if name not in DEPENDS:
            assert shares == [getattr(one, name) for one in counted], name
    assert [one.kv_bytes for one in statistics] == [one.kv_bytes for one in counted]
    assert whole.kv_bytes == sum(one.kv_bytes for one in counted)
    assert whole.dram_peak_bytes <= whole.dram_budget_bytes


class SharedPool:
    """Two documents in one pool, each asked by single tokens; what is told, and shares of hits."""

    def __init__(self, cold_dir, busy_steps, **changes):
        self.answers, self.hits = [], []
        with attached(TINY.build(), cold_dir, alpha=0.1, **changes) as hill:
            caches = [hill.new_cache(800), hill.new_cache(800)]
            for seed, cache in enumerate(caches):
                feed(hill.model, cache, prompts([700], seed=seed)[0])
            first, other = caches
            # The first is busy, then the other, and then the first wants its rows again.
            for cache, steps in ((first, 12), (first, 1), (other, busy_steps), (first, 1)):
                before = cache.statistics()
                ids, _ = prompts([steps], seed=steps)
                for at in range(steps):
                    self.answers.append(feed_singly(hill.model, cache, ids[:, at : at + 1]))
                self.hits.append(cache.statistics().minus(before).hot_hit_rate)
            self.demoted = hill.statistics().demoted_rows
            for cache in caches:
                cache.close()


@pytest.mark.parametrize("policy", ["lru", "decayed"])
def test_rows_of_an_idle_document_give_way_to_those_of_a_busy_one(cold_dir, policy):
    little = SharedPool(cold_dir, 24, dram_budget="100%", pool_policy=policy)
    # The twin: no other document is busy.
    calm = SharedPool(cold_dir, 0, dram_budget="100%", pool_policy=policy)
    assert little.hits[1] == calm.hits[1] <= calm.hits[3]
    # Hits that fade do so while the other document takes steps, too.
    assert little.hits[3] < calm.hits[3] / 3
    assert little.demoted > calm.demoted
    # Nobody's answer changes by it.
    enough = SharedPool(cold_dir, 24, dram_budget="64MiB", pool_policy=policy)
    assert all(map(torch.equal, little.answers, enough.answers))
    assert (enough.hits, enough.demoted) == ([1.0] * 4, 0)
    little.answers[-1].view(torch.int32).view(-1)[0] ^= 1
    assert not torch.equal(little.answers[-1], enough.answers[-1])


def test_a_share_is_one_of_all_contexts_together(cold_dir):
    token_bytes = 64 * TINY.layers
    with attached(TINY.build(), cold_dir, dram_budget="4000%") as hill:
        caches, budgets = [], []
        for tokens in (1024, 2048, 1024):
            caches.append(hill.new_cache(tokens))
            budgets.append(hill.statistics().dram_budget_bytes)
        for cache in caches:
            cache.close()
        assert hill.statistics() is not None
    assert budgets[2] - budgets[1] == 40 * 1024 * token_bytes
    assert budgets[1] - budgets[0] == 40 * 2048 * token_bytes


def test_more_caches_than_a_budget_holds_are_refused_and_the_others_go_on(cold_dir, least_budget):
    document, _ = prompts([150])
    with attached(TINY.build(), cold_dir, dram_budget=least_budget(TINY, 200, 2)) as hill:
        calm = hill.new_cache(200)
        expected = list(talks(hill, calm, document))
        calm.close()
        first, second = hill.new_cache(200), hill.new_cache(200)
        with pytest.raises(
            BudgetError,
            match=r"3 caches of this model share one DRAM budget, and 4400 tokens in 3 sequences "
            r"are expected of them together: the DRAM budget of .* is too small.*raise "
            r"--dram-budget.*or close a cache first",
        ):
            hill.new_cache(4000)
        assert all(map(torch.equal, talks(hill, first, document), expected))
        # One that is closed or dropped expects nothing any more, whoever still has it.
        second.close()
        third = hill.new_cache(200)
        with pytest.raises(BudgetError, match="3 caches of this model share"):
            hill.new_cache(200)
        del third
        hill.new_cache(200).close()
        first.close()
        # Nobody is left, so there is room again.
        hill.new_cache(200).close()


@pytest.mark.filterwarnings("ignore:half of the DRAM budget")
def test_a_budget_that_ends_in_the_middle_names_who_shares_it(cold_dir, least_budget):
    """Nobody said how long these caches would be, so no plan refused one of them."""
    with attached(TINY.build(), cold_dir, dram_budget=least_budget(TINY, 200, 2)) as hill:
        caches, document = [], prompts([300])[0]

        def read_by_others():
            while len(caches) < 40:
                caches.append(hill.new_cache())
                feed(hill.model, caches[-1], document)

        def read_on():
            while caches[0].get_seq_length() < 4000:
                feed(hill.model, caches[0], document)

        with pytest.raises(BudgetError, match="--dram-budget, or use fewer caches") as refused:
            read_by_others()
        # The last one is among them where it has its open group, and then had no room for more.
        shared = [f": {len(caches) - more} sequences share it" for more in range(2)]
        assert any(one in str(refused.value) for one in shared)
        for cache in caches[1:]:
            cache.close()
        # One alone has nobody else to close.
        with pytest.raises(BudgetError, match=r"raise --dram-budget \(in Python"):
            read_on()
        caches[0].close()


def test_what_is_lent_is_in_the_plans_of_caches_and_they_in_its(cold_dir, least_budget):
    with attached(TINY.build(), cold_dir, dram_budget=least_budget(TINY, 200, 2)) as hill:
        assert hill.lend(1) is None
        first = hill.new_cache(200)
        assert hill.has_room(200)
        assert not hill.has_room(4000)
        loan = hill.lend(1 << 10)
        assert not hill.has_room(200)
        assert hill.has_room(200, without=[first])
        with pytest.raises(BudgetError, match=r"2 caches of .*together; 1.0 KiB of it are lent: "):
            hill.new_cache(200)
        loan.give_back()
        loan.give_back()
        second = hill.new_cache(200)
        # Both are expected to need all there is, though neither has anything yet.
        assert hill.lend(1 << 10) is None
        second.close()
        assert hill.lend(1 << 10) is not None
        first.close()


def test_the_last_cache_closes_the_engine_and_the_next_opens_one(cold_dir):
    model, before = TINY.build(), set(threading.enumerate())
    document, _ = prompts([100])
    with attached(model, cold_dir) as hill:
        first, second = hill.new_cache(), hill.new_cache()
        expected = bits(run(model, first, document))
        first.close()
        assert open_cold_files(cold_dir)
        assert torch.equal(bits(run(model, second, document)), expected)
        second.close()
        assert open_cold_files(cold_dir) == []
        assert set(threading.enumerate()) <= before
        third = hill.new_cache()
        assert third.statistics().scored_tokens == 0
        assert torch.equal(bits(run(model, third, document)), expected)
        del third
    assert open_cold_files(cold_dir) == []


def opened(hill):
    return hill.new_cache()


def closed(hill):
    hill.new_cache().close()


@pytest.mark.parametrize(
    ("use", "function", "event"),
    [
        # It counts one that no cache is there for.
        (opened, Engine.join, "return"),
        (opened, Engine.open_family, "call"),
        (opened, HillInferCache.__init__, "return"),
        # Or goes on to count one that is closed.
        (closed, Engine.leave, "call"),
        (closed, CacheFamily.lose, "call"),
    ],
)
def test_an_engine_whose_caches_ctrl_c_kept_from_being_counted_ends_with_the_last(
    use, function, event, cold_dir
):
    before = set(threading.enumerate())
    with attached(TINY.build(), cold_dir) as hill:
        first = hill.new_cache()
        with pytest.raises(KeyboardInterrupt), interrupted(function, event):
            use(hill)
        # The twin: it is open as long as one is.
        first.fork().close()
        assert open_cold_files(cold_dir)
        first.close()
        del first
        gc.collect()
        # In a thread of its own, where nobody closes it.
        for one in set(threading.enumerate()) - before:
            one.join(ENOUGH)
        assert open_cold_files(cold_dir) == []
        assert set(threading.enumerate()) <= before
        assert hill.statistics() is None


def test_an_attachment_keeps_no_memory_of_caches_that_are_gone(cold_dir):
    document, _ = prompts([100])
    with attached(TINY.build(), cold_dir) as hill:
        for ends in (lambda cache: cache.close(), lambda cache: None):
            cache = hill.new_cache()
            run(hill.model, cache, document)
            engine = weakref.ref(cache.engine)
            ends(cache)
            assert hill.statistics().scored_tokens > 0
            del cache
            assert engine() is None
            assert hill.statistics() is None


def test_a_model_that_computes_in_another_type_gets_another_engine(cold_dir):
    model = TINY.build()
    document, _ = prompts([100])
    with attached(model, cold_dir) as hill:
        narrow = hill.new_cache()
        expected = bits(run(model, narrow, document))
        model.to(torch.bfloat16)
        wide = hill.new_cache()
        run(model, wide, document)
        model.to(torch.float32)
        again = hill.new_cache()
        run(model, again, document)
        for cache in (narrow, wide, again):
            cache.close()
    assert len(expected)


def test_a_cache_that_breaks_off_leaves_the_others_whole(cold_dir):
    model = TINY.build()
    document, _ = prompts([150])
    with attached(model, cold_dir, alpha=0.3) as hill:
        calm = hill.new_cache()
        expected = list(talks(hill, calm, document))
        calm.close()
        going_on, broken = hill.new_cache(), hill.new_cache()
        steps = talks(hill, going_on, document)
        found = [next(steps)]

        def strike(*_):
            raise ZeroDivisionError

        for _ in range(6):
            hook = model.model.layers[1].register_forward_hook(strike)
            with pytest.raises(ZeroDivisionError):
                feed(model, broken, document)
            hook.remove()
            found.append(next(steps))
        feed(model, broken, document)
        going_on.close()
        broken.close()
    assert all(map(torch.equal, found, expected))


def test_a_loaded_session_is_a_cache_of_the_engine(cold_dir):
    document, other = (prompts([length], seed=length)[0] for length in (1100, 150))
    with attached(TINY.build(), cold_dir, alpha=0.3) as hill:
        saved = hill.new_cache()
        feed(hill.model, saved, document)
        saved.save_session(cold_dir / "session")
        saved.close()
        assert open_cold_files(cold_dir) == []
        alone = [hill.load_session(cold_dir / "session"), hill.new_cache()]
        expected = [list(talks(hill, cache, other)) for cache in alone]
        for cache in alone:
            cache.close()
        loaded, new = hill.load_session(cold_dir / "session"), hill.new_cache()
        assert loaded.engine is new.engine
        going_on = zip(talks(hill, loaded, other), talks(hill, new, other), strict=True)
        found = list(zip(*going_on, strict=True))
        shares = [cache.statistics() for cache in (loaded, new)]
        whole = hill.statistics()
        for name in COUNTED:
            told = sum(getattr(one, name) for one in shares)
            assert told == pytest.approx(getattr(whole, name)), name
        assert whole.kv_bytes == sum(one.kv_bytes for one in shares)
        assert whole.dram_peak_bytes <= whole.dram_budget_bytes
        loaded.close()
        assert hill.statistics() is not None
        new.close()
        assert open_cold_files(cold_dir) == []
    for own, before in zip(found, expected, strict=True):
        assert all(map(torch.equal, own, before))


def test_statistics_of_an_attachment_without_caches(cold_dir):
    with hillinfer.attach(TINY.build(), cold_dir=cold_dir) as hill:
        assert hill.statistics() is None
