# SPDX-License-Identifier: Apache-2.0
"""What a device holds of segments, and what DRAM counts for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.devices.resident_shadow import ResidentShadow
from hillinfer.pools.accountant import Accountant, Part
from hillinfer.storage.segment import SegmentLayer
from hillinfer_model.kernel_spec import GROUP_TOKENS


class ResidentShadows:
    """Takes and gives back a device's room for segments, one by one.

    Parameters
    ----------
    device
        Holds shadows that the host need not; None where there is none, and nothing is done then.
    accountant
        Counts the copies of probe tokens.
    staging
        Returns memory for one shadow, the same at each call.
    """

    def __init__(
        self,
        device: DeviceShadows | None,
        accountant: Accountant,
        staging: Callable[[], NDArray[np.uint8]],
    ) -> None:
        self._device = device
        self._accountant = accountant
        self._staging = staging

    def claim(self, own: SegmentLayer, number: int) -> None:
        """Take room on the device for a segment of some number, and for its probes here."""
        if self._device is None or own.resident is not None or own.slot is not None:
            return
        resident = self._device.take(number)
        if resident is not None:
            try:
                self._accountant.take(Part.SHADOW, resident.probes.shadow.nbytes)
            except BaseException:
                self._device.give(resident)
                raise
        own.resident = resident

    def update(self, own: SegmentLayer) -> bool:
        """Send the device its full groups; return whether the segment is one of the device's."""
        if self._device is None or own.resident is None:
            return False
        assert own.shadow is not None
        self._device.update(own.resident, own.shadow, own.coded_tokens)
        return True

    def is_lost(self, own: SegmentLayer) -> bool:
        """Return whether a device held it that is no longer there."""
        return self._device is not None and own.resident is not None and self._device.lost

    def cut(self, own: SegmentLayer, tokens: int) -> None:
        """Keep full groups below `tokens` only."""
        if own.resident is not None:
            whole = tokens // GROUP_TOKENS * GROUP_TOKENS
            own.resident.tokens = min(own.resident.tokens, whole)

    def read(self, own: SegmentLayer, into: NDArray[np.uint8]) -> bool:
        """Bring a shadow back; return False where no device holds it, or one that was lost."""
        if own.resident is None or self._device is None:
            return False
        return self._device.read(own.resident, into)

    def free(self, own: SegmentLayer) -> None:
        """Give the device's room back."""
        assert own.resident is not None
        assert self._device is not None
        self._device.give(own.resident)
        self._accountant.give(Part.SHADOW, own.resident.probes.shadow.nbytes)
        own.resident = None

    def told(
        self, base: int, own: SegmentLayer, remake: Callable[[], NDArray[np.uint8]]
    ) -> ResidentShadow:
        """Return what scorers are told of a segment that a device holds.

        Parameters
        ----------
        base
            Position of its first token.
        own
            The segment.
        remake
            Codes it again after the device was lost.
        """
        assert own.resident is not None
        assert own.statistics is not None
        return ResidentShadow(
            base,
            own.coded_tokens,
            own.statistics,
            own.resident.slot,
            own.resident.tokens,
            own.resident.probes,
            own.shadow,
            partial(self._brought_back, own, remake),
        )

    def _brought_back(
        self, own: SegmentLayer, remake: Callable[[], NDArray[np.uint8]]
    ) -> NDArray[np.uint8]:
        """Return a shadow that DRAM does not hold, valid until another is brought back."""
        if own.shadow is not None:
            return own.shadow
        staging = self._staging()
        return staging if self.read(own, staging) else remake()
