# SPDX-License-Identifier: Apache-2.0
"""Sequences: the layout of rows, block tables, tails, and hit rates of tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from types import MappingProxyType
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.extents.recording import Recording
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.native.tables import SequenceTables
from hillinfer.shadow.segments import Segment, ValueWords, known_values
from hillinfer.statistics import Counters, LayerHits
from hillinfer_model.kernel_spec import GROUP_TOKENS, SLICE_CHANNELS

# Of a tensor that the library reads where the model made it.
NUMBER_TYPES = MappingProxyType({torch.float32: 0, torch.bfloat16: 1, torch.float16: 2})
_QUERY_ITEM_BYTES = 4


def observed_bytes(shape: ModelShape, queries: int) -> int:
    """Return the bytes of the last prefill queries of one sequence."""
    return shape.layers * queries * shape.query_heads * shape.head_dim * _QUERY_ITEM_BYTES


# --- How keys and values of one token become one row ---

_FP16_MAX = 65504.0
_ITEM_BYTES = 2


class RowLayout:
    """Packs and views rows: K of all KV heads, then V, in the stored type (design, section 2)."""

    def __init__(self, shape: ModelShape) -> None:
        self._kv_heads = shape.kv_heads
        self._head_dim = shape.head_dim
        self._items = shape.kv_heads * shape.head_dim
        self.row_bytes = shape.row_bytes
        self._padded = shape.row_bytes > 2 * self._items * _ITEM_BYTES
        self.stored_type = (
            torch.bfloat16 if shape.stored_type is StoredType.BFLOAT16 else torch.float16
        )

    @property
    def suits_kernels(self) -> bool:
        """Whether a kernel can read keys from rows: FP16, of heads that a shadow does not pad."""
        is_whole = self._head_dim >= 64 and self._head_dim % SLICE_CHANNELS == 0
        return self.stored_type is torch.float16 and is_whole

    def round(self, states: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Round keys or values to the stored type.

        Parameters
        ----------
        states
            Keys or values of any shape in the model's type.

        Returns
        -------
        The rounded tensor in the stored type, and how many finite values did not fit FP16 (they
        become ±65504).
        """
        if states.dtype == self.stored_type:
            return states, 0
        rounded = states.to(self.stored_type)
        if self.stored_type is torch.bfloat16:
            return rounded, 0
        # One pass where nothing overflows, as in all models that suit the type; NaN goes on below.
        least, most = states.aminmax() if states.numel() else (states.new_zeros(()),) * 2
        if float(least) >= -_FP16_MAX and float(most) <= _FP16_MAX:
            return rounded, 0
        overflowed = int((rounded.isinf() & states.isfinite()).sum())
        if overflowed:
            rounded = torch.where(
                states.isfinite(), states.clamp(-_FP16_MAX, _FP16_MAX), states
            ).to(self.stored_type)
        return rounded, overflowed

    def pack(self, keys: torch.Tensor, values: torch.Tensor, out: NDArray[np.uint8]) -> None:
        """Write rows.

        Parameters
        ----------
        keys, values
            Stored type, shape (kv_heads, tokens, head_dim), on the CPU.
        out
            uint8 of shape (tokens, row_bytes).
        """
        # Through numpy: the views of a single token cost torch thrice as much.
        codes, used = out.view(np.int16), 2 * self._items
        both = codes[:, :used].reshape(len(out), 2, self._kv_heads, self._head_dim)
        for part, states in enumerate((keys, values)):
            both[:, part] = states.detach().view(torch.int16).numpy().transpose(1, 0, 2)
        if self._padded:
            codes[:, used:] = 0

    def keys(self, rows: torch.Tensor) -> torch.Tensor:
        """View the keys of uint8 rows (tokens, row_bytes) as (tokens, kv_heads, head_dim)."""
        return self._part(rows, 0)

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        """View the values of uint8 rows (tokens, row_bytes) as (tokens, kv_heads, head_dim)."""
        return self._part(rows, self._items)

    def _part(self, rows: torch.Tensor, start: int) -> torch.Tensor:
        items = rows.view(self.stored_type)[:, start : start + self._items]
        return items.view(len(rows), self._kv_heads, self._head_dim)


# --- One sequence's tokens and where its rows and shadow lie ---


