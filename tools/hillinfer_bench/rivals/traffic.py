# SPDX-License-Identifier: Apache-2.0
"""What a rival read, wrote and held."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Running totals of one rival, in bytes and steps.

    Parameters
    ----------
    drive_read_bytes, drive_write_bytes
        What went over the drive's wire, alignment and gaps read through included.
    dram_bytes, dram_peak_bytes
        Held now, and the most ever held at once: rows, tails, shadows of keys, tables and buffers.
    steps
        Decode steps begun.
    """

    drive_read_bytes: int
    drive_write_bytes: int
    dram_bytes: int
    dram_peak_bytes: int
    steps: int
