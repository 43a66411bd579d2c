# SPDX-License-Identifier: Apache-2.0
"""The key shadow of a saved session, segment by segment."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer.sessions.errors import damaged
from hillinfer.sessions.saved_session import SavedSession
from hillinfer.sessions.sequence_parts import UNCODED
from hillinfer.sessions.session_files import CHANNEL_BYTES, Part, slot_bytes
from hillinfer.storage.aligned_buffer import aligned_buffer
from hillinfer_model.channel_statistics import ChannelStatistics

_EXPONENTS = (-14, 16)
_MEAN_LIMIT = (1 << 23) - 1


class SavedShadow:
    """Codes and statistics of a session's segments in all layers.

    Parameters
    ----------
    session
        Whose.

    Attributes
    ----------
    coded
        int32 (segments, layers): tokens coded, -1 where no statistics were taken.
    """

    def __init__(self, session: SavedSession) -> None:
        self._session = session
        # Direct I/O reads whole slots, into aligned memory.
        self._staging: NDArray[np.uint8] | None = None
        manifest = session.manifest
        self._spec = manifest.spec
        shape = (manifest.extent.segments, manifest.shape.layers)
        self.coded: NDArray[np.int32] = session.array(Part.CODED, "<i4", shape)
        begun = np.arange(shape[0])[:, None] * self._spec.segment_tokens
        room = np.minimum(session.tokens - begun, self._spec.segment_tokens)
        if ((self.coded < UNCODED) | (self.coded > room)).any():
            raise damaged(session.directory, f"{Part.CODED.value} counts tokens that are not there")

    def statistics(self, segment: int, layer: int) -> ChannelStatistics | None:
        """Return the statistics of one segment and layer, None where none were taken."""
        if self.coded[segment, layer] == UNCODED:
            return None
        shape = (self._spec.kv_heads, self._spec.head_dim)
        channels = shape[0] * shape[1]
        packed = np.empty(channels * CHANNEL_BYTES, np.uint8)
        place = segment * self.coded.shape[1] + layer
        self._session.read_into(Part.STATISTICS, packed, place * len(packed))
        exponents = packed[:channels].view(np.int8).reshape(shape).copy()
        means = packed[channels:].copy().view("<i4").astype(np.int32).reshape(shape)
        low, high = _EXPONENTS
        if (
            exponents.min() < low
            or exponents.max() > high
            or max(-int(means.min()), int(means.max())) > _MEAN_LIMIT
        ):
            raise damaged(
                self._session.directory,
                f"{Part.STATISTICS.value} holds numbers outside the scoring contract",
            )
        return ChannelStatistics(exponents, means)

    def read_codes(self, segment: int, layer: int, into: NDArray[np.uint8]) -> None:
        """Fill a segment's shadow of one layer, uint8 (segment_beats, 64)."""
        size = slot_bytes(self._spec)
        if self._staging is None:
            self._staging = aligned_buffer(size)[:size]
        self._session.read_into(Part.SHADOW, self._staging, self.slot(segment, layer) * size)
        into.reshape(-1)[:] = self._staging[: into.size]

    def slot(self, segment: int, layer: int) -> int:
        """Return the slot of a segment in a layer: a layer's segments lie one behind the other."""
        return layer * self._session.manifest.extent.segments + segment
