# SPDX-License-Identifier: Apache-2.0
"""Where the score arrays of a launch lie, and what is in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hillinfer.devices.errors import DeviceError
from hillinfer.devices.scoring_device import DeviceSegment, ScoredTokens
from hillinfer_model.beats import Beats, beat_count
from hillinfer_model.choices import Scope
from hillinfer_model.descriptor import TUPLE_BYTES, Descriptor
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.launch_shape import query_beats
from hillinfer_model.score_tuples import WINDOW_TOKENS

# The bits of a tuple that hold the token's position in its window.
_POSITION = np.uint32(WINDOW_TOKENS - 1)


class ScoreArrays:
    """Score arrays and query blocks of a launch's segments, one behind the other (section 6).

    Parameters
    ----------
    spec
        The kernel's.
    scope
        What shares one selected set.
    segments
        What is scored.
    """

    def __init__(self, spec: KernelSpec, scope: Scope, segments: Sequence[DeviceSegment]) -> None:
        self._spec = spec
        self._segments = segments
        self._sets = 1 if scope is Scope.LAYER else spec.kv_heads
        self._scope = scope
        sizes = [beat_count(one.tokens * TUPLE_BYTES) for one in segments]
        self._sizes = sizes
        self.starts = np.concatenate([[0], np.cumsum(sizes) * self._sets]).tolist()

    @property
    def beats(self) -> int:
        """Beats of all score arrays."""
        return int(self.starts[-1])

    def descriptors(self, shadows: Sequence[int]) -> Beats:
        """Return the launch's descriptors, uint8 of shape (segments, 64).

        Parameters
        ----------
        shadows
            Where each segment's shadow lies, in beats from the start of the buffer.
        """
        return np.concatenate(
            [
                Descriptor(
                    shadow=shadow,
                    query=index * query_beats(self._spec),
                    score=start,
                    base_position=one.base_position,
                    tokens=one.tokens,
                    score_stride=size if self._scope is Scope.KV_HEAD else 0,
                ).pack()
                for index, (one, shadow, start, size) in enumerate(
                    zip(self._segments, shadows, self.starts, self._sizes, strict=False)
                )
            ]
        )

    def scored(self, index: int, first: int, stop: int, scores: Beats) -> ScoredTokens:
        """Return the tuples first <= token < stop of a segment out of the score buffer.

        Raises
        ------
        DeviceError
            Where they are not of these tokens: the device has left something else there.
        """
        start, size = self.starts[index], self._sizes[index]
        arrays = scores[start : start + self._sets * size].reshape(self._sets, -1).view("<u4")
        tuples = arrays[:, first:stop].astype(np.uint32)
        base = self._segments[index].base_position
        positions = np.arange(base + first, base + stop, dtype=np.uint32) & _POSITION
        if ((tuples & _POSITION) != positions).any():
            raise DeviceError(
                f"the device left no scores of tokens {base + first} to {base + stop - 1} where "
                "it counted them complete"
            )
        return ScoredTokens(index, first, tuples)
