# SPDX-License-Identifier: Apache-2.0
"""Traces, rows and settings that the benchmark's tests share."""

import numpy as np

from hillinfer.settings import Settings
from hillinfer_bench.replay.selection_trace import SelectionTrace
from hillinfer_bench.report.rows import BenchRow
from hillinfer_model.selection import kept_positions, selected_count

SETTINGS = Settings().changed(alpha=0.1)


def local_trace(prefix, steps, layers=2, settings=SETTINGS, seed=0):
    """Return sets as models select them: recent tokens and runs more often, changing slowly."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(layers):
        tokens = prefix + steps
        # Neighbours share their scores, so that runs are selected.
        base = np.repeat(random.standard_normal(-(-tokens // 3)), 3)[:tokens]
        sets = []
        for length in range(prefix + 1, prefix + steps + 1):
            ages = length - 1 - np.arange(length)
            scores = base[:length] + 0.3 * random.standard_normal(length)
            scores += 1.5 * np.exp(-ages / (0.1 * prefix))
            scores[kept_positions(length, settings.kept_sinks, settings.kept_recent)] = np.inf
            count = selected_count(length, settings.alpha, settings.kept_tokens, None)
            sets.append(np.sort(np.argsort(-scores)[:count]).astype(np.int32))
        made.append(tuple(sets))
    return SelectionTrace("made", settings, prefix, tuple(made), ((),) * layers)


def measured_row(system="hillinfer", median_ms=10.0, **changes):
    """Return a row as if it had been measured."""
    values = {
        "model": "opt-6.7b", "type": "float32", "layers": 2, "all_layers": 32,
        "context": 32_768, "batch": 1, "alpha": 0.1, "budget_share": 0.2, "shadow": "auto",
        "shadow_used": "int2" if system.startswith("hillinfer") else None,
        "system": system, "selection": "modelled selection", "min_ms": median_ms * 0.9,
        "median_ms": median_ms, "spread": 0.1, "steps": 16,
        "tokens_per_second": 1e3 / median_ms, "kv_ms": median_ms / 2, "drive_read_bytes": 1.0,
        "drive_write_bytes": 0.0, "dram_read_bytes": 1.0, "held_bytes": 1, "budget_bytes": 1,
        "rss_bytes": 1, "memory_gbps": 10.0, "drive_gbps": 1.0, "read_us": 0.0,
        "limit_ms": median_ms / 2, "drive_reads": 1.0,
        "serial_limit_ms": median_ms * 0.6, "kv_limit_ms": median_ms / 4,
        "middle_limit_ms": median_ms * 0.8,
    }  # fmt: skip
    values |= changes
    values.setdefault("step_ms", (median_ms,) * values["steps"])
    return BenchRow(**values)