class Sequence:
    """State of one sequence; rows by logical position, padding never stored.

    Where they lie is in tables that the native library owns: calls here change them, and attributes
    look at them. Groups are numbers in the cold pool, one per 64 positions, the same in every
    layer; full groups may be shared with sequences that have the same prefix. The open group's
    rows, fewer than 64, lie in `tails`; a group that the newest token filled lies there until the
    next comes.

    Parameters
    ----------
    tables
        What it begins with; empty ones where None.
    band
        Layers whose rows it has; all of them where None.

    Attributes
    ----------
    band
        As given, until `SequenceManager.open_bands` leaves it the first layers alone.
    deeper
        What has the rows of the layers behind them, where those have fewer: a sequence per band.
    kept, kept_until
        Of a deeper band: the positions among all tokens of those that it has of the first
        `kept_until`, int64, in the order of its rows; of later tokens it has every one, behind
        these. Where it has fewer rows, the last of them are still to come.
    lacking
        How many tokens of the sequence have no row in this band.
    told
        Rows that layers attend to, int64 ascending, whatever they would select, once they have so
        many tokens; None where nobody says. Behind these it is what may be read ahead.
    lengths, held_starts
        Of each layer its tokens, and the position of the first row in its tail; to be looked at.
    tails
        uint8 (layers, 64, row_bytes): rows of the open group, which stay where they are.
    table_addresses
        Of each layer's table, for the native library.
    """

    def __init__(
        self,
        layers: int,
        row_bytes: int,
        tables: SequenceTables | None = None,
        band: range | None = None,
    ) -> None:
        self.band = range(layers) if band is None else band
        self.deeper: list[Sequence] = []
        self.kept, self.kept_until = np.zeros(0, np.int64), 0
        self.lacking = 0
        self.told: tuple[int, NDArray[np.int64]] | None = None
        # 4 bytes per token, where a list of numbers takes 36.
        self.token_ids = array("i")
        self.tables = SequenceTables(layers, row_bytes) if tables is None else tables
        # Asked for at every layer and step.
        self.lengths, self.held_starts = self.tables.lengths, self.tables.held_starts
        self.tails, self.table_addresses = self.tables.tails, self.tables.addresses
        self._groups = self.tables.groups()
        # Of which moment the descriptors of its shadow are, layer by layer.
        self.described = [-1] * layers
        # What the library is told of its values, layer by layer.
        self.value_words: list[ValueWords | None] = [None] * layers
        self.segments: list[Segment] = []
        self.hits = self.tables.hits
        # Queries of the last prefill tokens, float32 (queries, query_heads, head_dim), until what
        # they select is counted.
        self.observed: list[torch.Tensor | None] = [None] * layers
        # What steps did for it: where several caches take a step together, each gets its own.
        self.counters, self.layer_hits = Counters(), LayerHits(layers)
        # Takes its rows to a store as they are made; None where nobody stores them.
        self.recording: Recording | None = None

    def fork(self) -> Sequence:
        """Return a sequence of the same rows and hits; it has no segments and deeper bands yet."""
        copy = Sequence(len(self.described), self.tails.shape[2], self.tables.fork(), self.band)
        copy.keep(self.kept, self.kept_until)
        copy.token_ids = self.token_ids[:]
        copy.observed, copy.told = list(self.observed), self.told
        return copy

    def of(self, layer: int) -> Sequence:
        """Return what has a layer's rows: this, or one of its deeper bands."""
        own = self
        for one in self.deeper:
            if layer < one.band.start:
                break
            own = one
        return own

    def bands(self) -> list[Sequence]:
        """Return this and its deeper bands."""
        return [self, *self.deeper]

    def become_band(self, layers: range) -> None:
        """Learn that this is a deeper band of the sequence that it is a fork of, of these layers.

        It has the first tokens, and gets those that are kept of what comes.
        """
        self.band = layers
        self.keep(np.arange(self.tokens), self.tokens)
        # The sequence has them.
        del self.token_ids[:]

    def deepen(self, band: Sequence) -> None:
        """Take a band of deeper layers; what is counted of it is counted of this sequence."""
        band.counters, band.layer_hits = self.counters, self.layer_hits
        self.deeper.append(band)

    def keep(self, positions: NDArray[np.int64], until: int) -> None:
        """Say which of the first `until` tokens a deeper band has, int64, in order of its rows."""
        self.kept, self.kept_until = positions, until
        self.lacking = until - len(positions)

    def tell_rows(self, tokens: int, rows: NDArray[np.int64]) -> None:
        """Say which rows its layers attend to, int64 ascending, once they have so many tokens."""
        self.told = tokens, rows

    def told_rows(self, tokens: int) -> NDArray[np.int64] | None:
        """Return what was told for so many tokens; what was told for others does not count."""
        return self.told[1] if self.told is not None and self.told[0] == tokens else None

    def told_among(self, layer: int) -> list[NDArray[np.int64]] | None:
        """Return the one set of rows that a layer's newest tokens were told; None for no such."""
        told = self.told_rows(self.lengths[layer])
        return None if told is None else [told]

    @property
    def is_ordered(self) -> bool:
        """Whether a deeper band has its rows in the order of positions."""
        return bool((self.kept[1:] > self.kept[:-1]).all())

    def rows_before(self, length: int) -> int:
        """Return how many of the first `length` tokens a deeper band has, or is to have."""
        if length >= self.kept_until:
            return len(self.kept) + length - self.kept_until
        return int(np.count_nonzero(self.kept < length))

    def rows_until(self, length: int) -> int:
        """Return how many rows of a deeper band come before any of tokens from `length` on."""
        if length >= self.kept_until:
            return self.rows_before(length)
        (later,) = np.nonzero(self.kept >= length)
        return int(later[0]) if len(later) else len(self.kept)

    @property
    def tokens(self) -> int:
        """Tokens whose rows are there, by the first layer: it has a forward pass's first."""
        return self.lengths[self.band.start]

    @property
    def groups(self) -> list[int]:
        """The numbers of its groups, in the order of positions."""
        numbers: list[int] = self._groups.tolist()
        return numbers

    @property
    def group_count(self) -> int:
        """How many groups it has."""
        return len(self._groups)

    def shares_groups(self, other: Sequence) -> bool:
        """Say whether positions of this sequence lie in the same groups as those of another."""
        count = min(self.group_count, other.group_count)
        return bool((self._groups[:count] == other._groups[:count]).any())

    def append_groups(self, numbers: Iterable[int]) -> None:
        """Let the next positions lie in these groups, in every layer."""
        self.tables.append_groups(np.fromiter(numbers, np.int64))
        self._groups = self.tables.groups()

    def set_length(self, layer: int, length: int, held: int) -> None:
        """Say how many tokens a layer has, and which position the first row of its tail has."""
        self.tables.set_length(layer, length, held)

    def truncate(self, length: int) -> list[int]:
        """Forget positions from `length` on, with their hits; return the groups that go.

        Of a group that is cut the tail must have the rows that stay.
        """
        gone = self.groups[length // GROUP_TOKENS :]
        # Also of a band that got no row before its pass broke off.
        self.told = None
        self.tables.truncate(length)
        self._groups = self.tables.groups()
        self.described = [-1] * len(self.described)
        self.value_words = [None] * len(self.described)
        return gone

    def known_words(self, layer: int) -> ValueWords:
        """Return what the library is told of a layer's values; any thread may ask.

        That is of its segments up to the first one without statistics of values.
        """
        own, segments = self.value_words[layer], self.segments
        # `truncate` forgets them: a segment that is made anew has other values.
        if own is None or len(own.values) != len(segments):
            own = self.value_words[layer] = ValueWords.of(known_values(layer, segments))
        return own

    def tail_start(self, layer: int) -> int:
        """Return the position of the open group's first token in a layer."""
        return self.lengths[layer] // GROUP_TOKENS * GROUP_TOKENS

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row numbers of positions in full groups, int64 of the same shape."""
        # Every step asks for those of all hot rows, and numpy's remainder takes many times what its
        # quotient does.
        first: NDArray[np.int64] = self._groups.take(positions // GROUP_TOKENS) * GROUP_TOKENS
        return first + (positions & (GROUP_TOKENS - 1))

    def count_reads(self, reads: int, byte_count: int, rows: int) -> None:
        """Count reads that brought rows of this sequence; the store counts those of all.

        Parameters
        ----------
        reads, byte_count
            Calls to the drive, and the bytes that they brought.
        """
        self.counters.cold_reads += reads
        self.counters.cold_read_bytes += byte_count
        self.counters.cold_useful_bytes += rows * self.tails.shape[2]


def distinct_rows(sequences: Iterable[Sequence]) -> int:
    """Return how many distinct rows some sequences have, in all of their layers."""
    # Bands share groups that were there before them, each for layers of its own.
    layers_of: dict[int, set[int]] = {}
    open_rows = 0
    for one in {id(own): own for sequence in sequences for own in sequence.bands()}.values():
        for group in one.groups:
            layers_of.setdefault(group, set()).update(one.band)
        open_rows += sum(one.lengths[layer] % GROUP_TOKENS for layer in one.band)
    return sum(map(len, layers_of.values())) * GROUP_TOKENS + open_rows


# --- Keys and values of rows, where they lie ---


class RowPart:
    """Keys or values of a sequence's rows as FP16, and views of those in tails.

    A view takes longer to make than a token's keys take to code, and each step needs one per layer:
    it is made once for as long as the sequence lives.

    Parameters
    ----------
    view
        Returns them as part of uint8 rows (tokens, row_bytes), see `RowLayout`.
    """

    def __init__(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._view = view
        self._known: WeakKeyDictionary[Sequence, list[torch.Tensor]] = WeakKeyDictionary()

    def of(self, rows: NDArray[np.uint8]) -> torch.Tensor:
        """Return those of rows, float16 (tokens, kv_heads, head_dim); a view where it can be."""
        return self._half(self._view(torch.from_numpy(rows)))

    def fill(self, blocks: Iterable[NDArray[np.uint8]], out: torch.Tensor) -> int:
        """Write those of blocks of rows to `out`, as `of` returns them; return how many came."""
        at = 0
        for rows in blocks:
            out[at : at + len(rows)] = self.of(rows)
            at += len(rows)
        return at

    def in_tail(self, layer: int, sequence: Sequence, first: int, stop: int) -> torch.Tensor:
        """Return those of some rows of a layer's tail.

        Parameters
        ----------
        first, stop
            Rows of it.

        Returns
        -------
        float16 (stop - first, kv_heads, head_dim): the memory itself, or converted from bfloat16.
        """
        known = self._known.get(sequence)
        if known is None:
            known = [self._view(torch.from_numpy(tail)) for tail in sequence.tails]
            self._known[sequence] = known
        return self._half(known[layer][first:stop])

    @staticmethod
    def _half(states: torch.Tensor) -> torch.Tensor:
        return states if states.dtype is torch.float16 else states.half()
