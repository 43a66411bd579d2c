# SPDX-License-Identifier: Apache-2.0
"""Threads that each use a cache get what each would get alone."""

import gc
import inspect
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

import pytest
import torch
from generation_runs import attached, attached_with, bits, run, with_streamed_shadows
from tiny_models import TinyModel, prompts
from transformers import DynamicCache

from hillinfer.errors import CacheUseError
from hillinfer.hf.engine import Use

# A third layer is the first whose query is predicted.
TINY = TinyModel(layers=3)
DOCUMENT, _ = prompts([150])
QUESTIONS = [prompts([9], seed=seed)[0] for seed in (1, 2, 3)]
# The most that anything waits, however busy the machine.
ENOUGH = 60
# For what does not come.
A_MOMENT = 1


@contextmanager
def slow_layers(model, seconds=0.001):
    """Let other threads run in the middle of every layer, as they do in a large model."""

    def wait(*_):
        time.sleep(seconds)

    with ExitStack() as hooks:
        for layer in model.model.layers:
            for part in (layer.self_attn, layer.mlp):
                hooks.callback(part.register_forward_pre_hook(wait).remove)
        yield


def together(*works):
    """Run each in a thread of its own, and return or raise what they did."""
    results = [None] * len(works)
    start = threading.Barrier(len(works))

    def work(number):
        start.wait(ENOUGH)
        try:
            results[number] = works[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(works))]
    for one in threads:
        one.start()
    for one in threads:
        one.join(ENOUGH)
        assert not one.is_alive(), "a thread waits for ever"
    for one in results:
        if isinstance(one, Exception):
            raise one
    return results


@dataclass(frozen=True)
class Place:
    """A document, and the budget in bytes that has its rows and its shadow where they are to be."""

    document: torch.Tensor
    budget: int
    rows_from_drive: bool = True
    shadow_from_drive: bool = False


# Bytes that are held for rows ahead of a predicted query.
ROWS_AHEAD = 22_000
MEMORY = Place(DOCUMENT, 24 << 20, rows_from_drive=False)
# Each has room for buffers, open shadows and less than half of the rows.
OF_FORKS = Place(DOCUMENT, 1_280_000)
OF_ONE_CACHE = Place(DOCUMENT, 816_000)
OF_TWO_CACHES = Place(DOCUMENT, 1_300_000)
STREAMED = Place(prompts([1100])[0], 1_860_000, shadow_from_drive=True)


@contextmanager
def forks(hills, document):
    """Yield a cache of the document for each question, all forks of one."""
    with closing(hills[0].new_cache()) as whole:
        run(hills[0].model, whole, document, new_tokens=1)
        yield [hills[0].model] * len(QUESTIONS), [whole.fork() for _ in QUESTIONS]


@contextmanager
def caches(hills, document):
    """Yield an empty cache of one model for each question."""
    yield [hills[0].model] * len(QUESTIONS), [hills[0].new_cache() for _ in QUESTIONS]


@contextmanager
def models(hills, document):
    """Yield a model and an empty cache for each question."""
    yield [hill.model for hill in hills], [hill.new_cache() for hill in hills]


def answers(shared, place, query, cold_dir, run_all):
    """Return the logits' bits of every token of each question's answer, and traffic."""
    with ExitStack() as stack:
        hills = [
            stack.enter_context(
                attached_with(
                    TINY.build(),
                    cold_dir,
                    {"open_runtime": with_streamed_shadows} if place.shadow_from_drive else {},
                    dram_budget=place.budget + ROWS_AHEAD * (query == "predicted"),
                    query=query,
                )
            )
            for _ in QUESTIONS
        ]
        users, opened = stack.enter_context(shared(hills, place.document))
        for model in users[: 1 if shared is not models else None]:
            stack.enter_context(slow_layers(model))

        def ask(model, cache, question):
            return bits(run(model, cache, torch.cat([place.document, question], 1), new_tokens=5))

        given = zip(users, opened, QUESTIONS, strict=True)
        found = run_all(*(lambda one=one: ask(*one) for one in given))
        statistics = opened[-1].statistics()
        for cache in opened:
            cache.close()
    return found, statistics


def same(found, expected):
    return all(map(torch.equal, found, expected))


