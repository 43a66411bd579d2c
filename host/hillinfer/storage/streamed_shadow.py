# SPDX-License-Identifier: Apache-2.0
"""A segment whose shadow comes from the drive when it is scored."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hillinfer.devices.scorer import SegmentShadow
from hillinfer.hie.probe_shadow import ProbeShadow
from hillinfer_model.channel_statistics import ChannelStatistics


class StreamedShadow(SegmentShadow):
    """A `SegmentShadow` that is read when it is asked for.

    Parameters
    ----------
    base_position, tokens, statistics
        As there.
    read
        Returns the shadow, valid until another segment's is asked for.
    place
        Descriptor and offset from which a device can load it, or None.
    probes
        The host's copy of the probe tokens where a device is to score it, else None.
    """

    def __init__(
        self,
        base_position: int,
        tokens: int,
        statistics: ChannelStatistics,
        read: Callable[[], NDArray[np.uint8]],
        place: tuple[int, int] | None = None,
        probes: ProbeShadow | None = None,
    ) -> None:
        for name, value in (
            ("base_position", base_position),
            ("tokens", tokens),
            ("statistics", statistics),
            ("_read", read),
            ("place", place),
            ("_probes", probes),
        ):
            object.__setattr__(self, name, value)

    place: tuple[int, int] | None
    _probes: ProbeShadow | None

    @property
    def shadow(self) -> NDArray[np.uint8]:
        """Read the shadow, uint8 of shape (segment_beats, 64)."""
        read: Callable[[], NDArray[np.uint8]] = self._read  # type: ignore[attr-defined]
        return read()

    @property
    def on_drive(self) -> bool:
        """Say that it is."""
        return True

    @property
    def device_tokens(self) -> int:
        """All of them, where a device is to load and score it."""
        return 0 if self.place is None or self._probes is None else self.tokens

    @property
    def probes(self) -> ProbeShadow:
        """The host's copy of the probe tokens."""
        assert self._probes is not None
        return self._probes
