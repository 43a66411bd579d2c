# SPDX-License-Identifier: Apache-2.0
"""Opens the parts that an engine ties together, and ends them in order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hillinfer.attention.kernels import host_attention
from hillinfer.attention.row_attention import DenseAttention, OneSet, RowAttention, RowStates
from hillinfer.devices.device_scorer import EngineScorer
from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.devices.opening import OpenDevice, make_scorer
from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.checksums import RowSums
from hillinfer.drive.engine_table import open_engine
from hillinfer.drive.files import IOMode, buffered_warning, round_up, sweep
from hillinfer.drive.landing import LandingArea, RowBuffers
from hillinfer.drive.read_engines import ReadEngine
from hillinfer.drive.regions import GroupTable
from hillinfer.drive.shared_files import OpenFiles
from hillinfer.engine.budget_growth import BudgetGrowth, FollowingBudget
from hillinfer.engine.budget_plan import (
    kernel_spec,
    landing_block_rows,
    landing_rows,
    sealing_bytes,
    staging_bytes,
    value_statistics_bytes,
    widened_bytes,
)
from hillinfer.engine.coded_step import CodedStep
from hillinfer.engine.cold_rows import ColdRows
from hillinfer.engine.decode_step import NativeDecode
from hillinfer.engine.gpu_coded_step import AnyCodedStep, GpuCodedStep
from hillinfer.engine.joined_step import JoinedStep
from hillinfer.engine.queries import LayerCalls
from hillinfer.engine.selection import PrefetchPipeline, TokenSelection
from hillinfer.errors import SettingsError, SetupWarning
from hillinfer.extents.group_seals import GroupSeals
from hillinfer.extents.recording import EngineSide
from hillinfer.extents.shared_chunks import SharedChunks
from hillinfer.gpu.attention import GpuSide
from hillinfer.gpu.staging import CopyLane, StagingPlan
from hillinfer.kv.cold_store import ColdStore
from hillinfer.kv.gather import Gather
from hillinfer.kv.hot_pools import HotPools
from hillinfer.kv.opened_sequences import SequenceOpener
from hillinfer.kv.pool_manager import LayerStepLog, PoolManager
from hillinfer.kv.pool_policies import LayerShares, make_pool_policy
from hillinfer.kv.prefetch_buffer import PrefetchBuffer
from hillinfer.kv.rows import SequenceManager, WriteBack
from hillinfer.kv.sequence import RowLayout
from hillinfer.kv.sequence_shadows import SequenceShadows
from hillinfer.memory_budget import Accountant, Part
from hillinfer.model_shape import ModelShape
from hillinfer.rates.profiling import share_by_rates
from hillinfer.schedule.kept_windows import DENSE_PASSES, KeptWindows, WindowKey
from hillinfer.schedule.windows import PassWindows, SlackTable
from hillinfer.scoring.coded import AlignedWeights
from hillinfer.scoring.scorer import ImportanceEvaluation, Scorer
from hillinfer.secrecy.cold_pages import PoolKey, SealedRowPages
from hillinfer.settings import Encryption, Settings
from hillinfer.shadow.code_file import CodeFile
from hillinfer.shadow.memory import ShadowMemory
from hillinfer.shadow.segments import RowPlaces
from hillinfer.shadow.store import ShadowStore
from hillinfer.shadow.values import ValueCodes
from hillinfer.statistics import Counters, LayerHits
from hillinfer.trace.recorder import SILENT, LayerStep, Recorder
from hillinfer.trace.trace_file import Lanes, PoolTimeline, TraceFile, told
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec

# --- parts, and the order in which they end ---


@dataclass(frozen=True)
class RuntimeParts:
    """What `open_parts` opened.

    Parameters
    ----------
    timeline, recorder
        What is written down; the timeline is None where nobody asked for one.
    calls, engine, key, store, shadow_store
        The drive, and what is on it; the key is None where that is plain.
    device
        What holds segments of its own, or None.
    following
        Raises the budget with the context; None where it is fixed.
    groups, rows, shadow, shadow_memory, values
        What sequences own; `values` are codes, None where no token is coded.
    opener, recording
        Takes up sequences of sessions and stores; what rows on their way into a store pass through.
    selection, dense, attention, decode, joined, coded, pipeline
        Choosing tokens and attending to them; `decode` is None where the model computes on a GPU,
        `joined` where rows of a batch attend one after the other, and `coded` where no token is
        coded.
    codes_file
        Codes on the drive; None where no token is coded, or rows are sealed.
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
    key: PoolKey | None
    store: ColdStore
    shadow_store: ShadowStore
    layout: RowLayout
    spec: KernelSpec
    device: DeviceShadows | None
    pools: HotPools
    manager: PoolManager
    following: FollowingBudget | None
    prefetch: PrefetchBuffer
    buffers: RowBuffers
    gather: Gather
    groups: GroupTable
    rows: SequenceManager
    shadow: SequenceShadows
    shadow_memory: ShadowMemory
    values: ValueCodes | None
    opener: SequenceOpener
    recording: EngineSide
    selection: TokenSelection
    one_set: OneSet
    dense: DenseAttention
    windows: PassWindows
    attention: RowAttention
    decode: NativeDecode | None
    joined: JoinedStep | None
    coded: AnyCodedStep | None
    codes_file: CodeFile | None
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
            ends.callback(self.windows.close)
            if self.key is not None:
                ends.callback(self.key.erase)
            ends.callback(self.engine.close)
            ends.callback(self.shadow_store.close)
            if self.codes_file is not None:
                ends.callback(self.codes_file.close)
            ends.callback(self.recording.chunks.close)
            ends.callback(self.store.close)
            ends.callback(self.pools.close)
            ends.callback(self.buffers.close)
            ends.callback(self.prefetch.close)
            if self.decode is not None:
                ends.callback(self.decode.forget)
            if self.gpu is not None:
                ends.callback(self.gpu.stop)
            ends.callback(self.pipeline.close)