@pytest.mark.filterwarnings("ignore::hillinfer.errors.SetupWarning")
@pytest.mark.parametrize(
    ("shared", "place", "query"),
    [
        (forks, MEMORY, "predicted"),
        (forks, OF_FORKS, "true"),
        (forks, OF_FORKS, "predicted"),
        (forks, STREAMED, "true"),
        (forks, STREAMED, "predicted"),
        (caches, OF_TWO_CACHES, "predicted"),
        (models, OF_ONE_CACHE, "true"),
    ],
    ids=[
        *("forks", "forks on the drive", "forks on the drive, predicted"),
        *("forks with a streamed shadow", "forks with a streamed shadow, predicted"),
        *("caches", "models"),
    ],
)
def test_every_thread_gets_the_answer_that_it_would_get_alone(shared, place, query, cold_dir):
    alone, statistics = answers(
        shared, place, query, cold_dir, lambda *works: [one() for one in works]
    )
    found, _ = answers(shared, place, query, cold_dir, together)
    assert same(found, alone)
    found[1][-1, 0, 0] ^= 1
    assert not same(found, alone)
    assert (statistics.cold_rows_read > 0) is place.rows_from_drive
    assert (statistics.shadow_read_bytes > 0) is place.shadow_from_drive


def test_operations_wait_until_another_threads_pass_is_through(cold_dir, tmp_path):
    """Whatever comes while a pass is under way comes after it, as if it had been called then."""
    model = TINY.build()
    way, _ = prompts([5], seed=4)
    operations = {
        "fork": lambda cache: cache.fork().close(),
        "crop": lambda cache: cache.crop(0),
        "statistics": lambda cache: cache.statistics(),
        "save": lambda cache: cache.save_session(tmp_path / "session"),
        "reset": lambda cache: cache.fork().reset(),
        "close": lambda cache: cache.close(),
    }

    @torch.no_grad()
    def steps(cache):
        return [model(one, past_key_values=cache).logits for one in torch.split(way, 1, 1)]

    with attached(model, cold_dir) as hill:
        whole = hill.new_cache()
        run(model, whole, DOCUMENT)
        expected = steps(whole.fork())
        with slow_layers(model, 0.004):
            for operation in operations.values():
                going_on, other = whole.fork(), whole.fork()
                found, _ = together(
                    lambda cache=going_on: steps(cache),
                    # In the middle of some layer.
                    lambda cache=other, do=operation: (time.sleep(0.01), do(cache)),
                )
                assert all(map(torch.equal, found, expected))
                assert going_on.get_seq_length() == whole.get_seq_length() + 5
        whole.close()


def test_only_whole_passes_are_counted_elsewhere(cold_dir):
    model = TINY.build()
    seen = []
    with attached(model, cold_dir) as hill, torch.no_grad():
        cache = hill.new_cache()
        model(DOCUMENT, past_key_values=cache)

        def look(*_):
            seen.append(cache.get_seq_length())
            together(lambda: seen.append(cache.get_seq_length()))

        hook = model.model.layers[2].self_attn.o_proj.register_forward_hook(look)
        model(DOCUMENT[:, :1], past_key_values=cache)
        hook.remove()
        assert seen == [151, 150]
        assert cache.get_seq_length() == 151
        cache.close()


def test_an_attachment_tells_of_whole_steps_of_other_threads(cold_dir):
    model = TINY.build()
    told, asking = [], []
    with attached(model, cold_dir) as hill, torch.no_grad():
        cache = hill.new_cache()
        model(DOCUMENT, past_key_values=cache)

        def ask():
            told.append(hill.statistics().scored_tokens)

        def in_the_middle(*_):
            # In this thread it is told of what was done until now.
            ask()
            asking.append(threading.Thread(target=ask, daemon=True))
            asking[-1].start()
            asking[-1].join(0.2)

        hook = model.model.layers[1].mlp.register_forward_hook(in_the_middle)
        model(DOCUMENT[:, :1], past_key_values=cache)
        hook.remove()
        asking[0].join(ENOUGH)
        assert told == [2 * 151, 3 * 151]
        cache.close()


def test_two_threads_do_not_generate_with_one_cache(cold_dir):
    model = TINY.build()
    with attached(model, cold_dir) as hill:
        alone, cache = hill.new_cache(), hill.new_cache()
        expected = run(model, alone, DOCUMENT)
        refused = []

        class Streamer:
            """Has another thread try in the middle."""

            def put(self, ids):
                for use in (
                    lambda: run(model, cache, DOCUMENT),
                    lambda: model(DOCUMENT[:, :1], past_key_values=cache),
                ):
                    with pytest.raises(CacheUseError, match=r"another thread.*fork\(\)"):
                        together(use)
                    refused.append(len(ids))

            def end(self):
                pass

        found = run(model, cache, DOCUMENT, streamer=Streamer())
        assert len(refused) > 4
        assert torch.equal(bits(found), bits(expected))
        # It may go on in another thread afterwards.
        further = torch.cat([found.sequences, QUESTIONS[0]], 1)
        (found,) = together(lambda: run(model, cache, further))
        assert torch.equal(bits(found), bits(run(model, alone, further)))
        alone.close()
        cache.close()


