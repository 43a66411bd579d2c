# SPDX-License-Identifier: Apache-2.0
"""Opens everything behind a cache."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from hillinfer.app.decode_step import NativeDecode
from hillinfer.app.prefetch_pipeline import PrefetchPipeline
from hillinfer.app.share_by_rates import share_by_rates
from hillinfer.app.token_selection import TokenSelection
from hillinfer.attention.dense_attention import DenseAttention
from hillinfer.attention.host_attention import host_attention
from hillinfer.attention.row_attention import RowAttention
from hillinfer.attention.row_states import RowStates
from hillinfer.counters import Counters
from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.scorer import Scorer
from hillinfer.devices.table import make_scorer
from hillinfer.errors import SetupWarning
from hillinfer.gpu.copy_lane import CopyLane
from hillinfer.gpu.gpu_side import GpuSide
from hillinfer.gpu.staging_plan import StagingPlan
from hillinfer.hie.evaluation import ImportanceEvaluation
from hillinfer.model_shape import ModelShape
from hillinfer.policies.pool_policies import make_pool_policy
from hillinfer.pools.accountant import Accountant, Part
from hillinfer.pools.budget_plan import kernel_spec, staging_bytes, widened_bytes
from hillinfer.pools.following_budget import BudgetGrowth, FollowingBudget
from hillinfer.pools.hot_pools import HotPools
from hillinfer.pools.layer_hits import LayerHits
from hillinfer.pools.layer_shares import LayerShares
from hillinfer.pools.layer_step import LayerStep
from hillinfer.pools.layer_step_log import LayerStepLog
from hillinfer.pools.pool_keeper import PoolKeeper
from hillinfer.runtime_parts import RuntimeParts
from hillinfer.settings import Settings
from hillinfer.storage.aligned_buffer import round_up
from hillinfer.storage.cold_file import IOMode, buffered_warning
from hillinfer.storage.cold_store import ColdStore
from hillinfer.storage.drive_calls import DriveCalls
from hillinfer.storage.gather import Gather, RowBuffers
from hillinfer.storage.group_table import GroupTable
from hillinfer.storage.leftovers import sweep
from hillinfer.storage.open_files import OpenFiles
from hillinfer.storage.prefetch_buffer import LandingArea, PrefetchBuffer
from hillinfer.storage.read_engines import open_engine
from hillinfer.storage.row_keeper import RowKeeper
from hillinfer.storage.row_layout import RowLayout
from hillinfer.storage.row_sums import RowSums
from hillinfer.storage.shadow_keeper import ShadowKeeper
from hillinfer.storage.shadow_memory import ShadowMemory
from hillinfer.storage.shadow_store import ShadowStore
from hillinfer.storage.spill_queue import SpillQueue
from hillinfer.timeline.lanes import Lanes
from hillinfer.timeline.pool_timeline import PoolTimeline
from hillinfer.timeline.recorder import Recorder
from hillinfer.timeline.silent import SILENT
from hillinfer.timeline.trace_file import TraceFile
from hillinfer_model.kernel_spec import GROUP_TOKENS


def open_parts(
    shape: ModelShape,
    settings: Settings,
    budget_bytes: int,
    cold_dir: Path,
    observe: Callable[[LayerStep], None] | None,
    calls: DriveCalls | None,
    shadow_limit_bytes: int,
    announce_streaming: Callable[[], None],
    scorer: Scorer | None,
    evaluate: Callable[[Scorer, Settings], ImportanceEvaluation],
    lane: CopyLane | None,
    growth: BudgetGrowth | None,
) -> RuntimeParts:
    """Open the parts of a `Runtime`; parameters and errors are its.

    What holds files, a device or locked memory is closed where something behind it cannot be
    opened.
    """
    counters = Counters()
    layer_hits = LayerHits(shape.layers)
    layout = RowLayout(shape)
    accountant = Accountant(budget_bytes)
    accountant.take(Part.STAGING, staging_bytes(shape, settings))
    spec = kernel_spec(shape, settings)
    with ExitStack() as undone:
        timeline = PoolTimeline(settings.pool_timeline) if settings.pool_timeline else None
        if timeline is not None:
            undone.callback(timeline.close)
        recorder: Recorder = Lanes(TraceFile(settings.trace)) if settings.trace else SILENT
        undone.callback(recorder.close)
        if scorer is None:
            scorer = make_scorer(
                settings.device, spec, settings.scope, settings.device_options, recorder
            )
            if isinstance(scorer, DeviceScorer):
                undone.callback(scorer.shadows.close)
        device = scorer.shadows if isinstance(scorer, DeviceScorer) else None
        policy = make_pool_policy(settings.pool_policy)
        pools = HotPools(
            shape,
            accountant,
            policy,
            LayerShares(shape.layers, settings.pool_sizes),
            recorder,
            growth.most_bytes if growth else 0,
        )
        if growth is not None:
            accountant.let_grow(partial(pools.least_bytes, settings.kept_tokens))
        keeper = PoolKeeper(pools, policy, settings, counters)
        calls = calls or DriveCalls()
        sweep(cold_dir, calls)
        engine = open_engine(settings.io, settings.io_threads, calls)
        undone.callback(engine.close)
        if isinstance(scorer, DeviceScorer):
            share_by_rates(scorer, shape, settings, cold_dir, engine, shadow_limit_bytes)
        store = ColdStore(
            cold_dir,
            shape,
            settings.block_rows * shape.row_bytes,
            engine,
            counters,
            calls,
            recorder,
            RowSums(shape.layers, accountant),
        )
        undone.callback(store.close)
        if store.own_io_mode is IOMode.BUFFERED:
            warnings.warn(buffered_warning(cold_dir), SetupWarning, stacklevel=3)
        landing = LandingArea(settings.prefetch_blocks, settings.block_rows, shape.row_bytes)
        prefetch = PrefetchBuffer(store, landing)
        # At least a group, so that a tile of attention never waits for two buffers.
        buffers = RowBuffers(max(settings.block_rows, GROUP_TOKENS), shape.row_bytes)
        log = LayerStepLog(pools, counters, layer_hits, _told(observe, timeline))
        gather = Gather(
            store,
            pools,
            keeper,
            prefetch,
            buffers,
            settings.block_rows,
            counters,
            log,
        )
        spill = SpillQueue(
            store,
            round_up(settings.block_rows, GROUP_TOKENS),
            shape.row_bytes,
            counters,
        )
        groups = GroupTable()
        shadow_store = ShadowStore(
            cold_dir,
            store.own_io_mode,
            spec,
            engine,
            calls,
            recorder,
        )
        undone.callback(shadow_store.close)
        shadow_memory = ShadowMemory(
            shadow_store,
            spec,
            shadow_limit_bytes,
            accountant,
            counters,
            announce_streaming,
            device,
        )
        following = (
            FollowingBudget(growth, accountant, shadow_memory.raise_limit) if growth else None
        )
        shadow = ShadowKeeper(scorer, shape.layers, gather, layout, shadow_memory)
        rows = RowKeeper(
            shape,
            layout,
            store,
            groups,
            spill,
            gather,
            pools,
            keeper,
            shadow,
            accountant,
            OpenFiles.of_process(),
        )
        evaluation = evaluate(scorer, settings)
        selection = TokenSelection(
            evaluation,
            shadow,
            keeper,
            spec,
            settings.scope,
            accountant,
            recorder,
        )
        # Behind almost everything that may fail: its memory is to be unlocked before it goes.
        gpu = None
        if lane is not None:
            plan = _staging_plan(shape, settings, accountant)
            gpu = GpuSide(lane, plan, gather, layout, counters, recorder)
            undone.callback(gpu.close)
            undone.callback(gpu.stop)
        states = RowStates(layout, counters) if gpu is None else gpu.states
        dense = DenseAttention(gather, states, settings.block_rows, recorder)
        attention = RowAttention(gather, states, recorder)
        native = host_attention(shape) if gpu is None else None
        decode = None
        if native is not None:
            decode = NativeDecode(
                native,
                spec,
                settings.scope,
                evaluation,
                selection,
                shadow,
                pools,
                gather,
                policy,
                log,
                counters,
                recorder,
            )
        pipeline = PrefetchPipeline(
            gather,
            torch.get_num_threads(),
            None if gpu is None else gpu.ahead,
        )
        undone.pop_all()
    return RuntimeParts(
        counters=counters,
        layer_hits=layer_hits,
        accountant=accountant,
        timeline=timeline,
        recorder=recorder,
        calls=calls,
        engine=engine,
        store=store,
        shadow_store=shadow_store,
        layout=layout,
        spec=spec,
        device=device,
        pools=pools,
        keeper=keeper,
        following=following,
        prefetch=prefetch,
        buffers=buffers,
        gather=gather,
        groups=groups,
        rows=rows,
        shadow=shadow,
        shadow_memory=shadow_memory,
        selection=selection,
        dense=dense,
        attention=attention,
        decode=decode,
        pipeline=pipeline,
        gpu=gpu,
    )


def _told(
    observe: Callable[[LayerStep], None] | None, timeline: PoolTimeline | None
) -> Callable[[LayerStep], None] | None:
    """Return what is called with every entry: the timeline first, where there is one."""
    if timeline is None:
        return observe
    if observe is None:
        return timeline.observe

    def note(entry: LayerStep) -> None:
        timeline.observe(entry)
        observe(entry)

    return note


def _staging_plan(shape: ModelShape, settings: Settings, accountant: Accountant) -> StagingPlan:
    room = widened_bytes(shape, settings)
    plan = StagingPlan.of(shape, room)
    # Only blocks of a few rows have no room for one in each buffer.
    accountant.take(Part.STAGING, max(0, plan.byte_count - room))
    return plan
