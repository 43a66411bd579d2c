# SPDX-License-Identifier: Apache-2.0
"""Batches: the sequence and left padding of each row, and a cache together with its forks."""

from __future__ import annotations

import weakref
from array import array
from collections import deque
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from hillinfer.engine.runtime import Runtime
from hillinfer.errors import CacheUseError, UnsupportedFeatureError
from hillinfer.hf.forward_plan import ForwardPlan, SequenceShare
from hillinfer.hf.prompts import Made
from hillinfer.kv.sequence import Sequence
from hillinfer.statistics import Counters, LayerHits
from hillinfer_model.kernel_spec import GROUP_TOKENS

# --- Reading attention masks ---


def left_padding(mask: torch.Tensor) -> list[int]:
    """Return how many padding tokens each row of a mask starts with.

    Parameters
    ----------
    mask
        (batch, tokens), zero for padding.

    Raises
    ------
    UnsupportedFeatureError
        Where padding stands after a token, or the mask is not two-dimensional.
    """
    if mask.ndim != 2:
        raise UnsupportedFeatureError(
            f"an attention mask of {mask.ndim} dimensions is not supported: pass the "
            "two-dimensional mask that the tokenizer gives"
        )
    real = mask.to(device="cpu", dtype=torch.bool)
    if bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise UnsupportedFeatureError(
            "padding after tokens is not supported: set tokenizer.padding_side = 'left'"
        )
    return [int(count) for count in (~real).sum(dim=1)]


# --- The rows of a batch and the sequences they hold ---


