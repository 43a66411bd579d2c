# SPDX-License-Identifier: Apache-2.0
"""Shares of codes in the memory that they and exact rows have, side by side: constant or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.generate.run_report import json_bytes
from hillinfer.model_shape import ModelShape
from hillinfer.shadow.coming_codes import record_bytes
from hillinfer.shadow.values import CODE_SHARE
from hillinfer.system.files import cannot_write, write_whole
from hillinfer_bench.replay.code_split import (
    CodedTrace,
    ReadReplay,
    Reads,
    SharedMemory,
    Split,
)
from hillinfer_bench.replay.following_share import FollowingReplay, Follows

SHARES = (0.0, 0.25, 0.5, 0.75, 0.8, CODE_SHARE, 0.9, 0.95, 1.0)


@dataclass(frozen=True)
class SplitRow:
    """One trace at one budget and one share; rows are means over steps, of all layers.

    Parameters
    ----------
    text, alpha, exact, budget
        Of the trace and the settings.
    shared_bytes, all_codes_bytes
        What both have together, and what codes of all tokens would take.
    follows
        What the share follows, from the product's on; None where it is constant.
    share
        Share of codes in the memory that both have, at the end.
    code_slots, hot_slots
        Of a layer.
    drive_rows, exact_misses, code_misses
        Per step; see `SplitReplayed`.
    filed, unfiled
        Per step: reads where coded tokens without codes come from the file of codes, and where
        they come as rows.
    code_hits_per_mebibyte, exact_hits_per_mebibyte
        What one more MiB of codes brings per step, and what one MiB less of rows loses, from the
        share before to this one; None for the first, or where codes take no more memory.
    """

    text: str
    alpha: float
    exact: float
    budget: str
    shared_bytes: int
    all_codes_bytes: int
    follows: str | None
    share: float
    code_slots: int
    hot_slots: int
    drive_rows: float
    exact_misses: float
    code_misses: float
    filed: Reads
    unfiled: Reads
    code_hits_per_mebibyte: float | None = None
    exact_hits_per_mebibyte: float | None = None


def split_rows(
    trace: CodedTrace,
    shape: ModelShape,
    budgets: Sequence[str],
    shares: Sequence[float] = SHARES,
) -> list[SplitRow]:
    """Return a row for each budget and share, shares ascending, then those that follow."""
    selected = trace.selected
    tokens, settings = selected.prefix + selected.steps, selected.settings
    sizes = shape.row_bytes, record_bytes(kernel_spec(shape, settings))
    rows: list[SplitRow] = []
    for budget in budgets:
        memory = SharedMemory.of_budget(shape, settings, tokens, budget)
        before: SplitRow | None = None
        for share in sorted(shares):
            split = memory.split(share)
            row = _row(trace, budget, memory, share, split, ReadReplay(trace, split, *sizes))
            rows.append(row if before is None else _with_margins(before, row, memory))
            before = row
        for follows in Follows:
            replay = FollowingReplay(trace, memory, CODE_SHARE, follows, *sizes)
            row = _row(trace, budget, memory, CODE_SHARE, memory.split(CODE_SHARE), replay)
            codes = replay.code_slots
            share = codes * shape.layers * memory.slot_bytes / memory.byte_count
            ended = replace(row, follows=follows.value, share=share, code_slots=codes)
            rows.append(replace(ended, hot_slots=memory.row_slots(codes)))
    return rows


def _row(
    trace: CodedTrace,
    budget: str,
    memory: SharedMemory,
    share: float,
    split: Split,
    replay: ReadReplay,
) -> SplitRow:
    """Play a trace and return what was found."""
    found, steps, settings = replay.replayed(), trace.selected.steps, trace.selected.settings
    return SplitRow(
        text=trace.selected.text,
        alpha=settings.importance_rate,
        exact=settings.exact_share,
        budget=budget,
        shared_bytes=memory.byte_count,
        all_codes_bytes=memory.all_codes * memory.shape.layers * memory.slot_bytes,
        follows=None,
        share=share,
        code_slots=split.codes,
        hot_slots=split.hot_rows,
        drive_rows=found.drive_rows / steps,
        exact_misses=found.exact_misses / steps,
        code_misses=found.code_misses / steps,
        filed=(replay.exact + replay.codes).each(steps),
        unfiled=(replay.exact + replay.rows).each(steps),
    )


def _with_margins(before: SplitRow, row: SplitRow, memory: SharedMemory) -> SplitRow:
    slots = row.code_slots - before.code_slots
    if not slots:
        return row
    mebibytes = slots * memory.shape.layers * memory.slot_bytes / 2**20
    return replace(
        row,
        code_hits_per_mebibyte=(before.code_misses - row.code_misses) / mebibytes,
        exact_hits_per_mebibyte=(row.exact_misses - before.exact_misses) / mebibytes,
    )


def write_splits(file: Path, rows: Sequence[SplitRow], facts: dict[str, Any]) -> None:
    """Write every row and the circumstances as JSON.

    Raises
    ------
    ReportError
        Where the file cannot be written.
    """
    record = {"label": "measured", **facts, "rows": [asdict(row) for row in rows]}
    try:
        write_whole(file, json_bytes(record))
    except OSError as error:
        raise cannot_write(file, error, "--out") from error


def splits_text(rows: Sequence[SplitRow]) -> str:
    """Return the rows as a Markdown table."""
    heads = (
        "text", "α", "M0", "shared, of all codes", "codes' share", "slots: codes, rows",
        "drive rows a step", "exact", "coded",
        "reads, MiB, modelled ms: codes of a file", "reads, MiB, modelled ms: all as rows",
        "code hits per MiB", "exact hits per MiB",
    )  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        margins = row.code_hits_per_mebibyte, row.exact_hits_per_mebibyte
        cells = (
            row.text,
            f"{row.alpha:g}",
            row.budget,
            f"{row.shared_bytes / 1e6:.1f} MB, {row.shared_bytes / row.all_codes_bytes:.2f}",
            f"{row.share:.2g}" + ("" if row.follows is None else f", follows {row.follows}"),
            f"{row.code_slots}, {row.hot_slots}",
            f"{row.drive_rows:.0f}",
            f"{row.exact_misses:.0f}",
            f"{row.code_misses:.0f}",
            *(
                f"{one.reads:.0f}, {one.byte_count / 2**20:.1f}, {one.milliseconds:.1f}"
                for one in (row.filed, row.unfiled)
            ),
            *("" if one is None else f"{one:.1f}" for one in margins),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
