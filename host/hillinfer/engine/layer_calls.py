# SPDX-License-Identifier: Apache-2.0
"""What all calls have in common by which the native library decodes one layer's token."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.engine.queries import explained
from hillinfer.kv.hot_pools import HotPools
from hillinfer.kv.pool_policies import PoolPolicy
from hillinfer.kv.sequence import NUMBER_TYPES, Sequence
from hillinfer.memory_budget import Accountant, Part
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.native.coming import MissList
from hillinfer.native.library import NativeLibrary, native_library
from hillinfer.native.selected_rows import SelectedRows
from hillinfer.native.split_rows import SplitRows
from hillinfer.native.structures import DecodeStep, Shape
from hillinfer.scoring.arguments import query_factor
from hillinfer.scoring.scorer import Wanted
from hillinfer.shadow.code_file import CodeFile
from hillinfer.shadow.segments import SegmentLayer
from hillinfer.shadow.values import ValueCodes
from hillinfer.trace.recorder import Lane, Recorder
from hillinfer_model.choices import Scope
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec

# Hits are counted in Python.
_NOT_COUNTED = -1
# After a step with cold rows it is looked for so many steps what is to be read.
_STEPS_AFTER_COLD = 16


class AskedStep:
    """What layers of one step are asked for alike.

    Parameters
    ----------
    step
        What the library is told.

    Attributes
    ----------
    address
        Where that lies.
    of
        What it is filled in for, or None: the tokens that are stored, how many the sequence has
        beside them, and the scaling.
    count
        How many tokens are chosen for each set.
    """

    def __init__(self, step: DecodeStep) -> None:
        self.step = step
        self.address = ctypes.addressof(step)
        self.of: tuple[int, int, float] | None = None
        self.count = 0

    def tell(self, of: tuple[int, int, float], coming: int, wanted: Wanted, exact: int = 0) -> None:
        """Fill in how much is to be chosen, how much of it is exact, and with which factors."""
        # After an interrupt in between it is filled in for nothing.
        step, before, self.of = self.step, self.of, None
        if before is None or before[2] != of[2]:
            self.tell_scaling(of[2])
        step.coming = coming
        step.sinks, step.recent, step.count = wanted.sinks, wanted.recent, wanted.count
        step.threads, step.exact = torch.get_num_threads(), exact
        self.of, self.count = of, wanted.count

    def tell_scaling(self, scaling: float) -> None:
        """Fill in the factors alone."""
        self.step.scaling, self.step.factor = scaling, query_factor(scaling)


class LayerCalls:
    """Tells the library of queries, and the pools of what it found.

    Parameters
    ----------
    shape
        The model's.
    spec, scope
        Of the scoring contract.
    pools
        Where rows lie.
    policy
        Tallies hits.
    """

    def __init__(
        self,
        shape: ModelShape,
        spec: KernelSpec,
        scope: Scope,
        pools: HotPools,
        policy: PoolPolicy,
    ) -> None:
        self._shape = shape
        self._spec = spec
        self._scope = scope
        self._pools = pools
        self._policy = policy
        self._query_shape = shape.query_heads, 1, shape.head_dim
        # A policy that counts in a way of its own does it in Python.
        is_common = type(policy).tally is PoolPolicy.tally
        self._shift = policy.fade_shift if is_common else _NOT_COUNTED
        # The first step from which on rows are thought to be hot again.
        self._aside_from = 0

    def asked(self) -> AskedStep:
        """Return what a kind of call asks for: another thread may still look at another kind's."""
        shape = self._shape
        return AskedStep(
            DecodeStep(
                shape=Shape.of(self._spec, self._scope),
                group_size=shape.group_size,
                stored_type=0 if shape.stored_type is StoredType.BFLOAT16 else 1,
                fade_shift=self._shift,
            )
        )

    def tell_query(self, step: DecodeStep, query: torch.Tensor) -> bool:
        """Say where a query lies; False where the library cannot read it, or others refuse it."""
        number_type, strides = NUMBER_TYPES.get(query.dtype), query.stride()
        if number_type is None or query.shape != self._query_shape or not query.is_cpu:
            return False
        if strides[2] != 1:
            return False
        step.query, step.head_stride, step.query_type = query.data_ptr(), strides[0], number_type
        return True

    def settle(self, layer: int, sequence: Sequence, length: int) -> None:
        """Wait until no row of a layer moves, and have room to count hits.

        Not with `attending` held: rows may move behind an observer that waits for it.
        """
        self._pools.settle(layer)
        if length > len(sequence.hits.counts[layer]):
            self._pools.cover_hits(sequence.hits, layer, length)

    def note_hits(
        self, layer: int, sequence: Sequence, selected: SelectedRows, misses: MissList
    ) -> None:
        """Note that what is selected was counted, or count it: each row once."""
        length = sequence.lengths[layer]
        self._pools.hits.note(layer, sequence, length & -GROUP_TOKENS, length)
        if self._shift == _NOT_COUNTED:
            counts = sequence.hits.counts[layer]
            self._policy.tally(counts, selected.rows)
            misses.recount(counts)

    def note_cold(self, step: int) -> None:
        """Note that rows were cold in a step."""
        self._aside_from = step + _STEPS_AFTER_COLD

    def may_choose_aside(self, past: int, newest: int, threads: int) -> bool:
        """Say whether another thread may choose while this one goes on, and gains time by it.

        It may where what it looks at stays as it is until the layer's turn: no segment of the
        sequence begins or becomes full with the token that comes, and its group goes on. It gains
        where nothing is to be read, as nothing was lately.

        Parameters
        ----------
        past
            Tokens that a layer has; one more is coming.
        newest
            The newest step that was attended to.
        threads
            Compute threads.
        """
        inside = past % self._spec.segment_tokens
        return (
            threads > 1
            and past % GROUP_TOKENS != 0
            and 0 < inside < self._spec.segment_tokens - 1
            and newest >= self._aside_from
        )


