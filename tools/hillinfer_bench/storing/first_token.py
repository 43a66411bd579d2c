# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of a stored prompt, beside computing it again."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import hillinfer
from hillinfer.generate.answering import Generation
from hillinfer.reuse.stored_prompts import StoredPrompts
from hillinfer.store.store import Store
from hillinfer_bench.quality.texts import TextSample
from hillinfer_bench.storing.beside import ReadsBeside
from hillinfer_bench.storing.rivals import (
    CHUNK_FILES,
    SESSION,
    RivalRow,
    measure_chunk_files,
    measure_session,
)

_CHUNK_TOKENS = 1024


@dataclass(frozen=True)
class FirstToken:
    """One prompt, in a cache of transformers.

    Parameters
    ----------
    stored_tokens, new_tokens
        Of the prompt: what the store has, and what is computed behind it.
    recompute_seconds
        Reading the whole prompt, as transformers does.
    stored_seconds
        Of each round: looking up, and computing the rest while rows are read into a new cache.
    compute_seconds
        Of each round, in turn with those: computing the rest alone, behind rows that are in memory.
    read_seconds
        Of each round: looking up and reading alone, until the last row is in its place.
    processor_seconds, reading_processor_seconds
        Of each round: processor time of all threads, of computing alone and reading alone together,
        and what of that reading alone took.
    first_layer_seconds, first_layer_processor_seconds
        Of each round: looking up and reading until the first layer's rows are there, and processor
        time of that. No layer can compute meanwhile.
    cores
        How many the process may use.
    bubble_seconds, placing_seconds
        Of each round: what layers waited for rows, and what the pass took to place them itself.
    stored_processor_seconds
        Of each round: processor time of all threads while `stored_seconds` passed.
    compute_faults, stored_faults
        Of each round: pages that the system had to bring meanwhile. Those are the heap's, which
        gives memory back in some passes and not in others.
    beside_seconds
        Of each round: computing the rest behind rows that are in memory, while the drive reads as
        many bytes as those behind the first layer and nobody looks at them.
    agrees
        Whether the first token is the same.
    rivals
        The same in other ways, in the same run.
    """

    stored_tokens: int
    new_tokens: int
    recompute_seconds: float
    stored_seconds: list[float]
    compute_seconds: list[float]
    read_seconds: list[float]
    processor_seconds: list[float]
    reading_processor_seconds: list[float]
    first_layer_seconds: list[float]
    first_layer_processor_seconds: list[float]
    cores: int
    bubble_seconds: list[float]
    placing_seconds: list[float]
    stored_processor_seconds: list[float]
    compute_faults: list[int]
    stored_faults: list[int]
    beside_seconds: list[float]
    agrees: bool
    rivals: list[RivalRow]

    @property
    def speedup(self) -> float:
        """Of the stored prompt over computing it again."""
        return self.recompute_seconds / median(self.stored_seconds)

    @property
    def allowed_seconds(self) -> float:
        """1.15 times the larger of reading and computing, and 50 ms."""
        return 1.15 * self.larger_seconds + 0.05

    @property
    def larger_seconds(self) -> float:
        """The larger of reading and computing: what a drive and a processor apart would need."""
        return max(median(self.compute_seconds), median(self.read_seconds))

    @property
    def possible_seconds(self) -> float:
        """What arithmetic allows.

        The first layer waits for its rows. From then on reading checks, widens and places rows on
        the cores that compute. And no pass is faster than one beside the drive's reads alone.
        """
        first = median(self.first_layer_seconds)
        busy = median(self.processor_seconds) - median(self.first_layer_processor_seconds)
        rest, compute = median(self.read_seconds) - first, median(self.compute_seconds)
        return first + max(compute, compute + self.drive_seconds, rest, busy / self.cores)

    @property
    def drive_seconds(self) -> float:
        """What plain reads of the same bytes beside it add to a pass, median of rounds.

        Interrupts, the kernel's part of reading and the drive's way to memory: no processor time of
        this process shows all of that where the machine is idle meanwhile.
        """
        both = zip(self.beside_seconds, self.compute_seconds, strict=True)
        return median(beside - alone for beside, alone in both)

    @property
    def hidden_possible(self) -> float:
        """The share of the smaller that can be hidden at most, by what arithmetic allows."""
        compute, read = median(self.compute_seconds), median(self.read_seconds)
        return (compute + read - self.possible_seconds) / min(compute, read)

    @property
    def hidden_reached(self) -> float:
        """The share of the smaller of reading and computing that is hidden, median of rounds.

        Each round is compared with itself: a machine that is slower for a while is so in all three.
        """
        rounds = zip(self.compute_seconds, self.read_seconds, self.stored_seconds, strict=True)
        return median((one + two - both) / min(one, two) for one, two, both in rounds)

    @property
    def shared_processor_seconds(self) -> float:
        """What both take more of the processors at once than apart, median of rounds."""
        both = zip(self.stored_processor_seconds, self.processor_seconds, strict=True)
        return median(together - apart for together, apart in both)

    def line(self) -> str:
        """Return what can be hidden and what is, for reading."""
        reading = median(self.reading_processor_seconds)
        computing = median(self.processor_seconds) - reading
        reached, most = self.hidden_reached, self.hidden_possible
        waited, placed = median(self.bubble_seconds), median(self.placing_seconds)
        return (
            f"  processor seconds on {self.cores} cores: reading {reading:.3f}, computing "
            f"{computing:.3f}; {1e3 * median(self.first_layer_seconds):.1f} ms until the first "
            f"layer's rows are there. The drive's reads alone add {1e3 * self.drive_seconds:.1f} "
            f"ms to a pass beside them. That leaves {most:.0%} of the smaller to be hidden; "
            f"{reached:.0%} is: the pass waited {1e3 * waited:.1f} ms for rows and took "
            f"{1e3 * placed:.1f} to place them. At once both take "
            f"{1e3 * self.shared_processor_seconds:+.1f} processor ms beyond those apart; page "
            f"faults: computing {median(self.compute_faults):.0f}, both "
            f"{median(self.stored_faults):.0f}"
        )


