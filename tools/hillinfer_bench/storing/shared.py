# SPDX-License-Identifier: Apache-2.0
"""Caches that share what a store has: opening a long prompt, a second cache, and their steps."""

from __future__ import annotations

import copy
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hillinfer
from hillinfer.drive.files import round_up
from hillinfer.model_shape import ModelShape
from hillinfer.reuse.described_model import slot_of
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.store.keys import CHUNK_TOKENS
from hillinfer.store.store import Store
from hillinfer_bench.storing.speed import read_plainly
from hillinfer_model.kernel_spec import GROUP_TOKENS

# Rows of Llama-3.1-8B, behind little else: what is timed is what a store changes.
_HEADS, _KV_HEADS, _HEAD_DIM, _HIDDEN, _WORDS = 32, 8, 128, 256, 64
# More than shadows, tails and staging memory take, so that some rows are hot and others cold.
_BUDGET_SHARE = 0.4
_ALLOWED_SECONDS = 0.05
_STEPS = 8
# As large as the codes of a segment and a layer.
_COPIED_BYTES = 512 << 10


@dataclass(frozen=True)
class Steps:
    """Decode steps of one cache: seconds that passed, and of all threads' processors."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class SharedRow:
    """A long stored prompt in caches of one attached model, beside a session of its own.

    Parameters
    ----------
    tokens, layers, shadow_bytes, row_bytes
        What was stored, in all.
    open_seconds
        Of each round, by a store that was just opened: looking the prompt up, until a cache that
        was empty can decode behind it.
    drive_seconds
        Of each round: as many bytes as rows have, in plain reads of 1 MiB.
    memory_seconds
        Of each round: as many bytes as shadows have, copied to memory that was not there before,
        by one thread. Opening can be no faster.
    second_seconds
        Of each round: making another cache while the first is open, and the same there.
    second_bytes
        What came with it of rows in memory and of key shadows, beyond room for its own open group.
    shared, private
        Steps of one token in the second cache, and in turn with each the same step behind a session
        of the same rows, whose attachment has as much memory.
    agrees
        Whether logits of both have the same bits.
    """

    tokens: int
    layers: int
    shadow_bytes: int
    row_bytes: int
    open_seconds: list[float]
    drive_seconds: list[float]
    memory_seconds: list[float]
    second_seconds: list[float]
    second_bytes: int
    shared: Steps
    private: Steps
    agrees: bool

    @property
    def allowed_seconds(self) -> float:
        """What opening may take: the shadow's bytes at the drive's rate, and 50 ms."""
        return self.shadow_bytes / self.row_bytes * median(self.drive_seconds) + _ALLOWED_SECONDS

    @property
    def possible_seconds(self) -> float:
        """What the drive's rate and new memory allow where the one hides behind the other."""
        reading = self.shadow_bytes / self.row_bytes * median(self.drive_seconds)
        return max(reading, median(self.memory_seconds))

    @property
    def step_ratio(self) -> float:
        """A shared step over the private one beside it, median of pairs."""
        pairs = zip(self.shared.wall, self.private.wall, strict=True)
        return median(own / other for own, other in pairs)

    @property
    def processor_ratio(self) -> float:
        """The same in processor time of all steps, which others on the machine change less."""
        return sum(self.shared.processor) / sum(self.private.processor)

    def line(self) -> str:
        """Return it for reading."""
        return (
            f"{self.tokens} tokens in a cache: opened in {1e3 * median(self.open_seconds):.0f} ms "
            f"({1e3 * self.allowed_seconds:.0f} allowed; its memory alone takes "
            f"{1e3 * median(self.memory_seconds):.0f}), a second cache in "
            f"{1e3 * median(self.second_seconds):.1f} ms with {self.second_bytes} bytes more; a "
            f"shared step {1e3 * median(self.shared.wall):.1f} ms, {self.step_ratio:.3f} of a "
            f"session's ({self.processor_ratio:.3f} in processor time), bits "
            f"{'agree' if self.agrees else 'DIFFER'}"
        )


