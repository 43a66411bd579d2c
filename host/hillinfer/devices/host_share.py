# SPDX-License-Identifier: Apache-2.0
"""How many of a sequence's segments the host scores."""

from __future__ import annotations

from typing import Protocol


class HostShare(Protocol):
    """Decides how segments are shared between host and device; asked once per segment."""

    def host_segments(self, segments: int) -> int:
        """Return how many of the first segments the host is to score."""
        ...

    def note(
        self, host_scored: int, host_selected: int, device_scored: int, device_selected: int
    ) -> None:
        """Learn, after a selection, how many tokens each side scored and how many were selected."""
        ...


class GivenBeta:
    """A `HostShare` of one β for good.

    Parameters
    ----------
    beta
        Host-scored to device-scored segments, Mc/Ms (HillInfer equation 4); 0 gives the device
        every full group.
    """

    def __init__(self, beta: float) -> None:
        self._share = beta / (1 + beta)

    def host_segments(self, segments: int) -> int:
        """Return the share, rounded."""
        return int(segments * self._share + 0.5)

    def note(
        self, host_scored: int, host_selected: int, device_scored: int, device_selected: int
    ) -> None:
        """Learn nothing."""
