# SPDX-License-Identifier: Apache-2.0
"""Adapters through which pruned prefill uses transformers' caches and an attached model's."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from hillinfer.errors import HillInferWarning, UnsupportedFeatureError
from hillinfer.hf.cache import HillInferCache
from hillinfer.hf.forward_plan import SequenceShare
from hillinfer.memory_budget import Part
from hillinfer.pruning.passes import Document, StagedCache
from hillinfer.pruning.rankers import unit_key_bytes
from hillinfer.pruning.states import DecidingKeys, States, StatesFile, StatesInMemory
from hillinfer.settings import Encryption

Documents = weakref.WeakKeyDictionary[Any, Document]


class OrdinaryCache(StagedCache):
    """A `DynamicCache` of transformers.

    Parameters
    ----------
    cache
        Of one sequence.
    documents
        Where what is known of caches is kept.
    """

    def __init__(self, cache: DynamicCache, documents: Documents) -> None:
        self._known, self._documents = weakref.ref(cache), documents

    @property
    def _cache(self) -> DynamicCache:
        cache = self._known()
        assert cache is not None, "a pass is with its cache"
        return cache

    @property
    def document(self) -> Document | None:
        """What is known of it."""
        return self._documents.get(self._cache)

    @property
    def passes(self) -> int | None:
        """Return None: nobody counts."""
        return None

    @property
    def brought_dense(self) -> None:
        """Return None: nobody knows what else came."""
        return None

    @property
    def is_alike(self) -> bool:
        """Whether there is one row: several that decode side by side hold other tokens."""
        return int(self._cache.layers[0].keys.shape[0]) == 1

    @property
    def is_causal(self) -> bool:
        """Return False: an SDPA without a mask takes the first keys for the queries' own."""
        return False

    def begin_stages(self) -> None:
        """Do nothing: its rows are its own."""

    def keep_whole(self, dense: int, seconds: float) -> None:
        """Do nothing: nobody keeps its rows."""

    def note(self, document: Document | None) -> None:
        """Keep it as long as the cache lives."""
        if document is None:
            self._documents.pop(self._cache, None)
        else:
            self._documents[self._cache] = document

    def check(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Refuse several sequences and padding; see `StagedCache`."""
        if hidden.shape[0] != 1:
            raise UnsupportedFeatureError(
                f"prune: {hidden.shape[0]} sequences at once, beams among them, have rows of their "
                "own in an ordinary cache, which is read in stages for one alone: read one at a "
                "time, or beams of one prompt into a cache of new_cache()"
            )
        if mask is not None and mask.ndim == 4:
            last = mask[0, 0, -1]
            if not bool((last if mask.dtype == torch.bool else last == 0).all()):
                raise _padded()

    def length(self, layer: int) -> int:
        """Return the tokens of a layer."""
        return int(self._cache.get_seq_length(layer))

    def expect_keys(self, layer: int, tokens: int) -> None:
        """Do nothing: they lie in memory."""

    def keys(
        self, layer: int, unit_tokens: int | None = None
    ) -> AbstractContextManager[torch.Tensor]:
        """Return what gives the keys of a layer where they lie."""
        return nullcontext(self._cache.layers[layer].keys[0])

    def shorten(self, layers: range, tokens: int) -> None:
        """Leave the first tokens, on which versions of transformers disagree."""
        for layer in self._cache.layers[layers.start : layers.stop]:
            if layer.is_initialized:
                layer.keys = layer.keys[..., :tokens, :]
                layer.values = layer.values[..., :tokens, :]

    def restart(self, layers: range, brought: int) -> None:
        """Leave the first tokens."""
        self.shorten(layers, brought)

    def open_bands(self, starts: Sequence[int]) -> None:
        """Do nothing: each layer has what it is brought."""

    def wait(self, first: int) -> None:
        """Do nothing: nothing is expected of a layer."""

    def piece(self, layers: range, tokens: int) -> AbstractContextManager[None]:
        """Return what encloses nothing."""
        return nullcontext()

    def keep(self, positions: Sequence[torch.Tensor], until: int) -> None:
        """Do nothing: the document has them."""

    def kept(self, until: int) -> None:
        """Return None: the document has them."""

    def wait_with(self, states: torch.Tensor) -> States:
        """Keep them in memory: no budget bounds this cache."""
        return StatesInMemory(states)

    def wait_between(self, states: torch.Tensor) -> States:
        """Keep them in memory, too."""
        return StatesInMemory(states)

    def bring(self, first: int, act: Callable[[], None]) -> None:
        """Do it: nothing is expected of a layer."""
        act()

    def undo(self, layers: range, tokens: int) -> None:
        """Leave the first tokens."""
        self.shorten(layers, tokens)

    @property
    def rows_move(self) -> bool:
        """Return True: they lie in tensors of their own."""
        return True

    def attend_to(self, layers: range, rows: torch.Tensor, coming: int = 1) -> None:
        """Do nothing: all that a layer has is attended to."""

    def enter(self, layers: range) -> None:
        """Do nothing: nothing is expected of a layer."""

    def ordinary(self) -> DynamicCache:
        """Return it."""
        return self._cache


class CacheOnDrive(StagedCache):
    """A cache of an attached model: what it keeps is selected from at each step.

    Parameters
    ----------
    cache
        Of one sequence, which several batch rows may hold.
    """

    def __init__(self, cache: HillInferCache) -> None:
        self._known = weakref.ref(cache)
        self._between: StatesFile | None = None
        self._expected: dict[int, DecidingKeys] = {}

    @property
    def _cache(self) -> HillInferCache:
        cache = self._known()
        assert cache is not None, "a pass is with its cache"
        return cache

    @property
    def _parts(self) -> Any:
        return self._cache.engine.runtime.parts

    @property
    def passes(self) -> int | None:
        """How many passes got through so far."""
        return self._cache.passes

    @property
    def brought_dense(self) -> int | None:
        """What a store or a session brought, as long as no pass came behind it."""
        return None if self._cache.passes else self._cache.dense_tokens

    @property
    def is_alike(self) -> bool:
        """Whether the batch is one sequence."""
        return len(self._cache.sequences) == 1

    @property
    def is_causal(self) -> bool:
        """Return True: it attends by itself."""
        return True

    def begin_stages(self) -> None:
        """Let a store take nothing of the pass: it keeps rows of all layers."""
        self._cache.begin_stages()

    def keep_whole(self, dense: int, seconds: float) -> None:
        """Store what a store would have taken of a prompt that was read whole at once."""
        self._cache.keep_read(dense, seconds)

    @property
    def document(self) -> Document | None:
        """What is known of it; forks have their own."""
        found = self._cache.notes
        assert found is None or isinstance(found, Document)
        return found

    def note(self, document: Document | None) -> None:
        """Keep it with the cache."""
        self._cache.notes = document

    def check(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Refuse padding, and sequences that would each keep other tokens."""
        if not self.is_alike:
            raise UnsupportedFeatureError(
                f"prune: {len(self._cache.sequences)} sequences at once would each keep other "
                "tokens: read one at a time"
            )
        if mask is not None and mask.ndim == 2 and not bool(mask.all()):
            raise _padded()

    def length(self, layer: int) -> int:
        """Return the tokens of a layer."""
        return int(self._cache.index_length(layer))

    def expect_keys(self, layer: int, tokens: int) -> None:
        """Take them as attention reads past rows, so that the drive is not asked again."""
        (sequence,) = self._cache.sequences
        self._expected[layer] = found = self._deciding(tokens)
        self._parts.dense.watch(layer, sequence.of(layer), found.take)

    def _deciding(self, tokens: int) -> DecidingKeys:
        runtime, accountant = self._cache.engine.runtime, self._parts.accountant
        layout, shape = runtime.layout, (tokens, runtime.shape.kv_heads, runtime.shape.head_dim)
        size = math.prod(shape) * layout.stored_type.itemsize
        accountant.take(Part.STAGING, size)
        return DecidingKeys(shape, layout.stored_type, partial(accountant.give, Part.STAGING, size))

    @contextmanager
    def keys(self, layer: int, unit_tokens: int | None = None) -> Iterator[torch.Tensor]:
        """Give the keys of a layer in the stored type, read back where they are not hot.

        Raises BudgetError where the budget does not hold them beside what must be there.
        """
        runtime, (sequence,) = self._cache.engine.runtime, self._cache.sequences
        own, found = sequence.of(layer), self._expected.pop(layer, None)
        tokens = own.lengths[layer]
        # Of a band that was told its rows a token before, these are read ahead meanwhile.
        if runtime.decode is None or sequence.of(layer + 1).told is None:
            runtime.settle()
        if found is None:
            found = self._deciding(tokens)
        try:
            rest = np.arange(found.done, tokens)
            for addresses in runtime.gather.stream_in_place(layer, own, rest):
                found.take(addresses)
            with self._units(tokens, unit_tokens):
                yield found.keys
        finally:
            self._parts.dense.watch_none()
            found.release()

    @contextmanager
    def _units(self, tokens: int, unit_tokens: int | None) -> Iterator[None]:
        """Count keys of units in FP32 in the block of code that this encloses."""
        accountant, shape = self._parts.accountant, self._cache.engine.runtime.shape
        size = unit_key_bytes(tokens, unit_tokens, shape.kv_heads * shape.head_dim)
        accountant.take(Part.STAGING, size)
        try:
            yield
        finally:
            accountant.give(Part.STAGING, size)

    def shorten(self, layers: range, tokens: int) -> None:
        """Leave nothing; the cache cuts all of its layers together."""
        if not tokens:
            self.restart(layers, 0)

    def restart(self, layers: range, brought: int) -> None:
        """Cut the band; what it began with is shared with those before it."""
        self._cache.engine.runtime.settle()
        for sequence in self._cache.sequences:
            self._parts.rows.cut_band(sequence.of(layers.start), brought)
        self._cache.lengths.leave(layers, brought)

    def open_bands(self, starts: Sequence[int]) -> None:
        """Let layers get fewer rows from each of these on.

        Raises BudgetError where the budget does not hold their open groups.
        """
        (sequence,) = self._cache.sequences
        self._parts.rows.open_bands(sequence, starts)

    def wait(self, first: int) -> None:
        """See `StagedCache`."""
        self._cache.lengths.wait(first)

    @contextmanager
    def piece(self, layers: range, tokens: int) -> Iterator[None]:
        """Bring so many tokens to layers that wait, in the block of code that this encloses."""
        lengths, (sequence,) = self._cache.lengths, self._cache.sequences
        # Once for all rows of the batch.
        lengths.begin_stage(layers, (SequenceShare(sequence, (0,), tokens),), 1)
        try:
            yield
        finally:
            lengths.end_stage()

    def keep(self, positions: Sequence[torch.Tensor], until: int) -> None:
        """See `StagedCache`."""
        for sequence in self._cache.sequences:
            for own, kept in zip(sequence.deeper, positions, strict=True):
                own.keep(kept.cpu().numpy(), until)

    def kept(self, until: int) -> tuple[list[torch.Tensor], int]:
        """See `StagedCache`; rows of the batch that parted since have the same ones."""
        bands = self._cache.sequences[0].deeper
        rows = [np.append(own.kept, np.arange(own.kept_until, until)) for own in bands]
        return [*map(torch.from_numpy, rows)], min(own.kept_until for own in bands)

    def wait_with(self, states: torch.Tensor) -> States:
        """Write them to the drive, once; where that is encrypted, keep them in the DRAM budget.

        Raises
        ------
        BudgetError
            Where the budget does not hold them, or the buffer that they go through; nothing of a
            document lies on an encrypted pool unsealed.
        ColdPoolError
            Where the drive fails.
        """
        document = self.document
        assert document is not None
        if self._is_sealed:
            return self._counted(states)
        file = document.boundary.file or self._fresh_file()
        piece = file.add(states)
        document.boundary = replace(document.boundary, file=file)
        return piece

    def wait_between(self, states: torch.Tensor) -> States:
        """Do the same, for as long as they are wanted, in a file that goes with the pass."""
        if self._is_sealed:
            return self._counted(states)
        if self._between is None:
            self._between = self._fresh_file()
        return self._between.add(states)

    @property
    def _is_sealed(self) -> bool:
        return self._cache.settings.encrypt_cold_pool is Encryption.YES

    def _counted(self, states: torch.Tensor) -> States:
        accountant, size = self._parts.accountant, states.nbytes
        accountant.take(Part.OTHER, size)
        if states.untyped_storage().nbytes() > size:
            # One row of a batch would keep the memory of all.
            states = states.clone()
        return StatesInMemory(states, partial(accountant.give, Part.OTHER, size))

    def _fresh_file(self) -> StatesFile:
        file = self._parts.store.fresh_file("states that wait")
        return StatesFile(file, self._parts.accountant)

    def bring(self, first: int, act: Callable[[], None]) -> None:
        """Do it once no other thread uses what the cache shares with others."""
        self._cache.bring(first, act)

    def undo(self, layers: range, tokens: int) -> None:
        """Want no keys: whoever uses the cache next forgets what a pass that broke off brought."""
        self._expected.clear()
        self._parts.dense.watch_none()

    @property
    def rows_move(self) -> bool:
        """Return False: they only come behind each other."""
        return False

    def attend_to(self, layers: range, rows: torch.Tensor, coming: int = 1) -> None:
        """Let the layers attend to these in place of what they would."""
        (sequence,) = self._cache.sequences
        if coming > 1:
            # What was announced is for a single token, and these come before it.
            self._cache.engine.runtime.settle()
        own = sequence.of(layers.start)
        own.tell_rows(own.lengths[layers.start] + coming, rows.cpu().numpy())

    def enter(self, layers: range) -> None:
        """See `StagedCache`."""
        self._cache.lengths.enter(layers)

    def ordinary(self) -> DynamicCache:
        """Refuse; see `StagedCache`."""
        raise UnsupportedFeatureError(
            'prune: decoding="swap" moves rows of a DynamicCache, and a cache of new_cache() '
            'selects among the rows of each band by itself: leave decoding="keep", where alpha '
            'says how many rows a token attends to, or take decoding="blocks:10%" or "enter:10%"'
        )


def staged_cache(cache: Any, documents: Documents) -> StagedCache | None:
    """Return a cache as reading in stages knows it; None where it is of another kind.

    Parameters
    ----------
    cache
        As given to the model.
    documents
        Where what is known of ordinary caches is kept.
    """
    if isinstance(cache, HillInferCache):
        return CacheOnDrive(cache)
    if isinstance(cache, DynamicCache):
        return OrdinaryCache(cache, documents)
    return None


def empty_waiting(documents: Documents) -> None:
    """Empty ordinary caches whose prompt still waits, and warn: nothing else could go on with them.

    Their first layers have tokens that deeper ones lack, and no model would say so.
    """
    for cache, document in [*documents.items()]:
        if not document.is_pending:
            continue
        tokens = cache.get_seq_length()
        documents.pop(cache, None)
        OrdinaryCache(cache, documents).shorten(range(len(cache.layers)), 0)
        if tokens:
            warnings.warn(
                f"prune: pruning ended while a prompt still waited for its end: its cache had "
                f"{tokens} tokens, some of them in its first layers alone, and is empty now. Read "
                "them again",
                HillInferWarning,
                stacklevel=3,
            )


def _padded() -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        "prune: the prompt is padded, and padding has no place among blocks: pass it without "
        "padding"
    )
