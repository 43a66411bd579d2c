# SPDX-License-Identifier: Apache-2.0
"""The worker's loads: rows of a step's prompts come layer by layer while layers compute."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from hillinfer.arrived_rows import ArrivedRows, ReadRows, Taker
from hillinfer.store.keys import CHUNK_TOKENS, Namespace
from hillinfer.store.store import Store
from hillinfer_model.kernel_spec import GROUP_TOKENS
from hillinfer_vllm.adapters import adapted
from hillinfer_vllm.kv_blocks import FIELDS, KvBlocks
from hillinfer_vllm.step_plan import PlannedLoad

# A read's rows are small beside what Python takes for each.
_LAYERS_AT_ONCE = 4


@dataclass
class TransferCounts:
    """What loading and storing did, running totals.

    Parameters
    ----------
    loaded_tokens, loaded_bytes
        Rows that were brought to their blocks.
    waited_seconds
        What forward passes waited for rows.
    loading_seconds
        From the first read to the last row in its block.
    accepted_tokens
        Those of them whose rows another engine made.
    failed_loads
        Requests whose rows did not come; vLLM computes them anew.
    stored_tokens, stored_bytes
        Rows that were given to the store.
    storing_seconds
        What forward passes took to take rows from their blocks.
    """

    loaded_tokens: int = 0
    loaded_bytes: int = 0
    waited_seconds: float = 0.0
    loading_seconds: float = 0.0
    accepted_tokens: int = 0
    failed_loads: int = 0
    stored_tokens: int = 0
    stored_bytes: int = 0
    storing_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def add(self, **amounts: float) -> None:
        """Add amounts by name, in any thread."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def by_name(self) -> dict[str, float]:
        """Return the totals by name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True)
class WorkerSide:
    """What a worker's loads and saves have in common.

    Parameters
    ----------
    store, namespace
        Where rows come from and go to.
    layers
        Blocks of each layer by its name, in the model's order.
    counts
        Where they count.
    """

    store: Store
    namespace: Namespace
    layers: Mapping[str, KvBlocks]
    counts: TransferCounts

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's rows in all layers."""
        return sum(one.row_bytes for one in self.layers.values())

    def numbers(self) -> dict[str, int]:
        """Return the number of each layer by its name."""
        return {name: number for number, name in enumerate(self.layers)}


