# SPDX-License-Identifier: Apache-2.0
"""Fits decode time over the context, and computes how much of its growth is bytes of shadow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class StepPoint:
    """What a decode step took at one context with one shadow format.

    Parameters
    ----------
    shadow
        Name of the format.
    tokens
        Of the context.
    shadow_bytes
        That a step scores, in all layers.
    seconds
        Of a step.
    """

    shadow: str
    tokens: int
    shadow_bytes: int
    seconds: float

    @property
    def name(self) -> str:
        """As goals call it."""
        return f"{self.shadow} at {self.tokens} tokens"


@dataclass(frozen=True)
class FormatGrowth:
    """What a step takes more at the longest context than at the shortest with one format.

    Parameters
    ----------
    shadow
        Name of the format.
    seconds
        Measured.
    by_bytes, by_tokens
        Seconds of it that the fit gives to bytes of shadow, and to tokens whatever their bytes.
    """

    shadow: str
    seconds: float
    by_bytes: float
    by_tokens: float

    @property
    def unexplained_share(self) -> float:
        """How far the bytes' part is from all of it, over all of it; 1 where nothing grew."""
        if self.seconds <= 0:
            return 1.0
        return abs(self.seconds - self.by_bytes) / self.seconds


@dataclass(frozen=True)
class StepGrowth:
    """Seconds of a step as a fixed part, a part per byte of shadow and a part per token.

    One format cannot tell bytes from tokens, since each token has the same bytes: two can.

    Parameters
    ----------
    fixed_seconds, seconds_per_byte, seconds_per_token
        The fit; every point's relative error weighs the same.
    largest_residual
        The largest share of a step that the fit does not give.
    formats
        Growth from the shortest to the longest context, by format.
    """

    fixed_seconds: float
    seconds_per_byte: float
    seconds_per_token: float
    largest_residual: float
    formats: tuple[FormatGrowth, ...]

    @classmethod
    def of(cls, points: Sequence[StepPoint]) -> StepGrowth | None:
        """Fit points; None where one context or one format leaves the parts open."""
        shadows = list(dict.fromkeys(point.shadow for point in points))
        lengths = {point.tokens for point in points}
        if len(shadows) < 2 or len(lengths) < 2:
            return None
        seconds = np.array([point.seconds for point in points])
        columns = np.array(
            [(1.0, point.shadow_bytes, point.tokens) for point in points], np.float64
        )
        scale = columns.max(axis=0)
        found, _, rank, _ = np.linalg.lstsq(
            columns / scale / seconds[:, None], np.ones(len(points)), rcond=None
        )
        if rank < len(scale):
            return None
        fixed, per_byte, per_token = (float(one) for one in found / scale)
        fitted = columns @ np.array([fixed, per_byte, per_token])
        return cls(
            fixed,
            per_byte,
            per_token,
            float(np.max(np.abs(seconds - fitted) / seconds)),
            tuple(_growth(points, shadow, per_byte, per_token) for shadow in shadows),
        )

    @property
    def bytes_per_second(self) -> float | None:
        """The rate at which a step passes over shadow; None where more bytes take no longer."""
        return 1 / self.seconds_per_byte if self.seconds_per_byte > 0 else None

    @property
    def worst(self) -> FormatGrowth:
        """The format whose bytes explain its growth least."""
        return max(self.formats, key=lambda one: one.unexplained_share)

    def as_dict(self) -> dict[str, Any]:
        """As the report has it."""
        return {
            **asdict(self),
            "shadow_bytes_per_second": self.bytes_per_second,
            "formats": [
                {**asdict(one), "unexplained_share": one.unexplained_share} for one in self.formats
            ],
        }


def _growth(
    points: Sequence[StepPoint], shadow: str, per_byte: float, per_token: float
) -> FormatGrowth:
    own = sorted((one for one in points if one.shadow == shadow), key=lambda one: one.tokens)
    first, last = own[0], own[-1]
    return FormatGrowth(
        shadow,
        last.seconds - first.seconds,
        per_byte * (last.shadow_bytes - first.shadow_bytes),
        per_token * (last.tokens - first.tokens),
    )
