# SPDX-License-Identifier: Apache-2.0
"""What a scorer is given, checked and described to the native library."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.native.structures import Addresses
from hillinfer.scoring.layout import ProbeShadow, ShadowLayout
from hillinfer.scoring.scorer import SegmentShadow
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.query_codes import LOG2_E
from hillinfer_model.statistics import DEFAULT_EXPONENT, LEAST_TOKENS, SINK_TOKENS

# --- Checks of arguments ---


class ScoringArguments:
    """Refuses arguments of another shape, type or order than a spec's."""

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec
        self._layout = ShadowLayout(spec)
        self._query_shape = spec.query_heads, spec.head_dim
        self._key_shape = spec.kv_heads, spec.head_dim

    def check_query(self, query: torch.Tensor) -> None:
        """Raise ValueError where a query is of another shape or type."""
        if query.dtype != torch.float32 or query.shape != self._query_shape:
            raise ValueError(
                f"a query is float32 of shape {self._query_shape}, not "
                f"{query.dtype} of shape {tuple(query.shape)}"
            )

    def check_segments(self, segments: Sequence[SegmentShadow], first: int = 0) -> None:
        """Raise ValueError where segments from number `first` on do not follow on each other."""
        length = self._spec.segment_tokens
        for index, segment in enumerate(segments[first:], first):
            if segment.base_position != index * length:
                raise ValueError(
                    f"segment {index} starts at position {segment.base_position}, not "
                    f"{index * length}"
                )
            least = 0 if index == len(segments) - 1 else length
            if not least <= segment.tokens <= length:
                raise ValueError(
                    f"segment {index} of {len(segments)} has {segment.tokens} tokens, not "
                    f"{least}..{length}"
                )

    def check_arrays(self, segment: SegmentShadow) -> None:
        """Raise ValueError where a segment's arrays are of another shape or type."""
        # Looking at a shadow on the drive would read it.
        if not segment.on_drive:
            self._layout.check(segment.shadow)
        self._check_statistics(segment.statistics)

    def check_keys(self, keys: torch.Tensor) -> None:
        """Raise ValueError where keys are of another shape or type."""
        shape = self._key_shape
        if keys.dtype != torch.float16 or keys.ndim != 3 or keys.shape[1:] != shape:
            raise ValueError(
                f"keys are float16 of shape (tokens, {shape[0]}, {shape[1]}), not {keys.dtype} of "
                f"shape {tuple(keys.shape)}"
            )

    def check_encoding(
        self,
        keys: torch.Tensor,
        statistics: ChannelStatistics,
        shadow: NDArray[np.uint8],
        first_token: int,
    ) -> None:
        """Raise ValueError where keys cannot be coded into a shadow; see `Scorer.encode`."""
        self.check_keys(keys)
        self._check_statistics(statistics)
        self._layout.check(shadow)
        if first_token < 0 or first_token + keys.shape[0] > self._spec.segment_tokens:
            raise ValueError(
                f"tokens {first_token}..{first_token + keys.shape[0]} lie outside a segment of "
                f"{self._spec.segment_tokens}"
            )

    def _check_statistics(self, statistics: ChannelStatistics) -> None:
        if statistics.means.shape != self._key_shape:
            raise ValueError(
                f"channel statistics have shape {self._key_shape}, not {statistics.means.shape}"
            )


def statistics_tokens(
    spec: KernelSpec,
    keys: torch.Tensor,
    first_position: int,
    preceding: ChannelStatistics | None,
) -> torch.Tensor | ChannelStatistics:
    """Return the tokens that a segment's own statistics come from, or what takes their place.

    Parameters
    ----------
    keys
        float16 of shape (tokens, kv_heads, head_dim): the segment's tokens so far.
    first_position
        Logical position of the first of them.
    preceding
        Statistics of the segment before; None for the first segment.

    Returns
    -------
    float16 of shape (tokens, kv_heads, head_dim) without the sinks, or where they are too few
    `preceding` itself or the contract's default (contract, section 3).

    Raises
    ------
    ValueError
        The tokens do not lie in one segment, the first segment is given a preceding one, or a
        later one with too few tokens is not.
    """
    if first_position < 0 or (
        first_position % spec.segment_tokens + keys.shape[0] > spec.segment_tokens
    ):
        raise ValueError(
            f"{keys.shape[0]} tokens from position {first_position} on do not lie in one segment "
            f"of {spec.segment_tokens}"
        )
    if first_position < spec.segment_tokens and preceding is not None:
        raise ValueError("the first segment was given the statistics of a preceding one")
    own = keys[max(SINK_TOKENS - first_position, 0) :]
    tokens = own.shape[0]
    if first_position >= spec.segment_tokens:
        if tokens < spec.segment_tokens // 2:
            if preceding is None:
                raise ValueError(
                    f"{tokens} tokens from position {first_position} on are too few for their own "
                    f"channel statistics, and those of the preceding segment are missing"
                )
            return preceding
    elif tokens < LEAST_TOKENS:
        shape = tuple(keys.shape[1:])
        return ChannelStatistics(
            np.full(shape, DEFAULT_EXPONENT, dtype=np.int8), np.zeros(shape, dtype=np.int32)
        )
    return own


