# SPDX-License-Identifier: Apache-2.0
"""Rows of another engine in blocks of vLLM: nothing that is computed behind them is stored.

`tests/host/reuse/test_other_makers.py` has rows of a model; here they are made by a formula.
"""

from dataclasses import replace

import pytest
from test_vllm_steps import BLOCK, IDS, OTHER, Engine, Turn, request_of, space_of

from hillinfer.store.maintenance import chains
from hillinfer_vllm.shared_store import opened_store

FEW, LONGER, UNLIKE = IDS[:400], IDS[:1000], OTHER[:800]
# Rows of the other engine are none of this one's.
SHIFT = 5


@pytest.fixture
def store(tmp_path):
    opened = opened_store({"store": str(tmp_path / "store"), "store_size": "64MiB"})
    yield opened
    opened.close()


@pytest.fixture
def theirs(tmp_path):
    return space_of(tmp_path, vllm="another engine")


@pytest.fixture
def own(tmp_path):
    return space_of(tmp_path)


@pytest.fixture
def engine(store, own, theirs):
    made = Engine(store, own, shift=SHIFT, asks={"others": lambda: ((theirs,), "")})
    yield made
    made.close()


def stored_by_the_other(store, theirs):
    other = Engine(store, theirs)
    other.read("theirs", FEW)
    other.close()


def turn_of(engine, name, ids, shared=(), refused=None):
    """Begin a request that finds blocks in vLLM's own cache; return its turn of a step."""
    request, at = request_of(name, ids, refused=refused), len(shared) * BLOCK
    fresh = [int(engine.free.pop()) for _ in range(-(-len(ids) // BLOCK) - len(shared))]
    external = engine.scheduler.matched(request, at)
    engine.scheduler.allocated(request, [*shared, *fresh], external)
    return Turn(name, ids, [*shared, *fresh], at + external, len(ids))


def ended(engine, name):
    engine.scheduler.finished(name)
    engine.saves.finish({name})


def found(engine, store, space, ids):
    """Tokens that the store has of a prompt once everything is written."""
    engine.close()
    prefix = store.find(space, ids)
    if prefix is None:
        return 0
    with prefix:
        return prefix.tokens


def taken_and_gone(engine, store, theirs):
    """Load rows of the other engine, which the store then gives up; return their blocks."""
    stored_by_the_other(store, theirs)
    first = turn_of(engine, "first", FEW)
    assert first.start == len(FEW) // 64 * 64
    engine.step([first])
    ended(engine, "first")
    (chain,) = chains(store.database)
    store.remove(chain.name)
    return first.numbers[: len(FEW) // BLOCK]


@pytest.mark.parametrize("between", ["nobody", "who is not served"])
def test_nothing_is_stored_behind_blocks_of_others_that_vllm_kept(
    engine, store, own, theirs, between
):
    """The store has those rows no more, and vLLM's own cache still does."""
    shared = taken_and_gone(engine, store, theirs)
    if between != "nobody":
        # What it computes behind them is vLLM's to give out, too, whichever step it was in.
        longer = turn_of(engine, "between", IDS[:640], shared, refused="images")
        fresh = longer.numbers[16:]
        engine.step([replace(longer, numbers=longer.numbers[:16], stop=512)])
        engine.step([replace(longer, start=512, is_new=False)], given={"between": fresh})
        ended(engine, "between")
        # Its last blocks say it all: the first ones may be another request's by now.
        shared = [int(engine.free.pop()) for _ in range(16)] + fresh
    second = turn_of(engine, "second", LONGER, shared)
    assert second.start == len(shared) * BLOCK
    engine.step([second])
    ended(engine, "second")
    assert found(engine, store, own, LONGER) == 0


def test_blocks_that_are_given_out_anew_are_of_others_no_more(engine, store, own, theirs):
    shared = taken_and_gone(engine, store, theirs)
    engine.free += shared
    numbers, _, _ = engine.read("second", UNLIKE[:320])
    assert set(numbers) <= set(shared)
    engine.step([turn_of(engine, "third", UNLIKE, numbers)])
    ended(engine, "third")
    assert found(engine, store, own, UNLIKE) == len(UNLIKE) // 64 * 64


def test_nothing_is_stored_behind_rows_of_others_that_come_in_the_same_step(
    engine, store, own, theirs
):
    # It was looked up before those rows were stored, and waits since.
    assert engine.scheduler.matched(request_of("second", LONGER), 0) == 0
    stored_by_the_other(store, theirs)
    first = turn_of(engine, "first", FEW)
    assert first.start == len(FEW) // 64 * 64
    second = turn_of(engine, "second", LONGER, first.numbers[: len(FEW) // BLOCK])
    # Whoever fills the blocks is not always told of first.
    engine.step([second, first])
    ended(engine, "second")
    assert found(engine, store, own, LONGER) == 0
