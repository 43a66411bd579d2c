# SPDX-License-Identifier: Apache-2.0
"""The shadow of one segment in all layers, shared by the sequences that have it in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hillinfer.devices.device_shadows import Resident
from hillinfer.devices.scorer import SegmentShadow
from hillinfer.hie.probe_shadow import ProbeShadow
from hillinfer.storage.shadow_arena import ShadowArena
from hillinfer_model.channel_statistics import ChannelStatistics


@dataclass(slots=True)
class SegmentLayer:
    """Codes and statistics of one segment in one layer (contract, section 1).

    Parameters
    ----------
    arena
        Where its shadow lies in DRAM, beside those of the layer's other segments.
    shadow
        uint8 of shape (segment_beats, 64) in DRAM; None where it is on the drive or not made yet.
    slot
        Where it lies in the `ShadowStore`; None where it was not written.
    resident
        What a device holds of it; None where it holds nothing.
    probes
        The probe tokens where it is full and at rest in DRAM, or lies on the drive and a device is
        to score it; else None.
    statistics
        None until it is full or first scored.
    coded_tokens
        Tokens coded so far.
    told
        What scorers are told of a full shadow at rest in DRAM: the same object at every step, so
        that they need to look at it only once.
    """

    arena: ShadowArena
    shadow: NDArray[np.uint8] | None = None
    slot: int | None = None
    resident: Resident | None = None
    probes: ProbeShadow | None = None
    statistics: ChannelStatistics | None = None
    coded_tokens: int = 0
    told: SegmentShadow | None = None

    def drop_shadow(self) -> None:
        """Forget what DRAM holds of it."""
        self.shadow, self.told = None, None


class Segment:
    """1,024 positions in every layer.

    Parameters
    ----------
    arenas
        Of each layer of the model.
    """

    def __init__(self, arenas: Iterable[ShadowArena]) -> None:
        self.layers = [SegmentLayer(arena) for arena in arenas]
        self.owners = 1

    def clone(self) -> Segment:
        """Return a segment that one sequence owns alone; its shadows are still the same arrays."""
        copy = Segment(())
        copy.layers = [replace(layer) for layer in self.layers]
        return copy
