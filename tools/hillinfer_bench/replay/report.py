# SPDX-License-Identifier: Apache-2.0
"""The pools table, for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hillinfer.output_file import cannot_write, write_whole
from hillinfer.run_report import json_bytes
from hillinfer_bench.replay.earlier import EARLIER, EARLIER_ABOUT, EARLIER_RULE
from hillinfer_bench.replay.pool_row import EQUAL, PoolRow, means

_HEADINGS = ("α", "selection", "pool, α·N", "policy", "sizes", "hit rate", "worst layer", "earlier")
HOW_COUNTED = (
    "hits are selected tokens, kept tokens included, found in the hot pool or in the open group; "
    "a pool of x α·N counts half a group for the open group and the rest as slots"
)


def table_text(rows: Sequence[PoolRow]) -> str:
    """Return the means over texts as a Markdown table with its columns aligned."""
    cells = [_HEADINGS, *(_cells(row) for row in means(rows))]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADINGS))]
    rule = ["-" * width for width in widths]
    head, *others = (
        [text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in cells
    )
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *others))


def earlier_rate(row: PoolRow) -> float | None:
    """Return the earlier figure of the same policy, pool and α; None where there is none."""
    if row.rule != EARLIER_RULE or row.sizes != EQUAL:
        return None
    return EARLIER.get((row.policy, row.pool_alphas, row.alpha))


def write_report(file: Path, rows: Sequence[PoolRow], facts: dict[str, Any]) -> None:
    """Write every row, the means over texts, the earlier figures and the circumstances as JSON.

    Raises
    ------
    ReportError
        Where the file cannot be written.
    """
    record = {
        "label": "measured",
        **facts,
        "counting": HOW_COUNTED,
        "earlier": {
            "label": EARLIER_ABOUT,
            "rows": [
                {"policy": policy, "pool_alphas": pool_alphas, "alpha": alpha, "hit_rate": rate}
                for (policy, pool_alphas, alpha), rate in EARLIER.items()
            ],
        },
        "means": [asdict(row) for row in means(rows)],
        "rows": [asdict(row) for row in rows],
    }
    try:
        write_whole(file, json_bytes(record))
    except OSError as error:
        raise cannot_write(file, error, "--out") from error


def _cells(row: PoolRow) -> tuple[str, ...]:
    earlier = earlier_rate(row)
    return (
        f"{row.alpha:g}",
        f"{row.rule} {row.shadow.upper()}",
        f"{row.pool_alphas:g}",
        row.policy,
        row.sizes,
        f"{row.hit_rate:.3f}",
        f"{row.worst_layer_hit_rate:.3f}",
        "" if earlier is None else f"{earlier:.3f}",
    )
