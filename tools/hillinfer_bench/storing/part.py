# SPDX-License-Identifier: Apache-2.0
"""The parts of a run of `hillinfer-bench storing`, each of which can be taken alone."""

from __future__ import annotations

from enum import StrEnum


class Part(StrEnum):
    """What is measured, in the order in which it is."""

    STREAMS = "streams"
    """Streams of stored prefixes, beside plain reads."""
    SEALED = "sealed"
    """The same of an encrypted store."""
    OPENING = "opening"
    """Opening a long prefix in place."""
    SHARED = "shared"
    """The same in caches that share it: a second one, and decode steps."""
    TOGETHER = "together"
    """Processes that read at once."""
    LOOKUPS = "lookups"
    """Looking a long prompt up."""
    MODEL = "model"
    """The first token of a real model, and what storing costs."""
    SAVED = "saved"
    """Traces, replayed."""
    KILLS = "kills"
    """Killed writers."""
    FLIPS = "flips"
    """Flipped bits."""
    CALLS = "calls"
    """Calls of the drive that fail."""
    MIXED = "mixed"
    """Processes that read, store and evict at once."""