def measure_shared(
    place: Path, tokens: int, layers: int, rounds: int, say: Callable[[str], None]
) -> SharedRow:
    """Store a prompt of made-up rows, and open it in caches.

    Parameters
    ----------
    place
        Where store, session and cold pools are made.
    tokens, layers
        A multiple of 1,024, and how many layers.
    rounds
        How often it is opened; each has eight steps.
    say
        Takes a line of progress.
    """
    place.mkdir()
    model = _model(layers, tokens)
    shape = ModelShape.from_config(model.config, model.dtype)
    slot = slot_of(shape)
    assert slot is not None
    ids = torch.arange(tokens + 1)[None] * 7 % _WORDS
    made = copy.deepcopy(model)
    Store.create(place / "store", int(1.3 * tokens * shape.token_bytes) + (256 << 20))
    shadow_bytes = tokens // CHUNK_TOKENS * layers * slot.byte_count
    budget = int(_BUDGET_SHARE * tokens * shape.token_bytes) + (64 << 20)
    given: dict[str, Any] = {"cold_dir": place, "dram_budget": budget}
    opened: list[float] = []
    plain: list[float] = []
    memory: list[float] = []
    second: list[float] = []
    with torch.no_grad():
        with hillinfer.attach(model, store=place / "store", **given) as hill:
            _fill(hill, ids, layers, place / "session")
        say(f"{tokens} tokens of {layers} layers stored, and saved as a session")
        for _ in range(rounds):
            with (
                Store(place / "store") as store,
                hillinfer.attach(model, store=store, **given) as hill,
                closing(hill.new_cache(tokens + 2)) as one,
            ):
                # The first prompt hashes the model.
                with closing(hill.new_cache(tokens + 2)) as other:
                    other.look_up(ids[:, :CHUNK_TOKENS] * 0 + 1, chunk_tokens=CHUNK_TOKENS)
                opened.append(_timed(partial(_look_up, one, ids)))
                before = hill.statistics()
                began = time.perf_counter()
                with closing(hill.new_cache(tokens + 2)) as other:
                    _look_up(other, ids)
                    second.append(time.perf_counter() - began)
                    after = hill.statistics()
                found = store.find(StoredPrompts(store, model).namespace, ids[0].tolist())
                assert found is not None, store.counts.last_failure
                with found:
                    plain.append(_timed(partial(read_plainly, store, found)))
                memory.append(_timed(partial(_take_memory, shadow_bytes)))
        shared, private, agrees = _steps(model, made, place, given, ids, rounds * _STEPS)
    return SharedRow(
        tokens,
        layers,
        shadow_bytes,
        tokens * shape.token_bytes,
        opened,
        plain,
        memory,
        second,
        sum(getattr(after, name) - getattr(before, name) for name in ("hot_bytes", "shadow_bytes"))
        - GROUP_TOKENS * shape.token_bytes,
        shared,
        private,
        agrees,
    )


def _model(layers: int, tokens: int) -> Any:
    config = LlamaConfig(
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        vocab_size=_WORDS,
        max_position_embeddings=2 * tokens,
    )
    torch.manual_seed(1)
    return LlamaForCausalLM(config).eval()


def _fill(hill: Any, ids: torch.Tensor, layers: int, session: Path) -> None:
    """Store a prompt whose keys and values are noise, as reading it would, and save a session."""
    noise = torch.Generator().manual_seed(1)
    tokens = ids.shape[1] - 1
    with closing(hill.new_cache(tokens + 2)) as cache:
        assert not cache.look_up(ids[:, :tokens], chunk_tokens=CHUNK_TOKENS)
        for start in range(0, tokens, CHUNK_TOKENS):
            size = 1, _KV_HEADS, CHUNK_TOKENS, _HEAD_DIM
            keys, values = (
                [torch.randn(size, generator=noise) for _ in range(layers)] for _ in range(2)
            )
            cache.fill(ids[:, start : start + CHUNK_TOKENS], keys, values)
        cache.end_prompt()
        cache.await_stored()
        assert cache.read_from_store.stored_tokens == tokens, cache.read_from_store
        cache.save_session(session)


def _look_up(cache: Any, ids: torch.Tensor) -> None:
    found = cache.look_up(ids, chunk_tokens=CHUNK_TOKENS)
    assert found == ids.shape[1] - 1, cache.read_from_store


def _steps(
    model: Any, twin: Any, place: Path, given: dict[str, Any], ids: torch.Tensor, count: int
) -> tuple[Steps, Steps, bool]:
    """Make the same steps in a second cache over stored rows, and behind a session, in turn."""
    agrees, both = True, (Steps(), Steps())
    tokens = ids.shape[1] - 1
    with ExitStack() as stack:
        store = stack.enter_context(Store(place / "store"))
        hill = stack.enter_context(hillinfer.attach(model, store=store, **given))
        own = stack.enter_context(hillinfer.attach(twin, **given))
        caches = [
            stack.enter_context(closing(hill.new_cache(tokens + 2 * count))) for _ in range(2)
        ]
        for cache in caches:
            _look_up(cache, ids)
        session = stack.enter_context(
            closing(own.load_session(place / "session", tokens + 2 * count))
        )
        parts = ((model, caches[1], both[0]), (twin, session, both[1]))
        # The first steps fill the hot rows, and are not counted.
        for number, token in enumerate(_tokens(2 * count)):
            logits = []
            for used, cache, steps in parts[:: 1 - 2 * (number % 2)]:
                began, spent = time.perf_counter(), time.process_time()
                output = used(torch.tensor([[token]]), past_key_values=cache)
                if number >= count:
                    steps.wall.append(time.perf_counter() - began)
                    steps.processor.append(time.process_time() - spent)
                logits.append(output.logits)
            agrees = agrees and torch.equal(*logits)
    return *both, agrees


def _tokens(count: int) -> Iterator[int]:
    yield from (13 * number % _WORDS for number in range(count))


def _take_memory(byte_count: int) -> None:
    """Copy bytes that are in a processor's cache to memory that was not there before."""
    source = np.zeros(_COPIED_BYTES, np.uint8)
    size = round_up(byte_count, _COPIED_BYTES)
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        # A kernel that has no huge pages refuses.
        with suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, size, _COPIED_BYTES):
            memory[start : start + _COPIED_BYTES] = source.data


def _timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