# --- passes that never end ------------------------------------------------------------------


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("dies", [False, True], ids=["thread goes on", "thread ends"])
def test_a_pass_that_broke_off_keeps_nobody_waiting(error, dies, cold_dir):
    """Torch tells nobody that an interrupt broke a pass off, and a thread may end with it."""
    model = TINY.build()
    with attached(model, cold_dir) as hill, torch.no_grad():
        whole = hill.new_cache()
        model(DOCUMENT, past_key_values=whole)
        expected = model(QUESTIONS[0], past_key_values=whole.fork()).logits
        broken, other = whole.fork(), whole.fork()

        def raises(*_):
            raise error

        def breaks():
            with torch.no_grad(), pytest.raises(error):
                model(QUESTIONS[0], past_key_values=broken)

        hook = model.model.layers[1].mlp.register_forward_hook(raises)
        if dies:
            together(breaks)
        else:
            breaks()
        hook.remove()

        @torch.no_grad()
        def go_on():
            return [model(QUESTIONS[0], past_key_values=one).logits for one in (other, broken)]

        (found,) = together(go_on)
        assert all(torch.equal(one, expected) for one in found)
        whole.close()


def test_threads_that_look_at_others_at_once_leave_garbage_collected():
    """Each keeps garbage from being collected while it looks, and has it collected afterwards."""
    use, is_between, over = Use(inspect.currentframe()), threading.Event(), threading.Event()

    def looks_second():
        sys.setprofile(stays)
        assert use.is_elsewhere

    def stays(frame, event, called):
        """Have the second look stay where it has found garbage uncollected, until the first is."""
        if event == "c_return" and called is gc.isenabled and not gc.isenabled():
            is_between.set()
            over.wait(ENOUGH)

    second = threading.Thread(target=looks_second)

    def begins(frame, event, called):
        if event == "c_return" and called is gc.disable:
            sys.setprofile(None)
            second.start()
            # It does not come so far where it waits for the first one's end.
            is_between.wait(A_MOMENT)

    def looks_first():
        sys.setprofile(begins)
        assert use.is_elsewhere
        over.set()

    try:
        together(looks_first)
        second.join(ENOUGH)
        assert gc.isenabled()
    finally:
        gc.enable()


def test_an_interrupt_while_another_thread_is_looked_at_leaves_garbage_collected():
    begun, over = threading.Event(), threading.Event()
    uses = []

    def waits():
        uses.append(Use(inspect.currentframe()))
        begun.set()
        over.wait(ENOUGH)

    def breaks(frame, event, called):
        if event == "c_return" and called is gc.disable:
            raise KeyboardInterrupt

    thread = threading.Thread(target=waits)
    thread.start()
    assert begun.wait(ENOUGH)
    try:
        sys.setprofile(breaks)
        with pytest.raises(KeyboardInterrupt):
            uses[0].is_elsewhere  # noqa: B018
        assert gc.isenabled()
    finally:
        sys.setprofile(None)
        over.set()
        thread.join()
        gc.enable()


def test_a_pass_inside_a_pass_is_refused_where_it_would_spoil_it(cold_dir):
    model = TINY.build()
    uses = {
        "pass": lambda cache: model(QUESTIONS[0], past_key_values=cache),
        "fork": lambda cache: cache.fork(),
        "crop": lambda cache: cache.crop(-1),
        "close": lambda cache: cache.close(),
    }
    with attached(model, cold_dir) as hill, torch.no_grad():
        whole = hill.new_cache()
        model(DOCUMENT, past_key_values=whole)
        expected = model(QUESTIONS[0][:, :1], past_key_values=whole.fork()).logits
        cache, sibling, other = whole.fork(), whole.fork(), hill.new_cache()
        refused = []

        def inside(module, args, output):
            if hook is None:
                return
            # A sibling may be closed: its rows are freed after the pass.
            some = ["pass", "fork", "crop"]
            for one, names in ((cache, [*uses]), (sibling, some), (other, some[:2])):
                for use in (uses[name] for name in names):
                    with pytest.raises(CacheUseError, match="under way in this thread"):
                        use(one)
                    refused.append(one)
            # What shares nothing may be used, and looking is always allowed.
            hook.remove()
            model(QUESTIONS[1], past_key_values=DynamicCache(config=model.config))
            assert cache.statistics().kv_bytes > 0
            assert sibling.statistics().kv_bytes > 0

        hook = model.model.layers[1].mlp.register_forward_hook(inside)
        found = model(QUESTIONS[0][:, :1], past_key_values=cache).logits
        assert len(refused) == 4 + 3 + 2
        assert torch.equal(found, expected)
        assert cache.get_seq_length() == 151
        for one in (whole, cache, sibling, other):
            one.close()
