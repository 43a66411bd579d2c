# SPDX-License-Identifier: Apache-2.0
"""Rows of the report and figures made of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from hillinfer_bench.systems.system import Counted

LARGEST_SPREAD = 0.2


@dataclass(frozen=True)
class Timing:
    """Milliseconds per decode step, all sequences of the batch together.

    Parameters
    ----------
    minimum, median
        Of the steps.
    spread
        What lies between the 10th and the 90th percentile, over the median.
    steps
        How many were measured.
    """

    minimum: float
    median: float
    spread: float
    steps: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Return the figures of at least one step."""
        low, median, high = np.percentile(seconds, (10, 50, 90)) * 1e3
        return cls(min(seconds) * 1e3, float(median), float((high - low) / median), len(seconds))

    @property
    def flagged(self) -> bool:
        """Whether the spread is too large for the median to mean much."""
        return self.spread > LARGEST_SPREAD


LIMIT_LABEL = (
    "modelled: the larger of the drive's and the memory's time; both overlap and nothing is "
    "computed. The drive's is its bytes over its rate, and for each read what one takes beside its "
    "bytes; the memory's is bytes of KV, shadow and weights that a step reads over its rate. "
    "serial: their sum, nothing overlaps. Each rate is the best of what was measured at the start "
    "and between the turns of the case's own steps, memory's for a tenth of a second or more each "
    "time; memory's also of what the case's fastest floor step read its weights with, the drive's "
    "also the mean bytes of any system's steps over its fastest step. What a "
    "read takes is the least that scattered reads of several sizes took beside their bytes. A row "
    "that is faster still is flagged"
)
# Clocks and rates move by some percent between a measurement and a step beside it, and the fastest
# of many steps may have read a little less than the mean.
LIMIT_TOLERANCE = 0.05


@dataclass(frozen=True)
class MachineRates:
    """What memory and drive give at best: limits are made of it.

    Parameters
    ----------
    memory
        Bytes per second of reading memory for a tenth of a second or more, with all compute
        threads: the fastest of all that can read it.
    drive
        Bytes per second of the fastest batch of reads of 1 MiB past the page cache, in order or at
        random, with the product's own read engine.
    scattered
        Of some sizes of scattered reads, many in flight: bytes, and seconds of each in the fastest
        batch.
    """

    memory: float
    drive: float
    scattered: tuple[tuple[int, float], ...] = ()

    @property
    def read_seconds(self) -> float:
        """What a read takes beside its bytes at the drive's rate, at least.

        No size that was measured is faster than bytes over the rate and this for each read.
        """
        beside = [seconds - size / self.drive for size, seconds in self.scattered]
        return max(0.0, min(beside, default=0.0))

    def best_of(self, others: Iterable[MachineRates]) -> MachineRates:
        """Return the best of these and others, each by itself."""
        every = (self, *others)
        least: dict[int, float] = {}
        for one in every:
            for size, seconds in one.scattered:
                least[size] = min(seconds, least.get(size, seconds))
        return MachineRates(
            max(one.memory for one in every),
            max(one.drive for one in every),
            tuple(sorted(least.items())),
        )

    @classmethod
    def middle_of(cls, samples: Sequence[MachineRates]) -> MachineRates:
        """Return the median of at least one measurement, each rate by itself."""
        taken: dict[int, list[float]] = {}
        for one in samples:
            for size, seconds in one.scattered:
                taken.setdefault(size, []).append(seconds)
        return cls(
            median(one.memory for one in samples),
            median(one.drive for one in samples),
            tuple((size, median(taken[size])) for size in sorted(taken)),
        )

    def shown_by_step(self, byte_count: float, milliseconds: float) -> MachineRates:
        """Return the rates with a drive no slower than a step has shown it to be.

        Parameters
        ----------
        byte_count
            What a step of its system read from the drive, in the mean.
        milliseconds
            How long it took.
        """
        return replace(self, drive=max(self.drive, byte_count / milliseconds * 1e3))

    def shown_by_floor(self, weight_bytes: int, floor_ms: float) -> MachineRates:
        """Return the rates with a memory no slower than a floor step has shown it to be.

        Parameters
        ----------
        weight_bytes
            Weights that each step reads.
        floor_ms
            The fastest step without a context.
        """
        return replace(self, memory=max(self.memory, weight_bytes / floor_ms * 1e3))