class Batch:
    """Which sequence each batch row continues, and by how much it is padded.

    Rows with the same tokens share one sequence until their tokens differ.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._sequences: list[Sequence] = []
        self._pads: list[int] = []
        self._made: list[Made] = []
        # Those that nobody holds any more, as long as an interrupt keeps them from being freed.
        self._gone: list[Sequence] = []

    @classmethod
    def of(cls, runtime: Runtime, sequence: Sequence) -> Batch:
        """Return a batch of one row that continues a sequence."""
        batch = cls(runtime)
        batch._sequences, batch._pads, batch._made = [sequence], [0], [Made()]
        return batch

    def only_sequence(self) -> Sequence:
        """Return the one sequence that all rows hold, without padding.

        Raises
        ------
        CacheUseError
            Where there is none, more than one, or padding.
        """
        distinct = _distinct(self._sequences)
        if len(distinct) != 1:
            raise CacheUseError(
                f"a session holds one sequence and this cache holds {len(distinct)}: save one "
                "document at a time"
            )
        if any(self._pads):
            raise CacheUseError(
                f"a session holds no padding and this prompt has {max(self._pads)} tokens of it: "
                "read the document by itself"
            )
        return distinct[0]

    def open_one(self) -> Sequence:
        """Return the sequence of the one row that this empty batch has from here on.

        Raises
        ------
        CacheUseError
            Where it holds tokens already.
        """
        if any(sequence.token_ids for sequence in self._sequences):
            raise CacheUseError("this cache holds tokens already: give a new one")
        self.clear()
        self._sequences, self._pads = [self._runtime.open_sequence()], [0]
        self._made = [Made()]
        return self._sequences[0]

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def pads(self) -> tuple[int, ...]:
        """Padding of each row."""
        return tuple(self._pads)

    def sequences(self) -> list[Sequence]:
        """Return what the rows hold, each sequence once."""
        return _distinct(self._sequences)

    @property
    def is_even(self) -> bool:
        """Whether all rows are as long as each other, padding counted."""
        rows = zip(self._sequences, self._pads, strict=True)
        return len({sequence.tokens + pad for sequence, pad in rows}) < 2

    def lengths(self, layers: int) -> list[int]:
        """Return the rows that each layer has, padding included, of passes that got through."""
        if not self._sequences:
            return [0] * layers
        first, pad = self._sequences[0], self._pads[0]
        return [pad + first.of(layer).lengths[layer] for layer in range(layers)]

    def lacking_from(self, layers: int) -> int:
        """Return the first layer for which tokens wait that it should have; `layers` for none."""
        bands = [
            band.band.start
            for one in self._sequences[:1]
            for band in one.deeper
            if band.tokens < band.rows_before(one.tokens)
        ]
        return min(bands, default=layers)

    @property
    def token_ids(self) -> list[list[int]]:
        """The tokens of each row so far, padding left out."""
        return [list(sequence.token_ids) for sequence in self._sequences]

    def clear(self) -> None:
        """Free all sequences; those that an interrupt leaves are freed by the next call."""
        self._gone = _distinct([*self._gone, *self._sequences])
        self._sequences, self._pads, self._made = [], [], []
        self._free_gone()

    def fork(self) -> Batch:
        """Return a batch of the same rows that goes on independently."""
        copy, forked = Batch(self._runtime), dict[int, Sequence]()
        try:
            for one in _distinct(self._sequences):
                forked[id(one)] = fork = self._runtime.fork(one)
                copy._sequences.append(fork)
        except BaseException:
            copy.clear()
            raise
        copy._sequences = [forked[id(one)] for one in self._sequences]
        copy._pads, copy._made = list(self._pads), list(self._made)
        return copy

    def fork_row(self, row: int) -> Batch:
        """Return a batch of one row alone, padding left out, that goes on independently."""
        copy = Batch.of(self._runtime, self._runtime.fork(self._sequences[row]))
        copy._made = [self._made[row]]
        return copy

    def truncate(self, length: int) -> None:
        """Forget the tokens of every row from index `length` on, padding counted."""
        pads = dict(zip(map(id, self._sequences), self._pads, strict=True))
        for sequence in _distinct(self._sequences):
            self._runtime.truncate(sequence, max(0, length - pads[id(sequence)]))
        self._pads = [min(pad, length) for pad in self._pads]
        self._made = [
            made.until(length - pad) for made, pad in zip(self._made, self._pads, strict=True)
        ]

    def choose(self, indices: list[int]) -> None:
        """Keep the given rows, in the given order, some of them perhaps more than once."""
        kept = [self._sequences[i] for i in indices]
        pads, made = [self._pads[i] for i in indices], [self._made[i] for i in indices]
        ids = set(map(id, kept))
        gone = _distinct([*self._gone, *self._sequences])
        gone = [one for one in gone if id(one) not in ids]
        # At one moment: no interrupt leaves rows that are held and freed, or neither.
        self._sequences, self._pads, self._made, self._gone = kept, pads, made, gone
        self._free_gone()

    def repeat(self, rows: int) -> None:
        """Have so many rows, each several times, where that comes out even."""
        copies, rest = divmod(rows, len(self))
        if not rest:
            self.choose([i for i in range(len(self)) for _ in range(copies)])

    @property
    def made(self) -> list[tuple[int, Made]]:
        """How rows were made: the first batch row of each sequence, and its own."""
        first = {id(sequence): row for row, sequence in reversed([*enumerate(self._sequences)])}
        return [(row, self._made[row]) for row in sorted(first.values())]

    def end_forward(self, plan: ForwardPlan) -> int:
        """Note how a pass that got through made its rows; return how many groups it filled densely.

        Parameters
        ----------
        plan
            Of the pass, all tokens of which have their own positions.
        """
        groups = 0
        for share in plan.shares:
            row = share.batch_rows[0]
            before = self._made[row]
            start = max(0, plan.start - self._pads[row])
            made = before.after(start, share.tokens, plan.tokens, plan.batch + plan.others)
            groups += made.dense // GROUP_TOKENS - before.dense // GROUP_TOKENS
            for one in share.batch_rows:
                self._made[one] = made
        return groups

    def filled(self, chunk_tokens: int | None) -> None:
        """Note that all rows came from a store, for prompts that are read in such chunks."""
        lengths = [len(sequence.token_ids) for sequence in self._sequences]
        self._made = [Made(length, chunk_tokens or 0, length) for length in lengths]

    def filled_by_another(self) -> None:
        """Note that all rows came from another engine: nothing of them is stored as made here."""
        self._made = [Made()] * len(self._sequences)

    def take(self, others: SequenceOf[Batch], pads: SequenceOf[int], rows: SequenceOf[int]) -> None:
        """Take over rows of other batches, which are empty then, in the place of none.

        Parameters
        ----------
        others
            Of one row each, or of none, which holds no tokens.
        pads
            Padding of each.
        rows
            Which of them each batch row continues.
        """
        opened = [one._sequences[0] if one else one.open_one() for one in others]
        for one in others:
            one._sequences, one._pads, one._made = [], [], []
        self._sequences = [opened[i] for i in rows]
        self._pads = [pads[i] for i in rows]

    def begin_forward(
        self, ids: torch.Tensor, start: int, mask: torch.Tensor | None
    ) -> tuple[SequenceShare, ...]:
        """Take new tokens in and say which sequence gets which.

        Parameters
        ----------
        ids
            (batch, tokens), left-padded.
        start
            Index of the first of them, padding counted.
        mask
            (batch, start + tokens) of zeros for padding, or None.

        Raises
        ------
        CacheUseError
            Where batch or mask do not continue what is there.
        """
        pads = self._padding(ids, start, mask)
        if not self._sequences:
            self._open(ids, pads)
        if len(ids) != len(self._sequences):
            raise CacheUseError(
                f"the cache holds {len(self._sequences)} sequences but the forward pass has "
                f"{len(ids)}"
            )
        self._pads = pads
        new_ids = [ids[i, max(0, pad - start) :].tolist() for i, pad in enumerate(pads)]
        self._part(new_ids)
        rows: dict[int, list[int]] = {}
        for i, sequence in enumerate(self._sequences):
            rows.setdefault(id(sequence), []).append(i)
        for first, *_ in rows.values():
            self._sequences[first].token_ids.extend(new_ids[first])
        return tuple(
            SequenceShare(self._sequences[own[0]], tuple(own), len(new_ids[own[0]]))
            for own in rows.values()
        )

    def check_continues(self, ids: torch.Tensor, mask: torch.Tensor | None, past: int) -> None:
        """Refuse full ids that do not start with what the rows hold.

        Parameters
        ----------
        ids
            What `generate` was given, (batch, tokens).
        mask
            Its attention mask, (batch, tokens) or longer, or None.
        past
            Tokens cached so far, padding counted.

        Raises
        ------
        CacheUseError
            Where another prompt is given on a used cache.
        """
        # `generate` repeats ids for beams and num_return_sequences, whose rows may exist already.
        copies, rest = divmod(len(self._sequences), len(ids))
        if rest or not copies:
            raise CacheUseError(
                f"the cache holds {len(self._sequences)} sequences but {len(ids)} were given: "
                "use a new cache"
            )
        if mask is not None and mask.shape[1] != ids.shape[1]:
            if mask.shape[1] != past + ids.shape[1]:
                raise CacheUseError(
                    f"{ids.shape[1]} new tokens on {past} cached ones need an attention mask of "
                    f"{past + ids.shape[1]}, not {mask.shape[1]}"
                )
            return
        # Without a mask `generate` finds the padding by itself, and the forward pass checks it.
        pads = self._pads[::copies] if mask is None else left_padding(mask)
        for i, (sequence, pad) in enumerate(zip(self._sequences, self._pads, strict=True)):
            own = pads[i // copies]
            given = array("i", ids[i // copies, own:past].tolist())
            # A row without tokens may get more padding.
            fits = own == pad or not sequence.token_ids
            if fits and given == sequence.token_ids[: len(given)] and ids.shape[1] <= past:
                raise CacheUseError(
                    f"the prompt does not continue what the cache holds (sequence {i}): all of its "
                    f"{ids.shape[1]} tokens are among the {past} that are there; to generate from "
                    f"its end again, call cache.crop({ids.shape[1] - past - 1}) first"
                )
            if not fits or given != sequence.token_ids:
                raise CacheUseError(
                    "the prompt does not continue what the cache holds "
                    f"(sequence {i}): use a new cache for another prompt, or pass the whole "
                    "conversation so far"
                )

    def _padding(self, ids: torch.Tensor, start: int, mask: torch.Tensor | None) -> list[int]:
        batch, tokens = ids.shape
        if mask is None:
            if any(self._pads):
                raise CacheUseError(
                    "the prompt was padded, so every forward pass needs the full attention mask"
                )
            return [0] * batch
        pads = left_padding(mask)
        if mask.shape != (batch, start + tokens):
            raise CacheUseError(
                f"the attention mask has shape {tuple(mask.shape)}, but {batch} rows of {start} "
                f"cached and {tokens} new tokens need {(batch, start + tokens)}"
            )
        for i, sequence in enumerate(self._sequences):
            # A row without tokens may get more padding, but nothing in the place of what it has.
            is_bound = bool(sequence.token_ids) or pads[i] < start
            if is_bound and pads[i] != self._pads[i]:
                raise CacheUseError(
                    f"sequence {i} was padded by {self._pads[i]} tokens, now by {pads[i]}"
                )
        return pads

    def _free_gone(self) -> None:
        with ExitStack() as freed:
            for sequence in self._gone:
                freed.callback(self._free, sequence)

    def _free(self, sequence: Sequence) -> None:
        try:
            self._runtime.release(sequence)
        except Exception:
            # Freed nevertheless.
            self._gone = [one for one in self._gone if one is not sequence]
            raise
        self._gone = [one for one in self._gone if one is not sequence]

    def _open(self, ids: torch.Tensor, pads: list[int]) -> None:
        opened: dict[tuple[int, tuple[int, ...]], Sequence] = {}
        for row_ids, pad in zip(ids.tolist(), pads, strict=True):
            key = (pad, tuple(row_ids))
            try:
                if key not in opened:
                    opened[key] = self._runtime.open_sequence()
            except BaseException:
                self.clear()
                raise
            self._sequences.append(opened[key])
        self._made = [Made()] * len(self._sequences)

    def _part(self, new_ids: SequenceOf[list[int]]) -> None:
        """Fork sequences whose batch rows bring different tokens from now on."""
        chosen: dict[tuple[int, tuple[int, ...]], Sequence] = {}
        taken: set[int] = set()
        for i, sequence in enumerate(self._sequences):
            key = (id(sequence), tuple(new_ids[i]))
            if key not in chosen:
                first = id(sequence) not in taken
                chosen[key] = sequence if first else self._runtime.fork(sequence)
                taken.add(id(sequence))
            self._sequences[i] = chosen[key]


def _distinct(sequences: list[Sequence]) -> list[Sequence]:
    return list({id(sequence): sequence for sequence in sequences}.values())


# --- Caches and their forks ---


@dataclass(frozen=True)
class Expectation:
    """How long a cache and its forks are said to get.

    Parameters
    ----------
    tokens
        Longest context, None where nobody knows.
    sequences
        Of different rows.
    from_start
        Tokens that it has from the start.
    """

    tokens: int | None = None
    sequences: int = 1
    from_start: int = 0

    @property
    def least_tokens(self) -> int:
        """Tokens that a sequence will have at least, as far as anyone knows."""
        return self.from_start if self.tokens is None else self.tokens


class CacheFamily:
    """A cache and its forks, of which statistics are told together."""

    def __init__(self, expectation: Expectation, layers: int) -> None:
        self.expectation = expectation
        self.counters = Counters()
        self.hits = LayerHits(layers)
        self._batches: weakref.WeakSet[Batch] = weakref.WeakSet()
        # One for each cache, one that is being opened too. Its methods are atomic without a lock.
        self._open: deque[None] = deque()

    @property
    def is_open(self) -> bool:
        """Whether any of its caches is neither closed nor dropped."""
        return bool(self._open)

    def add(self, batch: Batch) -> None:
        """Learn of one more cache's rows."""
        self._batches.add(batch)
        self._open.append(None)

    def await_one(self) -> None:
        """Learn that a cache is being opened, until `lose`; there is to be room for it already."""
        self._open.append(None)

    def lose(self) -> None:
        """Learn that one of the caches is closed or dropped; safe in any thread at any moment."""
        self._open.pop()

    @property
    def tokens(self) -> int:
        """Of all its sequences, held or expected, whichever are more."""
        known = self.expectation
        return max(sum(self._held), known.least_tokens * known.sequences)

    @property
    def sequences(self) -> int:
        """Held or expected, whichever are more."""
        return max(len(self._held), self.expectation.sequences)

    @property
    def _held(self) -> list[int]:
        return [one.tokens for batch in self.batches() for one in batch.sequences()]

    def batches(self) -> list[Batch]:
        """Return the rows of every cache that is not freed."""
        return list(self._batches)
