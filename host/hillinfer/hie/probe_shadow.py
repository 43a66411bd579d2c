# SPDX-License-Identifier: Apache-2.0
"""The part of a segment's shadow that a host keeps when a device holds the rest (section 3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer.hie.offsets import PROBE_STRIDE, SINKS
from hillinfer.hie.shadow_layout import ShadowLayout
from hillinfer_model.kernel_spec import BEAT_BYTES, GROUP_TOKENS


class ProbeShadow:
    """Codes and exponents of a segment's probe tokens, and of the sinks where it has them.

    They lie in whole groups of their own, laid out as the segment's (contract, section 5): first
    every 16th token, then sinks 1 to 3.

    Parameters
    ----------
    layout
        Of the segment's shadow.
    first
        Whether it is the first segment, which has the sinks.

    Attributes
    ----------
    tokens
        Ascending indices within the segment, in the order of the groups but for the sinks.
    shadow
        uint8 of shape (groups · group_beats, 64).
    """

    def __init__(self, layout: ShadowLayout, first: bool) -> None:  # noqa: FBT001 - a fact
        self._layout = layout
        probes = np.arange(0, layout.spec.segment_tokens, PROBE_STRIDE)
        sinks = np.arange(1, SINKS) if first else np.arange(0)
        self.tokens = np.concatenate([probes, sinks])
        groups = -(-self.tokens.size // GROUP_TOKENS)
        self.shadow = np.zeros((groups * layout.spec.group_beats, BEAT_BYTES), dtype=np.uint8)

    def take(self, shadow: NDArray[np.uint8], first_token: int, stop: int) -> None:
        """Copy the tokens first_token <= index < stop that are kept out of a segment's shadow."""
        places = np.flatnonzero((self.tokens >= first_token) & (self.tokens < stop))
        self._layout.copy_tokens(shadow, self.tokens[places], self.shadow, places)

    @property
    def groups(self) -> int:
        """Groups that its tokens fill."""
        return self.shadow.shape[0] // self._layout.spec.group_beats


def probe_bytes(layout: ShadowLayout) -> int:
    """Return an upper bound of the bytes of one segment's probe shadow."""
    tokens = layout.spec.segment_tokens // PROBE_STRIDE + SINKS - 1
    return -(-tokens // GROUP_TOKENS) * layout.spec.group_beats * BEAT_BYTES
