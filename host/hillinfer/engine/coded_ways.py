# SPDX-License-Identifier: Apache-2.0
"""Steps with coded tokens in other ways: attended to on a GPU, and with cold codes of a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.attention.coded import CodedAttention
from hillinfer.engine.budget_plan import most_coded, weighed_bytes
from hillinfer.engine.coded_step import CodedStep
from hillinfer.engine.queries import explained, host_query
from hillinfer.engine.selection import Sets, TokenSelection
from hillinfer.gpu.attention import GpuSide
from hillinfer.gpu.coded import CodedSet
from hillinfer.kv.gather import Gather, copy_rows
from hillinfer.kv.prefetch_buffer import LandedRows
from hillinfer.kv.sequence import Sequence
from hillinfer.kv.shadow_keeper import ShadowKeeper
from hillinfer.memory_budget import Accountant, Part
from hillinfer.native.structures import row_addresses
from hillinfer.scoring.aligned import AlignedWeights
from hillinfer.shadow.code_seats import CodeSeats
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


class _Reused:
    """Rows of memory for one step of one layer, counted when they grow."""

    def __init__(self, row_bytes: int, accountant: Accountant) -> None:
        self._row_bytes = row_bytes
        self._accountant = accountant
        self._memory = np.zeros((0, row_bytes), np.uint8)

    def take(self, rows: int) -> NDArray[np.uint8]:
        """Return so many rows, valid until the next are taken."""
        if rows > len(self._memory):
            self._accountant.take(Part.STAGING, (rows - len(self._memory)) * self._row_bytes)
            self._memory = np.zeros((rows, self._row_bytes), np.uint8)
        return self._memory[:rows]


class GpuCodedStep:
    """Finds codes, rows and L' on the host, and attends to them beside the model.

    Exact rows become hot, and codes that came are kept, as on the processor.

    Parameters
    ----------
    gpu
        Copies, and attends.
    weights
        Computes L'.
    values
        Keeps value codes.
    selection, shadow
        Who else uses shadows meanwhile, and who knows where they lie.
    gather
        Brings rows.
    row_bytes
        Of a row.
    accountant
        Counts memory that a step works in.
    counters
        Where tokens are counted.
    recorder
        Notes how long the parts take.
    """

    def __init__(
        self,
        gpu: GpuSide,
        weights: AlignedWeights,
        values: ValueCodes,
        selection: TokenSelection,
        shadow: ShadowKeeper,
        gather: Gather,
        row_bytes: int,
        accountant: Accountant,
        counters: Counters,
        recorder: Recorder,
    ) -> None:
        self._gpu = gpu
        self._weights = weights
        self._values = values
        self._selection = selection
        self._shadow = shadow
        self._gather = gather
        self._accountant = accountant
        self._counters = counters
        self._recorder = recorder
        self._spec = weights.spec
        self._token_bytes = weighed_bytes(weights.spec)
        self._weighed_tokens = 0
        self._arrived = _Reused(values.coder.row_bytes, accountant)
        self._together = _Reused(row_bytes, accountant)

    def begin_step(self) -> None:
        """Note that a forward pass begins."""
        self._values.begin_step()

    def missing(
        self, layer: int, sequence: Sequence, sets: Sets, exact: Sets, on_drive: int
    ) -> Positions:
        """Return positions of coded tokens without codes; see `CodedStep`."""
        own = self._shadow.known_values(layer, sequence)
        return without_codes(layer, sequence, sets, exact, on_drive, own, self._values)[0]

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
        arriving: LandedRows | None = None,
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
        self._expect(sum(map(len, coded)))
        with self._selection.scoring:
            own = self._shadow.complete_values(layer, sequence)
            with self._recorder.span(Lane.HOST_SCORING, "weigh", layer=layer):
                shadows = self._shadow.shadows(layer, sequence)
                weighed = self._weights.of_each(scaled, shadows, coded)
        wanted = _union(coded)
        found = self._codes(layer, sequence, wanted, own, arriving)
        given = [
            CodedSet(one, found.addresses[np.searchsorted(wanted, one)], of)
            for one, of in zip(coded, weighed, strict=True)
        ]
        union = _union(exact)
        out = query
        runs = self._gather.in_place(layer, sequence, union, step, landed, GROUP_TOKENS)
        with closing(runs):
            for addresses in self._at_once(runs, len(union)):
                with self._recorder.span(Lane.COMPUTE, "attention", layer=layer):
                    rows = union, addresses
                    out = self._gpu.coded.attend(scaled, query, rows, exact, given, own, self._spec)
        # Not before: what gives way for them was attended to.
        self._values.offer(layer, found.rows, found.numbers, found.codes)
        for counters in (self._counters, sequence.counters):
            counters.coded_tokens += sum(map(len, coded))
        return out.view(query.shape).to(query.dtype)

    # --- inside ----------------------------------------------------------------------------

    def _expect(self, tokens: int) -> None:
        """Count L' of so many tokens, where none had as many."""
        more = max(0, tokens - self._weighed_tokens)
        if more:
            self._accountant.take(Part.STAGING, more * self._token_bytes)
            self._weighed_tokens += more

    def _at_once(
        self, runs: Iterable[NDArray[np.uint64]], count: int
    ) -> Iterator[NDArray[np.uint64]]:
        """Yield addresses of all rows at once; those of runs are there until the next run is."""
        at = 0
        for addresses in runs:
            if len(addresses) == count:
                yield addresses
                continue
            rows = self._together.take(count)
            copy_rows(addresses, rows[at:])
            at += len(addresses)
            if at == count:
                yield row_addresses(rows, np.arange(count))

    def _codes(
        self,
        layer: int,
        sequence: Sequence,
        wanted: Positions,
        own: list[SegmentValues],
        arriving: LandedRows | None,
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
        if len(missing) or arriving is not None:
            self._bring(layer, sequence, wanted[missing], own, arrived, arriving)
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
        arriving: LandedRows | None,
    ) -> None:
        """Code tokens whose rows come from wherever they are."""
        at, size = 0, self._spec.segment_tokens
        with closing(self._gather.stream(layer, sequence, positions, arriving)) as blocks:
            for rows in blocks:
                values = self._shadow.value_part.of(rows)
                segments = positions[at : at + len(rows)] // size
                edges = np.flatnonzero(np.diff(segments, prepend=-1, append=len(own)))
                for first, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
                    coded = self._values.encode(values[first:stop], own[int(segments[first])])
                    arrived[at + first : at + stop] = coded
                at += len(rows)


