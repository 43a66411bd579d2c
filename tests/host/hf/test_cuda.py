# SPDX-License-Identifier: Apache-2.0
"""The same on a GPU: the model and attention there, rows and scoring on the host.

Nothing here needs more than one CUDA GPU; `pytest tests/host/hf/test_cuda.py` runs all of it. What
orders copies is tested without one in `tests/host/gpu` and `tests/host/hf/test_gpu_copies.py`.
"""

import gc
from contextlib import nullcontext, suppress

import pytest
import torch
from generation_runs import (
    CODED,
    LOGIT_TOLERANCE,
    MORE_EXACT,
    attached,
    attached_with,
    bits,
    logits,
    ordinary,
    run,
)
from tiny_models import DTYPES, TinyModel, prompts

from hillinfer.drive.files import aligned_buffer
from hillinfer.errors import CacheUseError, PageLockError, SetupWarning
from hillinfer.gpu.copies import IncomingRows, packed_rows
from hillinfer.gpu.staging import CudaLane, StagingKind, StagingMemory, StagingRing

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA GPU: run on a machine with one, with torch built for CUDA "
        "(pytorch.org says how to install it)",
    ),
]
MIB = 1 << 20
# Long enough that whoever does not wait for it is early by far: about 0.1 s at 2 GHz.
LONG_CYCLES = 200_000_000


@pytest.fixture
def lane():
    made = CudaLane(torch.device("cuda", torch.cuda.current_device()))
    yield made
    made.close()


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ordinary_cache_when_everything_is_selected(family, dtype, cold_dir):
    model = TinyModel(family, "mha" if family == "opt" else "gqa", dtype).build().cuda()
    ids, mask = (states.cuda() for states in prompts([150, 60]))
    with attached(model, cold_dir, alpha=1.0) as hill:
        cache = hill.new_cache()
        found = run(model, cache, ids, mask, new_tokens=3)
        statistics = cache.statistics()
        cache.close()
    expected = ordinary(model, ids, mask, new_tokens=3)
    same = (found.sequences == expected.sequences).all(0)[150:].long()
    steps = int(same.cumprod(0).sum())
    difference = (logits(found) - logits(expected))[: steps + 1]
    assert difference.abs().max() <= LOGIT_TOLERANCE[dtype]
    assert statistics.host_to_device_bytes > 0
    assert statistics.device_to_host_bytes > 0
    assert statistics.gpu_staging in ("pinned", "pageable")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("query", ["true", "predicted"])
def test_placement_of_coded_tokens_changes_nothing(dtype, query, cold_dir, least_budget):
    tiny = TinyModel(dtype=dtype, layers=4)
    model = tiny.build().cuda()
    ids, _ = prompts([250])
    outputs = []
    for changes in ({}, {"dram_budget": least_budget(tiny, 260) + MIB}, MORE_EXACT):
        coded = CODED | {"query": query} | changes
        with attached(model, cold_dir, **coded) as hill:
            cache = hill.new_cache()
            outputs.append(bits(run(model, cache, ids.cuda())))
            assert cache.statistics().coded_tokens > 0
            cache.close()
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scope", ["layer", "kv_head"])
@pytest.mark.parametrize("query", ["true", "predicted"])
def test_placement_changes_nothing(dtype, scope, query, cold_dir, least_budget):
    tiny = TinyModel(dtype=dtype, layers=4)
    model = tiny.build().cuda()
    ids, _ = prompts([250])
    outputs = []
    for budget, device, blocks in (
        ("24MiB", "nvme", 4),
        (least_budget(tiny, 260), "nvme", 4),
        (least_budget(tiny, 260), "nvme", 0),
        (least_budget(tiny, 260), "golden", 4),
    ):
        placement = {"dram_budget": budget, "device": device, "prefetch_blocks": blocks}
        with attached(model, cold_dir, scope=scope, query=query, **placement) as hill:
            cache = hill.new_cache()
            outputs.append(run(model, cache, ids.cuda()))
            cache.close()
    for output in outputs[1:]:
        assert torch.equal(bits(output), bits(outputs[0]))


class _Plain(CudaLane):
    """Every copy waits for everything: slow, and right by construction."""

    def to_gpu(self, target, source):
        torch.cuda.synchronize()
        copy = super().to_gpu(target, source)
        torch.cuda.synchronize()
        return copy

    def from_gpu(self, target, source):
        torch.cuda.synchronize()
        copy = super().from_gpu(target, source)
        torch.cuda.synchronize()
        return copy


