# SPDX-License-Identifier: Apache-2.0
"""What the connector counts, as vLLM logs it and gives it out to Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

# By the names of `TransferCounts`: what Prometheus calls it, and what it is.
METRICS = {
    "loaded_tokens": ("hillinfer_loaded_tokens_total", "Prompt tokens loaded from the store."),
    "loaded_bytes": ("hillinfer_loaded_bytes_total", "Bytes of rows loaded from the store."),
    "waited_seconds": ("hillinfer_load_wait_seconds_total", "What passes waited for rows."),
    "loading_seconds": ("hillinfer_load_seconds_total", "From first read to last row in place."),
    "accepted_tokens": (
        "hillinfer_accepted_tokens_total",
        "Prompt tokens loaded from the store whose rows another engine made.",
    ),
    "failed_loads": ("hillinfer_failed_loads_total", "Requests whose rows did not come."),
    "stored_tokens": ("hillinfer_stored_tokens_total", "Prompt tokens given to the store."),
    "stored_bytes": ("hillinfer_stored_bytes_total", "Bytes of rows given to the store."),
    "storing_seconds": ("hillinfer_store_seconds_total", "What passes took to hand rows over."),
}


# Of the same tokens whichever rank tells of them: bytes and failures are each rank's own.
_OF_FIRST_RANK = frozenset(
    {
        *("loaded_tokens", "accepted_tokens", "stored_tokens"),
        *("waited_seconds", "loading_seconds", "storing_seconds"),
    }
)


def of_other_rank(amounts: dict[str, float]) -> dict[str, float]:
    """Return what a rank that is not the first tells of what it counted."""
    return {name: amount for name, amount in amounts.items() if name not in _OF_FIRST_RANK}


class StoreStats(KVConnectorStats):  # type: ignore[misc]
    """Amounts by the names of `TransferCounts`."""

    def reset(self) -> None:
        """Begin again."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another's amounts to these."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what a line of the log says."""
        return {name: round(amount, 3) for name, amount in self.data.items() if amount}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


class StoreMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters, one of each for every engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kind = metric_types[Counter]
        made = {
            name: kind(name=told, documentation=help_, labelnames=labelnames)
            for name, (told, help_) in METRICS.items()
        }
        self._counters = {
            engine: {name: counter.labels(*values) for name, counter in made.items()}
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what one engine did since the last time."""
        for name, amount in transfer_stats_data.items():
            if name in METRICS:
                self._counters[engine_idx][name].inc(amount)
