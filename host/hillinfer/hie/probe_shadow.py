# SPDX-License-Identifier: Apache-2.0
"""The part of a segment's shadow that is looked at first, kept apart from the rest (section 3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer.hie.shadow_layout import ShadowLayout
from hillinfer_model.kernel_spec import BEAT_BYTES, GROUP_TOKENS, KernelSpec
from hillinfer_model.offsets import PROBE_STRIDE
from hillinfer_model.statistics import SINK_TOKENS


class ProbeShadow:
    """Codes and exponents of a segment's probe tokens, and of the sinks where it has them.

    They lie in whole groups of their own, laid out as the segment's (contract, section 5): first
    every 16th token, then sinks 1 to 3.

    Parameters
    ----------
    layout
        Of the segment's shadow.
    number
        Of the segment: number 0 has the sinks.

    Attributes
    ----------
    tokens
        Ascending indices within the segment, in the order of the groups but for the sinks.
    shadow
        uint8 of shape (groups · group_beats, 64).
    """

    def __init__(self, layout: ShadowLayout, number: int) -> None:
        self._layout = layout
        self.tokens = _kept_tokens(layout.spec, number)
        self.shadow = np.zeros((_beats(layout.spec, number), BEAT_BYTES), dtype=np.uint8)

    @classmethod
    def of(cls, layout: ShadowLayout, number: int, shadow: NDArray[np.uint8]) -> ProbeShadow:
        """Return the probe tokens of a full segment.

        Parameters
        ----------
        layout, number
            As for the class.
        shadow
            The segment's, uint8 of shape (segment_beats, 64).
        """
        made = cls(layout, number)
        made.take(shadow, 0, layout.spec.segment_tokens)
        return made

    def take(self, shadow: NDArray[np.uint8], first_token: int, stop: int) -> None:
        """Copy the tokens first_token <= index < stop that are kept out of a segment's shadow."""
        places = np.flatnonzero((self.tokens >= first_token) & (self.tokens < stop))
        self._layout.copy_tokens(shadow, self.tokens[places], self.shadow, places)

    @property
    def groups(self) -> int:
        """Groups that its tokens fill."""
        return self.shadow.shape[0] // self._layout.spec.group_beats


def probe_bytes(spec: KernelSpec, number: int) -> int:
    """Return the bytes of the probe shadow of the segment of some number."""
    return _beats(spec, number) * BEAT_BYTES


def _kept_tokens(spec: KernelSpec, number: int) -> NDArray[np.int64]:
    sinks = range(0 if number else 1, 0 if number else SINK_TOKENS)
    return np.array([*range(0, spec.segment_tokens, PROBE_STRIDE), *sinks], np.int64)


def _beats(spec: KernelSpec, number: int) -> int:
    return -(-_kept_tokens(spec, number).size // GROUP_TOKENS) * spec.group_beats
