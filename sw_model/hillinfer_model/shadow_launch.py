# SPDX-License-Identifier: Apache-2.0
"""One launch of `make_shadow`, as the kernel sees it."""

from __future__ import annotations

from dataclasses import dataclass

from hillinfer_model.beats import Beats, check_beats


@dataclass(frozen=True)
class ShadowLaunch:
    """Buffers and scalars of one `make_shadow` (contract, section 10).

    Every buffer is uint8 of shape (beats, 64), before the launch.

    Parameters
    ----------
    segments
        One descriptor per segment.
    rows
        FP16 keys, by rows.
    statistics
        Statistics blocks.
    shadow
        Content before the launch.
    launch_id
        Unsigned 32 bit.

    Raises
    ------
    ValueError
        Where a buffer has another type or shape, or the number does not fit its register.
    """

    segments: Beats
    rows: Beats
    statistics: Beats
    shadow: Beats
    launch_id: int

    def __post_init__(self) -> None:
        """Refuse what is no block of beats or no 32-bit number."""
        for name in ("segments", "rows", "statistics", "shadow"):
            check_beats(getattr(self, name), name)
        if not 0 <= self.launch_id < 2**32:
            raise ValueError(f"launch_id={self.launch_id} does not fit 32 bits")