# --- Memory that is used again ---


class ReusedRows:
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


class CountedMemory:
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


# --- The calls ---


class SplitCall:
    """The library's calls for one layer's step; see `SplitAttention`."""

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
        arrived: NDArray[np.uint8],
    ) -> None:
        self._calls = calls
        self._values = values
        self._file = file
        self._recorder = recorder
        self._layer = layer
        self._sequence = sequence
        self._split = split
        self.together = together
        self._arrived = arrived
        self._library = native_library()

    def begin(self, name: str, number: int, pool: int, asked: AskedStep, out: torch.Tensor) -> None:
        """Say which function begins, and what it is told."""
        self._name, self._number, self._pool = name, number, pool
        self._step, self._out = asked.address, out.data_ptr()
        self._table = self._sequence.table_addresses[self._layer]

    def look(self) -> bool:
        """Find rows and codes, and attend where all is here; see `SplitAttention`."""
        split, given = self._split, (self._name, self._number, self._table, self._pool)
        rest = self._step, split.address, split.misses.address, self._out

        def decode(slots: int) -> bool:
            return self._library.decode(*given, slots, *rest)

        with self._recorder.span(Lane.COMPUTE, "attention", layer=self._layer):
            is_here = self._values.look(self._layer, decode)
        self._calls.note_hits(self._layer, self._sequence, split.exact, split.misses)
        return is_here

    def fill(self) -> None:
        """Bring those codes that lie in a file, and leave the others; see `SplitAttention`."""
        if self._file is None or not self._split.cold_count:
            return
        split, key, own = self._split, id(self._sequence), self._sequence.counters
        rows, which = split.cold[1], split.cold_numbers
        numbers = split.missing_numbers[which]
        filled = self._file.fill(self._layer, key, rows, numbers, self._arrived, which, own)
        split.keep_cold(~filled)

    def code(self, first: int, rows: NDArray[np.uint64]) -> None:
        """Code tokens that were to be read; see `SplitAttention`."""
        own = first, len(rows), rows.ctypes.data
        given = self._number, self._step, self._split.address
        self._library.decode("hillinfer_code_cold", *given, *own)

    def end(self) -> None:
        """Attend, once all is here."""
        rest = self._step, self._split.address, self._out

        def attend(slots: int) -> bool:
            given = self._number, self._table
            return self._library.decode("hillinfer_end_split", *given, slots, *rest)

        with self._recorder.span(Lane.COMPUTE, "attention", layer=self._layer):
            self._values.look(self._layer, attend)


class ChoiceAhead:
    """Tokens that are being chosen, until someone asks for them.

    Nothing of it takes Python's global lock before that.

    Parameters
    ----------
    library
        Chooses.
    layer, sequence
        Whose tokens.
    sets
        int64 (sets, tokens), contiguous: becomes what is chosen.
    exact
        Likewise of exact tokens, where others are coded; else None.
    own
        The layer's last segment, which learns how many of its tokens are coded.
    held
        What else the library looks at until it has chosen.
    """

    def __init__(
        self,
        library: NativeLibrary,
        layer: int,
        sequence: Sequence,
        sets: NDArray[np.int64],
        exact: NDArray[np.int64] | None,
        own: SegmentLayer,
        held: object,
    ) -> None:
        self._library = library
        self._layer = layer
        self._sequence = sequence
        self._sets = sets
        self._exact = exact
        self._own = own
        self._held = held
        self._handle: int | None = None

    def begin(self, variant: int, step: int) -> None:
        """Begin to choose; `chosen` or `drop` must follow.

        Parameters
        ----------
        variant
            Number of the instruction set.
        step
            Address of what the library is asked; it may change afterwards.
        """
        table = self._sequence.table_addresses[self._layer]
        exact = None if self._exact is None else self._exact.ctypes.data
        sets = self._sets.ctypes.data, exact
        self._handle = self._library.begin_choice(variant, table, step, *sets)

    def chosen(self) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]] | None]:
        """Return the sets that are chosen, once they are, and their exact tokens or None.

        Raises
        ------
        CacheUseError
            Where the query was not finite.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            try:
                self._library.end_choice(handle)
            except NonFiniteQueryError as error:
                raise explained(self._layer, error) from error
            finally:
                self._own.coded_tokens = self._sequence.tables.coded[self._layer]
        return list(self._sets), None if self._exact is None else list(self._exact)

    def drop(self) -> None:
        """Wait until nothing is under way; what is chosen, or what went wrong, is forgotten."""
        with suppress(Exception):
            self.chosen()
