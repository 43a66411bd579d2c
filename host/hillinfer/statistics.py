# SPDX-License-Identifier: Apache-2.0
"""What an engine counts while it works, what a cache reports of it, and what a store counts."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

# --- Counters ---


@dataclass
class Counters:
    """Running totals of one runtime; bytes, rows, seconds or steps as the names say.

    `cold_reads` counts calls to the drive that fetch rows, `cold_read_bytes` what they really
    brought and `cold_useful_bytes` what was asked for; `shadow_read_bytes` come on top where the
    shadow does not fit in DRAM. Hot and cold rows are counted for selected tokens in decode, not
    for prefill streaming. `promoted_rows` were cold when they were selected and became hot,
    `demoted_rows` gave way. `scored_tokens` counts the tokens that decode steps chose from, also
    where all were selected. Of `selected_tokens`, `coded_tokens` came as codes and not as rows;
    `coded_arrivals` are those of them whose codes were not in DRAM: `coded_reads` of these came as
    codes, and the others as rows. Of `cold_write_bytes`, `code_write_bytes` were codes.
    """

    cold_reads: int = 0
    cold_read_bytes: int = 0
    cold_useful_bytes: int = 0
    cold_write_bytes: int = 0
    shadow_read_bytes: int = 0
    shadow_write_bytes: int = 0
    hot_rows_read: int = 0
    cold_rows_read: int = 0
    promoted_rows: int = 0
    demoted_rows: int = 0
    host_to_device_bytes: int = 0
    device_to_host_bytes: int = 0
    drive_wait_seconds: float = 0.0
    bubble_seconds: float = 0.0
    slack_seconds: float = 0.0
    deferred_writes: int = 0
    slack_write_bytes: int = 0
    selected_tokens: int = 0
    coded_tokens: int = 0
    coded_arrivals: int = 0
    coded_reads: int = 0
    code_write_bytes: int = 0
    scored_tokens: int = 0
    device_scored_tokens: int = 0
    kernel_launches: int = 0
    device_scored_segments: int = 0
    device_read_bytes: int = 0
    make_shadow_launches: int = 0
    shared_launches: int = 0
    fp16_overflows: int = 0

    def add_since(self, now: Counters, before: Counters) -> None:
        """Add what came between two moments of another count."""
        for one in fields(Counters):
            more = getattr(now, one.name) - getattr(before, one.name)
            setattr(self, one.name, getattr(self, one.name) + more)


class LayerHits:
    """Selected rows by layer.

    Parameters
    ----------
    layers
        Layers of the model.

    Attributes
    ----------
    hot, cold
        By layer, selected rows found in DRAM and on the drive.
    """

    def __init__(self, layers: int) -> None:
        self.hot = [0] * layers
        self.cold = [0] * layers

    def add(self, layer: int, hot: int, cold: int) -> None:
        """Count rows of a layer; one step of it comes at a time."""
        self.hot[layer] += hot
        self.cold[layer] += cold

    def copy(self) -> LayerHits:
        """Return what is counted now."""
        copy = LayerHits(len(self.hot))
        copy.hot, copy.cold = list(self.hot), list(self.cold)
        return copy

    def add_since(self, now: LayerHits, before: LayerHits) -> None:
        """Add what came between two moments of another count."""
        for own, new, old in (
            (self.hot, now.hot, before.hot),
            (self.cold, now.cold, before.cold),
        ):
            for layer, count in enumerate(new):
                own[layer] += count - old[layer]

    def rates(self) -> tuple[float, ...]:
        """Return each layer's share of selected rows found in DRAM; 1.0 where none was wanted."""
        return tuple(
            hot / (hot + cold) if hot + cold else 1.0
            for hot, cold in zip(self.hot, self.cold, strict=True)
        )


# --- Statistics ---

_COUNTING = frozenset(field.name for field in fields(Counters))


