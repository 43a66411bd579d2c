# SPDX-License-Identifier: Apache-2.0
"""Reads stored prefixes of one model's prompts into caches, and stores what caches hold."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.files import aligned_buffer
from hillinfer.errors import CacheUseError, SettingsError
from hillinfer.extents.group_seals import can_open
from hillinfer.extents.recording import EngineSide, Recording
from hillinfer.generate.answering import Generation
from hillinfer.generate.run_report import PassWay, StoreFacts
from hillinfer.hf.cache import HillInferCache
from hillinfer.hf.prompts import Made, ends_singly
from hillinfer.kv.opened_sequences import OpenedRows, StoredRows
from hillinfer.kv.sequence import RowLayout
from hillinfer.model_shape import ModelShape
from hillinfer.native.library import PROMPT_ROUNDING, native_library
from hillinfer.reuse.described_model import DescribedModel, has_stored_codes, slot_of
from hillinfer.reuse.landed_states import LandedStates, copied
from hillinfer.reuse.other_makers import FoundPrompts, OtherMakers
from hillinfer.reuse.row_placing import PlacingRules
from hillinfer.reuse.streaming import (
    Landing,
    Loading,
    LoadingCounts,
    OrdinaryCache,
    PassClock,
    takes_streams,
)
from hillinfer.reuse.ways import NoRates, RateSource, StoredReading, WayChooser
from hillinfer.schedule.kept_windows import PASSES_IN_MEMORY, KeptWindows, WindowKey
from hillinfer.schedule.windows import SlackTable
from hillinfer.statistics import StoreCounts
from hillinfer.store.keys import CHUNK_TOKENS, Namespace, Reuse
from hillinfer.store.pool_files import READERS, StoreError, StoreFailedError
from hillinfer.store.prefix import StoredPrefix, WrongBytesError
from hillinfer.store.store import Store
from hillinfer.system.kept_memory import KeptMemory
from hillinfer.trace.recorder import SILENT, Recorder
from hillinfer_model.kernel_spec import GROUP_TOKENS

# Tokens of an answer that room is made for.
_ANSWER_TOKENS = 256


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
        Tokens of one forward pass that reads a prompt; None: all of them.
    made_by
        What else decides which bits rows have: an adapter, a way to compute linear layers.
    described
        What is known of the model already; it is described anew where None.
    divided_by
        What else decides how a division into passes rounds, for `exact`.
    rates
        By which what follows a stored prefix is read token by token where that is sooner; None for
        all at once. With `Reuse.EXACT` it is always all at once.
    recorder
        Notes what passes wait for.
    others
        Engines whose rows of the same model are taken, too; None for none.
    placing
        When rows of caches in memory wait for a pass; the usual rules where None.

    Attributes
    ----------
    namespace
        What rows of this model are stored under.
    loaded
        What loading into caches in memory took so far.
    windows
        How long a layer of this model computes in a cache in memory; learns.
    """

    def __init__(
        self,
        store: Store,
        model: Any,
        salt: bytes = b"",
        reuse: Reuse = Reuse.LONGEST,
        chunk_tokens: int | None = CHUNK_TOKENS,
        made_by: Mapping[str, object] | None = None,
        described: Mapping[str, object] | None = None,
        divided_by: Mapping[str, object] | None = None,
        rates: RateSource | None = None,
        recorder: Recorder = SILENT,
        others: OtherMakers | None = None,
        placing: PlacingRules | None = None,
    ) -> None:
        self._store = store
        self._directory = str(store.places.directory)
        self._model = model
        self._salt = salt
        self._reuse, self._chunk_tokens = reuse, chunk_tokens
        self._recorder, self._placing = recorder, placing or PlacingRules()
        self._border = GROUP_TOKENS if reuse is Reuse.LONGEST else _common(chunk_tokens or 1)
        self._shape = ModelShape.from_config(model.config, model.dtype)
        self._layout = RowLayout(self._shape)
        if reuse is Reuse.EXACT:
            rates = NoRates("exact reads all at once")
        rates = rates or NoRates("no rates were given")
        self._ways = WayChooser(rates, self._shape, chunk_tokens)
        self._memory = KeptMemory()
        self.loaded = LoadingCounts()
        self.windows = SlackTable()
        with suppress(SettingsError, OSError):
            kept = KeptWindows.of_user()
            key = WindowKey.of(torch.get_num_threads(), PASSES_IN_MEMORY, self._shape)
            self.windows = kept.table(key) or self.windows
            for file in store.files:
                kept.follow(file.path.parent, file.turns, READERS)
        facts = dict(described if described is not None else DescribedModel(model).facts())
        facts |= {"made": "dense", "made_by": dict(made_by or {})}
        if reuse is Reuse.EXACT:
            facts |= {
                "chunk_tokens": chunk_tokens,
                "threads": torch.get_num_threads(),
                "torch": str(torch.__version__),
                "capability": torch.backends.cpu.get_cpu_capability(),
                "native": [native_library().variants[0].value, PROMPT_ROUNDING],
                "attention": str(getattr(model.config, "_attn_implementation", "")),
                "divided_by": dict(divided_by or {}),
            }
        self._slot = slot_of(self._shape)
        shadow_bytes = 0 if self._slot is None else self._slot.byte_count
        self.namespace = Namespace.of(
            facts, self._shape.layers, self._shape.row_bytes, shadow_bytes
        )
        self._prompts = FoundPrompts(store, self.namespace, salt, others, reuse, facts)

    @property
    def shape(self) -> ModelShape:
        """Shape of the model."""
        return self._shape

    def stored_key(self, ids: Sequence[int]) -> tuple[bytes, int, float] | None:
        """Return what the store has of a prompt; None where nothing.

        Returns
        -------
        The key of its longest stored prefix, how many tokens that has, and the seconds that
        computing it took once.
        """
        found = self._prompts.own(ids)
        if found is None:
            return None
        with found:
            last = found.chunks[-1]
            return last.sheet.group_keys[last.groups - 1], found.tokens, found.cost

    @property
    def counts(self) -> StoreCounts:
        """What the store did for this process."""
        return self._store.counts

    # --- ordinary caches -------------------------------------------------------------------

    def load_into(
        self, cache: OrdinaryCache, ids: Sequence[int], new_tokens: int = _ANSWER_TOKENS
    ) -> int:
        """Fill an empty cache in memory with the longest stored prefix; return its tokens.

        One token at least is left to be computed: its logits are wanted.

        A `DynamicCache` is filled layer by layer while it is used: a pass waits for the rows of a
        layer when it comes to it, and none sees rows that were not compared with their checksums.
        Rows that do not come are computed from `ids` in the middle of the pass, which goes on. Any
        other cache is full when this returns.

        Parameters
        ----------
        cache
            Empty, like `DynamicCache()`.
        ids
            Token numbers of the prompt.
        new_tokens
            How many tokens the answer may have for which room is made at once; any number may
            follow.

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
        with ExitStack() as leased:
            found = self._prompts.find_leased(ids, leased)
            tokens = 0 if found is None else self._usable(found, ids)
            if found is None or not tokens:
                return 0
            self._prompts.note(cache, found)
            self.loaded.prefixes += 1
            self.loaded.tokens += tokens
            if takes_streams(cache):
                room = len(ids) + new_tokens
                cache.layers = self._loading(found, tokens, ids, room).layers()
                # Closed once all rows have landed.
                leased.pop_all()
                return tokens
            held = self._states(tokens, self._model.device)
            try:
                for layer, position, rows in found.stream():
                    held.place(layer, position, rows, tokens)
            except (OSError, WrongBytesError):
                # The store knows; nothing of it has reached the cache.
                return 0
        for layer, (keys, values) in enumerate(held.layers):
            cache.update(keys[None], values[None], layer)
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
            What computing them took. CacheUseError is raised where some layer has fewer tokens.
        """
        if not self._prompts.has_own(cache):
            # Rows of two makers are never joined.
            return 0
        layers = [(one.keys[0], one.values[0]) for one in cache.layers]  # type: ignore[attr-defined]
        held = {keys.shape[1] for keys, _ in layers}
        if len(held) > 1 or min(held) < len(ids):
            raise CacheUseError(
                f"layers hold {sorted(held)} tokens, where the prompt has {len(ids)}: what was "
                "read in stages is stored once complete() has read it whole"
            )

        def rows(layer: int, start: int, out: NDArray[np.uint8]) -> None:
            keys, values = (
                self._layout.round(states[:, start : start + len(out)].to("cpu"))[0]
                for states in layers[layer]
            )
            self._layout.pack(keys, values, out)

        return self._keep(ids, rows, seconds)

    def schedule(self) -> dict[str, int | float]:
        """Return what loading took and what became of the store's writes so far, by name."""
        told: dict[str, int | float] = asdict(self.loaded)
        for file in self._store.files:
            for name, value in file.turns.counts().items():
                told[name] = told.get(name, 0) + value
        return told

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
        before = self.counts.refused_chunks
        recording = None
        # What is behind a border has, in other prompts, the bits of another division.
        whole = ids[: self.whole(len(ids))]
        with ExitStack() as leased:
            facts, found = self._opened(cache, ids, leased)
            if facts.found_tokens:
                way = self.way(facts.found_tokens, len(ids) - facts.found_tokens)
                facts = replace(facts, way=way.way, passes=(way,))
            if whole and not facts.is_of_another and self._prompts.is_own(found):
                recording = cache.record(partial(self._recording, cache, whole, found))
            if recording is not None:
                # It lets the prefix go when it ends.
                leased.pop_all()

        def refused() -> int:
            return self.counts.refused_chunks - before

        return StoredReading(facts, recording, refused, is_asked=bool(whole))

    def fill(self, cache: HillInferCache, ids: Sequence[int]) -> StoreFacts:
        """Give an empty cache the longest stored prefix, and store nothing; else as `open`."""
        with ExitStack() as leased:
            return self._opened(cache, ids, leased)[0]

    def keep_from(self, cache: HillInferCache, ids: Sequence[int], seconds: float = 0.0) -> int:
        """Store the rows of a prompt that a cache of HillInfer holds, read densely.

        Parameters and result as in `keep`.
        """
        return self._keep(ids, cache.copy_rows, seconds)

    def _opened(
        self, cache: HillInferCache, ids: Sequence[int], leased: ExitStack
    ) -> tuple[StoreFacts, StoredPrefix | None]:
        """Give a cache the longest stored prefix; return it where it may go on, to be let go."""
        assert self._slot is not None, "a model with a cache of HillInfer has shadows"
        started = time.perf_counter()
        found = self._prompts.find_leased(ids, leased)
        looked = time.perf_counter() - started
        opened = OpenedRows(0, 0, None)
        if found is not None:
            tokens = self._usable(found, ids)
            stored = StoredRows(
                self._store, found, ids, tokens, self._slot, has_stored_codes(cache)
            )
            try:
                if found.shape.tag_bytes and not can_open():
                    opened = copied(cache, stored, self._states)
                else:
                    opened = cache.open_stored(stored)
            except StoreFailedError:
                raise
            except StoreError as error:
                opened = OpenedRows(0, 0, error)
        failure = opened.failure
        if self.whole(opened.tokens) != opened.tokens:
            # A drive that failed in the middle has left a prefix that ends elsewhere.
            cache.crop(self.whole(opened.tokens) - opened.tokens)
            opened = replace(opened, tokens=self.whole(opened.tokens))
        made_by = self._prompts.maker(found) if opened.tokens else ""
        if failure is not None and found is not None:
            # Wrong bytes are found no more, and what was behind them is stored again. What is found
            # now may be another maker's than what was opened.
            found.close()
            found = self._prompts.find_leased(ids, leased)
        facts = StoreFacts(
            len(ids),
            found_tokens=opened.tokens,
            find_seconds=looked,
            read_seconds=time.perf_counter() - started - looked,
            read_bytes=opened.read_bytes,
            failure=str(failure) if failure is not None else self._failure_of(found),
            directory=self._directory,
            made_by=made_by,
            not_accepted=self._prompts.accepted.refused,
        )
        return facts, found

    def way(self, before: int, tokens: int) -> PassWay:
        """Return how tokens behind so many, of which a store brought the first, are best read."""
        return self._ways.way(before, tokens)

    def question_way(self, before: int, tokens: int, alpha: float) -> PassWay:
        """Return how a question's tokens are best read; parameters as of `WayChooser`."""
        return self._ways.question_way(before, tokens, alpha)

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
        assert self._slot is not None
        first = first_segment if has_stored_codes(cache) else sys.maxsize
        has_values = has_stored_codes(cache) and engine.value_codes is not None
        extra = self._slot.values.byte_count if has_values else 0
        what = self.namespace, ids, found, self._salt
        writer = self._store.writer(*what, leased=published, extra_bytes=extra)
        if writer is None:
            return None
        return Recording(self._store, writer, found, ids, engine, self._slot, first)

    # --- where a prefix may end ------------------------------------------------------------

    def whole(self, tokens: int) -> int:
        """Return how many tokens, at most so many, end where a stored prefix may end."""
        if self._reuse is Reuse.EXACT and self._chunk_tokens is None:
            # A prompt that is read in one pass has no border before its end.
            return 0
        return tokens // self._border * self._border

    def storable(self, made: Made) -> int:
        """Return how many tokens have rows that may be stored."""
        if self._reuse is Reuse.LONGEST:
            return self.whole(made.dense)
        return self.whole(made.even) if made.chunk == self._chunk_tokens else 0

    # --- inside ----------------------------------------------------------------------------

    def _usable(self, found: StoredPrefix, ids: Sequence[int]) -> int:
        """Return how many tokens of a found prefix to take; at least one is computed."""
        tokens = self.whole(min(found.tokens, len(ids) - 1))
        # A pass of a single token selects; the last one does so only where it would anyway.
        size = self._chunk_tokens
        if ends_singly(len(ids) - tokens, size) and not ends_singly(len(ids), size):
            tokens -= self._border
        return max(0, tokens)

    def _loading(self, found: StoredPrefix, tokens: int, ids: Sequence[int], room: int) -> Loading:
        """Begin to land a prefix, which is closed afterwards."""
        held = self._states(room, self._model.device)

        def read(own: Any, start: int, stop: int) -> None:
            Generation(self._model, own, self._chunk_tokens or len(ids)).read(ids[start:stop])

        clock = PassClock(self.windows)
        landing = Landing(
            found,
            tokens,
            self._border,
            held,
            self.loaded,
            self._recorder,
            clock.deadlines(min(len(ids) - tokens, self._chunk_tokens or len(ids)), tokens),
            self._placing,
        )
        batches = [(keys[None], values[None]) for keys, values in held.layers]
        return Loading(landing, batches, tokens, read, clock.passed, self.loaded)

    def _states(self, tokens: int, device: torch.device | str) -> LandedStates:
        kind = self._model.dtype
        return LandedStates(self._shape, self._layout, tokens, kind, device, self._memory)

    def _keep(
        self,
        ids: Sequence[int],
        rows: Callable[[int, int, NDArray[np.uint8]], None],
        seconds: float,
    ) -> int:
        # What is behind a border has, in other prompts, the bits of another division.
        ids = ids[: self.whole(len(ids))]
        found = self._prompts.own(ids)
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


def _common(chunk_tokens: int) -> int:
    """Return the least number of tokens that is whole groups and whole prefill chunks."""
    return int(np.lcm(GROUP_TOKENS, chunk_tokens))