class _Placing(Taker):
    """Checks rows and puts them to their blocks, in the threads that read them.

    Each read is placed once it is there, by the thread that made it and without Python. Several
    layers come at once, so that Python is asked for little beside a pass.

    Parameters
    ----------
    plan
        Which rows, and which blocks they go to.
    layers
        Blocks of each layer, in the model's order.
    there
        Told of each layer all of whose rows are in their blocks.
    """

    most_layers = _LAYERS_AT_ONCE
    places_reads = True

    def __init__(
        self, plan: PlannedLoad, layers: Sequence[KvBlocks], there: Sequence[threading.Event]
    ) -> None:
        self._wanted = range(plan.first, plan.stop)
        self._blocks = np.array(plan.blocks, np.int64)
        self._layers, self._there = layers, there
        self._missing = [len(self._wanted)] * len(layers)
        self._lock = threading.Lock()
        groups = -(-plan.stop // CHUNK_TOKENS) * CHUNK_TOKENS // GROUP_TOKENS
        self._fields = np.stack([one.fields(self._wanted, self._blocks) for one in layers])
        self._sums = np.zeros((len(layers), groups), np.uint32)
        self._is_placed = np.zeros((len(layers), groups), np.bool_)

    @property
    def is_missing(self) -> bool:
        """Whether rows did not come."""
        return any(self._missing)

    def take(self, arrived: Iterable[ArrivedRows]) -> None:
        """Place rows that were just read, and compare what was placed with its checksums."""
        for one in arrived:
            at = one.position // GROUP_TOKENS
            own = one.layer, slice(at, at + len(one.salts))
            sums = self._sums[own] if self._is_placed[own].all() else self._landed(one)
            one.check(sums)
            first = max(one.position, self._wanted.start)
            stop = min(one.position + len(one.rows), self._wanted.stop)
            with self._lock:
                self._missing[one.layer] -= max(0, stop - first)
                if not self._missing[one.layer]:
                    self._there[one.layer].set()

    def during(self, rows: ReadRows) -> NDArray[np.int64]:
        """Return where rows of each read go, and where their checksums do."""
        given = self._fields[rows.layers]
        groups = rows.positions // GROUP_TOKENS
        sums = rows.layers * self._sums.shape[1] + groups
        for name, own in (
            ("rows", rows.addresses),
            ("tokens", rows.tokens),
            ("position", rows.positions),
            ("salts", rows.salts),
            ("sums", sums * self._sums.itemsize + self._sums.ctypes.data),
        ):
            given[:, FIELDS[name]] = own
        ends = groups + rows.tokens // GROUP_TOKENS
        for layer, first, stop in zip(rows.layers, groups, ends, strict=True):
            self._is_placed[layer, first:stop] = True
        return given

    def _landed(self, one: ArrivedRows) -> NDArray[np.uint32]:
        blocks = self._layers[one.layer]
        return blocks.land(one.rows, one.position, self._wanted, self._blocks, one.salts)


class _Load:
    """One request's rows on their way.

    Parameters
    ----------
    plan
        Which rows, and which blocks they go to.
    side
        Where they come from and go to.
    """

    def __init__(self, plan: PlannedLoad, side: WorkerSide) -> None:
        self.plan = plan
        # Until all rows are there: whatever ends it before is a failure.
        self.failed = True
        self._side, self._layers = side, list(side.layers.values())
        self._there = [threading.Event() for _ in self._layers]
        self._thread = threading.Thread(target=self._run, name="hillinfer-vllm-load")
        self._thread.start()

    @property
    def blocks(self) -> set[int]:
        """Blocks that it fills."""
        size = self._layers[0].block_tokens
        return set(self.plan.blocks[self.plan.first // size : self.plan.stop // size])

    def wait(self, layer: int) -> None:
        """Wait until a layer's rows are in their blocks, or will not come."""
        self._there[layer].wait()

    def join(self) -> None:
        """Wait until it is over."""
        self._thread.join()

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            # What goes wrong is the store's to say, which was told; here it is a miss.
            with suppress(Exception):
                self._bring()
                self.failed = False
        finally:
            seconds, tokens = time.perf_counter() - started, self.plan.stop - self.plan.first
            counts = self._side.counts
            if self.failed:
                counts.add(loading_seconds=seconds, failed_loads=1)
            else:
                size = tokens * self._side.token_bytes
                counts.add(loading_seconds=seconds, loaded_tokens=tokens, loaded_bytes=size)
                if self.plan.namespace is not None:
                    counts.add(accepted_tokens=tokens)
            for there in self._there:
                there.set()

    def _bring(self) -> None:
        plan, side = self.plan, self._side
        space = plan.namespace or adapted(side.namespace, plan.prompt.adapter)
        found = side.store.find(space, plan.prompt.ids, plan.prompt.salt)
        if found is None:
            raise LookupError("the stored prefix is gone")
        with found:
            if found.tokens < plan.stop:
                raise LookupError("the stored prefix is shorter than it was")
            chunks, covered = 0, 0
            while covered < plan.stop:
                covered += found.chunks[chunks].groups * GROUP_TOKENS
                chunks += 1
            placing = _Placing(plan, self._layers, self._there)
            for _ in found.stream(chunks=chunks, taker=placing):
                pass
        if placing.is_missing:
            raise LookupError("rows are missing")


class Loads:
    """Loads of one step; one thread begins and waits for them.

    Parameters
    ----------
    side
        Where rows come from and go to.
    """

    def __init__(self, side: WorkerSide) -> None:
        self._side, self._numbers = side, side.numbers()
        self._under_way: list[_Load] = []
        self._failed: set[int] = set()

    @property
    def layers(self) -> list[str]:
        """Names of the layers, in the model's order."""
        return list(self._side.layers)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return next(iter(self._side.layers.values())).block_tokens

    def begin(self, plans: Sequence[PlannedLoad]) -> None:
        """Have the rows of a step come."""
        self._under_way = [_Load(plan, self._side) for plan in plans]

    def wait(self, layer: str) -> None:
        """Wait until one layer's rows are in their blocks."""
        if not self._under_way:
            return
        started = time.perf_counter()
        for load in self._under_way:
            load.wait(self._numbers[layer])
        self._side.counts.add(waited_seconds=time.perf_counter() - started)

    def end(self) -> set[int]:
        """Wait until nothing is on its way; return the step's blocks whose rows did not come."""
        failed: set[int] = set()
        for load in self._under_way:
            load.join()
            if load.failed:
                failed |= load.blocks
        self._under_way = []
        self._failed |= failed
        return failed

    def failed_blocks(self) -> set[int]:
        """Return the blocks whose rows did not come, once."""
        failed, self._failed = self._failed, set()
        return failed
