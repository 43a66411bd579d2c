# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks under vLLM's connector: they publish together, or nothing is found."""

from contextlib import ExitStack

import pytest
from test_vllm_steps import BLOCK, IDS, LAYERS, OTHER, SIZE, Engine, Turn, request_of

from hillinfer.store.store import Store
from hillinfer_vllm.loading import WorkerSide
from hillinfer_vllm.ranks import FoundByAll, RankReports
from hillinfer_vllm.scheduling import SchedulerSide
from hillinfer_vllm.shared_store import namespaces
from hillinfer_vllm.step_plan import Prompt
from hillinfer_vllm.storing import Publishing, Saves

FULL = len(IDS) // 64 * 64


class Ranks:
    """One scheduler and workers of several ranks, each with blocks and a namespace of its own."""

    def __init__(self, stores, spaces, kinds=(Saves, Saves)):
        self.spaces = spaces
        self.workers = [Engine(store, space) for store, space in zip(stores, spaces, strict=True)]
        for rank, (own, kind) in enumerate(zip(self.workers, kinds, strict=True)):
            own.shift = 100 * rank
            own.saves.close()
            side = WorkerSide(own.store, own.space, own.layers, own.counts)
            own.saves = kind(side, Publishing.TOGETHER)
        self.scheduler = SchedulerSide(stores[0], spaces, BLOCK)

    def read(self, name, ids, chunk=512, before_load=None):
        """Read a prompt as vLLM does; return its blocks, what was found, and failed blocks."""
        request = request_of(name, ids)
        numbers = [int(self.workers[0].free.pop()) for _ in range(-(-len(ids) // BLOCK))]
        external = self.scheduler.matched(request, 0)
        self.scheduler.allocated(request, numbers, external)
        at, failed, is_new = external, set(), True
        while at < len(ids):
            stop = min(at + chunk, len(ids))
            if before_load is not None:
                before_load()
            failed |= self.step([Turn(name, ids, numbers, at, stop, is_new)])
            is_new, at = False, stop
        self.scheduler.finished(name)
        # The step that tells workers that it is over; what all have written is published by it.
        self.step([], finished={name})
        return numbers, external, failed

    def step(self, turns, finished=frozenset()):
        plan, reports, failed = self.planned(turns), RankReports(), set()
        for own in self.workers:
            own.saves.publish(plan.publishes)
            own.saves.begin(plan.saves)
            own.loads.begin(plan.loads)
            own.compute(turns)
            own.saves.end(own.loads.end())
            own.saves.finish(set(finished))
            failed |= own.loads.failed_blocks()
            reports = reports.joined(RankReports.of(own.saves.written()))
        self.scheduler.reported(reports)
        if failed:
            self.scheduler.failed(failed)
        return failed

    def planned(self, turns):
        return self.scheduler.plan(self.workers[0].output_of(turns))

    def settle(self):
        for own in self.workers:
            own.saves.close()
        self.scheduler.close()


class WritesNothing(Saves):
    """As where a rank was killed, or its drive failed."""

    def begin(self, plans):
        pass


@pytest.fixture
def spaces(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    return namespaces({"vllm": "0"}, str(model), {}, LAYERS, 4 * 2 * 64, 2)


@pytest.fixture
def opened(tmp_path, spaces):
    """Ranks one set after the other over one store, each set as after a restart."""
    Store.create(tmp_path / "store", SIZE)
    with ExitStack() as stack:

        def ranks(**given):
            stores = [stack.enter_context(Store(tmp_path / "store")) for _ in spaces]
            made = Ranks(stores, spaces, **given)
            stack.callback(made.settle)
            return made

        yield ranks


def test_each_rank_has_a_namespace_of_its_own(tmp_path, spaces):
    model = str(tmp_path / "model")
    made = {
        one.digest
        for ranks in (1, 2, 4)
        for one in namespaces({"vllm": "0"}, model, {}, LAYERS, 512, ranks)
    }
    assert len(made) == 1 + 2 + 4


def test_what_all_ranks_have_written_is_found_by_all(opened):
    first = opened()
    numbers, external, _ = first.read("a", IDS)
    assert external == 0
    first.settle()
    fresh = opened()
    numbers, external, failed = fresh.read("b", IDS)
    assert external == FULL
    assert not failed
    assert all(own.holds(IDS, numbers) for own in fresh.workers)
    assert not fresh.workers[0].holds(OTHER, numbers)


def test_a_step_is_published_by_the_next_one(opened, spaces):
    ranks = opened()
    numbers = [int(ranks.workers[0].free.pop()) for _ in range(-(-len(IDS) // BLOCK))]
    request = request_of("a", IDS)
    ranks.scheduler.allocated(request, numbers, ranks.scheduler.matched(request, 0))
    ranks.step([Turn("a", IDS, numbers, 0, 512)])
    for own in ranks.workers:
        own.saves._writing.submit(int).result()
    store = ranks.workers[0].store
    assert FoundByAll(store, spaces, Prompt(tuple(IDS))).tokens == 0
    ranks.step([Turn("a", IDS, numbers, 512, 1024, False)])
    for own in ranks.workers:
        own.saves._writing.submit(int).result()
    assert FoundByAll(store, spaces, Prompt(tuple(IDS))).tokens == 512


def test_what_one_rank_has_not_is_found_by_none(opened, spaces):
    ranks = opened()
    ranks.read("a", IDS)
    ranks.settle()
    ranks = opened(kinds=(Saves, WritesNothing))
    ranks.read("b", OTHER)
    ranks.settle()
    fresh = opened()
    store = fresh.workers[0].store
    alone = [store.find(space, OTHER) for space in spaces]
    assert alone == [None, None]
    assert FoundByAll(store, spaces, Prompt(tuple(OTHER))).tokens == 0
    assert FoundByAll(store, spaces, Prompt(tuple(IDS))).tokens == FULL


def test_a_rank_whose_rows_did_not_come_keeps_all_from_storing(opened, spaces):
    first = opened()
    first.read("a", IDS)
    first.settle()
    ranks = opened()
    store = ranks.workers[1].store

    def quarantined():
        # Between looking up and loading, in the second rank's rows alone.
        with store.find(spaces[1], IDS) as found:
            store.blame(found.chunks[-1].record.number, OSError("the drive fails"))

    longer = IDS + OTHER
    done = []

    def once():
        if not done:
            done.append(quarantined())

    _, external, failed = ranks.read("b", longer, before_load=once)
    assert external == FULL
    assert failed
    ranks.settle()
    fresh = opened()
    found = FoundByAll(fresh.workers[0].store, spaces, Prompt(tuple(longer)))
    # What was computed behind wrong rows is nowhere, in the rank whose rows came either.
    assert found.tokens <= 1024
    behind = fresh.workers[0].store.find(spaces[0], longer)
    assert behind.tokens <= FULL
    behind.close()
    found.close()


def test_a_rank_that_lost_rows_keeps_all_from_finding_them(opened, spaces):
    first = opened()
    first.read("a", IDS)
    first.settle()
    ranks = opened()
    store = ranks.workers[0].store
    with store.find(spaces[1], IDS) as found:
        store.blame(found.chunks[-1].record.number, OSError("the drive fails"))
    _, external, failed = ranks.read("b", IDS)
    assert external == 1024
    assert not failed


def test_reports_count_ranks():
    one, other = RankReports.of({"a": 512, "b": 64}), RankReports.of({"a": 512, "b": 128})
    assert one.joined(other).counts == {("a", 512): 2, ("b", 64): 1, ("b", 128): 1}
    assert one.counts == {("a", 512): 1, ("b", 64): 1}