def measure_first_token(
    place: Path,
    model: Any,
    sample: TextSample,
    new_tokens: int,
    rounds: int,
    say: Callable[[str], None],
) -> FirstToken:
    """Read a text, store it, and read it from the store.

    Parameters
    ----------
    place
        Where the store is made.
    model
        Of transformers, unmodified.
    sample
        The text.
    new_tokens
        How many of its last tokens are not stored.
    rounds
        How often rivals read it. From the store it is read three times as often, and once more to
        warm up: what is hidden is a small difference of large figures.
    say
        Takes a line of progress.
    """
    from transformers import DynamicCache

    ids = list(sample.token_ids)
    held = len(ids) - new_tokens
    Store.create(place, 2 << 30)
    full = DynamicCache(config=model.config)
    generation = Generation(model, full, _CHUNK_TOKENS)
    seconds = -time.perf_counter()
    generation.read(ids)
    seconds += time.perf_counter()
    expected = _next_token(generation)
    say(f"{len(ids)} tokens computed in {seconds:.1f} s")
    stored: list[float] = []
    computed: list[float] = []
    read: list[float] = []
    waited: list[float] = []
    placed: list[float] = []
    busy_both: list[float] = []
    faults: list[int] = []
    faults_both: list[int] = []
    busy: list[float] = []
    busy_reading: list[float] = []
    first: list[float] = []
    busy_first: list[float] = []
    beside: list[float] = []
    agrees = True
    with Store(place) as store:
        prompts = StoredPrompts(store, model)
        own = _cut(full, held)
        prompts.keep(own, ids[:held], seconds * held / len(ids))
        del full, generation
        found = store.find(prompts.namespace, ids)
        assert found is not None, store.counts.last_failure
        drive = ReadsBeside(store, found)
        # The first round warms up, memory and drive, and is not counted.
        for turn in range(3 * rounds + 1):
            if turn == 1:
                timed = stored, computed, read, waited, placed, busy, busy_reading
                for row in (*timed, first, busy_first, busy_both, faults, faults_both, beside):
                    row.clear()
            began, spent = time.perf_counter(), time.process_time()
            cache = DynamicCache(config=model.config)
            tokens = prompts.load_into(cache, ids)
            for number, layer in enumerate(cache.layers):
                # Whoever looks at rows waits for them.
                assert layer.keys is not None
                if not number:
                    first.append(time.perf_counter() - began)
                    busy_first.append(time.process_time() - spent)
            # It would keep a part of this cache from the next one, in every other round another.
            del layer
            loaded, brought = time.perf_counter(), _faults()
            busy_reading.append(time.process_time() - spent)
            agrees = agrees and _rest(model, cache, ids[tokens:]) == expected
            ended = time.perf_counter()
            read.append(loaded - began)
            computed.append(ended - loaded)
            faults.append(_faults() - brought)
            busy.append(time.process_time() - spent)
            before = prompts.loaded.bubble_seconds, prompts.loaded.placing_seconds
            began, spent, brought = time.perf_counter(), time.process_time(), _faults()
            cache = DynamicCache(config=model.config)
            tokens = prompts.load_into(cache, ids)
            agrees = agrees and _rest(model, cache, ids[tokens:]) == expected
            stored.append(time.perf_counter() - began)
            busy_both.append(time.process_time() - spent)
            faults_both.append(_faults() - brought)
            waited.append(prompts.loaded.bubble_seconds - before[0])
            placed.append(prompts.loaded.placing_seconds - before[1])
            cache = DynamicCache(config=model.config)
            tokens = prompts.load_into(cache, ids)
            assert all(layer.keys is not None for layer in cache.layers)
            with drive:
                began = time.perf_counter()
                agrees = agrees and _rest(model, cache, ids[tokens:]) == expected
                beside.append(time.perf_counter() - began)
        found.close()
        assert not prompts.loaded.recomputed_tokens, store.counts.last_failure
        rivals = _rivals(place.with_name("rivals"), model, prompts, own, ids, expected, rounds)
    return FirstToken(
        tokens,
        len(ids) - tokens,
        seconds,
        stored,
        computed,
        read,
        busy,
        busy_reading,
        first,
        busy_first,
        len(os.sched_getaffinity(0)),
        waited,
        placed,
        busy_both,
        faults,
        faults_both,
        beside,
        agrees,
        rivals,
    )


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _rest(model: Any, cache: Any, ids: list[int]) -> int:
    """Return the first token behind some that are read into a cache."""
    own = Generation(model, cache, _CHUNK_TOKENS)
    with hillinfer.grouped_query(model):
        own.read(ids)
        return _next_token(own)


