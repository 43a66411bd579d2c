# SPDX-License-Identifier: Apache-2.0
"""Page-locked memory, its fallback, and how it is divided."""

import warnings

import numpy as np
import pytest
from copy_lanes import LateLane, UnlockableLane

from hillinfer.errors import SetupWarning
from hillinfer.gpu.staging import (
    QUERY_BUFFERS,
    ROW_BUFFERS,
    StagingKind,
    StagingMemory,
    StagingPlan,
)
from hillinfer.model_shape import ModelShape, StoredType


class LockingLane(LateLane):
    """Notes which pages are locked."""

    def __init__(self):
        super().__init__()
        self.locked = []

    def page_lock(self, memory):
        self.locked.append((memory.ctypes.data, memory.nbytes))

    def page_unlock(self, memory):
        self.locked.remove((memory.ctypes.data, memory.nbytes))


def test_pages_are_locked_once_and_unlocked_at_the_end():
    lane = LockingLane()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory = StagingMemory(lane, 8192)
    (start, size) = lane.locked[0]
    assert (start % 4096, size, memory.kind) == (0, 8192, StagingKind.PINNED)
    memory.close()
    memory.close()
    assert lane.locked == []


def test_pages_that_cannot_be_locked_are_told_and_used_as_they_are():
    with pytest.warns(SetupWarning, match=r"8\.0 KiB .* page-locked .*out of memory.*--block-rows"):
        memory = StagingMemory(UnlockableLane(), 8192)
    assert memory.kind is StagingKind.PAGEABLE
    assert memory.cut(2, 4096).shape == (2, 4096)
    memory.close()


def test_buffers_lie_behind_each_other_and_no_more_than_there_is():
    memory = StagingMemory(LateLane(), 4096)
    first, second = memory.cut(3, 1000), memory.cut(1, 1000)
    first[:], second[:] = 1, 2
    assert not np.shares_memory(first, second)
    assert int(first.sum()) == 3000
    with pytest.raises(ValueError, match="5000 bytes of 4096"):
        memory.cut(1, 1000)


@pytest.mark.parametrize("byte_count", [0, 1, 6144, 4096 * 40, 1 << 22])
@pytest.mark.parametrize("layers", [1, 2, 80])
def test_a_plan_takes_what_it_is_given_or_the_least_that_works(byte_count, layers):
    shape = ModelShape(
        layers=layers,
        kv_heads=2,
        query_heads=6,
        head_dim=24,
        stored_type=StoredType.FLOAT16,
        max_positions=4096,
    )
    plan = StagingPlan.of(shape, byte_count)
    assert plan.query_bytes >= 6 * 24 * 4
    assert plan.buffer_rows >= 1
    assert 1 <= plan.arriving_rows <= layers
    used = (ROW_BUFFERS * plan.buffer_rows + plan.arriving_rows) * plan.row_bytes
    used += QUERY_BUFFERS * plan.query_bytes
    assert plan.byte_count - 4096 < used <= plan.byte_count
    least = StagingPlan(1, 1, plan.row_bytes, plan.query_bytes).byte_count
    assert plan.byte_count <= max(byte_count, least)