def query_factor(scaling: float) -> float:
    """Return what a query is multiplied with, float64; it is rounded to float32 before.

    Parameters
    ----------
    scaling
        What the attention function multiplies inner products with.
    """
    return scaling * LOG2_E


# --- Descriptions of segments for the native library ---

# The addresses of shadow, c, M and probe groups (or 0), and the tokens.
_WORDS = struct.Struct("=5q")


class SegmentWords:
    """Describes segments to the library, a full one once for as long as its object lives.

    Asking numpy and checking shapes take longer than scoring a small model's segment does, and a
    long sequence has hundreds of segments.

    Parameters
    ----------
    check
        Called with every segment that is described anew; raises ValueError where its arrays are
        of no use.
    """

    def __init__(self, segment_tokens: int, check: Callable[[SegmentShadow], None]) -> None:
        self._size = segment_tokens
        self._check = check
        self._addresses = Addresses()
        self._known: dict[int, tuple[weakref.ref[SegmentShadow], bytes]] = {}
        # By the first of them, what all full segments of a sequence are, and their words.
        self._joined: dict[int, tuple[tuple[int, ...], bytes]] = {}

    def __len__(self) -> int:
        """Return how much it remembers: segments, and those that were told together."""
        return len(self._known) + len(self._joined)

    def of(self, segment: SegmentShadow, kept: list[NDArray[Any]]) -> bytes:
        """Return a segment's five words.

        Parameters
        ----------
        segment
            In host memory.
        kept
            Gets copies of arrays that have gaps; they must live until the library is called.
        """
        key = id(segment)
        known = self._known.get(key)
        if known is not None and known[0]() is segment:
            return known[1]
        self._check(segment)
        copies = len(kept)
        statistics, probes = segment.statistics, segment.probe_copy
        words = _WORDS.pack(
            self._address(segment.shadow, kept),
            self._address(statistics.exponents, kept),
            self._address(statistics.means, kept),
            0 if probes is None else self._address(probes.shadow, kept),
            segment.tokens,
        )
        # Other kinds find their shadow anew each time they are asked.
        fixed = type(segment) is SegmentShadow and len(kept) == copies
        if fixed and segment.tokens == self._size:
            self._remember(key, segment, words)
        return words

    def given(self, segment: SegmentShadow, probes: ProbeShadow, kept: list[NDArray[Any]]) -> bytes:
        """Return the words of a segment whose shadow is not here: 0, and its probe tokens'.

        Parameters
        ----------
        segment, kept
            As in `of`; it is looked at each time.
        probes
            Of the whole segment.
        """
        self._check(segment)
        statistics = segment.statistics
        return _WORDS.pack(
            0,
            self._address(statistics.exponents, kept),
            self._address(statistics.means, kept),
            self._address(probes.shadow, kept),
            segment.tokens,
        )

    def coded(
        self,
        shadow: NDArray[np.uint8],
        statistics: ChannelStatistics,
        kept: list[NDArray[Any]],
    ) -> tuple[int, bytes]:
        """Return the address of a shadow that is to be written, and the words that coding needs.

        Nothing is checked, and of the words only those of c and M say anything.
        """
        exponents = self._address(statistics.exponents, kept)
        means = self._address(statistics.means, kept)
        return self._addresses.of(shadow), _WORDS.pack(0, exponents, means, 0, 0)

    def joined(self, segments: Sequence[SegmentShadow]) -> bytes | None:
        """Return what `join` returned for the same objects in this order, where it is still true.

        Then none of them is on the drive.
        """
        if not segments:
            return b""
        known = self._joined.get(id(segments[0]))
        return known[1] if known is not None and known[0] == tuple(map(id, segments)) else None

    def join(self, segments: Sequence[SegmentShadow], kept: list[NDArray[Any]]) -> bytes:
        """Return the words of consecutive segments from a sequence's first on; see `of`.

        Where all of them stay as they are, they are not looked at again, however many there are.
        """
        words = b"".join([self.of(one, kept) for one in segments])
        ids = tuple(map(id, segments))
        if ids and all(one in self._known for one in ids):
            self._joined[ids[0]] = ids, words
        return words

    def _remember(self, key: int, segment: SegmentShadow, words: bytes) -> None:
        forget, joined = self._known, self._joined

        def drop(dead: weakref.ref[SegmentShadow]) -> None:
            # Before its id can be another's; segments go seldom.
            joined.clear()
            # Another segment may have the same id by now.
            if forget.get(key, (None, b""))[0] is dead:
                del forget[key]

        self._known[key] = (weakref.ref(segment, drop), words)

    def _address(self, values: NDArray[Any], kept: list[NDArray[Any]]) -> int:
        try:
            return self._addresses.of(values)
        except ValueError:
            whole = np.ascontiguousarray(values)
            kept.append(whole)
            return self._addresses.of(whole)