@dataclass(frozen=True)
class Limit:
    """Least milliseconds of one decode step; see `LIMIT_LABEL`.

    Parameters
    ----------
    drive_ms, memory_ms
        Reading from each alone.
    """

    drive_ms: float
    memory_ms: float

    @classmethod
    def of(cls, counted: Counted, steps: int, weight_bytes: int, rates: MachineRates) -> Limit:
        """Return the limit of one step.

        Parameters
        ----------
        counted
            Totals of so many steps.
        steps
            How many.
        weight_bytes
            Weights that each step reads.
        rates
            The machine's.
        """
        drive = counted.drive_read_bytes / steps / rates.drive
        drive += counted.drive_reads / steps * rates.read_seconds
        memory = (counted.dram_read_bytes / steps + weight_bytes) / rates.memory
        return cls(drive * 1e3, memory * 1e3)

    @property
    def overlapped_ms(self) -> float:
        """What no step can be faster than: drive and memory are read at the same time."""
        return max(self.drive_ms, self.memory_ms)

    @property
    def serial_ms(self) -> float:
        """The same where one is read after the other."""
        return self.drive_ms + self.memory_ms


def is_beaten(limit_ms: float, min_ms: float) -> bool:
    """Say whether a step was faster than its limit by more than clocks and rates move."""
    return min_ms < (1 - LIMIT_TOLERANCE) * limit_ms


def row_flags(
    spread: float | None, min_ms: float | None, limit_ms: float | None
) -> tuple[str, ...]:
    """Return why figures of a row mean little, in words; nothing where they are not there.

    Parameters
    ----------
    spread
        As in `Timing`.
    min_ms, limit_ms
        The fastest step, and what bytes and rates allow.
    """
    flags = []
    if spread is not None and spread > LARGEST_SPREAD:
        flags.append(f"spread {spread:.0%}, above {LARGEST_SPREAD:.0%}")
    if min_ms is not None and limit_ms is not None and is_beaten(limit_ms, min_ms):
        flags.append(
            f"fastest step {min_ms:.4g} ms, below the limit of {limit_ms:.4g} ms: drive or memory "
            "was faster in a step than in any measurement beside it"
        )
    return tuple(flags)