class _Late(CudaLane):
    """The GPU is busy for a while before each copy, and nothing fresh is in memory."""

    def allocate(self, rows, row_bytes):
        made = super().allocate(rows, row_bytes)
        with torch.cuda.stream(self._to_gpu):
            return made.fill_(0xFF)

    def to_gpu(self, target, source):
        with torch.cuda.stream(self._to_gpu):
            torch.cuda._sleep(LONG_CYCLES // 100)
        return super().to_gpu(target, source)

    def from_gpu(self, target, source):
        with torch.cuda.stream(self._from_gpu):
            torch.cuda._sleep(LONG_CYCLES // 100)
        return super().from_gpu(target, source)


class _Unwaited(_Late):
    """The mistake: compute does not wait for copies."""

    def compute_waits(self, copy, target):
        target.record_stream(torch.cuda.current_stream())


@pytest.mark.parametrize("query", ["true", "predicted"])
def test_late_copies_change_nothing_and_a_wait_left_out_does(query, cold_dir):
    model = TinyModel(dtype=torch.bfloat16, layers=4).build().cuda()
    ids, mask = (states.cuda() for states in prompts([185, 60]))
    found = {}
    for kind in (_Plain, CudaLane, _Late, _Unwaited):
        lane = {"make_lane": lambda devices, kind=kind: kind(*devices)}
        with attached_with(model, cold_dir, lane, query=query) as hill:
            cache = hill.new_cache()
            # Memory that nothing was copied into makes queries that are not finite.
            with suppress(CacheUseError) if kind is _Unwaited else nullcontext():
                found[kind] = bits(run(model, cache, ids, mask))
            cache.close()
    assert torch.equal(found[CudaLane], found[_Plain])
    assert torch.equal(found[_Late], found[_Plain])
    assert _Unwaited not in found or not torch.equal(found[_Unwaited], found[_Plain])


def test_pages_are_locked_while_they_are_used(lane):
    memory = StagingMemory(lane, MIB)
    assert memory.kind is StagingKind.PINNED
    staged = torch.from_numpy(memory.cut(1, MIB)[0])
    assert staged.is_pinned()
    memory.close()
    # The driver takes the same pages again, so they had been given back.
    lane.page_lock(memory._memory)
    lane.page_unlock(memory._memory)


def test_pages_that_cannot_be_locked_are_told_and_the_gpu_goes_on(lane, monkeypatch):
    locked = aligned_buffer(MIB)
    lane.page_lock(locked)
    with pytest.raises(PageLockError, match=r"cudaHostRegister says .*error"):
        lane.page_lock(locked)
    # The error was taken back: the next kernel is not blamed for it.
    assert int(torch.ones(4, device="cuda").sum()) == 4
    lane.page_unlock(locked)
    monkeypatch.setattr(
        "hillinfer.gpu.staging.aligned_buffer", lambda byte_count: locked[:byte_count]
    )
    lane.page_lock(locked)
    with pytest.warns(SetupWarning, match="could not be page-locked"):
        memory = StagingMemory(lane, MIB)
    assert memory.kind is StagingKind.PAGEABLE
    lane.page_unlock(locked)


def test_copies_to_the_gpu_pass_what_it_is_computing(lane):
    """The copy is done while the compute that was asked for before it still runs."""
    memory = StagingMemory(lane, MIB)
    ring = StagingRing(memory.cut(4, MIB // 4))
    rows = torch.randint(256, (3000, 256), dtype=torch.uint8)
    torch.cuda._sleep(20 * LONG_CYCLES)
    computed = torch.cuda.Event()
    computed.record()
    incoming = IncomingRows(lane, ring, len(rows), rows.shape[1])
    incoming.add(rows.numpy())
    incoming._copies[-1].wait()
    assert not computed.query(), "the copies waited for compute, or the GPU is too fast"
    assert torch.equal(incoming.take().cpu(), rows)
    ring.close()
    memory.close()


def test_a_copy_from_the_gpu_waits_for_what_it_copies(lane):
    memory = StagingMemory(lane, 4096)
    ring = StagingRing(memory.cut(1, 4096))
    row = torch.zeros(1, 4096, dtype=torch.uint8, device="cuda")
    buffer = ring.acquire()
    torch.cuda._sleep(LONG_CYCLES)
    row.fill_(7)
    ring.arrive(buffer, lane.from_gpu(torch.from_numpy(ring.buffers[buffer])[None], row))
    # Its memory may go to others at once, who then wait for the copy.
    del row
    torch.full((1, 4096), 9, dtype=torch.uint8, device="cuda")
    assert (ring.arrived(buffer) == 7).all()
    ring.close()
    memory.close()


def test_memory_of_rows_is_not_used_again_while_they_are_computed_with(lane):
    memory = StagingMemory(lane, 4 * MIB)
    ring = StagingRing(memory.cut(2, MIB))
    sums = []
    for number in range(20):
        rows = torch.full((4096, 256), number, dtype=torch.uint8)
        incoming = IncomingRows(lane, ring, len(rows), 256)
        incoming.add(rows.numpy())
        taken = incoming.take()
        torch.cuda._sleep(LONG_CYCLES // 20)
        sums.append(taken.long().sum())
        del incoming, taken
    assert [int(one) for one in sums] == [number * 4096 * 256 for number in range(20)]
    ring.close()
    memory.close()


def test_rows_packed_on_the_gpu_are_those_of_the_host(lane):
    states = torch.randn(2, 3, 5, 6).half()
    on_host = packed_rows(states[0], states[1], 128)
    states = states.cuda()
    assert torch.equal(packed_rows(states[0], states[1], 128).cpu(), on_host)


def test_closing_gives_everything_back(cold_dir):
    model = TinyModel(layers=4).build().cuda()
    ids = prompts([185])[0].cuda()
    held = []
    for _ in range(3):
        with attached(model, cold_dir, query="predicted") as hill:
            cache = hill.new_cache()
            run(model, cache, ids)
            cache.close()
        del cache
        gc.collect()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[1] == held[2]
