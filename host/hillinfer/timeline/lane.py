# SPDX-License-Identifier: Apache-2.0
"""The lanes of a trace: what may go on at the same time."""

from __future__ import annotations

from enum import StrEnum


class Lane(StrEnum):
    """What a span of time was spent on, in the order in which lanes are shown."""

    STEPS = "steps"
    """Forward passes, and in them the cache's part of each layer, waiting included."""
    COMPUTE = "compute"
    """The model between the cache's calls, and attention over rows that are there."""
    HOST_SCORING = "host scoring"
    """Coding and scoring of key shadows by the processor, and choosing the top α."""
    DEVICE_SCORING = "device scoring"
    """From the launch on a device until its last score has come."""
    READS = "reads"
    """Batches of reads from the drive."""
    COPIES = "copies"
    """Rows moved within DRAM: new ones stored, cold ones promoted."""
    WRITES = "writes"
    """Groups of rows and shadows written to the drive."""
