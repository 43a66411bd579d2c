# SPDX-License-Identifier: Apache-2.0
"""The native library's calls for one layer's step over exact rows and coded tokens."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.landing import LandingTable
from hillinfer.engine.queries import (
    AsideChoice,
    AskedStep,
    LayerCalls,
    Sets,
    explained,
)
from hillinfer.kv.prefetch_buffer import LandedRows
from hillinfer.kv.sequence import Sequence
from hillinfer.memory_budget import Accountant, Part
from hillinfer.native.library import native_library
from hillinfer.native.selected import MissList, SelectedRows
from hillinfer.native.signatures import SplitLanding
from hillinfer.native.split import ColdTokens, SplitRows, split_bytes, with_more
from hillinfer.native.structures import ReadWay, address_of
from hillinfer.shadow.code_file import CodeFile
from hillinfer.shadow.segments import SegmentLayer
from hillinfer.shadow.values import ValueCodes
from hillinfer.trace.recorder import SILENT, Lane, Recorder
from hillinfer_model.errors import NonFiniteQueryError

# --- Sequences that take a step together ---


@dataclass
class JoinedPart:
    """One sequence of a step, and the memory that the library chooses for it in.

    Parameters
    ----------
    row
        Of the batch.
    sequence
        Whose token comes.
    past
        Tokens that it had before.
    selected, misses
        What is chosen for it in a layer, and what of that is on the drive alone.
    split
        Instead of `selected`, where some of it is coded.
    """

    row: int
    sequence: Sequence
    past: int
    selected: SelectedRows
    misses: MissList
    split: SplitRows | None = None


# --- Tokens that are chosen before their layer's turn ---


class SplitPool:
    """Memory that the library chooses in for a layer, while what it chose for others waits.

    Any thread may ask. All of it has room for as many, so that a step asks for that once. Whatever
    makes more raises BudgetError where M0 has no memory, and there is as much room as before then.

    Parameters
    ----------
    sets, code_bytes, accountant
        As in `SplitRoom`.

    Attributes
    ----------
    room
        As that of `SplitRows`; it never becomes less.
    """

    def __init__(self, sets: int, code_bytes: int, accountant: Accountant) -> None:
        self._sets, self._code_bytes, self._accountant = sets, code_bytes, accountant
        self.room = 0, 0, 0
        self._growing, self._spare = threading.Lock(), list[SplitRows]()

    def expect(self, count: int, exact: int, tokens: int) -> None:
        """Have room for sets of so many positions and exact ones, of so many tokens."""
        while count > (own := self.room)[0] or exact > own[1] or tokens > own[2]:
            # Each token makes it a little more.
            more = with_more(count), with_more(exact), with_more(tokens)
            room = max(own[0], more[0]), max(own[1], more[1]), max(own[2], more[2])
            made = [self._made(room) for _ in range(_SPARE_SPLITS)]
            with self._growing:
                if self.room == own:
                    self.room, self._spare = room, made

    def take(self, count: int, exact: int) -> SplitRows:
        """Return memory for sets of so many positions, so many of them exact."""
        room = self.room
        try:
            # Another thread may take what is seen here. What was made for less is dropped.
            while (split := self._spare.pop()).room != room:
                pass
        except IndexError:
            split = self._made(room)
        split.table.set_rows, split.exact.table.set_rows = count, exact
        return split

    def told(self, sets: Sets, exact: Sets, tokens: int) -> SplitRows:
        """Return memory that is told what is selected of so many tokens; as `SplitRows.tell`."""
        count, best = len(sets[0]), len(exact[0])
        self.expect(count, best, tokens)
        split = self.take(count, best)
        split.tell(sets, exact)
        return split

    def give(self, split: SplitRows) -> None:
        """Have it used again; who keeps it for good need not say so."""
        if len(self._spare) < _SPARE_SPLITS:
            self._spare.append(split)

    def _made(self, room: tuple[int, int, int]) -> SplitRows:
        """Make memory, which is counted for as long as it lives."""
        byte_count = split_bytes(self._sets, *room)
        with self._accountant.taking(Part.STAGING, byte_count):
            split = SplitRows(self._sets, *room, self._code_bytes)
        weakref.finalize(split, self._accountant.give, Part.STAGING, byte_count).atexit = False
        return split


# Of the layer that attends, and of the next one.
_SPARE_SPLITS = 2


@dataclass(frozen=True)
class SplitAhead:
    """What a layer attends to, as `Ahead`, where the library has it: nobody asks which it is.

    Parameters
    ----------
    landed
        Rows that are read ahead of exact tokens, and of those without codes in a file; or None.
    split
        The tokens, valid until they are attended to.
    """

    landed: LandedRows | None
    split: SplitRows

    @property
    def sets(self) -> Sets:
        """The selected sets."""
        return self.split.in_place[0]

    @property
    def exact(self) -> Sets:
        """The exact tokens of each."""
        return self.split.in_place[1]

    @property
    def counts(self) -> tuple[int, int]:
        """How many sets there are, and how many tokens in all of them."""
        sets = self.split.exact.table.set_count
        return sets, sets * self.split.table.set_rows


class ChoiceAhead:
    """Tokens that are being chosen, until someone asks for them.

    Nothing of it takes Python's global lock before that.

    Parameters
    ----------
    layer, sequence
        Whose tokens.
    split
        Says how much is chosen, and becomes what is.
    own
        The layer's last segment, which learns how many of its tokens are coded.
    read
        Begins to read what is cold of it, given where the library finds what it is to end before;
        None where hardly anything is, which is read in its turn.
    """

    def __init__(
        self,
        layer: int,
        sequence: Sequence,
        split: SplitRows,
        own: SegmentLayer,
        read: Callable[[int], SplitAhead] | None,
    ) -> None:
        self._layer = layer
        self._sequence = sequence
        self._split = split
        self._own = own
        # What else the library looks at until it has chosen.
        self._held = [one.layers[layer].shadow for one in sequence.segments]
        self._read = read
        self._choice = AsideChoice()
        self._later: Callable[[], None] | None = None

    def begin(self, variant: int, past: int, step: int) -> None:
        """Begin to choose; `ahead` or `drop` must follow.

        Parameters
        ----------
        variant
            Number of the instruction set.
        past
            Tokens that are stored, without the one that is chosen for, which may be there already.
        step
            Address of what the library is asked; it may change afterwards.
        """
        table = self._sequence.table_addresses[self._layer]
        sets = self._split.table.sets, self._split.exact.table.sets
        self._choice.begin(variant, table, past, step, *sets)

    def wait(self, begin: Callable[[], None]) -> None:
        """Have it begin by calling that, once its layer's products are made or somebody asks."""
        self._later = begin

    def begin_late(self) -> None:
        """Begin where that was left for now."""
        later, self._later = self._later, None
        if later is not None:
            later()

    @property
    def reads(self) -> bool:
        """Whether something may have to be read of what is chosen."""
        return self._read is not None

    def ahead(self) -> SplitAhead:
        """Return what is chosen, once it is, and begin to read what is cold of it.

        Raises
        ------
        CacheUseError
            Where the query was not finite.
        """
        self.begin_late()
        try:
            if self._read is not None:
                # What is cold is listed by the call that ends the choice.
                return self._read(self._choice.address)
            self._choice.end()
        except NonFiniteQueryError as error:
            raise explained(self._layer, error) from error
        finally:
            self._own.coded_tokens = self._sequence.tables.coded[self._layer]
        return SplitAhead(None, self._split)

    def drop(self) -> None:
        """Wait until nothing is under way; what is chosen, or what went wrong, is forgotten."""
        self._later = self._read = None
        with suppress(Exception):
            self.ahead()

    def __del__(self) -> None:
        """Wait where an interrupt left it to nobody: a thread writes to memory that goes now."""
        with suppress(Exception):
            self._choice.end()


