# SPDX-License-Identifier: Apache-2.0
"""The parts that a runtime ties together, and the order in which they end."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from hillinfer.app.decode_step import NativeDecode
from hillinfer.app.prefetch_pipeline import PrefetchPipeline
from hillinfer.app.token_selection import TokenSelection
from hillinfer.attention.dense_attention import DenseAttention
from hillinfer.attention.row_attention import RowAttention
from hillinfer.counters import Counters
from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.gpu.gpu_side import GpuSide
from hillinfer.pools.accountant import Accountant
from hillinfer.pools.following_budget import FollowingBudget
from hillinfer.pools.hot_pools import HotPools
from hillinfer.pools.layer_hits import LayerHits
from hillinfer.pools.pool_keeper import PoolKeeper
from hillinfer.storage.cold_store import ColdStore
from hillinfer.storage.drive_calls import DriveCalls
from hillinfer.storage.gather import Gather, RowBuffers
from hillinfer.storage.group_table import GroupTable
from hillinfer.storage.prefetch_buffer import PrefetchBuffer
from hillinfer.storage.read_engine import ReadEngine
from hillinfer.storage.row_keeper import RowKeeper
from hillinfer.storage.row_layout import RowLayout
from hillinfer.storage.shadow_keeper import ShadowKeeper
from hillinfer.storage.shadow_memory import ShadowMemory
from hillinfer.storage.shadow_store import ShadowStore
from hillinfer.timeline.pool_timeline import PoolTimeline
from hillinfer.timeline.recorder import Recorder
from hillinfer_model.kernel_spec import KernelSpec


@dataclass(frozen=True)
class RuntimeParts:
    """What `open_parts` opened.

    Parameters
    ----------
    counters, layer_hits, accountant
        What is counted.
    timeline, recorder
        What is written down; the timeline is None where nobody asked for one.
    calls, engine, store, shadow_store
        The drive, and what is on it.
    layout, spec
        How a row and a shadow are laid out.
    device
        What holds segments of its own, or None.
    pools, keeper
        Hot rows.
    following
        Raises the budget with the context; None where it is fixed.
    prefetch, buffers, gather
        Rows on their way from the drive.
    groups, rows, shadow, shadow_memory
        What sequences own.
    selection, dense, attention, decode, pipeline
        Choosing tokens and attending to them; `decode` is None where the model computes on a GPU.
    gpu
        What there is only because the model computes on a GPU, or None.
    """

    counters: Counters
    layer_hits: LayerHits
    accountant: Accountant
    timeline: PoolTimeline | None
    recorder: Recorder
    calls: DriveCalls
    engine: ReadEngine
    store: ColdStore
    shadow_store: ShadowStore
    layout: RowLayout
    spec: KernelSpec
    device: DeviceShadows | None
    pools: HotPools
    keeper: PoolKeeper
    following: FollowingBudget | None
    prefetch: PrefetchBuffer
    buffers: RowBuffers
    gather: Gather
    groups: GroupTable
    rows: RowKeeper
    shadow: ShadowKeeper
    shadow_memory: ShadowMemory
    selection: TokenSelection
    dense: DenseAttention
    attention: RowAttention
    decode: NativeDecode | None
    pipeline: PrefetchPipeline
    gpu: GpuSide | None

    def close(self) -> None:
        """Stop all threads and give the drive's space back."""
        # The last that is named is the first that ends; each ends whatever became of another.
        with ExitStack() as ends:
            if self.gpu is not None:
                ends.callback(self.gpu.close)
            ends.callback(self.recorder.close)
            if self.timeline is not None:
                ends.callback(self.timeline.close)
            if self.device is not None:
                ends.callback(self.device.close)
            ends.callback(self.engine.close)
            ends.callback(self.shadow_store.close)
            ends.callback(self.store.close)
            ends.callback(self.pools.close)
            ends.callback(self.buffers.close)
            ends.callback(self.prefetch.close)
            if self.gpu is not None:
                ends.callback(self.gpu.stop)
            ends.callback(self.pipeline.close)