def _rivals(
    place: Path,
    model: Any,
    prompts: StoredPrompts,
    held: Any,
    ids: Sequence[int],
    expected: int,
    rounds: int,
) -> list[RivalRow]:
    """Measure what else a first token can come from; what fails has a row that says so."""
    place.mkdir()
    files, session = place / "files", place / "session"
    files.mkdir()

    def of_session() -> RivalRow:
        with hillinfer.attach(model, cold_dir=place) as hill:
            # One token at least is left to be computed, and the session has none of it.
            before = [*ids[: held.get_seq_length()], 0]
            return measure_session(
                session, hill, lambda own: prompts.fill(own, before), ids, rounds
            )

    ways = {
        CHUNK_FILES: lambda: measure_chunk_files(files, model, held, ids, expected, rounds),
        SESSION: of_session,
    }
    rows = []
    for name, way in ways.items():
        try:
            rows.append(way())
        except Exception as error:
            rows.append(RivalRow(name, skipped=f"it failed: {type(error).__name__}: {error}"))
    return rows


def _next_token(generation: Generation) -> int:
    from hillinfer.generate.tokens import Sampling

    (token,) = generation.decode(Sampling(), 1, frozenset())
    return token


def _cut(cache: Any, tokens: int) -> Any:
    """Return a cache of the first tokens of another one, which stays."""
    from transformers import DynamicCache

    own = DynamicCache()
    for layer, one in enumerate(cache.layers):
        own.update(one.keys[:, :, :tokens], one.values[:, :, :tokens], layer)
    return own
