# SPDX-License-Identifier: Apache-2.0
"""Everything behind a cache: rows, shadow, pools, drive and attention over them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch

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
from hillinfer.gpu.copied_rows import CopiedRows
from hillinfer.gpu.copy_lane import CopyLane
from hillinfer.gpu.gpu_side import GpuSide
from hillinfer.gpu.packed_rows import packed_rows
from hillinfer.gpu.staging_memory import StagingKind
from hillinfer.gpu.staging_plan import StagingPlan
from hillinfer.hie.evaluation import ImportanceEvaluation
from hillinfer.model_shape import ModelShape
from hillinfer.policies.pool_policies import make_pool_policy
from hillinfer.pools.accountant import Accountant, Part
from hillinfer.pools.budget_plan import kernel_spec, staging_bytes, widened_bytes
from hillinfer.pools.hot_pools import HotPools
from hillinfer.pools.layer_hits import LayerHits
from hillinfer.pools.layer_shares import LayerShares
from hillinfer.pools.layer_step import LayerStep
from hillinfer.pools.pool_keeper import PoolKeeper
from hillinfer.sessions.saved_session import SavedSession
from hillinfer.sessions.saving import RowOwner, SavedBytes, SessionOrigin, save_sequence
from hillinfer.sessions.sequence_parts import parts_of
from hillinfer.settings import Settings
from hillinfer.statistics import CacheStatistics
from hillinfer.storage.aligned_buffer import round_up
from hillinfer.storage.cold_file import IOMode, buffered_warning
from hillinfer.storage.cold_store import ColdStore
from hillinfer.storage.drive_calls import DriveCalls
from hillinfer.storage.group_table import GroupTable
from hillinfer.storage.landed_rows import LandedRows
from hillinfer.storage.landing_area import LandingArea
from hillinfer.storage.leftovers import sweep
from hillinfer.storage.read_engines import open_engine
from hillinfer.storage.row_keeper import RowKeeper
from hillinfer.storage.row_layout import RowLayout
from hillinfer.storage.row_reader import RowReader
from hillinfer.storage.sequence import Sequence
from hillinfer.storage.shadow_keeper import ShadowKeeper
from hillinfer.storage.shadow_memory import ShadowMemory
from hillinfer.storage.shadow_store import ShadowStore
from hillinfer.storage.spill_queue import SpillQueue
from hillinfer.storage.stored_base import StoredBase
from hillinfer.timeline.lanes import Lanes
from hillinfer.timeline.pool_timeline import PoolTimeline
from hillinfer.timeline.recorder import Recorder
from hillinfer.timeline.silent import SILENT
from hillinfer.timeline.trace_file import TraceFile
from hillinfer_model.kernel_spec import GROUP_TOKENS


def _unseen(entry: LayerStep) -> None:
    """Record nothing."""


def _unannounced() -> None:
    """Say nothing, because whoever made the plan did."""


class Runtime:
    """Stores the rows of sequences and attends to them (design, sections 1 and 6).

    Parameters
    ----------
    shape
        The model's.
    settings
        How tokens are selected and where rows lie.
    budget_bytes
        M0.
    cold_dir
        Directory of the cold pool.
    observe
        Called with what happened to the pools of each layer and step, from any thread.
    calls
        How the drive is reached; the operating system itself where None.
    shadow_limit_bytes
        Most bytes of full shadows in DRAM; the others are on the drive.
    base
        What a saved session holds, for `resume`; the runtime closes it.
    announce_streaming
        Called once, before the first shadow goes to the drive.
    scorer
        Executes the scoring contract; that of the settings' device where None.
    evaluate
        Makes what selects tokens with that scorer; benchmarks give one that replays selections.
    lane
        Copies to and from the model's GPU, and is closed with this; None where the model computes
        on the processor, and rows are attended to where they lie.

    Raises
    ------
    BudgetError
        Where the budget does not even hold the buffers.
    ColdPoolError
        Where the directory cannot hold the cold pool.
    """

    def __init__(
        self,
        shape: ModelShape,
        settings: Settings,
        budget_bytes: int,
        cold_dir: Path,
        observe: Callable[[LayerStep], None] = _unseen,
        calls: DriveCalls | None = None,
        shadow_limit_bytes: int = sys.maxsize,
        base: StoredBase | None = None,
        announce_streaming: Callable[[], None] = _unannounced,
        scorer: Scorer | None = None,
        evaluate: Callable[[Scorer, Settings], ImportanceEvaluation] = ImportanceEvaluation,
        lane: CopyLane | None = None,
    ) -> None:
        self.shape = shape
        self.settings = settings
        self.counters = Counters()
        self._observe = observe
        self._layer_hits = LayerHits(shape.layers)
        self._timeline = PoolTimeline(settings.pool_timeline) if settings.pool_timeline else None
        self.recorder: Recorder = Lanes(TraceFile(settings.trace)) if settings.trace else SILENT
        self.layout = RowLayout(shape)
        self._accountant = Accountant(budget_bytes)
        self._accountant.take(Part.STAGING, staging_bytes(shape, settings))
        self._spec = kernel_spec(shape, settings)
        scorer = scorer or make_scorer(
            settings.device, self._spec, settings.scope, settings.device_options, self.recorder
        )
        self._device = scorer.shadows if isinstance(scorer, DeviceScorer) else None
        policy = make_pool_policy(settings.pool_policy)
        self._pools = HotPools(
            shape,
            self._accountant,
            policy,
            LayerShares(shape.layers, settings.pool_sizes),
            self.recorder,
        )
        self._keeper = PoolKeeper(self._pools, policy, settings, self.counters)
        self.calls = calls or DriveCalls()
        sweep(cold_dir, self.calls)
        self._engine = open_engine(settings.io, settings.io_threads, self.calls)
        with ExitStack() as undone:
            undone.callback(self._engine.close)
            if isinstance(scorer, DeviceScorer):
                share_by_rates(scorer, shape, settings, cold_dir, self._engine, shadow_limit_bytes)
            self._store = ColdStore(
                cold_dir,
                shape,
                settings.block_rows * shape.row_bytes,
                self._engine,
                self.counters,
                self.calls,
                base.rows if base else None,
                self.recorder,
            )
            undone.pop_all()
        if self._store.own_io_mode is IOMode.BUFFERED:
            warnings.warn(buffered_warning(cold_dir), SetupWarning, stacklevel=2)
        self._reader = RowReader(
            self._store,
            self._pools,
            self._keeper,
            LandingArea(settings.prefetch_blocks, settings.block_rows, shape.row_bytes),
            settings.block_rows,
            shape.row_bytes,
            self.counters,
            self._layer_hits,
            self._note,
        )
        spill = SpillQueue(
            self._store,
            round_up(settings.block_rows, GROUP_TOKENS),
            shape.row_bytes,
            self.counters,
        )
        self._groups = GroupTable()
        self._shadow_store = ShadowStore(
            cold_dir,
            self._store.own_io_mode,
            self._spec,
            self._engine,
            self.calls,
            base.shadow if base else None,
            self.recorder,
        )
        shadow_memory = ShadowMemory(
            self._shadow_store,
            self._spec,
            shadow_limit_bytes,
            self._accountant,
            self.counters,
            announce_streaming,
            self._device,
        )
        self._shadow = ShadowKeeper(scorer, shape.layers, self._reader, self.layout, shadow_memory)
        self._rows = RowKeeper(
            shape,
            self.layout,
            self._store,
            self._groups,
            spill,
            self._reader,
            self._pools,
            self._keeper,
            self._shadow,
            self._accountant,
        )
        self._selection = TokenSelection(
            evaluate(scorer, settings),
            self._shadow,
            self._keeper,
            self._spec,
            settings.scope,
            self._accountant,
            self.recorder,
        )
        # Behind everything that may fail: its memory is to be unlocked before it goes.
        self._gpu = None if lane is None else self._gpu_side(lane)
        states = RowStates(self.layout, self.counters) if self._gpu is None else self._gpu.states
        self._dense = DenseAttention(self._reader, states, settings.block_rows, self.recorder)
        self._attention = RowAttention(self._reader, states, host_attention(shape), self.recorder)
        self._pipeline = PrefetchPipeline(
            self._reader,
            torch.get_num_threads(),
            None if self._gpu is None else self._gpu.ahead,
        )
        self._step = 0
        self._closed = False

    # --- sequences and their rows ----------------------------------------------------------

    def open_sequence(self) -> Sequence:
        """Return a new, empty sequence."""
        return self._rows.open()

    def fork(self, sequence: Sequence) -> Sequence:
        """Return a sequence with the same tokens; full groups and segments are shared."""
        self._settle_arrivals()
        return self._rows.fork(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free whatever only this sequence owned."""
        self._forget_ahead()
        self._rows.release(sequence)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forget the tokens from position `length` on, in every layer."""
        self._settle()
        self._rows.truncate(sequence, length)

    def resume(self, saved: SavedSession, tokens: int) -> Sequence:
        """Return a sequence of the first tokens of a saved session; see `RowKeeper.resume`."""
        return self._rows.resume(saved, tokens)

    def save(self, sequence: Sequence, target: Path, origin: SessionOrigin) -> SavedBytes:
        """Save a sequence of whole tokens; see `save_sequence`."""
        self._settle()
        self._reader.settle()
        self._store.check()
        return save_sequence(
            sequence,
            RowOwner(self._store, self._groups),
            parts_of(sequence, self.shape, self._shadow),
            self.shape,
            target,
            origin,
            self.calls,
        )

    def begin_step(self) -> None:
        """Note that a forward pass begins, and raise what went wrong while writing before it."""
        self._settle()
        self._step += 1
        self.recorder.begin_step(self._step)
        self._keeper.begin_step(self._step)
        self._store.check()

    def append(
        self, layer: int, sequence: Sequence, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store the rows of new tokens, wherever the model computed them; see `RowKeeper.append`.

        Where the model has a GPU, the row of a single token comes back while it computes on.
        """
        if keys.device.type != "cpu":
            self.counters.device_to_host_bytes += 2 * keys.numel() * keys.element_size()
        if self._gpu is not None:
            if self._gpu.arrivals.newest(layer, sequence) is not None:
                self._gpu.arrivals.settle()
            place = self._rows.reserve(layer, sequence) if keys.shape[1] == 1 else None
            if place is not None:
                row = packed_rows(keys, values, self.shape.row_bytes)
                self._gpu.arrivals.begin(layer, sequence, row, place)
                return
            # What is in the open group goes on to the drive with it.
            self._gpu.arrivals.settle()
        self._rows.append(layer, sequence, keys.cpu(), values.cpu(), self._step)

    def code_full_segments(self, layer: int, sequence: Sequence, keys: torch.Tensor) -> None:
        """Code the key shadow of new rows that nothing attends to; attention does it too.

        Parameters as in `TokenSelection.code_full_segments`.
        """
        self._selection.code_full_segments(layer, sequence, keys)

    # --- attention -------------------------------------------------------------------------

    def attend_dense(
        self,
        layer: int,
        sequence: Sequence,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Attend to everything: past rows block by block, then the new tokens causally.

        Parameters
        ----------
        layer, sequence
            Where the new tokens were just appended.
        query
            (query_heads, tokens, head_dim) on the model's device.
        keys, values
            The new tokens', stored type, (kv_heads, tokens, head_dim), on the model's device.
        scaling
            Factor on inner products.

        Returns
        -------
        (query_heads, tokens, head_dim) in the query's type.
        """
        # First, while rows that were just appended are promoted: attention waits for that.
        self.code_full_segments(layer, sequence, keys)
        out = self._dense.attend(layer, sequence, query, keys, values, scaling)
        if self._keeper.observed_queries:
            last = query[:, -self._keeper.observed_queries :]
            sequence.observed[layer] = last.transpose(0, 1).float().cpu().contiguous()
        return out

    def announce(self, layer: int, sequence: Sequence, query: torch.Tensor, scaling: float) -> None:
        """Begin to select, and to read, for the token that is about to come to a layer.

        What is announced is what `attend_selected` then attends to, whatever query it is given: the
        same tokens wherever rows lie and however fast they come.

        Parameters
        ----------
        layer, sequence
            Where one token more is coming; all others are stored.
        query
            Predicted, (query_heads, 1, head_dim) on the model's device.
        scaling
            Factor on inner products.
        """
        past = sequence.lengths[layer]
        if self._selection.selects_all(past + 1):
            return
        bring = self._on_host(query[:, 0])
        select = self._selection.announced(layer, sequence, scaling, bring)
        if self._gpu is None and self._selection.is_quick(layer, sequence):
            self._pipeline.select_now(layer, sequence, past, select)
        else:
            self._pipeline.announce(layer, sequence, past, select)

    def attend_selected(
        self,
        layer: int,
        sequence: Sequence,
        query: torch.Tensor,
        keys: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Attend to the top α of all tokens, this step's own included.

        Parameters
        ----------
        layer, sequence
            Where the new token was just appended.
        query
            (query_heads, 1, head_dim) on the model's device.
        keys
            The new token's, stored type, (kv_heads, 1, head_dim).
        scaling
            Factor on inner products.

        Returns
        -------
        (query_heads, 1, head_dim) in the query's type.
        """
        length = sequence.lengths[layer]
        landed: LandedRows | None = None
        copied: Future[CopiedRows] | None = None
        ahead = self._pipeline.take(layer, sequence)
        if ahead is None:
            self._settle_arrivals()
        if ahead is not None:
            selected, landed, copied = ahead.sets, ahead.landed, ahead.copied
        elif self._selection.selects_all(length):
            selected = self._selection.everything(layer, sequence, keys)
        else:
            selected = self._selection.select(layer, sequence, query, keys, scaling)
        self.counters.scored_tokens += length * len(selected)
        self.counters.selected_tokens += sum(len(positions) for positions in selected)
        given = (layer, sequence, query, selected, scaling, self._step, landed)
        if self._gpu is None:
            out = self._attention.selected(*given)
        else:
            newest = self._gpu.arrivals.newest(layer, sequence)
            if newest is None:
                # It may have come by now, or not have come at all.
                self._settle_arrivals()
            out = self._gpu.attention.selected(*given, copied, newest)
        self._rows.offer_filled(layer, sequence, self._step)
        return out

    # --- the rest --------------------------------------------------------------------------

    def statistics(self) -> CacheStatistics:
        """Return memory and traffic so far, promotions that are under way included."""
        self._pools.wait()
        if self._device is not None:
            self.counters.kernel_launches = self._device.launches
            self.counters.device_scored_tokens = self._device.scored_tokens
        peak = self._accountant.peak()
        return CacheStatistics(
            kv_bytes=self._rows.kv_bytes,
            dram_budget_bytes=self._accountant.budget_bytes,
            dram_peak_bytes=sum(peak.values()),
            hot_bytes=peak[Part.HOT],
            shadow_bytes=peak[Part.SHADOW],
            staging_bytes=peak[Part.STAGING],
            other_bytes=peak[Part.OTHER],
            io_mode=self._store.io_mode.value,
            io_engine=self._engine.name,
            layer_hit_rates=self._layer_hits.rates(),
            device_lost=self._device is not None and self._device.lost,
            gpu_staging=(self._gpu.staging_kind if self._gpu else StagingKind.NONE).value,
            gpu_staging_bytes=self._gpu.staging_bytes if self._gpu else 0,
            **asdict(self.counters),
        )

    def close(self) -> None:
        """Stop all threads and give the drive's space back; harmless when done twice."""
        if not self._closed:
            self._closed = True
            # The last that is named is the first that ends; each ends whatever became of another.
            with ExitStack() as ends:
                if self._gpu is not None:
                    ends.callback(self._gpu.close)
                ends.callback(self.recorder.close)
                if self._timeline is not None:
                    ends.callback(self._timeline.close)
                if self._device is not None:
                    ends.callback(self._device.close)
                ends.callback(self._engine.close)
                ends.callback(self._shadow_store.close)
                ends.callback(self._store.close)
                ends.callback(self._pools.close)
                ends.callback(self._reader.close)
                if self._gpu is not None:
                    ends.callback(self._gpu.stop)
                ends.callback(self._pipeline.close)

    def _gpu_side(self, lane: CopyLane) -> GpuSide:
        room = widened_bytes(self.shape, self.settings)
        plan = StagingPlan.of(self.shape, room)
        # Only blocks of a few rows have no room for one in each buffer.
        self._accountant.take(Part.STAGING, max(0, plan.byte_count - room))
        return GpuSide(lane, plan, self._reader, self.layout, self.counters, self.recorder)

    def _forget_ahead(self) -> None:
        """Forget what was announced, and wait until nothing is on its way from a GPU."""
        self._pipeline.drop()
        if self._gpu is not None:
            self._gpu.queries.settle()
            self._gpu.arrivals.wait()

    def _settle(self) -> None:
        """Forget what was announced, and have every row that is stored in its place."""
        self._forget_ahead()
        self._settle_arrivals()

    def _settle_arrivals(self) -> None:
        if self._gpu is not None:
            self._gpu.arrivals.settle()

    def _on_host(self, query: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return what returns a query as the host scores with it, at once or once it came."""
        if self._gpu is not None:
            return self._gpu.queries.bring(query)
        on_host = query.float().cpu()
        return lambda: on_host

    def _note(self, entry: LayerStep) -> None:
        if self._timeline is not None:
            self._timeline.observe(entry)
        self._observe(entry)
