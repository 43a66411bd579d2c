# SPDX-License-Identifier: Apache-2.0
"""How fast tokens are scored and their rows transferred, and what sharing costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from hillinfer.errors import SettingsError


@dataclass(frozen=True)
class Rates:
    """The four constants of equation 2 (HillInfer section 4.3), of one layer, and one more.

    The paper counts bytes of KV. Here a token is scored by its shadow and transferred as a row,
    which differ in size, so all four count tokens, whose quotients are the same. What sharing costs
    a step, however few the tokens, is in none of them.

    Parameters
    ----------
    f_c
        Tokens per second that the host scores.
    f_s
        Tokens per second that the device scores; 0 where there is none.
    b_c
        Tokens per second whose rows are copied out of the hot pool.
    b_s
        Tokens per second whose rows are read from the drive, scattered.
    sharing
        Seconds of a step in which a device scores, beyond scoring and beyond what the host alone
        takes: the launch, and merging both sides' scores.

    Raises
    ------
    SettingsError
        Where one is negative or no number.
    """

    f_c: float
    f_s: float
    b_c: float
    b_s: float
    sharing: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no rate; 0 (never) and infinity (at once) are."""
        for one in fields(self):
            value = getattr(self, one.name)
            # Not `< 0`, which would let NaN through.
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise SettingsError(f"{one.name}={value!r} is no rate: it must be 0 or more")


def seconds_of(tokens: float, rate: float) -> float:
    """Return how long tokens take at a rate; nothing takes no time, even at rate 0."""
    if not tokens:
        return 0.0
    return math.inf if rate == 0 else tokens / rate
