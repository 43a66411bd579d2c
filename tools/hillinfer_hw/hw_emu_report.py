# SPDX-License-Identifier: Apache-2.0
"""The report of `make hw_emu`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hillinfer_hw.emulator import Emulator

# Of the first row, for readers that look for one number each.
_ABOVE = (
    "xrt_version",
    "kernel_launches",
    "simulated_cycles",
    "prompt_tokens",
    "new_tokens",
    "segments_per_launch",
    "p2p_bytes",
    "make_shadow_launches",
    "wall_seconds",
)


def hw_emu_report(emulator: Emulator, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the report.

    Parameters
    ----------
    emulator
        Whose cards were generated with.
    rows
        One of each engine, at least one.
    """
    return {
        "label": emulator.label,
        "emulator": emulator.name,
        **{name: rows[0][name] for name in _ABOVE},
        "tokens_equal": all(row["tokens_equal"] for row in rows),
        "rows": list(rows),
    }


def shown_row(row: Mapping[str, Any]) -> str:
    """Return a row as a line for people."""
    cycles = (
        "cycles not told"
        if row["simulated_cycles"] is None
        else f"{row['simulated_cycles']} cycles"
    )
    return (
        f"{row['engine']}: {row['prompt_tokens']} prompt and {row['new_tokens']} new tokens, "
        f"{row['kernel_launches']} launches, {cycles}, "
        f"{row['device_scored_tokens']} of {row['scored_tokens']} tokens scored by the card, "
        f"{row['segments_per_launch']} segments a launch, "
        f"{row['make_shadow_launches']} launches of make_shadow, {row['p2p_bytes']} bytes by P2P, "
        f"{row['cold_rows_read']} cold rows read, "
        f"tokens {'equal' if row['tokens_equal'] else 'DIFFER'}, {row['wall_seconds']} s"
    )
