# SPDX-License-Identifier: Apache-2.0
"""Reads stored prefixes of one model's prompts into caches, and stores what caches hold."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.files import aligned_buffer
from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.errors import CacheUseError
from hillinfer.extents.recording import EngineSide, Recording
from hillinfer.extents.shared_chunks import StoredRowsError
from hillinfer.extents.slot import ShadowSlot
from hillinfer.generate.answering import Generation
from hillinfer.generate.run_report import StoreFacts
from hillinfer.hf.cache import HillInferCache
from hillinfer.kv.opened_sequences import OpenedRows, StoredRows
from hillinfer.kv.sequence import RowLayout
from hillinfer.model_shape import ModelShape
from hillinfer.reuse.ways import PassRates, Way
from hillinfer.sessions.fingerprint import ModelIdentity
from hillinfer.settings import Settings
from hillinfer.store.keys import CHUNK_TOKENS, Namespace, Reuse
from hillinfer.store.pool_files import StoreError
from hillinfer.store.prefix import StoredPrefix, WrongBytesError
from hillinfer.store.store import Store
from hillinfer_model.choices import KeyMode
from hillinfer_model.kernel_spec import GROUP_TOKENS

# What key shadows of a store are coded in: the one that caches have unless told otherwise.
_SHADOW = KeyMode.INT4


class OrdinaryCache(Protocol):
    """A cache of transformers that lies in memory."""

    def update(self, key_states: Any, value_states: Any, layer_idx: int) -> Any:
        """Take keys and values of new tokens in one layer."""

    def get_seq_length(self) -> int:
        """Return how many tokens it holds."""


class StoredPrompts:
    """A store, as one model uses it.

    Parameters
    ----------
    store
        Open.
    model
        A causal language model of transformers, whose weights are hashed once.
    salt
        Of a tenant; what others have stored is not found.
    reuse
        Where a prefix may end.
    chunk_tokens
        Tokens of one forward pass that reads a prompt.
    made_by
        What else decides which bits rows have: an adapter, a way to compute linear layers.
    rates
        By which what follows a stored prefix is read token by token where that is sooner; None for
        all at once. With `Reuse.EXACT` it is always all at once.
    """

    def __init__(
        self,
        store: Store,
        model: Any,
        salt: bytes = b"",
        reuse: Reuse = Reuse.LONGEST,
        chunk_tokens: int = CHUNK_TOKENS,
        made_by: Mapping[str, object] | None = None,
        rates: PassRates | None = None,
    ) -> None:
        self._store = store
        self._model = model
        self._salt = salt
        self._rates = None if reuse is Reuse.EXACT else rates
        self._border = GROUP_TOKENS if reuse is Reuse.LONGEST else _common(chunk_tokens)
        self._shape = ModelShape.from_config(model.config, model.dtype)
        self._layout = RowLayout(self._shape)
        facts = asdict(ModelIdentity(model).fingerprint(KeyMode.INT8))
        # What the shadow is coded by changes no row, and ids say what a tokenizer made of a text.
        for name in ("shadow", "tokenizer", "contract_version", "segment_tokens"):
            del facts[name]
        facts |= {"made": "dense", "device": model.device.type, "made_by": dict(made_by or {})}
        if reuse is Reuse.EXACT:
            facts |= {
                "chunk_tokens": chunk_tokens,
                "threads": torch.get_num_threads(),
                "torch": str(torch.__version__),
                "attention": str(getattr(model.config, "_attn_implementation", "")),
            }
        self._slot = _slot_of(self._shape)
        shadow_bytes = 0 if self._slot is None else self._slot.byte_count
        self.namespace = Namespace.of(
            facts, self._shape.layers, self._shape.row_bytes, shadow_bytes
        )

    # --- ordinary caches -------------------------------------------------------------------

    def load_into(self, cache: OrdinaryCache, ids: Sequence[int]) -> int:
        """Fill an empty cache in memory with the longest stored prefix; return its tokens.

        One token at least is left to be computed: its logits are wanted.

        Parameters
        ----------
        cache
            Empty, like `DynamicCache()`.
        ids
            Token numbers of the prompt.

        Raises
        ------
        CacheUseError
            Where the cache holds tokens already.
        """
        if cache.get_seq_length():
            raise CacheUseError(
                f"load_into fills an empty cache, and this one holds {cache.get_seq_length()} "
                "tokens: give a new one"
            )
        found = self._store.find(self.namespace, ids, self._salt)
        if found is None:
            return 0
        with found:
            tokens = self._usable(found, ids)
            held = self._states(tokens)
            try:
                for layer, position, rows in found.stream():
                    self._fill(held[layer], position, rows, tokens)
            except (OSError, WrongBytesError):
                # The store knows; nothing of it has reached the cache.
                return 0
        if tokens:
            for layer, (keys, values) in enumerate(held):
                device = self._model.device
                cache.update(keys[None].to(device), values[None].to(device), layer)
        return tokens

    def keep(self, cache: OrdinaryCache, ids: Sequence[int], seconds: float = 0.0) -> int:
        """Store the rows of a prompt that a cache in memory holds; return how many can be found.

        Parameters
        ----------
        cache
            With keys and values of every layer in `layers[i].keys` and `.values`.
        ids
            Token numbers of what it holds.
        seconds
            What computing them took.
        """
        layers = [(one.keys[0], one.values[0]) for one in cache.layers]  # type: ignore[attr-defined]

        def rows(layer: int, start: int, out: NDArray[np.uint8]) -> None:
            keys, values = (
                self._layout.round(states[:, start : start + len(out)].to("cpu"))[0]
                for states in layers[layer]
            )
            self._layout.pack(keys, values, out)

        return self._keep(ids, rows, seconds)

    # --- HillInfer's caches ----------------------------------------------------------------

    def open(self, cache: HillInferCache, ids: Sequence[int]) -> StoredReading:
        """Give an empty cache of HillInfer the longest stored prefix, and store what it reads.

        Rows of the prefix stay where the store has them: the cache reads what it selects. Rows
        that passes of several tokens bring from now on go to the store as they leave memory, and
        are found by everybody chunk by chunk. The store must stay open while the cache is.

        Parameters
        ----------
        cache
            Empty.
        ids
            Token numbers of the whole prompt, of which the cache gets those behind the prefix.

        Raises
        ------
        CacheUseError
            Where the cache holds tokens already.
        """
        assert self._slot is not None, "a model with a cache of HillInfer has shadows"
        started = time.perf_counter()
        found = self._store.find(self.namespace, ids, self._salt)
        looked = time.perf_counter() - started
        opened = OpenedRows(0, 0, None)
        if found is not None:
            stored = StoredRows(
                self._store, found, ids, self._usable(found, ids), self._slot, _fits(cache)
            )
            try:
                opened = cache.open_stored(stored)
            except StoreError as error:
                opened = OpenedRows(0, 0, error)
        failure = opened.failure
        if failure is not None and found is not None:
            # Wrong bytes are found no more, and what was behind them is stored again.
            found.close()
            found = self._store.find(self.namespace, ids, self._salt)
        facts = StoreFacts(
            len(ids),
            found_tokens=opened.tokens,
            find_seconds=looked,
            read_seconds=time.perf_counter() - started - looked,
            read_bytes=opened.read_bytes,
            way=str(self.way(opened.tokens, len(ids) - opened.tokens)) if opened.tokens else "",
            failure=str(failure) if failure is not None else self._failure_of(found),
        )
        recording = cache.record(partial(self._recording, cache, ids, found))
        if recording is None and found is not None:
            found.close()
        return StoredReading(cache, facts, recording)

    def way(self, found_tokens: int, tokens: int) -> Way:
        """Return how tokens behind a stored prefix are best read."""
        if tokens == 1:
            return Way.IN_PLACE
        if self._rates is None:
            return Way.STREAMED
        return self._rates.way(found_tokens * self._shape.token_bytes, tokens)

    def _failure_of(self, found: StoredPrefix | None) -> str:
        return "" if found is not None else self._store.counts.last_failure

    def _recording(
        self,
        cache: HillInferCache,
        ids: Sequence[int],
        found: StoredPrefix | None,
        engine: EngineSide,
        first_segment: int,
    ) -> Recording | None:
        published = partial(engine.chunks.note_published, self._store)
        writer = self._store.writer(self.namespace, ids, found, self._salt, keeper=published)
        if writer is None:
            return None
        assert self._slot is not None
        first = first_segment if _fits(cache) else sys.maxsize
        return Recording(self._store, writer, found, ids, engine, self._slot, first)

    # --- inside ----------------------------------------------------------------------------

    def _usable(self, found: StoredPrefix, ids: Sequence[int]) -> int:
        return min(found.tokens, len(ids) - 1) // self._border * self._border

    def _states(self, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        size = (self._shape.kv_heads, tokens, self._shape.head_dim)
        return [
            (torch.empty(size, dtype=self._model.dtype), torch.empty(size, dtype=self._model.dtype))
            for _ in range(self._shape.layers)
        ]

    def _fill(
        self,
        held: tuple[torch.Tensor, torch.Tensor],
        position: int,
        rows: NDArray[np.uint8],
        tokens: int,
    ) -> None:
        own = torch.from_numpy(rows[: max(0, tokens - position)])
        stop = position + len(own)
        held[0][:, position:stop] = self._layout.keys(own).transpose(0, 1)
        held[1][:, position:stop] = self._layout.values(own).transpose(0, 1)

    def _keep(
        self,
        ids: Sequence[int],
        rows: Callable[[int, int, NDArray[np.uint8]], None],
        seconds: float,
    ) -> int:
        found = self._store.find(self.namespace, ids, self._salt)
        stored = 0 if found is None else found.tokens
        writer = None
        try:
            writer = self._store.writer(self.namespace, ids, found, self._salt)
            if writer is None:
                return stored
            writer.cost_per_group = seconds * GROUP_TOKENS / max(1, len(ids))
            size = CHUNK_TOKENS * self._shape.row_bytes
            memory = aligned_buffer(size)[:size].reshape(CHUNK_TOKENS, -1)
            start = stored
            while start < len(ids) // GROUP_TOKENS * GROUP_TOKENS and not writer.is_ended:
                stop = min(
                    start // CHUNK_TOKENS * CHUNK_TOKENS + CHUNK_TOKENS,
                    len(ids) // GROUP_TOKENS * GROUP_TOKENS,
                )
                for layer in range(self._shape.layers):
                    own = memory[: stop - start]
                    rows(layer, start, own)
                    writer.write(layer, start // GROUP_TOKENS, own)
                writer.publish(stop)
                start = stop
            return writer.published_tokens
        finally:
            if writer is not None:
                writer.close()
            if found is not None:
                found.close()


class StoredReading:
    """A prompt that a cache is about to read, or has read, as far as a store had no rows of it.

    Parameters
    ----------
    cache
        Holds the stored prefix.
    facts
        What came of opening it.
    recording
        Takes rows to the store; None where none are stored.
    """

    def __init__(
        self, cache: HillInferCache, facts: StoreFacts, recording: Recording | None
    ) -> None:
        self._cache, self._facts, self._recording = cache, facts, recording

    @property
    def found_tokens(self) -> int:
        """Tokens that the cache holds already."""
        return self._facts.found_tokens

    @property
    def way(self) -> Way:
        """How the tokens behind them are to be read."""
        return Way(self._facts.way or Way.STREAMED)

    def finish(self) -> None:
        """Publish what is left of the prompt, behind the rows that are being written."""
        if self._recording is not None:
            self._cache.end_recording()

    def facts(self) -> StoreFacts:
        """Return what the store did, once everything is published that is queued."""
        if self._recording is None:
            return self._facts
        began = time.perf_counter()
        self._recording.settle()
        stored = max(0, self._recording.published_tokens - self._facts.found_tokens)
        seconds = self._facts.store_seconds + time.perf_counter() - began
        return replace(self._facts, stored_tokens=stored, store_seconds=seconds)


class StoredGeneration(Generation):
    """A generation that looks a prompt up in a store before it reads it, and stores it afterwards.

    Parameters
    ----------
    model, cache, chunk_tokens
        As in `Generation`; an empty cache of HillInfer.
    prompts
        The store, as the model uses it.

    """

    def __init__(
        self, model: Any, cache: HillInferCache, chunk_tokens: int, prompts: StoredPrompts
    ) -> None:
        super().__init__(model, cache, chunk_tokens)
        self._prompts = prompts
        self._reading: StoredReading | None = None
        self._passes: list[Sequence[int]] = []

    @property
    def read_from_store(self) -> StoreFacts | None:
        """What the store brought for the prompt that was read first; None before."""
        return None if self._reading is None else self._reading.facts()

    def read(
        self, token_ids: Sequence[int], on_progress: Callable[[int], None] = lambda done: None
    ) -> None:
        """Read tokens; the first ones of a first prompt come from the store where it has them."""
        if self._reading is not None or self.cache.get_seq_length():
            super().read(token_ids, on_progress)
            return
        reading = self._reading = self._prompts.open(self.cache, token_ids)
        start = reading.found_tokens
        if start:
            # As they were read: where the store fails they are read so again.
            size = self._chunk_tokens
            self._passes = [token_ids[at : at + size] for at in range(0, start, size)]
            self._passes[-1] = token_ids[(len(self._passes) - 1) * size : start]
            on_progress(start)
        is_single = start and reading.way is Way.IN_PLACE
        own = super().read_singly if is_single else super().read
        own(token_ids[start:], lambda done: on_progress(start + done))
        reading.finish()

    def fork(self) -> StoredGeneration:
        """Return a generation that goes on from here by itself, and needs no store either."""
        twin = StoredGeneration(self._model, self.cache.fork(), self._chunk_tokens, self._prompts)
        twin._logits, twin._passes = self._logits, list(self._passes)
        twin._reading = self._reading
        return twin

    def _forward(self, token_ids: Sequence[int]) -> None:
        try:
            super()._forward(token_ids)
        except StoredRowsError:
            # Rows that the store has cannot be read: all are computed, in the passes that made
            # them, so that no bit of the answer is another.
            self.cache.reset()
            for one in self._passes:
                super()._forward(one)
            super()._forward(token_ids)
        self._passes.append(token_ids)


def _slot_of(shape: ModelShape) -> ShadowSlot | None:
    """Return how shadows of a model are stored; None where it can have none."""
    try:
        return ShadowSlot(kernel_spec(shape, Settings(shadow=_SHADOW)))
    except ValueError:
        return None


def _fits(cache: HillInferCache) -> bool:
    """Return whether a cache has the shadows that a store has."""
    return cache.settings.key_mode is _SHADOW


def _common(chunk_tokens: int) -> int:
    """Return the least number of tokens that is whole groups and whole prefill chunks."""
    return int(np.lcm(GROUP_TOKENS, chunk_tokens))
