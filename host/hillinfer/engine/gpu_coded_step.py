# SPDX-License-Identifier: Apache-2.0
"""A step over exact rows and coded tokens whose attention is computed where the model is."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.engine.budget_plan import most_coded, weighed_bytes
from hillinfer.engine.coded_step import CodedStep
from hillinfer.engine.queries import Ahead, Sets, explained, host_query
from hillinfer.engine.selection import TokenSelection
from hillinfer.gpu.attention import CodedSet, GpuSide
from hillinfer.kv.gather import Gather
from hillinfer.kv.prefetch_buffer import LandedRows
from hillinfer.kv.sequence import Sequence
from hillinfer.kv.sequence_shadows import SequenceShadows
from hillinfer.memory_budget import Accountant
from hillinfer.native.library import native_library
from hillinfer.native.split import CountedMemory, ReusedRows
from hillinfer.native.structures import row_addresses
from hillinfer.scoring.coded import AlignedWeights
from hillinfer.shadow.code_file import CodeFile
from hillinfer.shadow.values import SegmentValues, ValueCodes
from hillinfer.statistics import Counters
from hillinfer.trace.recorder import Lane, Recorder
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.kernel_spec import GROUP_TOKENS

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class _Found:
    """Codes of tokens that rows are wanted of: where they lie, and those that came.

    Parameters
    ----------
    addresses
        uint64, of each token.
    rows, numbers, codes
        Row numbers of those that came, their segments' numbers, and uint8 (tokens, row_bytes).
    kept
        What must live as long.
    """

    addresses: NDArray[np.uint64]
    rows: Positions
    numbers: Positions
    codes: NDArray[np.uint8]
    kept: list[NDArray[np.uint8]]


class GpuCodedStep:
    """Finds codes, rows and L' on the host, and attends to them beside the model.

    Exact rows become hot, and codes that came are kept, as on the processor. What coded tokens lack
    is not read ahead.

    Parameters
    ----------
    values, file
        Keep value codes; the file is None where none is.
    selection, shadow
        Who else uses shadows meanwhile, and who knows where they lie.
    """

    def __init__(
        self,
        gpu: GpuSide,
        weights: AlignedWeights,
        values: ValueCodes,
        file: CodeFile | None,
        selection: TokenSelection,
        shadow: SequenceShadows,
        gather: Gather,
        row_bytes: int,
        accountant: Accountant,
        counters: Counters,
        recorder: Recorder,
    ) -> None:
        self._gpu = gpu
        self._weights = weights
        self._values = values
        self._file = file
        self._selection = selection
        self._shadow = shadow
        self._gather = gather
        self._counters = counters
        self._recorder = recorder
        self._spec = weights.spec
        self._weighed = CountedMemory(weighed_bytes(weights.spec), accountant)
        self._arrived = ReusedRows(values.coder.row_bytes, accountant)
        self._together = ReusedRows(row_bytes, accountant)

    def begin_step(self) -> None:
        """Note that a forward pass begins."""
        if self._file is not None:
            self._file.drop()
        self._values.begin_step()

    @property
    def chosen(self) -> Sets:
        """The sets that the last `step` chose: there is none."""
        return []

    def begin_to_read(
        self, layer: int, sequence: Sequence, past: int, sets: Sets, exact: Sets
    ) -> Ahead:
        """Begin to read exact rows that are cold; parameters as for `CodedStep`."""
        union = _union(exact)
        # The newest token is stored when its layer begins.
        stored = union[: union.searchsorted(past)]
        landed = self._gather.land(layer, sequence, stored, past & -GROUP_TOKENS)
        return Ahead(sets, landed, None, exact)

    def step(
        self, layer: int, sequence: Sequence, query: torch.Tensor, scaling: float, step: int
    ) -> torch.Tensor | None:
        """Leave it to others; see `CodedStep`."""
        return None

    def attend(
        self,
        layer: int,
        sequence: Sequence,
        query: torch.Tensor,
        sets: Sets,
        scaling: float,
        step: int,
        landed: LandedRows | None,
        exact: Sets,
    ) -> torch.Tensor:
        """Attend to what is selected; parameters, result and errors as for `CodedStep.attend`.

        Query and output are beside the model.
        """
        # The newest row is attended to, and its group may be coded from.
        self._gpu.arrivals.settle()
        coded = [np.setdiff1d(*one, assume_unique=True) for one in zip(sets, exact, strict=True)]
        try:
            scaled = self._weights.scaled(host_query(query), scaling)
        except NonFiniteQueryError as error:
            raise explained(layer, error) from error
        self._weighed.expect(sum(map(len, coded)))
        if self._file is not None:
            length = sequence.lengths[layer]
            self._file.expect(most_coded(len(sets), len(sets[0]), length))
        with self._selection.scoring:
            own = self._shadow.complete_values(layer, sequence).values
            with self._recorder.span(Lane.HOST_SCORING, "weigh", layer=layer):
                shadows = self._shadow.shadows(layer, sequence)
                weighed = self._weights.of_each(scaled, shadows, coded)
        wanted = _union(coded)
        found = self._codes(layer, sequence, wanted, own)
        given = [
            CodedSet(one, found.addresses[np.searchsorted(wanted, one)], of)
            for one, of in zip(coded, weighed, strict=True)
        ]
        union = _union(exact)
        # Before anybody looks at rows, which to take memory may move.
        together = self._together.take(len(union))
        out = query
        runs = self._gather.in_place(layer, sequence, union, step, landed)
        with closing(runs):
            for addresses in _at_once(runs, together):
                with self._recorder.span(Lane.COMPUTE, "attention", layer=layer):
                    rows = union, addresses
                    out = self._gpu.coded.attend(scaled, query, rows, exact, given, own, self._spec)
        # Not before: what gives way for them was attended to.
        self._values.offer(layer, found.rows, found.numbers, found.codes)
        for counters in (self._counters, sequence.counters):
            counters.coded_tokens += sum(map(len, coded))
        return out.view(query.shape).to(query.dtype)

    # --- inside ----------------------------------------------------------------------------

    def _codes(
        self,
        layer: int,
        sequence: Sequence,
        wanted: Positions,
        own: list[SegmentValues],
    ) -> _Found:
        """Find the codes of tokens, and make those that DRAM does not hold of their rows."""
        numbers = np.array([one.number for one in own])[wanted // self._spec.segment_tokens]
        held = sequence.held_starts[layer]
        settled = int(np.searchsorted(wanted, held))
        rows = sequence.rows(wanted[:settled])
        addresses = np.empty(len(wanted), np.uint64)
        addresses[:settled], kept = self._values.find(layer, rows, numbers[:settled])
        (missing,) = np.nonzero(addresses[:settled] == 0)
        in_tail = np.arange(settled, len(wanted))
        arrived = self._arrived.take(len(missing) + len(in_tail))
        if len(arrived):
            addresses[np.append(missing, in_tail)] = row_addresses(arrived, np.arange(len(arrived)))
        if len(in_tail):
            # A group lies in one segment.
            part = self._shadow.value_part.in_tail(layer, sequence, 0, GROUP_TOKENS)
            values = part[torch.from_numpy(wanted[settled:] - held)]
            number = int(wanted[settled]) // self._spec.segment_tokens
            arrived[len(missing) :] = self._values.encode(values, own[number])
        if len(missing):
            rest = np.arange(len(missing))
            if self._file is not None:
                of, key = (rows[missing], numbers[missing]), id(sequence)
                places, started = addresses[missing], time.perf_counter()
                try:
                    rest = rest[~self._file.fill(layer, key, *of, places, sequence.counters)]
                    waited = time.perf_counter() - started
                    for counters in (self._counters, sequence.counters):
                        counters.drive_wait_seconds += waited
                    # Those that did not come lie where they are to go.
                    native_library().copy_rows(places, arrived)
                finally:
                    self._file.let_go(layer, key)
            self._bring(layer, sequence, wanted[missing[rest]], own, arrived, rest)
            for counters in (self._counters, sequence.counters):
                counters.coded_arrivals += len(missing)
        return _Found(addresses, rows[missing], numbers[missing], arrived[: len(missing)], kept)

    def _bring(
        self,
        layer: int,
        sequence: Sequence,
        positions: Positions,
        own: list[SegmentValues],
        arrived: NDArray[np.uint8],
        places: Positions,
    ) -> None:
        """Code tokens whose rows come from wherever they are, each to its place."""
        at, size = 0, self._spec.segment_tokens
        with closing(self._gather.stream(layer, sequence, positions)) as blocks:
            for rows in blocks:
                values = self._shadow.value_part.of(rows)
                segments = positions[at : at + len(rows)] // size
                edges = np.flatnonzero(np.diff(segments, prepend=-1, append=len(own)))
                for first, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
                    coded = self._values.encode(values[first:stop], own[int(segments[first])])
                    arrived[places[at + first : at + stop]] = coded
                at += len(rows)


def _at_once(
    runs: Iterable[NDArray[np.uint64]], rows: NDArray[np.uint8]
) -> Iterator[NDArray[np.uint64]]:
    """Yield addresses of as many rows at once; those of runs are there until the next run is."""
    at = 0
    for addresses in runs:
        if len(addresses) == len(rows):
            yield addresses
            continue
        native_library().copy_rows(addresses, rows[at:])
        at += len(addresses)
        if at == len(rows):
            yield row_addresses(rows, np.arange(at))


def _union(sets: Sets) -> Positions:
    return sets[0] if len(sets) == 1 else np.unique(np.concatenate(sets))


AnyCodedStep = CodedStep | GpuCodedStep