def _union(sets: Sets) -> Positions:
    return sets[0] if len(sets) == 1 else np.unique(np.concatenate(sets))


def without_codes(
    layer: int,
    sequence: Sequence,
    sets: Sets,
    exact: Sets,
    on_drive: int,
    own: list[SegmentValues],
    values: ValueCodes,
) -> tuple[Positions, Positions, Positions]:
    """Return coded tokens that DRAM holds no codes of: positions, ascending, rows and numbers.

    Parameters
    ----------
    layer, sequence, sets, exact, on_drive
        As in `CodedStep.missing`.
    own
        What is known of each segment's values.
    values
        Keeps codes.
    """
    coded = [np.setdiff1d(*one, assume_unique=True) for one in zip(sets, exact, strict=True)]
    wanted, size = _union(coded), values.spec.segment_tokens
    wanted = wanted[: np.searchsorted(wanted, min(on_drive, len(own) * size))]
    numbers = np.array([one.number for one in own], np.int64)[wanted // size]
    rows = sequence.rows(wanted)
    missing = ~values.holds(layer, rows, numbers)
    return wanted[missing], rows[missing], numbers[missing]


# --- Cold codes of a file ---


class FiledCodedStep:
    """Reads cold codes of a file, ahead where it can, before another step looks for codes.

    What the file has not comes as rows.

    Parameters
    ----------
    step
        Attends.
    seats
        Has the file, and lets what came be found.
    values, shadow
        Who keeps codes, and who knows under which numbers.
    """

    def __init__(
        self,
        step: CodedStep | GpuCodedStep,
        seats: CodeSeats,
        values: ValueCodes,
        shadow: ShadowKeeper,
    ) -> None:
        self._step = step
        self._seats = seats
        self._values = values
        self._shadow = shadow

    def begin_step(self) -> None:
        """Note that a forward pass begins; what one that broke off had begun to read is dropped."""
        self._seats.file.drop()
        self._step.begin_step()

    def missing(
        self, layer: int, sequence: Sequence, sets: Sets, exact: Sets, on_drive: int
    ) -> Positions:
        """Begin to read codes, and return positions of coded tokens whose rows are wanted.

        Parameters as in `CodedStep.missing`.
        """
        if not self._seats.are_wanted(layer):
            return self._step.missing(layer, sequence, sets, exact, on_drive)
        own = self._shadow.known_values(layer, sequence)
        positions, rows, numbers = without_codes(
            layer, sequence, sets, exact, on_drive, own, self._values
        )
        come = self._seats.file.begin(layer, id(sequence), rows, numbers)
        return positions[~come]

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
        arriving: LandedRows | None = None,
    ) -> torch.Tensor:
        """Attend to what is selected; parameters, result and errors as for `CodedStep.attend`."""
        file, key = self._seats.file, id(sequence)
        file.expect(most_coded(len(sets), len(sets[0]), sequence.lengths[layer]))
        # Rows that were read ahead are not read once more, as codes.
        is_open = arriving is None and not file.is_coming(layer, key)
        if is_open and self._seats.are_wanted(layer):
            self.missing(layer, sequence, sets, exact, sequence.held_starts[layer])
        with self._seats.seated(layer, key, self._values, sequence.counters):
            given = layer, sequence, query, sets, scaling, step, landed, exact, arriving
            return self._step.attend(*given)


# --- Which way ---

AnyCodedStep = CodedStep | GpuCodedStep | FiledCodedStep


def coded_step(
    gpu: GpuSide | None,
    seats: CodeSeats | None,
    attention: CodedAttention,
    weights: AlignedWeights,
    values: ValueCodes,
    selection: TokenSelection,
    shadow: ShadowKeeper,
    *given: Any,
) -> AnyCodedStep:
    """Return what takes steps with coded tokens.

    Parameters
    ----------
    gpu
        Where the model computes on a GPU, else None.
    seats
        Where codes lie in a file, else None.
    attention, weights, values, selection, shadow, given
        As for `CodedStep`.
    """
    parts = weights, values, selection, shadow, *given
    step = CodedStep(attention, *parts) if gpu is None else GpuCodedStep(gpu, *parts)
    return step if seats is None else FiledCodedStep(step, seats, values, shadow)
