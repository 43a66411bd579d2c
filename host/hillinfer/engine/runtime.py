# SPDX-License-Identifier: Apache-2.0
"""The runtime behind an engine's caches: store, shadow, pools, drive, selection and attention."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch

from hillinfer.devices.device_scorer import EngineScorer
from hillinfer.devices.opening import DEVICES, OpenDevice
from hillinfer.drive.calls import DriveCalls
from hillinfer.engine.budget_growth import BudgetGrowth, say_nothing
from hillinfer.engine.coded_call import SplitAhead
from hillinfer.engine.coded_step import CodedStep
from hillinfer.engine.opening import open_parts
from hillinfer.engine.queries import Ahead, Prediction, Sets
from hillinfer.gpu.copies import packed_rows
from hillinfer.gpu.staging import CopyLane, StagingKind
from hillinfer.kv.opened_sequences import OpenedRows, StoredRows
from hillinfer.kv.saved_sequences import (
    SavedBytes,
    SessionOrigin,
    parts_of,
    save_sequence,
    value_coder,
)
from hillinfer.kv.sequence import Sequence, distinct_rows
from hillinfer.memory_budget import Part
from hillinfer.model_shape import ModelShape
from hillinfer.scoring.scorer import ImportanceEvaluation, Scorer
from hillinfer.sessions.opening import SavedSession
from hillinfer.settings import Settings
from hillinfer.statistics import CacheStatistics, Counters, LayerHits
from hillinfer.trace.recorder import SILENT, LayerStep


class Runtime:
    """Stores the rows of sequences and attends to them (design, sections 1 and 6).

    Parameters
    ----------
    observe
        Called with what happened to the pools of each layer and step, from any thread.
    calls
        How the drive is reached; the operating system itself where None.
    shadow_limit_bytes
        Most bytes of full shadows in DRAM; the others are on the drive.
    announce_streaming
        Called once, before the first shadow goes to the drive.
    scorer
        Executes the scoring contract; that of the settings' device where None.
    evaluate
        Makes what selects tokens with that scorer; benchmarks give one that replays selections.
    lane
        Copies to and from the model's GPU, and is closed with this; None where the model computes
        on the processor, and rows are attended to where they lie.
    growth
        How the budget follows the context; None where it is fixed.
    devices
        What opens the device that the settings name.
    observe_selected
        Called with layer, length and sets of every selection that is attended to.

    Attributes
    ----------
    parts
        What it ties together; the runtime ends them.

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
        observe: Callable[[LayerStep], None] | None = None,
        calls: DriveCalls | None = None,
        shadow_limit_bytes: int = sys.maxsize,
        announce_streaming: Callable[[], None] = say_nothing,
        scorer: EngineScorer | None = None,
        evaluate: Callable[[Scorer, Settings], ImportanceEvaluation] = ImportanceEvaluation,
        lane: CopyLane | None = None,
        growth: BudgetGrowth | None = None,
        devices: Mapping[str, OpenDevice] = DEVICES,
        observe_selected: Callable[[int, int, Sets], None] | None = None,
    ) -> None:
        self.shape = shape
        self.settings = settings
        self.parts = parts = open_parts(
            shape,
            settings,
            budget_bytes,
            cold_dir,
            observe,
            calls,
            shadow_limit_bytes,
            announce_streaming,
            scorer,
            evaluate,
            lane,
            growth,
            devices,
        )
        self.counters, self.recorder = parts.counters, parts.recorder
        self.layout, self.calls = parts.layout, parts.calls
        self._layer_hits, self._accountant = parts.layer_hits, parts.accountant
        self._engine, self._store = parts.engine, parts.store
        self._spec, self._device = parts.spec, parts.device
        self._pools, self._manager, self._following = parts.pools, parts.manager, parts.following
        self._buffers, self.gather, self.prefetch = parts.buffers, parts.gather, parts.prefetch
        self._groups, self._rows, self._shadow = parts.groups, parts.rows, parts.shadow
        self._selection, self._pipeline = parts.selection, parts.pipeline
        self._dense, self._attention, self._gpu = parts.dense, parts.attention, parts.gpu
        self.decode, self.joined, self.coded = parts.decode, parts.joined, parts.coded
        self.observe_selected = observe_selected
        self._step, self.is_closed = 0, False

    # --- sequences and their rows ----------------------------------------------------------

    def open_sequence(self) -> Sequence:
        """Return a new, empty sequence."""
        return self._rows.open()

    def expect(self, tokens: int) -> None:
        """Learn how long sequences get, of which a device gets its share; only speed changes."""
        if self._device is not None:
            self._device.expect(-(-tokens // self._spec.segment_tokens))

    @property
    def budget_bytes(self) -> int:
        """M0 now."""
        return self._accountant.budget_bytes

    @property
    def follows_context(self) -> bool:
        """Whether the budget is a share of what is stored, and grows with it."""
        return self._following is not None

    def cover(self, tokens: int) -> None:
        """Make a budget that follows the context that of so many distinct tokens."""
        assert self._following is not None
        self._following.cover(tokens)

    def limit_shadows(self, limit_bytes: int) -> None:
        """Hold no more full shadows than that in DRAM from here on."""
        self.parts.shadow_memory.limit_to(limit_bytes)

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
        """Return a sequence of the first tokens of a saved session; see `SequenceOpener`."""
        self._settle()
        if self._following is not None:
            self._following.cover(self._rows.tokens + tokens)
        return self.parts.opener.resume(saved, tokens)

    def open_stored(self, sequence: Sequence, stored: StoredRows) -> OpenedRows:
        """Give an empty sequence the first tokens of a stored prompt; see `SequenceOpener`."""
        self._settle()
        if self._following is not None:
            self._following.cover(self._rows.tokens + stored.tokens)
        return self.parts.opener.open_stored(sequence, stored)

    def save(self, sequence: Sequence, target: Path, origin: SessionOrigin) -> SavedBytes:
        """Save a sequence of whole tokens; see `save_sequence`."""
        self.settle()
        self._store.check()
        pool = self._store, self._groups
        parts = parts_of(sequence, self.shape, self._shadow)
        coder = value_coder(sequence, self.shape, self._shadow)
        return save_sequence(sequence, *pool, parts, coder, self.shape, target, origin, self.calls)

    def settle(self) -> None:
        """Wait until nothing is under way that moves rows."""
        self._settle()
        self._buffers.settle()

    @property
    def step(self) -> int:
        """Forward passes begun so far: the number of the one under way."""
        return self._step

    def begin_step(self) -> None:
        """Note that a forward pass begins, and raise what went wrong while writing before it."""
        self._settle()
        self._step += 1
        if self.recorder is not SILENT:
            self.recorder.begin_step(self._step)
        if self.coded is not None:
            self.coded.begin_step()
        self._manager.begin_step(self._step)
        self._store.check()

    def append(
        self, layer: int, sequence: Sequence, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store rows of new tokens, wherever they were computed; see `SequenceManager.append`.

        Where the model has a GPU, the row of a single token comes back while it computes on.
        """
        if self._following is not None and layer == sequence.band.start:
            self._following.cover(self._rows.tokens_with(sequence, keys.shape[1]))
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

    def append_token(
        self,
        layer: int,
        sequence: Sequence,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch_row: int,
    ) -> bool:
        """Store the row of one token as the model made it; False where `append` must do it.

        Parameters as in `SequenceManager.append_token`.
        """
        if self._gpu is not None:
            return False
        if self._following is not None and layer == sequence.band.start:
            tokens = self._rows.tokens_with(sequence, 1)
            if tokens > self._following.covered:
                self._following.cover(tokens)
        overflows = self._rows.append_token(layer, sequence, keys, values, batch_row)
        if overflows is None:
            return False
        if overflows:
            self.count_overflows(sequence, overflows)
        if layer == 0:
            self._selection.expect(sequence.lengths[0])
        return True

    def count_overflows(self, sequence: Sequence, overflows: int) -> None:
        """Count finite values of a sequence's new rows that did not fit FP16."""
        for counters in (self.counters, sequence.counters):
            counters.fp16_overflows += overflows

    def code_full_segments(
        self,
        layer: int,
        sequence: Sequence,
        keys: torch.Tensor,
        values: torch.Tensor | None = None,
    ) -> None:
        """Code rows that nothing attends to; see `TokenSelection.code_full_segments`."""
        self._selection.code_full_segments(layer, sequence, keys, values)

    # --- attention -------------------------------------------------------------------------

    def attend_dense(
        self,
        layer: int,
        sequence: Sequence,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
        among: Sets | None = None,
    ) -> torch.Tensor:
        """Attend to everything: past rows block by block, then the new tokens causally.

        Parameters and result as in `DenseAttention.attend`.
        """
        # The row of a single token may still be on its way.
        self._settle_arrivals()
        # First, while rows that were just appended are promoted: attention waits for that.
        self.code_full_segments(layer, sequence, keys, values)
        out = self._dense.attend(layer, sequence, query, keys, values, scaling, among)
        if self._manager.observed_queries:
            last = query[:, -self._manager.observed_queries :].transpose(0, 1)
            # A copy: a view would keep all queries of the chunk, which nothing counts.
            sequence.observed[layer] = last.to("cpu", torch.float32, copy=True).contiguous()
        return out

    def announce(
        self, layer: int, sequence: Sequence, query: torch.Tensor | Prediction, scaling: float
    ) -> None:
        """Begin to select, and to read, for the token that is about to come to a layer.

        What is announced is what `attend_selected` then attends to, whatever query it is given: the
        same tokens wherever rows lie and however fast they come.

        Parameters
        ----------
        layer, sequence
            Where one token more is coming; all others are stored.
        query
            Predicted, (query_heads, 1, head_dim) on the model's device, or what computes it as the
            only one of its batch: in the layer's turn where nothing is to be read before.
        """
        is_quick = self._gpu is None and self._selection.is_quick(layer, sequence)
        is_quick = is_quick and self._pipeline.is_idle
        given = layer, sequence, query, scaling
        coded, decode = self.coded, self.decode
        if is_quick and isinstance(coded, CodedStep):
            for choose in (coded.choose_late, coded.choose_next):
                chosen = choose(*given)
                if chosen is not None:
                    self._pipeline.keep(layer, sequence, chosen)
                    return
        if decode is not None and decode.keep(*given):
            return
        past = sequence.lengths[layer]
        if self._selection.selects_all(past + 1, sequence.lacking):
            return
        if is_quick and decode is not None and (ahead := decode.choose_next(*given)) is not None:
            self._pipeline.keep(layer, sequence, ahead)
            return
        if isinstance(query, Prediction):
            query = query.queries()[0]
        select = self._selection.announced(layer, sequence, scaling, self._on_host(query[:, 0]))
        begin = self._pipeline.select_now if is_quick else self._pipeline.announce
        begin(layer, sequence, past, select)

    def begin_choice(self, layer: int, sequence: Sequence) -> None:
        """Have tokens chosen of a layer whose own products are made, where that waited for them."""
        if self.decode is not None and self.decode.kept:
            self.decode.begin(layer, sequence)
        self._pipeline.begin_late(layer, sequence)

    def attend_selected(
        self,
        layer: int,
        sequence: Sequence,
        query: torch.Tensor,
        keys: torch.Tensor | None,
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
            The new token's, stored type, (kv_heads, 1, head_dim); None where the tail has its row.
        scaling
            Factor on inner products.

        Returns
        -------
        (query_heads, 1, head_dim) in the query's type.
        """
        length = sequence.lengths[layer]
        ahead = self._pipeline.take(layer, sequence)
        # Those that come next were chosen meanwhile.
        self._pipeline.read_on()
        own = layer, sequence, query, scaling
        is_told = sequence.told is not None
        for whole in (self.coded, self.decode) if ahead is None and not is_told else ():
            attended = None if whole is None else whole.step(*own, self._step)
            if whole is not None and attended is not None:
                if self.observe_selected is not None:
                    self.observe_selected(layer, length, whole.chosen)
                self._rows.offer_filled(layer, sequence, self._step)
                return attended
        if ahead is None or is_told:
            self._settle_arrivals()
            keys = self._rows.newest_keys(layer, sequence) if keys is None else keys
            ahead = self._selection.own(layer, sequence, query, keys, scaling, ahead)
        if self.observe_selected is not None:
            self.observe_selected(layer, length, [one.copy() for one in ahead.sets])
        sets, tokens = ahead.counts
        for counters in (self.counters, sequence.counters):
            counters.scored_tokens += length * sets
            counters.selected_tokens += tokens
        if isinstance(ahead, SplitAhead):
            assert isinstance(self.coded, CodedStep)
            out = self.coded.attend_split(*own, self._step, ahead)
        else:
            out = self._attend_to(*own, ahead)
        self._rows.offer_filled(layer, sequence, self._step)
        return out

    def _attend_to(
        self, layer: int, sequence: Sequence, query: torch.Tensor, scaling: float, ahead: Ahead
    ) -> torch.Tensor:
        """Attend to sets that are known here."""
        given = (layer, sequence, query, ahead.sets, scaling, self._step, ahead.landed)
        if ahead.exact is not None and self.coded is not None:
            return self.coded.attend(*given, ahead.exact)
        if self.decode is not None and (out := self.decode.attend(*given)) is not None:
            return out
        if self._gpu is None:
            return self._attention.selected(*given)
        if (newest := self._gpu.arrivals.newest(layer, sequence)) is None:
            # It may have come by now, or not have come at all.
            self._settle_arrivals()
        return self._gpu.attention.selected(*given, ahead.copied, newest)

    def statistics(self) -> CacheStatistics:
        """Return memory and traffic so far, promotions that are under way included."""
        self._count()
        peak = self._accountant.peak()
        return CacheStatistics(
            kv_bytes=self.kv_bytes(self._rows.sequences),
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

    def kv_bytes(self, sequences: list[Sequence]) -> int:
        """Return the bytes of all distinct rows of some sequences."""
        return distinct_rows(sequences) * self.shape.row_bytes

    def counted(self) -> tuple[Counters, LayerHits]:
        """Return what is counted so far, promotions that are under way included."""
        self._count()
        return replace(self.counters), self._layer_hits.copy()

    def _count(self) -> None:
        self._pools.wait()
        self.parts.windows.count_into(self.counters)
        if self._device is not None:
            self._device.count_into(self.counters)

    def close(self) -> None:
        """Stop all threads and give the drive's space back; harmless when done twice."""
        if not self.is_closed:
            self.is_closed = True
            self.parts.close()

    def _forget_ahead(self) -> None:
        """Forget what was announced, and wait until nothing is on its way from a GPU."""
        # What is waited for here may wait for a demand itself that an interrupt left.
        if (turns := self._store.turns).demands or self.prefetch.unclaimed:
            turns.forget_demands()
        self._pipeline.drop()
        if self._dense.ahead:
            self._dense.forget_ahead()
        if self.decode is not None and self.decode.kept:
            self.decode.forget()
        if self.joined is not None and self.joined.parts:
            self.joined.forget()
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