# --- The calls ---


class SplitCall:
    """The library's calls for one layer's step; attends to exact and coded tokens.

    Attributes
    ----------
    together
        uint8 (rows, row_bytes): room for all exact rows where these are not read at once.
    waited_seconds
        How long it has waited for codes.
    times
        When rows of either table landed that `land` was given, where its call landed all: from
        when to when, nanoseconds of `perf_counter_ns`.
    """

    def __init__(
        self,
        calls: LayerCalls,
        values: ValueCodes,
        file: CodeFile | None,
        recorder: Recorder,
        layer: int,
        sequence: Sequence,
        split: SplitRows,
        together: NDArray[np.uint8],
    ) -> None:
        self._calls = calls
        self._values = values
        self._file = file
        self._recorder = recorder
        self._layer = layer
        self._sequence = sequence
        self._split = split
        self.together = together
        self.waited_seconds = 0.0
        self.times: list[tuple[int, int]] = []
        # Tokens whose codes lie in a file.
        self._filed: ColdTokens | None = None
        self._library = native_library()

    def begin(self, name: str, number: int, pool: int, asked: AskedStep, out: torch.Tensor) -> None:
        """Say which function begins, and what it is told."""
        self._name, self._number, self._pool = name, number, pool
        self._step, self._out = asked.address, out.data_ptr()
        self._table = self._sequence.table_addresses[self._layer]

    def look(self) -> bool:
        """Find rows and codes, list misses, and attend where all is here, or say that it is not."""
        split, given = self._split, (self._name, self._number, self._table, self._pool)
        rest, key = (self._step, split.address, split.misses.address, self._out), id(self._sequence)
        coming = None if self._file is None else self._file.on_way(self._layer, key)
        codes = None if coming is None else coming.told()

        def decode(slots: int) -> bool:
            # Codes stay, whoever makes room until all is here.
            self._held = self._values.layers[self._layer].columns.chunks
            return self._library.decode(*given, slots, *rest)

        started = time.perf_counter_ns()
        try:
            split.table.coming = codes
            is_here = self._values.look(self._layer, decode)
        finally:
            split.table.coming = None
        if self._recorder is not SILENT:
            # What it waited for is none of its own time.
            started += split.misses.waited_ns + (0 if coming is None else coming.waited_ns)
            stop = time.perf_counter_ns()
            self._recorder.note(Lane.COMPUTE, "attention", started, stop, layer=self._layer)
        if not split.misses.is_looked_for:
            return False
        self._calls.note_hits(self._layer, self._sequence, split.exact, split.misses)
        if self._file is not None and coming is not None and coming.taken:
            self.waited_seconds += coming.waited_ns / 1e9
            self._file.took(self._layer, key, self._sequence.counters)
        return is_here

    def expect(self) -> None:
        """Begin to bring what `fill` is to bring, where nobody has; only other rows stay cold."""
        split, key = self._split, id(self._sequence)
        if self._file is None or not split.cold_count:
            return
        rows, numbers = split.cold[1], split.missing_numbers[split.cold_numbers]
        if self._file.has_begun_all(self._layer, key, rows, numbers):
            self._filed = split.set_all_aside()
            return
        filed = self._file.covers(self._layer, rows, numbers)
        if not self._file.has_begun(self._layer, key):
            self._file.begin_first(self._layer, key, rows[filed], numbers[filed])
        self._filed = split.set_aside(filed)

    def land(
        self,
        numbers: NDArray[np.int64],
        exact: LandingTable | None,
        coded: LandingTable | None,
    ) -> Callable[[ReadWay | None], int] | None:
        """Return a call of the library that lands all that is missing and attends to it.

        It is given how the rows' file is read, and returns its outcome. None where something has to
        be done one after the other. `numbers` says which of the exact rows are landed.
        """
        filed, split, key = self._filed, self._split, id(self._sequence)
        coming, codes = None, None
        if self._file is not None and filed is not None and len(filed.rows):
            coming = self._file.on_way(self._layer, key)
            wanted = filed.rows, split.missing_numbers[filed.numbers]
            codes = coming.told() if coming is not None and coming.is_of(*wanted) else None
            if codes is None:
                return None
        tables = [None if one is None else ctypes.addressof(one.table) for one in (exact, coded)]
        which = None if filed is None else address_of(filed.numbers)

        def call(way: ReadWay | None) -> int:
            given = None if way is None else ctypes.addressof(way)
            landing = SplitLanding(given, tables[0], address_of(numbers), tables[1], codes, which)
            rest = self._step, split.address, ctypes.addressof(landing), self._out
            function, outcomes = self._library.functions.hillinfer_land_split, list[int]()

            def attend(slots: int) -> bool:
                outcomes.append(function(self._number, self._table, slots, *rest))
                return not outcomes[0]

            is_here = self._values.look(self._layer, attend)
            came = landing.came_ns
            stamps = landing.begun_ns, landing.exact_ns, landing.coded_ns
            self.times = list(pairwise(stamps))
            self.waited_seconds = (came - landing.begun_ns) / 1e9
            if is_here and self._recorder is not SILENT:
                stop = time.perf_counter_ns()
                self._recorder.note(Lane.COMPUTE, "attention", came, stop, layer=self._layer)
            if is_here and coming is not None and self._file is not None:
                self._file.took(self._layer, key, self._sequence.counters)
            return outcomes[0]

        return call

    def fill(self) -> bool:
        """Bring codes that lie in a file; True where some did not come, whose rows are cold now."""
        filed, self._filed = self._filed, None
        if self._file is None or filed is None or not len(filed.rows):
            return False
        split, key, own = self._split, id(self._sequence), self._sequence.counters
        numbers = split.missing_numbers[filed.numbers]
        places = np.zeros(len(filed.rows), np.uint64)
        filled = self._file.fill(self._layer, key, filed.rows, numbers, places, own)
        if filled.all():
            split.tell_codes(filed.numbers, places)
            return False
        split.tell_codes(filed.numbers[filled], places[filled])
        split.take_back(filed.only(~filled))
        return True

    def code(self, first: int, rows: NDArray[np.uint64]) -> None:
        """Code tokens that were to be read, from the first one on, whose rows lie there now."""
        own = first, len(rows), rows.ctypes.data
        given = self._number, self._step, self._split.address
        self._library.decode("hillinfer_code_cold", *given, *own)

    def end(self) -> None:
        """Attend, once all is here."""
        rest = self._step, self._split.address, self._out

        def attend(slots: int) -> bool:
            given = self._number, self._table
            return self._library.decode("hillinfer_end_split", *given, slots, *rest)

        try:
            with self._recorder.span(Lane.COMPUTE, "attention", layer=self._layer):
                self._values.look(self._layer, attend)
        finally:
            if self._file is not None:
                self._file.let_go(self._layer, id(self._sequence))
