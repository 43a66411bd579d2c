# SPDX-License-Identifier: Apache-2.0
"""One new token attends to exact rows and coded tokens (contract, sections 14 to 16)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.attention.coded import CodedAttention
from hillinfer.engine.budget_plan import weighed_bytes
from hillinfer.engine.queries import explained, host_query
from hillinfer.engine.selection import Sets, TokenSelection
from hillinfer.kv.gather import Gather, copy_rows
from hillinfer.kv.prefetch_buffer import LandedRows
from hillinfer.kv.sequence import NUMBER_TYPES, Sequence
from hillinfer.kv.shadow_keeper import ShadowKeeper
from hillinfer.memory_budget import Accountant, Part
from hillinfer.model_shape import StoredType
from hillinfer.native.coded import FoundCodes
from hillinfer.native.library import native_library
from hillinfer.native.structures import DecodeStep, Shape, row_addresses
from hillinfer.scoring.aligned import AlignedWeights, Weighed
from hillinfer.scoring.arguments import query_factor
from hillinfer.shadow.values import SegmentValues, ValueCodes
from hillinfer.statistics import Counters
from hillinfer.trace.recorder import Lane, Recorder
from hillinfer_model.choices import Scope
from hillinfer_model.coded_attention import BLOCK_TOKENS
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.kernel_spec import GROUP_TOKENS
from hillinfer_model.value_layout import code_row_bytes

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class _Described:
    """The coded tokens of a set as `CodedTokens` has them, int64 (segments, 9), and what they name.

    Addresses are those of the arrays beside them.
    """

    words: NDArray[np.int64]
    code_rows: NDArray[np.uint64]
    exponents: NDArray[np.uint64]
    weighed: Weighed


@dataclass(frozen=True)
class _Arrivals:
    """Codes of tokens whose rows were brought, by row number; and what keeps the others meanwhile.

    `numbers` are those of their segments' values, `codes` uint8 (tokens, row_bytes).
    """

    rows: Positions
    numbers: Positions
    codes: NDArray[np.uint8]
    kept: list[NDArray[np.uint8]]


# --- Memory that is used again ---


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


class _Counted:
    """Counts memory that each step of a layer makes anew, by the tokens that it is made for."""

    def __init__(self, token_bytes: int, accountant: Accountant) -> None:
        self._token_bytes = token_bytes
        self._accountant = accountant
        self._tokens = 0

    def expect(self, tokens: int) -> None:
        """Count what a step of so many tokens makes, where none had as many."""
        more = max(0, tokens - self._tokens)
        if more:
            self._accountant.take(Part.STAGING, more * self._token_bytes)
            self._tokens += more


# --- The step ---


class CodedStep:
    """Brings exact rows and value codes of a layer's selected tokens together and attends to them.

    Exact rows come as all rows do, and become hot. Codes of values lie in DRAM, or are made of rows
    that are read for that and then forgotten. Keys of coded tokens are their L'.

    Parameters
    ----------
    attention
        Computes.
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
        attention: CodedAttention,
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
        self._attention = attention
        self._weights = weights
        self._values = values
        self._selection = selection
        self._shadow = shadow
        self._gather = gather
        self._counters = counters
        self._recorder = recorder
        self._segment_tokens = weights.spec.segment_tokens
        self._code_bytes = code_row_bytes(weights.spec)
        self._library = native_library()
        self._is_native = weights.variant is attention.variant
        self._number = attention.variant.number
        shape = attention.shape
        self._step = DecodeStep(
            shape=Shape.of(weights.spec, Scope.LAYER),
            group_size=shape.group_size,
            stored_type=0 if shape.stored_type is StoredType.BFLOAT16 else 1,
        )
        self._step_address = ctypes.addressof(self._step)
        # Codes of tokens whose rows were brought, and rows that come in more runs than one.
        self._arrived = _Reused(values.coder.row_bytes, accountant)
        self._together = _Reused(row_bytes, accountant)
        self._weighed = _Counted(weighed_bytes(weights.spec), accountant)

    def begin_step(self) -> None:
        """Note that a forward pass begins."""
        self._values.begin_step()

    def missing(
        self, layer: int, sequence: Sequence, sets: Sets, exact: Sets, on_drive: int
    ) -> Positions:
        """Return positions of coded tokens whose codes DRAM does not hold now, ascending.

        Parameters
        ----------
        layer, sequence
            Whose.
        sets, exact
            As in `attend`.
        on_drive
            Positions from here on are left out: they are in the tail.
        """
        own = self._shadow.known_values(layer, sequence)
        size = self._segment_tokens
        if len(sets) == 1 and len(own) * size > int(sets[0][-1]):
            words = b"".join([one.words for one in own])
            found = FoundCodes(sets[0], exact[0], words)
            self._values.see(layer, sequence.table_addresses[layer], on_drive, found)
            return found.positions(found.missing)
        coded = [_without(*one) for one in zip(sets, exact, strict=True)]
        wanted = coded[0] if len(coded) == 1 else np.unique(np.concatenate(coded))
        wanted = wanted[: np.searchsorted(wanted, on_drive)]
        wanted = wanted[: np.searchsorted(wanted, len(own) * self._segment_tokens)]
        numbers = np.array([one.number for one in own], np.int64)[wanted // self._segment_tokens]
        held = self._values.holds(layer, sequence.rows(wanted), numbers)
        return wanted[~held]

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
        """Attend to what is selected, and let exact rows that were cold become hot.

        Parameters
        ----------
        layer, sequence
            Where.
        query
            (query_heads, 1, head_dim): the true one, whichever ranked.
        sets
            What is selected, ascending int64 positions of each set.
        scaling
            Factor on inner products.
        step
            The current step.
        landed
            What of the exact rows was read ahead, or None.
        exact
            The exact tokens among `sets`.
        arriving
            What of rows whose codes are missing was read ahead, or None.

        Returns
        -------
        (query_heads, 1, head_dim) in the query's type.

        Raises
        ------
        CacheUseError
            Where the query is not finite.
        """
        whole = layer, sequence, query, sets, scaling, step, landed, exact, arriving
        attended = self._attend_natively(*whole) if len(sets) == 1 else None
        if attended is not None:
            return attended
        coded = [_without(*one) for one in zip(sets, exact, strict=True)]
        try:
            scaled = self._weights.scaled(host_query(query), scaling)
        except NonFiniteQueryError as error:
            raise explained(layer, error) from error
        self._weighed.expect(sum(map(len, coded)))
        with self._selection.scoring:
            own = self._shadow.complete_values(layer, sequence)
            with self._recorder.span(Lane.HOST_SCORING, "weigh", layer=layer):
                shadows = self._shadow.shadows(layer, sequence)
                weighed = self._weights.of_each(scaled, shadows, coded)
        wanted = coded[0] if len(coded) == 1 else np.unique(np.concatenate(coded))
        codes, arrivals = self._codes(layer, sequence, wanted, own, arriving)
        union = exact[0] if len(exact) == 1 else np.unique(np.concatenate(exact))
        described = [
            self._described(one, codes[np.searchsorted(wanted, one)], own, of)
            for one, of in zip(coded, weighed, strict=True)
        ]
        runs = self._gather.in_place(layer, sequence, union, step, landed, BLOCK_TOKENS)
        out = np.zeros(scaled.shape, np.float32)
        with closing(runs):
            for addresses in self._at_once(runs, len(union)):
                with self._recorder.span(Lane.COMPUTE, "attention", layer=layer):
                    self._attend(scaled.numpy(), union, addresses, exact, described, out)
        # Not before: what gives way for them was attended to.
        self._values.offer(layer, arrivals.rows, arrivals.numbers, arrivals.codes)
        for counters in (self._counters, sequence.counters):
            counters.coded_tokens += sum(map(len, coded))
        return torch.from_numpy(out).view(query.shape).to(query)

    def _attend_natively(
        self,
        layer: int,
        sequence: Sequence,
        query: torch.Tensor,
        sets: Sets,
        scaling: float,
        step: int,
        landed: LandedRows | None,
        exact: Sets,
        arriving: LandedRows | None,
    ) -> torch.Tensor | None:
        """Do what `attend` does with one set, over the library's tables.

        None, and nothing is done, where they do not have what it needs.
        """
        asked, length = self._step, sequence.lengths[layer]
        if not self._is_native or not self._tell_query(asked, query):
            return None
        with self._selection.scoring:
            own = self._shadow.complete_values(layer, sequence)
            if self._shadow.described(layer, sequence, length) is None:
                return None
            # They stay while the library looks at them, whoever makes room meanwhile.
            shadows = [one.layers[layer].shadow for one in sequence.segments]
        self._weighed.expect(len(sets[0]))
        asked.scaling, asked.factor = scaling, query_factor(scaling)
        asked.threads = torch.get_num_threads()
        table = sequence.table_addresses[layer]
        found = FoundCodes(sets[0], exact[0], b"".join([one.words for one in own]))
        kept = self._values.look(layer, table, sequence.held_starts[layer], found), shadows
        missing = found.missing
        arrived = self._arrived.take(len(missing) + found.in_tail)
        found.table.arrived = arrived.ctypes.data
        if len(missing) or arriving is not None:
            self._bring_natively(layer, sequence, found, arriving)
            for counters in (self._counters, sequence.counters):
                counters.coded_arrivals += len(missing)
        out = torch.empty(query.shape)
        runs = self._gather.in_place(layer, sequence, exact[0], step, landed, BLOCK_TOKENS)
        with closing(runs):
            for addresses in self._at_once(runs, len(exact[0])):
                lies = self._values.coder.row_bytes, addresses.ctypes.data, out.data_ptr()
                with self._recorder.span(Lane.COMPUTE, "attention", layer=layer):
                    given = self._number, table, self._step_address, found.address
                    try:
                        self._library.decode("hillinfer_attend_codes", *given, *lies)
                    except NonFiniteQueryError as error:
                        raise explained(layer, error) from error
        if len(missing):
            rows, segments = found.rows[missing], found.positions(missing) // self._segment_tokens
            numbers = np.array([one.number for one in own])[segments]
            # Not before: what gives way for them was attended to.
            self._values.offer(layer, rows, numbers, arrived[: len(missing)])
        del kept
        for counters in (self._counters, sequence.counters):
            counters.coded_tokens += found.count
        return out if query.dtype is torch.float32 else out.to(query.dtype)

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

    def _bring_natively(
        self, layer: int, sequence: Sequence, found: FoundCodes, arriving: LandedRows | None
    ) -> None:
        """Code tokens whose rows come from wherever they are."""
        positions, at = found.positions(found.missing), 0
        rows = self._gather.stream_in_place(layer, sequence, positions, arriving)
        with closing(rows) as blocks:
            for addresses in blocks:
                self._library.call(
                    "hillinfer_code_missing",
                    self._number,
                    self._step_address,
                    found.address,
                    self._values.coder.row_bytes,
                    addresses.ctypes.data,
                    at,
                    len(addresses),
                )
                at += len(addresses)

    def _tell_query(self, asked: DecodeStep, query: torch.Tensor) -> bool:
        """Say where a query lies; False where the library cannot read it."""
        number_type, strides = NUMBER_TYPES.get(query.dtype), query.stride()
        if number_type is None or not query.is_cpu or strides[2] != 1:
            return False
        asked.query, asked.head_stride, asked.query_type = query.data_ptr(), strides[0], number_type
        return True

    def _attend(
        self,
        scaled: NDArray[np.float32],
        union: Positions,
        addresses: NDArray[np.uint64],
        exact: list[Positions],
        described: list[_Described],
        out: NDArray[np.float32],
    ) -> None:
        if len(exact) == 1:
            out[:] = self._attention.attend_described(scaled, addresses, described[0].words)
            return
        group = len(scaled) // len(exact)
        for head, (own, coded) in enumerate(zip(exact, described, strict=True)):
            rows = addresses[np.searchsorted(union, own)]
            heads = slice(head * group, (head + 1) * group)
            only = range(head, head + 1)
            found = self._attention.attend_described(scaled, rows, coded.words, only)
            out[heads] = found[heads]

    # --- codes of values ---------------------------------------------------------------------

    def _codes(
        self,
        layer: int,
        sequence: Sequence,
        wanted: Positions,
        own: list[SegmentValues],
        arriving: LandedRows | None,
    ) -> tuple[NDArray[np.uint64], _Arrivals]:
        """Return where codes of each token lie, and those that came."""
        numbers = np.array([one.number for one in own])[wanted // self._segment_tokens]
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
            number = int(wanted[settled]) // self._segment_tokens
            arrived[len(missing) :] = self._values.encode(values, own[number])
        if len(missing) or arriving is not None:
            self._bring(layer, sequence, wanted[missing], own, arrived, arriving)
            for counters in (self._counters, sequence.counters):
                counters.coded_arrivals += len(missing)
        came = rows[missing], numbers[missing], arrived[: len(missing)]
        return addresses, _Arrivals(*came, kept)

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
        at = 0
        with closing(self._gather.stream(layer, sequence, positions, arriving)) as blocks:
            for rows in blocks:
                values = self._shadow.value_part.of(rows)
                segments = positions[at : at + len(rows)] // self._segment_tokens
                edges = np.flatnonzero(np.diff(segments, prepend=-1, append=len(own)))
                for first, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
                    coded = self._values.encode(values[first:stop], own[int(segments[first])])
                    arrived[at + first : at + stop] = coded
                at += len(rows)

    def _described(
        self,
        positions: Positions,
        codes: NDArray[np.uint64],
        own: list[SegmentValues],
        weighed: Weighed,
    ) -> _Described:
        """Describe the coded tokens of a set segment by segment, as `CodedTokens` has it."""
        edges = np.searchsorted(positions, np.arange(len(own) + 1) * self._segment_tokens)
        (numbers,) = np.nonzero(np.diff(edges))
        first, count = edges[numbers], np.diff(edges)[numbers]
        words = np.empty((len(numbers), 9), np.int64)
        words[:, 0] = weighed.aligned.ctypes.data + 4 * first
        words[:, 1] = weighed.invalid.ctypes.data + first
        words[:, 2] = codes.ctypes.data + 8 * first
        # Exponents lie behind the code row.
        exponents = codes + np.uint64(self._code_bytes)
        words[:, 3] = exponents.ctypes.data + 8 * first
        words[:, 4] = 1
        for line, number in zip(words, numbers.tolist(), strict=True):
            line[5] = own[number].statistics.exponents.ctypes.data
            line[6] = own[number].statistics.means.ctypes.data
        words[:, 7] = len(positions)
        words[:, 8] = count
        return _Described(words, codes, exponents, weighed)


def _without(selected: Positions, exact: Positions) -> Positions:
    """Return the selected positions that are not exact, ascending."""
    stays = np.ones(len(selected), np.bool_)
    stays[np.searchsorted(selected, exact)] = False
    return selected[stays]
