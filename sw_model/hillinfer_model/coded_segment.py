# SPDX-License-Identifier: Apache-2.0
"""A segment's key codes together with its channel statistics."""

from __future__ import annotations

from dataclasses import dataclass

from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.key_codes import KeyCodes


@dataclass(frozen=True)
class CodedSegment:
    """Key codes of one segment's tokens so far, with what they are relative to.

    Parameters
    ----------
    base_position
        Position of the first token, a multiple of the segment length.
    codes
        Of all its tokens so far.
    statistics
        The segment's.
    """

    base_position: int
    codes: KeyCodes
    statistics: ChannelStatistics
