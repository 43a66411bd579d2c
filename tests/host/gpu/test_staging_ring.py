# SPDX-License-Identifier: Apache-2.0
"""A staging buffer is touched by one at a time, and free only after its copy's event."""

import threading

import numpy as np
import pytest
import torch
from copy_lanes import GatedLane, LateLane

from hillinfer.gpu.staging import BufferState, StagingRing

BYTES = 64


class GivenCopy:
    def __init__(self):
        self.done = threading.Event()

    def wait(self):
        assert self.done.wait(30)


def ring_of(count):
    return StagingRing(np.zeros((count, BYTES), np.uint8))


def states(ring):
    return [state.value for state in ring.states()]


def test_the_life_of_a_buffer_that_leaves():
    ring, copy = ring_of(2), GivenCopy()
    first = ring.acquire()
    assert states(ring) == ["held", "free"]
    ring.leave(first, copy)
    assert states(ring) == ["leaving", "free"]
    second = ring.acquire()
    assert second != first
    # Nothing else is free: the next one waits for the copy's event and not a moment less.
    got = []
    waiting = threading.Thread(target=lambda: got.append(ring.acquire()))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert states(ring) == ["leaving", "held"]
    copy.done.set()
    waiting.join(30)
    assert got == [first]
    assert states(ring) == ["held", "held"]


def test_the_life_of_a_buffer_that_arrives():
    ring, copy = ring_of(1), GivenCopy()
    buffer = ring.acquire()
    ring.arrive(buffer, copy)
    assert states(ring) == ["arriving"]
    assert ring.acquire_free() is None
    copy.done.set()
    assert ring.acquire_free() is None, "what arrived is still to be read"
    ring.arrived(buffer)
    assert states(ring) == ["held"]
    ring.give(buffer)
    assert ring.acquire_free() == buffer


_STEPS = {
    "leave": lambda ring, buffer: ring.leave(buffer, GivenCopy()),
    "arrive": lambda ring, buffer: ring.arrive(buffer, GivenCopy()),
    "arrived": lambda ring, buffer: ring.arrived(buffer),
    "give": lambda ring, buffer: ring.give(buffer),
}


@pytest.mark.parametrize(
    ("state", "refused"),
    [
        (BufferState.FREE, ["leave", "arrive", "arrived", "give"]),
        (BufferState.HELD, ["arrived"]),
        (BufferState.LEAVING, ["leave", "arrive", "arrived", "give"]),
        (BufferState.ARRIVING, ["leave", "arrive", "give"]),
    ],
    ids=lambda value: value.value if isinstance(value, BufferState) else "",
)
def test_every_other_order_is_refused(state, refused):
    for step in refused:
        ring = ring_of(1)
        if state is not BufferState.FREE:
            ring.acquire()
        if state is BufferState.LEAVING:
            ring.leave(0, GivenCopy())
        if state is BufferState.ARRIVING:
            ring.arrive(0, GivenCopy())
        with pytest.raises(RuntimeError, match=f"buffer 0 is {state.value}"):
            _STEPS[step](ring, 0)
        assert ring.states() == [state]


def test_whoever_waits_for_what_never_comes_is_told():
    ring = ring_of(1)
    ring.arrive(ring.acquire(), GivenCopy())
    with pytest.raises(RuntimeError, match="all staging buffers arrive"):
        ring.acquire()


def test_closing_waits_for_copies_and_hands_nothing_out_afterwards():
    ring, copy = ring_of(2), GivenCopy()
    ring.leave(ring.acquire(), copy)
    closing = threading.Thread(target=ring.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    copy.done.set()
    closing.join(30)
    assert states(ring) == ["free", "free"]
    with pytest.raises(RuntimeError, match="given back"):
        ring.acquire()


def test_one_that_waits_while_the_ring_is_closed_is_told():
    ring, told = ring_of(1), []
    ring.acquire()

    def take():
        try:
            ring.acquire()
        except RuntimeError as error:
            told.append(str(error))

    waiting = threading.Thread(target=take)
    waiting.start()
    waiting.join(0.05)
    ring.close()
    waiting.join(30)
    assert told
    assert "given back" in told[0]


def through(ring, lane, workers=2, pieces=60):
    """Send numbered pieces from several threads at once; return what came and what was sent."""
    sent = np.arange(workers * pieces, dtype=np.int64).repeat(BYTES // 8).view(np.uint8)
    sent = torch.from_numpy(sent.reshape(-1, BYTES))
    came = lane.allocate(len(sent), BYTES)
    errors = []

    def send(worker):
        try:
            for number in range(worker, len(sent), workers):
                buffer = ring.acquire()
                ring.buffers[buffer] = sent[number].numpy()
                piece = torch.from_numpy(ring.buffers[buffer])
                ring.leave(buffer, lane.to_gpu(came[number], piece))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=send, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    ring.close()
    lane.close()
    return came, sent


@pytest.mark.parametrize("count", [1, 2, 3])
def test_two_threads_and_a_late_lane_never_see_each_others_bytes(count):
    assert torch.equal(*through(ring_of(count), LateLane(to_gpu=[0, 0.002, 0, 0, 0.001])))


def test_a_ring_that_frees_before_the_event_is_found_out():
    class Careless(StagingRing):
        def leave(self, buffer, copy):
            self.give(buffer)

    assert not torch.equal(*through(Careless(np.zeros((2, BYTES), np.uint8)), LateLane([0.002])))


def test_a_closed_gate_lets_nothing_back():
    lane = GatedLane()
    source, target = torch.ones(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    lane.to_gpu(target, source).wait()
    assert torch.equal(target, source)
    lane.gate.clear()
    copy = lane.from_gpu(target, source)
    assert not torch.equal(target, source)
    lane.gate.set()
    copy.wait()
    assert torch.equal(target, source)
    lane.close()
