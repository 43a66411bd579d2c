# SPDX-License-Identifier: Apache-2.0
"""How the next token is chosen from logits."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hillinfer.errors import CacheUseError, SettingsError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sampling:
    """Greedy at temperature 0, else drawn from what top-k and top-p leave.

    Parameters
    ----------
    temperature
        Divides the logits; 0 takes the most likely token.
    top_k
        Number of most likely tokens that stay; 0 for all.
    top_p
        Smallest probability mass that stays, above 0, at most 1.
    seed
        Of the random numbers; the same seed draws the same tokens from the same logits.

    Raises
    ------
    SettingsError
        Where a value is outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        if not 0 <= self.temperature < float("inf"):
            raise SettingsError(f"temperature={self.temperature} must be 0 (greedy) or above")
        if self.top_k < 0:
            raise SettingsError(f"top_k={self.top_k} must be 0 (all tokens) or above")
        if not 0 < self.top_p <= 1:
            raise SettingsError(f"top_p={self.top_p} must be above 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise SettingsError(f"seed={self.seed} must be between 0 and 2^63 - 1")
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            raise SettingsError(
                "top_k and top_p do nothing at temperature 0 (greedy): set --temperature as well"
            )

    def as_json(self) -> dict[str, float]:
        """Return the choices by name, for a report."""
        return asdict(self)


class TokenChooser:
    """Draws tokens one after the other, with random numbers of its own.

    Parameters
    ----------
    sampling
        How.
    device
        Where the logits lie.
    """

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        import torch
        from transformers import (
            LogitsProcessorList,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        self._processors: Any = LogitsProcessorList()
        self._random: torch.Generator | None = None
        if sampling.temperature == 0:
            return
        self._random = torch.Generator(device).manual_seed(sampling.seed)
        self._processors.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            self._processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._processors.append(TopPLogitsWarper(sampling.top_p))

    def choose(self, logits: torch.Tensor) -> int:
        """Return the id of the next token, given logits of shape (vocabulary,).

        Raises
        ------
        CacheUseError
            Where the greatest of them is no finite number: any token would be as good then.
        """
        if not math.isfinite(float(logits.max())):
            raise CacheUseError(
                "the model's output is not finite: its weights or its number type are at fault; "
                "try --dtype float32"
            )
        if self._random is None:
            return int(logits.argmax())
        scores: torch.Tensor = self._processors(None, logits.float()[None])
        return int(scores.softmax(-1).multinomial(1, generator=self._random))
