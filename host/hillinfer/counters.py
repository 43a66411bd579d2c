# SPDX-License-Identifier: Apache-2.0
"""What a runtime counts while it works."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Running totals of one runtime; bytes, rows, seconds or steps as the names say.

    `cold_reads` counts calls to the drive that fetch rows, `cold_read_bytes` what they really
    brought and `cold_useful_bytes` what was asked for; `shadow_read_bytes` come on top where the
    shadow does not fit in DRAM. Hot and cold rows are counted for selected tokens in decode, not
    for prefill streaming. `promoted_rows` were cold when they were selected and became hot,
    `demoted_rows` gave way. `scored_tokens` counts the tokens that decode steps chose from, also
    where all were selected.
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
    selected_tokens: int = 0
    scored_tokens: int = 0
    device_scored_tokens: int = 0
    kernel_launches: int = 0
    fp16_overflows: int = 0
