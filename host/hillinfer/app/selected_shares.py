# SPDX-License-Identifier: Apache-2.0
"""How large a share of each side's tokens is selected (HillInfer section 4.3, skewness)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SelectedShares:
    """What stands for α in equation 2 once it is known that one side's tokens matter more.

    Parameters
    ----------
    alpha_c, alpha_s
        Selected share of the tokens that the host and the device score.
    """

    alpha_c: float
    alpha_s: float


class RunningShares:
    """Running means of the selected shares: all selected over all scored tokens so far.

    Parameters
    ----------
    alpha
        Importance rate α, which holds for a side that has not scored anything yet.
    """

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._host = [0, 0]
        self._device = [0, 0]

    def note(
        self, host_scored: int, host_selected: int, device_scored: int, device_selected: int
    ) -> None:
        """Learn how many tokens of each side were scored and how many of them selected."""
        for side, scored, selected in (
            (self._host, host_scored, host_selected),
            (self._device, device_scored, device_selected),
        ):
            side[0] += scored
            side[1] += selected

    @property
    def shares(self) -> SelectedShares:
        """The means so far."""
        return SelectedShares(self._mean(self._host), self._mean(self._device))

    def _mean(self, side: list[int]) -> float:
        scored, selected = side
        return selected / scored if scored else self._alpha