@dataclass(frozen=True)
class BenchRow:
    """One system on one case, or why it was not measured.

    Parameters
    ----------
    model, type
        Name, and the type it computes in.
    layers, all_layers
        Layers that were measured, and those of the whole model.
    context, batch, alpha, budget_share, shadow
        As in `Case`.
    part
        As in `Case`.
    system
        Its name.
    selection
        `measured selection` or `modelled selection`.
    chosen
        What the system chose for itself.
    shadow_used
        Format of HillInfer's shadow, where `shadow` may leave the choice to it; None for others.
    skipped
        Why nothing was measured; all that follows is then None.
    min_ms, median_ms, spread
        Of one decode step of the whole batch; see `Timing`.
    step_ms
        Milliseconds of each measured step, in their order.
    tokens_per_second
        From the median, all sequences together.
    kv_ms
        The median without that of the loop's floor, measured in the same turns: what holding and
        attending to the context costs. None where the floor was not measured.
    drive_reads, drive_read_bytes, drive_write_bytes, dram_read_bytes
        Counted per step.
    held_bytes, budget_bytes, rss_bytes
        Memory as the system counts it, M0, and by how much the process grew.
    hit_rate, io_mode
        As in `Counted`.
    predicted_layers
        Layers whose query is predicted and whose tokens are selected before their turn.
    memory_gbps, drive_gbps, read_us
        What limits are made with, as in `MachineRates`: the best measured, beside the row's steps
        too.
    limit_ms, kv_limit_ms
        What bytes and rates allow, with and without the weights, where drive and memory are read
        at the same time; modelled.
    serial_limit_ms
        The first of them where one is read after the other.
    middle_limit_ms
        The first of them with the middle rates between the turns of the case's steps. No bound: a
        step may meet better ones.
    perplexity, agreement
        Of the decoded text, and the share of steps with the full cache's most probable token; None
        for random weights.
    """

    model: str
    type: str
    layers: int
    all_layers: int
    context: int
    batch: int
    alpha: float
    budget_share: float
    shadow: str
    system: str
    selection: str
    chosen: str = ""
    shadow_used: str | None = None
    skipped: str | None = None
    min_ms: float | None = None
    median_ms: float | None = None
    spread: float | None = None
    steps: int | None = None
    tokens_per_second: float | None = None
    kv_ms: float | None = None
    drive_reads: float | None = None
    drive_read_bytes: float | None = None
    drive_write_bytes: float | None = None
    dram_read_bytes: float | None = None
    held_bytes: int | None = None
    budget_bytes: int | None = None
    rss_bytes: int | None = None
    hit_rate: float | None = None
    io_mode: str | None = None
    predicted_layers: int | None = None
    memory_gbps: float | None = None
    drive_gbps: float | None = None
    read_us: float | None = None
    limit_ms: float | None = None
    serial_limit_ms: float | None = None
    middle_limit_ms: float | None = None
    kv_limit_ms: float | None = None
    perplexity: float | None = None
    agreement: float | None = None
    part: str = ""
    step_ms: tuple[float, ...] | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """Why the figures mean little: the machine was not as steady as they need."""
        return row_flags(self.spread, self.min_ms, self.limit_ms)

    @property
    def beats_limit(self) -> bool:
        """Whether its fastest step was faster than drive and memory were ever measured to allow."""
        known = self.min_ms is not None and self.limit_ms is not None
        return known and is_beaten(self.limit_ms or 0.0, self.min_ms or 0.0)

    def limit_over(self, floor: BenchRow | None) -> float | None:
        """Return its limit where a step takes the model's loop, too, and reads KV behind it.

        Modelled, and no bound: the floor's fastest step, Python included, then the KV's bytes from
        memory. What ranks by a predicted query may be read earlier, and the loop may be faster in
        other turns. The drive is read meanwhile.

        Parameters
        ----------
        floor
            The model's loop alone, measured in the same turns; without it, `limit_ms`.
        """
        if self.limit_ms is None or floor is None or floor.min_ms is None:
            return self.limit_ms
        assert self.dram_read_bytes is not None
        assert self.memory_gbps is not None
        from_memory = self.dram_read_bytes / self.memory_gbps / 1e6
        return max(self.limit_ms, floor.min_ms + from_memory)

    @property
    def flagged(self) -> bool:
        """Whether there is a reason to doubt the figures; such a row meets no goal."""
        return bool(self.flags)

    @property
    def case(self) -> tuple[object, ...]:
        """What rows of one comparison have in common."""
        return (
            self.model,
            self.type,
            self.context,
            self.batch,
            self.alpha,
            self.budget_share,
            self.shadow,
            self.part,
        )

    @property
    def name(self) -> str:
        """What tells the row from others, in one line."""
        part = "" if self.layers == self.all_layers else f" ({self.layers} of {self.all_layers})"
        return (
            f"{self.model}{part} {self.type}, {self.context} tokens, batch {self.batch}, "
            f"α {self.alpha:g}, budget {100 * self.budget_share:.12g}%, shadow {self.shadow}, "
            + (f"{self.part}, " if self.part else "")
            + self.system
        )


@dataclass(frozen=True)
class Ratio:
    """A ratio of two medians.

    Parameters
    ----------
    name
        `over_floor`: the system's over that of the loop's floor. `speedup_vs_transformers`: that of
        the faster stock cache over the system's. `joined_speedup`: that of caches one after another
        over that of the same caches together.
    system
        Whose rows they are.
    row, against
        Names of both rows.
    value
        The ratio.
    context, alpha
        Of the case.
    flagged
        A row behind it is.
    allowed
        What bytes and rates allow, modelled, or the model's loop alone, measured; None where that
        is not told.
    """

    name: str
    system: str
    row: str
    against: str
    value: float
    context: int
    alpha: float
    flagged: bool
    allowed: float | None = None
