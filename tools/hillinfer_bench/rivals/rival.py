# SPDX-License-Identifier: Apache-2.0
"""The base class of rivals: setup, counters, and the interface that all implement."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.files import aligned_buffer
from hillinfer.errors import BudgetError, CacheUseError, SettingsError
from hillinfer.kv.sequence import RowLayout
from hillinfer.model_shape import ModelShape
from hillinfer.settings import IOChoice
from hillinfer.values import format_bytes


@dataclass(frozen=True)
class Traffic:
    """Running totals of one rival, in bytes and steps.

    Parameters
    ----------
    drive_reads
        Reads of the drive.
    drive_read_bytes, drive_write_bytes
        What went over the drive's wire, alignment and gaps read through included.
    dram_bytes, dram_peak_bytes
        Held now, and the most ever held at once: rows, tails, shadows of keys, tables and buffers.
    steps
        Decode steps begun.
    """

    drive_reads: int
    drive_read_bytes: int
    drive_write_bytes: int
    dram_bytes: int
    dram_peak_bytes: int
    steps: int


@dataclass(frozen=True)
class RivalSetup:
    """The same for every rival of a comparison.

    Parameters
    ----------
    shape
        The model's.
    batch
        Sequences, numbered from 0.
    context
        Tokens expected in each at the end, prompt and answer; more are refused.
    budget_bytes
        M0: everything that a rival holds in DRAM, but for `full-memory`, which has no bound.
    alpha
        Importance rate: the fraction of the current length that is selected, in (0, 1].
    cold_dir
        An existing directory on the drive.
    io
        How rows are read.
    calls
        How the drive is reached.
    block_rows
        Rows that torch scores, and without the native library attends to, at a time.
    ahead_rows
        Rows that may be read before their layer attends, as many as HillInfer's landing area has.
    threads
        Reads in flight without io_uring.
    kept_sinks, kept_recent
        Tokens that are always selected: the first and the most recent ones.
    selections
        For benchmarks on random weights: which positions a rival that selects attends to, int64
        ascending, by layer, row and length. It ranks as ever and then takes these in place of its
        own. None where it selects by itself.
    block_bytes, piece_bytes, window_bytes
        Most bytes of a large sequential read, of a piece of scattered reads (enough that the
        drive's queue is empty for a small part of the time only), and of what `full-swap` maps at
        once; each is rounded to whole groups, at least one.
    form
        How `full-memory` holds and attends to its cache, such as `sdpa over float32`, or what
        attends to codes of few bits; None for the fastest.

    Raises
    ------
    SettingsError
        Where a value is outside what it allows.
    """

    shape: ModelShape
    batch: int
    context: int
    budget_bytes: int
    alpha: float
    cold_dir: Path
    io: IOChoice = IOChoice.AUTO
    calls: DriveCalls = field(default_factory=DriveCalls)
    block_rows: int = 1024
    ahead_rows: int = 4 * 512
    threads: int = 16
    kept_sinks: int = 4
    kept_recent: int = 32
    selections: Callable[[int, int, int], NDArray[np.int64]] | None = None
    block_bytes: int = 4 << 20
    piece_bytes: int = 4 << 20
    window_bytes: int = 1 << 20
    form: str | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "context", "block_rows", "threads", "kept_recent"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}={getattr(self, name)}: at least 1 is needed")
        for name in ("kept_sinks", "budget_bytes", "ahead_rows"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name}={getattr(self, name)} must be 0 or more")
        if not 0.0 < self.alpha <= 1.0:
            raise SettingsError(
                f"alpha={self.alpha} is outside (0, 1]; 0.1 selects a tenth of the tokens"
            )

    @property
    def kept_tokens(self) -> int:
        """Tokens that are always selected."""
        return self.kept_sinks + self.kept_recent

    @property
    def units(self) -> int:
        """Layers times sequences."""
        return self.shape.layers * self.batch


class Meter:
    """Hands out the memory of one rival and counts it; any thread may use it.

    Parameters
    ----------
    budget_bytes
        The most that may be held at once; None for no bound.
    """

    def __init__(self, budget_bytes: int | None) -> None:
        self._budget = budget_bytes
        self._lock = threading.Lock()
        self._reads = self._read = self._written = self._held = self._peak = self._steps = 0

    @property
    def free_bytes(self) -> int:
        """What is left of the budget; 0 without one."""
        return max(0, (self._budget or 0) - self._held)

    def buffer(self, byte_count: int) -> NDArray[np.uint8]:
        """Return page-aligned bytes, counted for the rival's life; BudgetError where too many."""
        self.hold(byte_count)
        return aligned_buffer(byte_count)[:byte_count]

    def array(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return a zeroed array, counted as in `buffer`."""
        self.hold(prod(shape) * np.dtype(dtype).itemsize)
        return np.zeros(shape, dtype)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of unset values, counted as in `buffer`."""
        self.hold(prod(shape) * dtype.itemsize)
        return torch.empty(shape, dtype=dtype)

    def hold(self, byte_count: int) -> None:
        """Count bytes held; BudgetError where they do not fit the budget."""
        with self._lock:
            if self._budget is not None and self._held + byte_count > self._budget:
                raise BudgetError(
                    f"a DRAM budget of {format_bytes(self._budget)} is too small for this rival: "
                    f"it needs {format_bytes(self._held + byte_count)} or more; raise budget_bytes"
                )
            self._held += byte_count
            self._peak = max(self._peak, self._held)

    def hold_beyond(self, byte_count: int) -> None:
        """Count bytes held, whether they fit the budget or not."""
        with self._lock:
            self._held += byte_count
            self._peak = max(self._peak, self._held)

    def release(self, byte_count: int) -> None:
        """Count bytes given back."""
        with self._lock:
            self._held -= byte_count

    def count_reads(self, reads: int, byte_count: int) -> None:
        """Count reads of the drive, and the bytes that they brought together."""
        with self._lock:
            self._reads += reads
            self._read += byte_count

    def count_write(self, byte_count: int) -> None:
        """Count bytes written to the drive."""
        with self._lock:
            self._written += byte_count

    def count_step(self) -> None:
        """Count a decode step."""
        self._steps += 1

    def traffic(self) -> Traffic:
        """Return the totals."""
        counts = self._reads, self._read, self._written, self._held, self._peak, self._steps
        return Traffic(*counts)


class Rival(ABC):
    """The KV of several sequences, attended to in decode the way another system does.

    A step is `begin_step`, then for every layer in order `append` and `attend` of every sequence;
    appends of a layer may all come before its attends. A context manager that closes.

    Parameters
    ----------
    setup
        The same for all rivals of a comparison.

    Raises
    ------
    BudgetError
        Where the budget cannot hold what this rival must hold.
    ColdPoolError
        Where the drive or its directory cannot be used.
    """

    wants_prediction: ClassVar[bool] = False
    """Whether `predict` is worth calling."""
    bounded: ClassVar[bool] = True
    """Whether the rival keeps within the budget."""
    holds_prompt: ClassVar[bool] = False
    """Whether prompts are held in memory, beyond the budget and not on the drive, until they are
    cut."""
    direct: ClassVar[bool] = True
    """Whether its reads of the drive pass the page cache by, where that can be."""

    def __init__(self, setup: RivalSetup) -> None:
        self.setup = setup
        self.layout = RowLayout(setup.shape)
        self.meter = Meter(setup.budget_bytes if self.bounded else None)
        self.lengths = [[0] * setup.batch for _ in range(setup.shape.layers)]

    @classmethod
    def memory_share(cls) -> float:
        """Return the most memory of a rival without a bound, over the rows of all tokens."""
        return 2.0

    def scored_token_bytes(self) -> float:
        """Return the bytes per token of a sequence, all layers, that a step reads only to rank."""
        return 0.0

    def attended_token_bytes(self) -> float:
        """Return the least bytes per token of a sequence, all layers, that attention reads.

        From memory, over all tokens: where only some are attended to, their share of it. The rows
        of the importance rate's tokens, where not said otherwise.
        """
        return self.setup.alpha * self.setup.shape.token_bytes

    def describe(self) -> str:
        """Return in a few words what this rival chose for itself."""
        return ""

    @abstractmethod
    def fill(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take more of a sequence's prompt, without attention.

        Parameters
        ----------
        layer, row
            Which layer of which sequence.
        keys, values
            Stored type, (kv_heads, tokens, head_dim), on the CPU.

        Raises
        ------
        CacheUseError
            Where the sequence gets longer than `setup.context`.
        """

    # Most rivals have no use for this one, nor for `predict`.
    def observe(  # noqa: B027
        self, layer: int, row: int, queries: torch.Tensor, scaling: float
    ) -> None:
        """Look at the last queries of the prompt, after `fill`.

        Parameters
        ----------
        layer, row
            Which layer of which sequence.
        queries
            (query_heads, n, head_dim), those of the last n tokens.
        scaling
            Factor on inner products.
        """

    def begin_step(self) -> None:
        """Learn that the next decode step begins."""
        self.meter.count_step()

    def predict(  # noqa: B027
        self, layer: int, query: torch.Tensor, scaling: float
    ) -> None:
        """Learn a layer's approximate queries before the layer is reached.

        Only useful where `wants_prediction`; anything may be left out, and a layer without
        prediction is attended to with its true query alone.

        Parameters
        ----------
        layer
            The layer that comes next.
        query
            (batch, query_heads, 1, head_dim).
        scaling
            Factor on inner products.
        """

    @abstractmethod
    def append(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take the KV of one new token; shapes and errors as in `fill`, with one token."""

    @abstractmethod
    def attend(self, layer: int, row: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend with the newest token's query.

        Parameters
        ----------
        layer, row
            Where the token was just appended.
        query
            (query_heads, 1, head_dim).
        scaling
            Factor on inner products.

        Returns
        -------
        (query_heads, 1, head_dim) in the query's type.
        """

    def traffic(self) -> Traffic:
        """Return what was read, written and held so far."""
        return self.meter.traffic()

    def settle(self) -> None:
        """Wait for what steps have left under way, such as reads for the next one."""
        # Totals have it all in them, so they wait for it.
        self.traffic()

    @abstractmethod
    def close(self) -> None:
        """Give memory, threads and the drive's space back; harmless when done twice."""

    def grow(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Check new keys and values, count their tokens and return the length before."""
        shape, start = self.setup.shape, self.lengths[layer][row]
        expected = (shape.kv_heads, keys.shape[1] if keys.ndim == 3 else 1, shape.head_dim)
        kind = self.layout.stored_type
        if not tuple(keys.shape) == tuple(values.shape) == expected or not (
            keys.dtype == values.dtype == kind
        ):
            raise CacheUseError(
                f"keys {tuple(keys.shape)} {keys.dtype} and values {tuple(values.shape)} "
                f"{values.dtype} of layer {layer}: both must be {expected} {kind}"
            )
        if start + keys.shape[1] > self.setup.context:
            raise CacheUseError(
                f"{start + keys.shape[1]} tokens in sequence {row}, but context="
                f"{self.setup.context}: make the rival with a larger context"
            )
        self.lengths[layer][row] = start + keys.shape[1]
        return start

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