@dataclass(frozen=True)
class CacheStatistics:
    """Memory and traffic of a cache so far; the four parts are those at the peak.

    Bytes unless the name says otherwise. `kv_bytes` counts the rows of every distinct sequence.
    `layer_hit_rates` is `hot_hit_rate` of each layer, of the whole run. `gpu_staging` says whether
    the `gpu_staging_bytes` that copies to and from a GPU go through are `pinned`, or `pageable`
    because the pages could not be locked, or `none`; they are a part of `staging_bytes`.
    """

    kv_bytes: int
    dram_budget_bytes: int
    dram_peak_bytes: int
    hot_bytes: int
    shadow_bytes: int
    staging_bytes: int
    other_bytes: int
    cold_reads: int
    cold_read_bytes: int
    cold_useful_bytes: int
    cold_write_bytes: int
    shadow_read_bytes: int
    shadow_write_bytes: int
    hot_rows_read: int
    cold_rows_read: int
    promoted_rows: int
    demoted_rows: int
    host_to_device_bytes: int
    device_to_host_bytes: int
    drive_wait_seconds: float
    selected_tokens: int
    scored_tokens: int
    device_scored_tokens: int
    kernel_launches: int
    device_lost: bool
    fp16_overflows: int
    io_mode: str
    io_engine: str
    layer_hit_rates: tuple[float, ...]
    gpu_staging: str = "none"
    gpu_staging_bytes: int = 0
    bubble_seconds: float = 0.0
    slack_seconds: float = 0.0
    deferred_writes: int = 0
    slack_write_bytes: int = 0
    coded_tokens: int = 0
    coded_arrivals: int = 0
    coded_reads: int = 0
    code_write_bytes: int = 0
    device_scored_segments: int = 0
    device_read_bytes: int = 0
    make_shadow_launches: int = 0
    shared_launches: int = 0

    @property
    def hot_hit_rate(self) -> float:
        """Share of the selected rows that lay in DRAM; 1.0 where none was asked for."""
        rows = self.hot_rows_read + self.cold_rows_read
        return self.hot_rows_read / rows if rows else 1.0

    @property
    def selected_share(self) -> float:
        """Selected tokens over scored tokens; 1.0 where nothing was scored."""
        return self.selected_tokens / self.scored_tokens if self.scored_tokens else 1.0

    def minus(self, earlier: CacheStatistics) -> CacheStatistics:
        """Return these statistics with the counts of `earlier` taken away."""
        return replace(
            self,
            **{
                field.name: getattr(self, field.name) - getattr(earlier, field.name)
                for field in fields(self)
                if field.name in _COUNTING
            },
        )


# --- What a store counts ---


@dataclass(frozen=True)
class StoreCounts:
    """What a store did for this process since it was opened.

    Parameters
    ----------
    lookups, hit_tokens, miss_tokens
        Prompts looked up, and how many of their tokens were found.
    restored_bytes, stored_bytes, stored_tokens
        Rows that were read back, and rows and tokens that can be found since.
    evicted_chunks, quarantined_chunks, refused_chunks
        Chunks that gave way, those whose bytes were wrong, and those that were not stored because
        they were not admitted or too much was written that day.
    failures
        What went wrong and became a miss.
    saved_seconds
        What computing the rows that were found took when they were stored.
    bubble_seconds
        What passes waited for rows that stream.
    last_failure
        What went wrong last.
    """

    lookups: int = 0
    hit_tokens: int = 0
    miss_tokens: int = 0
    restored_bytes: int = 0
    stored_bytes: int = 0
    stored_tokens: int = 0
    evicted_chunks: int = 0
    quarantined_chunks: int = 0
    refused_chunks: int = 0
    failures: int = 0
    saved_seconds: float = 0.0
    bubble_seconds: float = 0.0
    last_failure: str = ""


class StoreMeter:
    """Counts what a store does; any thread may."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = StoreCounts()

    @property
    def counts(self) -> StoreCounts:
        """What was counted so far."""
        return self._counts

    def add(self, **amounts: float) -> None:
        """Add to counts, by the names of `StoreCounts`."""
        with self._lock:
            now = {name: getattr(self._counts, name) + amount for name, amount in amounts.items()}
            self._counts = replace(self._counts, **now)

    def note_failure(self, error: Exception) -> None:
        """Count what became a miss, and keep what it says."""
        with self._lock:
            self._counts = replace(
                self._counts, failures=self._counts.failures + 1, last_failure=str(error)
            )


# --- The snapshot ---

METRIC_PREFIX = "hillinfer_store_"
# Counted by this process; the other names are of what all processes have stored.
COUNTED = tuple(
    field.name.removesuffix("_chunks") if field.name == "quarantined_chunks" else field.name
    for field in fields(StoreCounts)
    if field.name != "last_failure"
)


def store_metrics(counts: StoreCounts, holds: Mapping[str, float]) -> dict[str, float]:
    """Return counts and what a store holds as a server gives them out, by their full names.

    Parameters
    ----------
    counts
        Of this process; each only grows.
    holds
        What the store holds now, as `Store.statistics` names it.
    """
    numbers = asdict(counts)
    del numbers["last_failure"]
    counted = dict(zip(COUNTED, numbers.values(), strict=True))
    return {f"{METRIC_PREFIX}{name}": value for name, value in {**holds, **counted}.items()}
