# SPDX-License-Identifier: Apache-2.0
"""Quantises values as keys are, and says what the codes stand for (contract, section 14)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import KeyMode
from hillinfer_model.key_codes import KeyCodes, encode_keys
from hillinfer_model.statistics import segment_statistics

CODE_LIMIT = 7


def value_statistics(
    values: NDArray[np.uint16],
    first_position: int,
    segment_tokens: int,
    preceding: ChannelStatistics | None,
) -> ChannelStatistics:
    """Return the channel statistics of a segment's values (contract, section 14).

    Parameters
    ----------
    values
        uint16 of shape (tokens, kv_heads, head_dim): FP16 codes of the tokens that the segment's
        key statistics are taken over.
    first_position, segment_tokens
        As for `segment_statistics`, whose errors it raises.
    preceding
        Of the values of the segment before, None for the first.
    """
    return segment_statistics(values, first_position, segment_tokens, preceding)


def encode_values(values: NDArray[np.uint16], statistics: ChannelStatistics) -> KeyCodes:
    """Code values relative to their segment's channel statistics (contract, section 14).

    Parameters
    ----------
    values
        uint16 of shape (tokens, kv_heads, head_dim), FP16 codes.
    statistics
        Of the segment's values.

    Raises
    ------
    ValueError, TypeError
        As `encode_keys`.
    """
    return encode_keys(values, statistics, KeyMode.INT4)


def decode_values(codes: KeyCodes, statistics: ChannelStatistics) -> NDArray[np.float64]:
    """Return what value codes stand for, exact in float64; NaN where invalid (section 14).

    Parameters
    ----------
    codes
        Of tokens of one segment.
    statistics
        Of the segment's values.

    Returns
    -------
    float64 of shape (tokens, kv_heads, head_dim).
    """
    powers = np.where(codes.invalid, 0, codes.exponents).astype(np.int64)[:, :, np.newaxis]
    distances = codes.codes.astype(np.int64) << powers
    decoded = np.ldexp(
        (distances + statistics.means).astype(np.float64),
        statistics.exponents.astype(np.int32) - 14,
    )
    return np.where(codes.invalid[:, :, np.newaxis], np.nan, decoded)
