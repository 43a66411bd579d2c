# SPDX-License-Identifier: Apache-2.0
"""Reads stored prefixes of one model's prompts into caches, and stores what caches hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.files import aligned_buffer
from hillinfer.errors import CacheUseError, HillInferError
from hillinfer.generate.answering import Generation
from hillinfer.generate.run_report import StoreFacts
from hillinfer.hf.cache import HillInferCache
from hillinfer.kv.sequence import RowLayout
from hillinfer.metrics import StoreCounts
from hillinfer.model_shape import ModelShape
from hillinfer.sessions.fingerprint import ModelIdentity
from hillinfer.store.keys import CHUNK_TOKENS, Namespace, Reuse
from hillinfer.store.pool_files import StoreFailedError
from hillinfer.store.prefix import StoredPrefix, WrongBytesError
from hillinfer.store.store import Store
from hillinfer_model.choices import KeyMode
from hillinfer_model.kernel_spec import GROUP_TOKENS


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
    """

    def __init__(
        self,
        store: Store,
        model: Any,
        salt: bytes = b"",
        reuse: Reuse = Reuse.LONGEST,
        chunk_tokens: int = CHUNK_TOKENS,
        made_by: Mapping[str, object] | None = None,
    ) -> None:
        self._store = store
        self._directory = str(store.places.directory)
        self._model = model
        self._salt = salt
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
        self.namespace = Namespace.of(facts, self._shape.layers, self._shape.row_bytes, 0)

    @property
    def counts(self) -> StoreCounts:
        """What the store did for this process."""
        return self._store.counts

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
            except OSError as error:
                self._store.note_failure(error)
                return 0
            except WrongBytesError:
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

    def fill(self, cache: HillInferCache, ids: Sequence[int]) -> StoreFacts:
        """Fill an empty cache of HillInfer with the longest stored prefix.

        Rows come chunk by chunk, so that memory holds one chunk beside the cache's budget.
        """
        started = time.perf_counter()
        found = self._store.find(self.namespace, ids, self._salt)
        looked = time.perf_counter() - started
        if found is None:
            return StoreFacts(
                len(ids),
                find_seconds=looked,
                failure=self._store.counts.last_failure,
                directory=self._directory,
            )
        failure, done = "", 0
        with found:
            tokens = self._usable(found, ids)
            try:
                for position, chunk in found.chunkwise():
                    count = min(tokens - position, chunk.shape[1])
                    if count <= 0:
                        break
                    rows = chunk[:, :count]
                    held = self._states(count)
                    for layer, own in enumerate(held):
                        self._fill(own, 0, rows[layer], count)
                    part = torch.tensor([list(ids[position : position + count])])
                    cache.fill(
                        part, *(list(map(_batched, side)) for side in zip(*held, strict=True))
                    )
                    done = position + count
            except OSError as error:
                failure = str(error)
                self._store.note_failure(error)
            except WrongBytesError as error:
                failure = str(error)
        return StoreFacts(
            len(ids),
            found_tokens=done,
            find_seconds=looked,
            read_seconds=time.perf_counter() - started - looked,
            read_bytes=done * self._shape.token_bytes,
            failure=failure,
            directory=self._directory,
        )

    def keep_from(self, cache: HillInferCache, ids: Sequence[int], seconds: float = 0.0) -> int:
        """Store the rows of a prompt that a cache of HillInfer holds, read densely.

        Parameters and result as in `keep`.
        """
        return self._keep(ids, cache.copy_rows, seconds)

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
            while start < writer.tokens and not writer.is_ended:
                stop = min(start // CHUNK_TOKENS * CHUNK_TOKENS + CHUNK_TOKENS, writer.tokens)
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


class StoredGeneration(Generation):
    """A generation that looks a prompt up in a store before it reads it, and stores it afterwards.

    Parameters
    ----------
    model, cache, chunk_tokens
        As in `Generation`; an empty cache of HillInfer.
    prompts
        The store, as the model uses it.

    Attributes
    ----------
    read_from_store
        What the store brought for the prompt that was read first; None before.
    """

    def __init__(
        self, model: Any, cache: HillInferCache, chunk_tokens: int, prompts: StoredPrompts
    ) -> None:
        super().__init__(model, cache, chunk_tokens)
        self._prompts = prompts
        self.read_from_store: StoreFacts | None = None

    def read(
        self, token_ids: Sequence[int], on_progress: Callable[[int], None] = lambda done: None
    ) -> None:
        """Read tokens; the first ones of a first prompt come from the store where it has them."""
        if self.read_from_store is not None or self.cache.get_seq_length():
            super().read(token_ids, on_progress)
            return
        told = self.read_from_store = self._prompts.fill(self.cache, token_ids)
        start = told.found_tokens
        if start:
            on_progress(start)
        begun = time.perf_counter()
        super().read(token_ids[start:], lambda done: on_progress(start + done))
        seconds = (time.perf_counter() - begun) * len(token_ids) / (len(token_ids) - start)
        begun = time.perf_counter()
        failure, before = told.failure, self._prompts.counts
        try:
            self._prompts.keep_from(self.cache, self._read_densely(token_ids, start), seconds)
        except StoreFailedError:
            raise
        except HillInferError as error:
            # Rows that cannot be read back are not stored; the answer does not wait for that.
            failure = failure or str(error)
        after = self._prompts.counts
        self.read_from_store = StoreFacts(
            **asdict(told)
            | {
                "stored_tokens": after.stored_tokens - before.stored_tokens,
                "refused_chunks": after.refused_chunks - before.refused_chunks,
                "failure": failure,
                "store_seconds": time.perf_counter() - begun,
            }
        )

    # --- inside ----------------------------------------------------------------------------

    def _read_densely(self, token_ids: Sequence[int], start: int) -> Sequence[int]:
        """Return the first tokens, without one that was read alone, as in decode.

        Parameters
        ----------
        token_ids
            That were read.
        start
            Where reading began; what is before came from the store.
        """
        if self._chunk_tokens == 1:
            return token_ids[:start]
        alone = (len(token_ids) - start) % self._chunk_tokens == 1
        return token_ids[: len(token_ids) - alone]


def _batched(states: torch.Tensor) -> torch.Tensor:
    return states[None]


def _common(chunk_tokens: int) -> int:
    """Return the least number of tokens that is whole groups and whole prefill chunks."""
    return int(np.lcm(GROUP_TOKENS, chunk_tokens))
