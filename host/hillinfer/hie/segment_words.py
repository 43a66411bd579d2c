# SPDX-License-Identifier: Apache-2.0
"""What the native library is told of segments, remembered for those that stay as they are."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hillinfer.devices.scorer import SegmentShadow
from hillinfer.hie.probe_shadow import ProbeShadow
from hillinfer.native.addresses import Addresses
from hillinfer_model.channel_statistics import ChannelStatistics

# The addresses of shadow, c, M and probe groups (or 0), and the tokens.
_WORDS = struct.Struct("=5q")


class SegmentWords:
    """Describes segments to the library, a full one once for as long as its object lives.

    Asking numpy and checking shapes take longer than scoring a small model's segment does, and a
    long sequence has hundreds of segments.

    Parameters
    ----------
    segment_tokens
        Of a full segment.
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
