# SPDX-License-Identifier: Apache-2.0
"""Which tokens a layer attends to (HillInfer section 4.1)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.files import round_up
from hillinfer.engine.budget_plan import SCORE_GROWTH_TOKENS, score_bytes
from hillinfer.errors import CacheUseError
from hillinfer.gpu.copies import CopiedRows
from hillinfer.kv.pool_keeper import PoolKeeper
from hillinfer.kv.prefetch_buffer import LandedRows
from hillinfer.kv.sequence import Sequence
from hillinfer.kv.shadow_keeper import ShadowKeeper
from hillinfer.memory_budget import Accountant, Part
from hillinfer.scoring.scorer import ImportanceEvaluation, SegmentShadow, Split
from hillinfer.trace.recorder import Lane, Recorder
from hillinfer_model.choices import Scope
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.kernel_spec import KernelSpec

Sets = list[NDArray[np.int64]]
# Scoring of one layer, as the native library counts it in bytes (`Shape::work_bytes`), that is done
# while another thread would still be waking, and taking Python's lock and the caches from the one
# that computes.
QUICK_BYTES = 4 << 20


@dataclass(frozen=True)
class Ahead:
    """What a layer attends to, and what was done of it before its turn.

    Parameters
    ----------
    sets
        The selected sets, one for the layer or one per KV head.
    landed
        Their cold rows that are read ahead, or None.
    copied
        What of them is on its way to the model's GPU; None where it has none.
    exact
        The exact tokens of each set where others are coded; `landed` are rows of these.
    arriving
        Rows of coded tokens whose codes DRAM does not hold, that are read ahead; or None.
    """

    sets: Sets
    landed: LandedRows | None
    copied: Future[CopiedRows] | None
    exact: Sets | None = None
    arriving: LandedRows | None = None


class TokenSelection:
    """Codes what the shadow lacks, scores it and takes the top α (HillInfer section 4.1, HIE).

    Any thread may ask; shadows are coded and scored by one at a time.

    Parameters
    ----------
    evaluation
        Scores and selects.
    shadow
        Codes keys.
    keeper
        Learns what the last queries of a prompt would select.
    spec, scope
        Fix the memory that scores take.
    accountant
        Counts it.
    recorder
        Notes how long coding and scoring take.

    Attributes
    ----------
    scoring
        Held by whoever codes or scores.
    """

    def __init__(
        self,
        evaluation: ImportanceEvaluation,
        shadow: ShadowKeeper,
        keeper: PoolKeeper,
        spec: KernelSpec,
        scope: Scope,
        accountant: Accountant,
        recorder: Recorder,
    ) -> None:
        self._evaluation = evaluation
        self._is_fast = evaluation.is_fast
        self._shadow = shadow
        self._keeper = keeper
        self._spec = spec
        heads = spec.scored_heads // spec.kv_heads
        token_bytes = spec.segment_bytes / spec.segment_tokens
        self._token_work = token_bytes * heads / spec.key_mode.code_bits
        self._scope = scope
        self._accountant = accountant
        self._recorder = recorder
        self._score_bytes = self._room_tokens = 0
        self.scoring = threading.Lock()

    def selects_all(self, length: int, lacking: int) -> bool:
        """Say whether so many rows are selected whole, so that nothing is scored.

        Parameters
        ----------
        length, lacking
            As in `ImportanceEvaluation.wanted`.
        """
        return self._evaluation.selects_all(length, lacking)

    def everything(self, layer: int, sequence: Sequence, keys: torch.Tensor) -> Sets:
        """Return the sets of a sequence that is selected whole.

        A segment takes its statistics when it is full or first scored, so the shadow waits here.

        Parameters
        ----------
        layer, sequence, keys
            As in `code_full_segments`.
        """
        self.code_full_segments(layer, sequence, keys)
        return self._evaluation.everything(sequence.lengths[layer])

    def code_full_segments(
        self,
        layer: int,
        sequence: Sequence,
        keys: torch.Tensor,
        values: torch.Tensor | None = None,
    ) -> None:
        """Code the key shadow of segments that the newest tokens made full.

        Parameters
        ----------
        layer, sequence
            Where the tokens were just appended.
        keys, values
            Theirs, stored type, (kv_heads, tokens, head_dim). Values are read back where they are
            None and wanted.
        """
        given = None
        if values is not None and self._evaluation.has_coded:
            given = shadow_states(values)
        with self.scoring, self._recorder.span(Lane.HOST_SCORING, "code", layer=layer):
            self._shadow.code_full_segments(layer, sequence, shadow_states(keys), given)

    def own(
        self,
        layer: int,
        sequence: Sequence,
        query: torch.Tensor,
        keys: torch.Tensor,
        scaling: float,
    ) -> Ahead:
        """Select for a token that was just appended, by its own query.

        Parameters
        ----------
        layer, sequence
            Where.
        query
            (query_heads, 1, head_dim) on the model's device.
        keys
            The new token's, stored type, (kv_heads, 1, head_dim).
        scaling
            Factor on inner products.

        Raises
        ------
        CacheUseError
            Where the query is not finite.
        """
        length = sequence.lengths[layer]
        if self.selects_all(length, sequence.lacking):
            return Ahead(self.everything(layer, sequence, keys), None, None)
        self.make_room(length)
        with self.scoring, _Explained(layer):
            with self._recorder.span(Lane.HOST_SCORING, "code", layer=layer):
                shadows = self._shadow.code_all(layer, sequence, shadow_states(keys))
            with self._recorder.span(Lane.HOST_SCORING, "score", layer=layer, tokens=length):
                self._count_observed(layer, sequence, scaling, shadows)
                chosen = self._evaluation.chosen(
                    host_query(query), scaling, shadows, 0, sequence.lacking
                )
        sets, exact = both_of(chosen)
        return Ahead(sets, None, None, exact)

    def is_quick(self, layer: int, sequence: Sequence) -> bool:
        """Say whether scoring a layer takes no longer than having another thread do it.

        It does where the processor scores little, and waits for neither a device nor a drive.
        """
        if not self._is_fast or sequence.lengths[layer] * self._token_work > QUICK_BYTES:
            return False
        # A generator takes five times as long, at every layer.
        for segment in sequence.segments:  # noqa: SIM110
            if segment.layers[layer].slot is not None:
                return False
        return True

    def announced(
        self,
        layer: int,
        sequence: Sequence,
        scaling: float,
        bring: Callable[[], torch.Tensor],
    ) -> Callable[[], Sets | Split]:
        """Return what selects for the token that is about to come, for another thread to call.

        What takes memory or looks at the open group is done here.

        Parameters
        ----------
        layer, sequence
            Where one token more is coming; all others are stored.
        scaling
            Factor on inner products.
        bring
            Returns the predicted query, float32 (query_heads, head_dim) on the CPU; may wait.
        """
        past, lacking = sequence.lengths[layer], sequence.lacking
        self.make_room(past)
        if sequence.observed[layer] is not None or not self._shadow.codes_from_tail(
            layer, sequence
        ):
            with self.scoring, _Explained(layer):
                shadows = self._past(layer, sequence, past)
                self._count_observed(layer, sequence, scaling, shadows)

        def select() -> Sets | Split:
            query = bring()
            with self.scoring, _Explained(layer):
                shadows = self._past(layer, sequence, past)
                with self._recorder.span(Lane.HOST_SCORING, "score", layer=layer, tokens=past):
                    return self._evaluation.chosen(query, scaling, shadows, 1, lacking)

        return select

    def _past(self, layer: int, sequence: Sequence, past: int) -> list[SegmentShadow]:
        with self._recorder.span(Lane.HOST_SCORING, "code", layer=layer):
            return self._shadow.code_past(layer, sequence, past)

    def _count_observed(
        self, layer: int, sequence: Sequence, scaling: float, shadows: list[SegmentShadow]
    ) -> None:
        """Count what the last prefill queries would select as the first hits, once."""
        observed, sequence.observed[layer] = sequence.observed[layer], None
        for query in () if observed is None else observed:
            chosen = self._evaluation.chosen(query, scaling, shadows, 0, sequence.lacking)
            sets, exact = both_of(chosen)
            own = np.unique(np.concatenate(sets if exact is None else exact))
            self._keeper.tally(layer, sequence, own)

    def expect(self, tokens: int) -> None:
        """Learn that layers are about to choose from so many tokens, before the first asks."""
        if not self._evaluation.selects_all(tokens):
            self.make_room(tokens)

    def make_room(self, tokens: int) -> None:
        """Count what scoring so many tokens takes of memory."""
        if tokens <= self._room_tokens:
            return
        needed = score_bytes(self._spec, self._scope, tokens)
        if needed > self._score_bytes:
            self._accountant.take(Part.OTHER, needed - self._score_bytes)
            self._score_bytes = needed
        # Until then every layer and step asks for no more.
        self._room_tokens = round_up(tokens, SCORE_GROWTH_TOKENS)


class _Explained:
    """Says what to do about a query that cannot be scored.

    A class, because a generator takes several times as long at every layer and step.
    """

    def __init__(self, layer: int) -> None:
        self._layer = layer

    def __enter__(self) -> None:
        """Do nothing yet."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the reason in words that help."""
        if isinstance(error, NonFiniteQueryError):
            raise explained(self._layer, error) from error


def explained(layer: int, error: NonFiniteQueryError) -> CacheUseError:
    """Return an error that says what to do about a query that cannot be scored."""
    return CacheUseError(
        f"layer {layer} made a query that is not finite ({error}): the model's weights or its "
        "number type are at fault; try --dtype float32 (the rows that the drive returned are "
        "those that were written)"
    )


def both_of(chosen: Sets | Split) -> tuple[Sets, Sets | None]:
    """Return selected sets, and the exact tokens of each where others are coded."""
    return (chosen.sets, chosen.exact) if isinstance(chosen, Split) else (chosen, None)


def shadow_states(states: torch.Tensor) -> torch.Tensor:
    """Return keys or values (kv_heads, tokens, head_dim) token by token in FP16, to be coded."""
    moved = states.transpose(0, 1)
    if moved.dtype is torch.float16 and moved.is_cpu:
        return moved
    return moved.to(device="cpu", dtype=torch.float16)


def host_query(query: torch.Tensor) -> torch.Tensor:
    """Return a query (query_heads, 1, head_dim) as it is scored with, on the processor."""
    own = query[:, 0]
    return own if own.dtype is torch.float32 and own.is_cpu else own.float().cpu()
