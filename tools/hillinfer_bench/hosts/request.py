# SPDX-License-Identifier: Apache-2.0
"""What one run of `hillinfer-bench hosts` was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hillinfer.errors import SettingsError

# One process holds all requests: 10 GB at most.
_MOST_COPIES = 100


class Part(StrEnum):
    """What is made."""

    ROUTING = "routing"
    """Measured: two replicas with a store each, behind a router with each policy."""
    FLEET = "fleet"
    """Modelled: copies of traces over many hosts."""


@dataclass(frozen=True)
class HostsRequest:
    """Documents for two replicas, and traces for a fleet.

    Parameters
    ----------
    parts
        What is made.
    model
        Of the replicas.
    directory
        On the drive, where stores are made.
    documents, document_tokens, questions
        That are asked about, how long each is, and how often each is asked about.
    together
        Requests under way at once.
    copies
        Of each trace, the most.
    share
        What all stores of a fleet hold over the distinct blocks of the requests.
    out
        Where the figures go as JSON.
    """

    parts: frozenset[Part]
    model: str
    directory: Path
    documents: int
    document_tokens: int
    questions: int
    together: int
    copies: int
    share: float
    out: Path

    def __post_init__(self) -> None:
        """Refuse values that mean nothing.

        Raises
        ------
        SettingsError
            Naming the option and what it allows.
        """
        if not 1 <= self.copies <= _MOST_COPIES:
            raise SettingsError(f"copies={self.copies} must be 1 to {_MOST_COPIES}")
        if not 0 < self.share <= 1:
            raise SettingsError(f"share={self.share} must be above 0 and at most 1")
        for name in ("documents", "document_tokens", "questions", "together"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}={getattr(self, name)} must be at least 1")
