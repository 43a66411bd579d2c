# SPDX-License-Identifier: Apache-2.0
"""Codes and statistics of a saved session, segment by segment."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import aligned_buffer
from hillinfer.sessions.manifest import CHANNEL_BYTES, Part, code_bytes, damaged, slot_bytes
from hillinfer.sessions.opening import SavedSession
from hillinfer_model.channel_statistics import ChannelStatistics

# Stands for a segment of a layer that has taken no statistics yet.
UNCODED = -1
# All bytes of statistics that no values have: c is no such number.
NOT_TAKEN = 127
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
        return self._taken(Part.STATISTICS, segment, layer)

    @property
    def segment_tokens(self) -> int:
        """Tokens of a segment."""
        return self._spec.segment_tokens

    @property
    def has_value_codes(self) -> bool:
        """Whether it has codes of values that are as they were saved."""
        return self._session.has_codes

    def value_codes(self, layer: int, first: int, tokens: int) -> NDArray[np.uint8]:
        """Return codes of values of full groups, uint8 (tokens, code_bytes); see `read_codes`."""
        codes = np.empty((tokens, code_bytes(self._spec)), np.uint8)
        self._session.read_codes(layer, first, codes)
        return codes

    def warn_of_value_codes(self) -> None:
        """Say that codes of values cannot be read any more."""
        self._session.warn_of_codes("cannot be read any more")

    def values(self, segment: int, layer: int) -> ChannelStatistics | None:
        """Return the statistics of a segment's values, None where none were taken."""
        if Part.VALUES.value not in self._session.manifest.digests:
            return None
        return self._taken(Part.VALUES, segment, layer)

    def _taken(self, part: Part, segment: int, layer: int) -> ChannelStatistics | None:
        shape = (self._spec.kv_heads, self._spec.head_dim)
        channels = shape[0] * shape[1]
        packed = np.empty(channels * CHANNEL_BYTES, np.uint8)
        place = segment * self.coded.shape[1] + layer
        self._session.read_into(part, packed, place * len(packed))
        if part is Part.VALUES and (packed == NOT_TAKEN).all():
            return None
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
                f"{part.value} holds numbers outside the scoring contract",
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
