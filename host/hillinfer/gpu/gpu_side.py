# SPDX-License-Identifier: Apache-2.0
"""Everything a runtime has only because the model computes on a GPU."""

from __future__ import annotations

from hillinfer.counters import Counters
from hillinfer.gpu.arrivals import Arrivals
from hillinfer.gpu.brought_queries import BroughtQueries
from hillinfer.gpu.copies_ahead import CopiesAhead
from hillinfer.gpu.copy_lane import CopyLane
from hillinfer.gpu.gathered_attention import GatheredAttention
from hillinfer.gpu.staged_states import StagedStates
from hillinfer.gpu.staging_memory import StagingMemory
from hillinfer.gpu.staging_plan import QUERY_BUFFERS, ROW_BUFFERS, StagingPlan
from hillinfer.gpu.staging_ring import StagingRing
from hillinfer.storage.gather import Gather
from hillinfer.storage.row_layout import RowLayout
from hillinfer.timeline.recorder import Recorder


class GpuSide:
    """Staging buffers, the lane that copies, and attention over what it copied.

    Parameters
    ----------
    lane
        To the model's GPU; closed with this.
    plan
        How staging memory is divided.
    gather, layout, counters, recorder
        The runtime's.

    Attributes
    ----------
    attention, states, ahead, arrivals, queries
        The parts, each for one way that bytes take.
    rings
        Their buffers: for rows, for those of new tokens that come back, and for queries.
    """

    def __init__(
        self,
        lane: CopyLane,
        plan: StagingPlan,
        gather: Gather,
        layout: RowLayout,
        counters: Counters,
        recorder: Recorder,
    ) -> None:
        self._lane = lane
        self._memory = StagingMemory(lane, plan.byte_count)
        # What the report says, also after the end.
        self.staging_kind = self._memory.kind
        self.staging_bytes = plan.byte_count
        row_bytes = plan.row_bytes
        rows = StagingRing(self._memory.cut(ROW_BUFFERS, plan.buffer_rows * row_bytes))
        arriving = StagingRing(self._memory.cut(plan.arriving_rows, row_bytes))
        queries = StagingRing(self._memory.cut(QUERY_BUFFERS, plan.query_bytes))
        self.rings = [rows, arriving, queries]
        self.states = StagedStates(layout, counters, lane, rows)
        self.attention = GatheredAttention(lane, rows, gather, self.states, recorder)
        self.ahead = CopiesAhead(lane, rows, gather, row_bytes, recorder)
        self.arrivals = Arrivals(lane, arriving)
        self.queries = BroughtQueries(lane, queries)

    def stop(self) -> None:
        """Stop looking at rows, and wait for the copies that were asked for."""
        self.ahead.close()
        for ring in self.rings:
            ring.close()

    def close(self) -> None:
        """Give the memory back, after `stop`; raises where the GPU failed."""
        try:
            self._lane.close()
        finally:
            # Before it goes: a GPU must not know pages of memory that is somebody else's.
            self._memory.close()