# --- Opens everything behind a cache ---


def open_parts(
    shape: ModelShape,
    settings: Settings,
    budget_bytes: int,
    cold_dir: Path,
    observe: Callable[[LayerStep], None] | None,
    calls: DriveCalls | None,
    shadow_limit_bytes: int,
    announce_streaming: Callable[[], None],
    scorer: EngineScorer | None,
    evaluate: Callable[[Scorer, Settings], ImportanceEvaluation],
    lane: CopyLane | None,
    growth: BudgetGrowth | None,
    devices: Mapping[str, OpenDevice],
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
                settings.device, spec, settings.scope, settings.device_options, recorder, devices
            )
            if scorer.on_device is not None:
                undone.callback(scorer.on_device.shadows.close)
        on_device = scorer.on_device
        device = None if on_device is None else on_device.shadows
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
        manager = PoolManager(pools, policy, settings, counters)
        calls = calls or DriveCalls()
        sweep(cold_dir, calls)
        engine = open_engine(settings.io, settings.io_threads, calls)
        undone.callback(engine.close)
        if on_device is not None:
            share_by_rates(on_device, shape, settings, cold_dir, engine, shadow_limit_bytes)
        key = None
        if settings.encrypt_cold_pool is Encryption.YES:
            key = PoolKey(accountant)
            undone.callback(key.erase)
        write_back_rows = round_up(settings.block_rows, GROUP_TOKENS)
        store = ColdStore(
            cold_dir,
            shape,
            settings.block_rows * shape.row_bytes,
            engine,
            counters,
            calls,
            recorder,
            RowSums(shape.layers, accountant),
            pages=None
            if key is None
            else SealedRowPages(
                key,
                shape.layers,
                shape.row_bytes,
                sealing_bytes(write_back_rows * shape.row_bytes),
            ),
        )
        undone.callback(store.close)
        if store.own_io_mode is IOMode.BUFFERED:
            warnings.warn(buffered_warning(cold_dir), SetupWarning, stacklevel=3)
        size, ahead = landing_block_rows(settings), landing_rows(shape, settings)
        landing = LandingArea(ahead // size, size, shape.row_bytes)
        prefetch = PrefetchBuffer(store, landing)
        undone.callback(prefetch.close)
        # At least a group, so that a tile of attention never waits for two buffers.
        buffers = RowBuffers(max(settings.block_rows, GROUP_TOKENS), shape.row_bytes)
        log = LayerStepLog(pools, counters, layer_hits, told(observe, timeline))
        gather = Gather(
            store,
            pools,
            manager,
            prefetch,
            buffers,
            settings.block_rows,
            counters,
            log,
        )
        write_back = WriteBack(
            store,
            write_back_rows,
            shape.row_bytes,
            counters,
        )
        groups = GroupTable()
        seals = GroupSeals(accountant, GROUP_TOKENS * shape.row_bytes)
        chunks = SharedChunks(store.others, groups, seals)
        shadow_store = ShadowStore(
            cold_dir,
            store.own_io_mode,
            spec,
            engine,
            calls,
            recorder,
            None if key is None else key.file(),
        )
        undone.callback(shadow_store.close)
        values, codes_file = None, None
        if settings.has_coded_tokens:
            least_hot = partial(pools.least_bytes, settings.kept_tokens)
            if key is None:
                drive = cold_dir, store.own_io_mode, spec, shape.layers, engine, accountant
                codes_file = CodeFile(*drive, counters, calls, recorder)
                undone.callback(codes_file.close)
            values = ValueCodes(spec, shape.layers, accountant, least_hot, pools.set_aside)
        shadow_memory = ShadowMemory(
            shadow_store,
            spec,
            shadow_limit_bytes,
            accountant,
            counters,
            announce_streaming,
            device,
            value_statistics_bytes(spec, settings),
        )
        places = None
        if key is None and layout.suits_kernels:
            places = RowPlaces(
                store.others.placement,
                lambda layer: store.files[layer].descriptor,
                store.settle,
                GROUP_TOKENS * shape.row_bytes,
            )
        shadow_memory.let_device_make(places)
        following = (
            FollowingBudget(growth, accountant, shadow_memory.raise_limit) if growth else None
        )
        shadow = SequenceShadows(
            scorer,
            shape.layers,
            gather,
            layout,
            shadow_memory,
            values,
            codes_file,
        )
        rows = SequenceManager(
            shape,
            layout,
            store,
            groups,
            write_back,
            gather,
            pools,
            manager,
            shadow,
            accountant,
            chunks,
        )
        opener = SequenceOpener(
            shape,
            store,
            groups,
            chunks,
            pools,
            manager,
            shadow,
            rows,
            buffers,
            OpenFiles.of_process(),
        )
        kept = shadow.codes
        filed = kept.filed if kept is not None and codes_file is not None else None
        queue, sums = store.behind_writes, store.sums_of
        recording = EngineSide(chunks, queue, sums, shadow.stored_codes, filed)
        evaluation = evaluate(scorer, settings)
        of_selection = evaluation, shadow, manager, spec, settings.scope, accountant, recorder
        begin_together = None if on_device is None else on_device.begin_together
        selection = TokenSelection(*of_selection, begin_together)
        choosing_by = selection.scoring, selection.make_room, recorder
        one_set = OneSet(scorer, evaluation.wanted, shadow, manager, *choosing_by)
        layer_calls = LayerCalls(shape, spec, settings.scope, pools, policy)
        cold = ColdRows(store, pools, manager, prefetch, buffers)
        # Behind almost everything that may fail: its memory is to be unlocked before it goes.
        gpu = None
        if lane is not None:
            plan = _staging_plan(shape, settings, accountant)
            gpu = GpuSide(lane, plan, gather, layout, counters, recorder)
            undone.callback(gpu.close)
            undone.callback(gpu.stop)
        coded: AnyCodedStep | None = None
        coded_on_host: CodedStep | None = None
        if values is not None:
            weights = AlignedWeights(spec)
            rest = shape.row_bytes, accountant, counters, recorder
            if gpu is None:
                parts = evaluation, selection, shadow, pools, prefetch, cold, layer_calls, log
                both = (*parts, *rest)
                coded = coded_on_host = CodedStep(weights, values, codes_file, *both)
            else:
                of_gpu = gpu, weights, values, codes_file, selection, shadow, gather
                coded = GpuCodedStep(*of_gpu, *rest)
        states = RowStates(layout, counters) if gpu is None else gpu.states
        windows = _windows(shape, store, cold_dir, recorder)
        dense = DenseAttention(
            gather,
            states,
            settings.block_rows,
            recorder,
            windows,
            shape.layers,
            ahead,
        )
        attention = RowAttention(gather, states, recorder)
        native = host_attention(shape) if gpu is None else None
        copies = None if gpu is None else gpu.ahead
        pipeline = PrefetchPipeline(gather, prefetch, torch.get_num_threads(), coded, copies)
        decode, joined = None, None
        if native is not None:
            choosing = (native, spec, settings.scope, evaluation, selection, shadow, pools)
            decode = NativeDecode(*choosing, gather, cold, layer_calls, log, counters, recorder)
            if JoinedStep.is_for(native, evaluation, policy, recorder):
                own = pipeline.read_on, accountant, coded_on_host
                joined = JoinedStep(*choosing, cold, layer_calls, log, counters, *own)
        undone.pop_all()
    return RuntimeParts(
        counters=counters,
        layer_hits=layer_hits,
        accountant=accountant,
        timeline=timeline,
        recorder=recorder,
        calls=calls,
        engine=engine,
        key=key,
        store=store,
        shadow_store=shadow_store,
        layout=layout,
        spec=spec,
        device=device,
        pools=pools,
        manager=manager,
        following=following,
        prefetch=prefetch,
        buffers=buffers,
        gather=gather,
        groups=groups,
        rows=rows,
        shadow=shadow,
        shadow_memory=shadow_memory,
        values=values,
        opener=opener,
        recording=recording,
        selection=selection,
        one_set=one_set,
        dense=dense,
        windows=windows,
        attention=attention,
        decode=decode,
        joined=joined,
        coded=coded,
        codes_file=codes_file,
        pipeline=pipeline,
        gpu=gpu,
    )


def _windows(
    shape: ModelShape, store: ColdStore, cold_dir: Path, recorder: Recorder
) -> PassWindows:
    """Return the windows of passes, as well as they are known of this machine."""
    table, rates = None, None
    keep: Callable[[SlackTable], None] | None = None
    with suppress(SettingsError, OSError):
        kept = KeptWindows.of_user()
        key = WindowKey.of(torch.get_num_threads(), DENSE_PASSES, shape)
        table, rates = kept.table(key), kept.follow(cold_dir, store.turns)
        if rates is not None:
            # Whoever had the drive measured wants what passes teach, too.
            keep = partial(kept.keep, key)
    return PassWindows(
        table or SlackTable(), store.turns, shape.row_bytes, rates, recorder, keep=keep
    )


def _staging_plan(shape: ModelShape, settings: Settings, accountant: Accountant) -> StagingPlan:
    room = widened_bytes(shape, settings)
    plan = StagingPlan.of(shape, room)
    # Only blocks of a few rows have no room for one in each buffer.
    accountant.take(Part.STAGING, max(0, plan.byte_count - room))
    return plan
