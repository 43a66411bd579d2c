# SPDX-License-Identifier: Apache-2.0
"""The output and status buffers that a launch leaves in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hillinfer_model.beats import Beats

# What every byte of a status buffer holds before a launch, so that a beat nobody wrote shows.
STATUS_FILL = 0xA5
# Bytes of a status beat that count its segment's complete tokens.
TOKENS_COMPLETE = slice(12, 16)


@dataclass(frozen=True)
class LaunchResult:
    """The two buffers a launch writes, whole, after its end (contract, section 11).

    Parameters
    ----------
    output
        uint8 of shape (beats, 64): the scores, or the shadow of a `make_shadow`.
    status
        uint8 of shape (segments, 64): one status beat per segment; one that the launch did not
        come to still holds `STATUS_FILL`.
    """

    output: Beats
    status: Beats

    @property
    def completed_tokens(self) -> int:
        """Tokens that the status beats which were written count complete."""
        written = self.status[np.any(self.status != STATUS_FILL, axis=1)]
        return int(np.ascontiguousarray(written[:, TOKENS_COMPLETE]).view("<u4").sum())
