# SPDX-License-Identifier: Apache-2.0
"""How much is selected of a sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wanted:
    """How many tokens a set has, and which of them are in it whatever their score.

    Parameters
    ----------
    count
        Tokens of a set.
    sinks, recent
        How many of the first and of the newest tokens are kept.
    """

    count: int
    sinks: int
    recent: int

    def check(self, length: int, coming: int) -> None:
        """Raise ValueError where this cannot be had of `length` tokens, `coming` among them."""
        if min(self.sinks, self.recent - coming) < 0:
            raise ValueError(
                f"sinks={self.sinks} or recent={self.recent} is below what is kept with "
                f"coming={coming}"
            )
        kept = min(self.sinks + self.recent, length)
        if not kept <= self.count <= length:
            raise ValueError(f"count={self.count} is outside {kept}..{length}")
