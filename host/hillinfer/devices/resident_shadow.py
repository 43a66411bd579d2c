# SPDX-License-Identifier: Apache-2.0
"""A segment whose shadow a device holds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hillinfer.devices.scorer import SegmentShadow
from hillinfer.hie.probe_shadow import ProbeShadow
from hillinfer_model.channel_statistics import ChannelStatistics


class ResidentShadow(SegmentShadow):
    """A `SegmentShadow` of which a device holds the first tokens, and the host the probe tokens.

    Parameters
    ----------
    base_position, tokens, statistics
        As there.
    slot
        Where it lies on the device.
    resident_tokens
        Tokens that the device holds, whole groups.
    probes
        What the host keeps of them.
    held
        The whole shadow where DRAM holds it, too.
    bring_back
        Makes the whole shadow in DRAM again, from the device or from rows; valid until another
        segment's is asked for.
    """

    def __init__(
        self,
        base_position: int,
        tokens: int,
        statistics: ChannelStatistics,
        slot: int,
        resident_tokens: int,
        probes: ProbeShadow,
        held: NDArray[np.uint8] | None,
        bring_back: Callable[[], NDArray[np.uint8]],
    ) -> None:
        for name, value in (
            ("base_position", base_position),
            ("tokens", tokens),
            ("statistics", statistics),
            ("slot", slot),
            ("resident_tokens", resident_tokens),
            ("_probes", probes),
            ("_held", held),
            ("_bring_back", bring_back),
        ):
            object.__setattr__(self, name, value)

    slot: int
    resident_tokens: int
    _probes: ProbeShadow
    _held: NDArray[np.uint8] | None
    _bring_back: Callable[[], NDArray[np.uint8]]

    @property
    def shadow(self) -> NDArray[np.uint8]:
        """Return the whole shadow, uint8 of shape (segment_beats, 64)."""
        return self._bring_back() if self._held is None else self._held

    @property
    def on_drive(self) -> bool:
        """Whether looking at `shadow` takes more than a look."""
        return self._held is None

    @property
    def device_tokens(self) -> int:
        """How many of the first tokens the device scores."""
        return self.resident_tokens

    @property
    def probes(self) -> ProbeShadow:
        """The host's copy of the probe tokens among them."""
        return self._probes
