# SPDX-License-Identifier: Apache-2.0
"""How tokens behind a stored prefix are read: all rows stream by once, or few are gathered."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Way(StrEnum):
    """How a pass gets at the rows of a stored prefix."""

    IN_PLACE = "opened in place"
    """Token by token, each gathers the rows that it selects."""
    STREAMED = "streamed"
    """All tokens at once attend to all rows, which stream by once."""


@dataclass(frozen=True)
class PassRates:
    """What decides between both ways.

    Parameters
    ----------
    read_bytes_per_second
        What the drive gives long reads.
    step_seconds
        What reading one token by itself takes.
    """

    read_bytes_per_second: float
    step_seconds: float

    def way(self, prefix_bytes: int, tokens: int) -> Way:
        """Return the sooner way to read so many tokens behind rows of so many bytes."""
        streaming = prefix_bytes / self.read_bytes_per_second
        return Way.STREAMED if streaming < tokens * self.step_seconds else Way.IN_PLACE
