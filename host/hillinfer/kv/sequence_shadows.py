# SPDX-License-Identifier: Apache-2.0
"""Keeps every sequence's key shadow up to date with its rows."""

from __future__ import annotations

import threading
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from functools import partial
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.devices.device import ROWS_TOGETHER
from hillinfer.drive.shared_files import ShadowBase
from hillinfer.errors import BudgetError
from hillinfer.kv.gather import Gather
from hillinfer.kv.sequence import RowLayout, RowPart, Sequence
from hillinfer.scoring.scorer import Scorer, SegmentShadow
from hillinfer.sessions.opening import SavedShadow
from hillinfer.shadow.code_file import CodeFile
from hillinfer.shadow.kept_codes import KeptCodes
from hillinfer.shadow.memory import ShadowMemory
from hillinfer.shadow.segments import Segment, SegmentLayer, ValueWords, coded_tokens, known_values
from hillinfer.shadow.values import ValueCodes
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec


class SequenceShadows:
    """Codes keys segment by segment, each segment's statistics taken once (contract, section 3).

    Parameters
    ----------
    values
        Keeps value codes; None where no token is coded.
    file
        Has codes of full groups on the drive; None where nothing has.
    """

    def __init__(
        self,
        scorer: Scorer,
        layers: int,
        gather: Gather,
        layout: RowLayout,
        memory: ShadowMemory,
        values: ValueCodes | None = None,
        file: CodeFile | None = None,
    ) -> None:
        self._scorer = scorer
        self.spec: KernelSpec = scorer.spec
        self._layers = layers
        self._gather = gather
        self._memory, self.coming = memory, memory.coming
        self.values, self.codes = values, None if values is None else KeptCodes(values, file)
        self._key_part, self.value_part = RowPart(layout.keys), RowPart(layout.values)
        self._no_keys = torch.empty((0, self.spec.kv_heads, self.spec.head_dim)).half()
        self._coding = threading.Lock()  # Of codes and tables; free while tokens are scored.

    def code_full_segments(
        self,
        layer: int,
        sequence: Sequence,
        fresh: torch.Tensor,
        values: torch.Tensor | None = None,
    ) -> None:
        """Code every segment that is full and not yet coded.

        Parameters
        ----------
        fresh
            Keys of the newest tokens, float16 (tokens, kv_heads, head_dim) on the CPU; saves
            reading them back.
        values
            Their values likewise; None to read them back where they are wanted.
        """
        full = sequence.lengths[layer] // self.spec.segment_tokens
        with self._coding:
            self._code(layer, sequence, fresh, full * self.spec.segment_tokens, values)

    def code_all(self, layer: int, sequence: Sequence, fresh: torch.Tensor) -> list[SegmentShadow]:
        """Code every token, because scoring follows, and return the shadow of all segments."""
        with self._coding:
            self._code(layer, sequence, fresh, sequence.lengths[layer])
        return self.shadows(layer, sequence)

    def code_past(self, layer: int, sequence: Sequence, past: int) -> list[SegmentShadow]:
        """Code the first `past` tokens and return their shadow.

        Unlike `code_all`, whatever is stored meanwhile: one token more may be, by another thread.
        """
        with self._coding:
            self._code(layer, sequence, self._no_keys, past)
        return self.shadows(layer, sequence)

    def codes_from_tail(self, layer: int, sequence: Sequence) -> bool:
        """Say whether coding what is left of a layer takes no memory and reads nothing back.

        Another thread may code it then, while this one takes memory or reads rows.
        """
        size, tokens = self.spec.segment_tokens, sequence.lengths[layer]
        number = (tokens - 1) // size
        # A full group leaves the tail when the next token comes.
        if number >= len(sequence.segments) or tokens % GROUP_TOKENS == 0:
            return False
        segment = sequence.segments[number]
        own = segment.layers[layer]
        coded = number * size + own.coded_tokens
        return (
            segment.owners == 1 and own.shadow is not None and coded >= sequence.held_starts[layer]
        )

    def described(self, layer: int, sequence: Sequence, stop: int) -> SegmentLayer | None:
        """Describe the shadow of the first `stop` tokens to the native library, where it may code.

        It may where all of it lies in DRAM, and what is not coded yet lies in the tail and in a
        segment that has statistics, belongs to this sequence alone and does not become full.

        Returns
        -------
        The last segment, whose table has its coded tokens; None where it may not.
        """
        size, segments = self.spec.segment_tokens, sequence.segments
        last = (stop - 1) // size
        if self._memory.has_device or last != len(segments) - 1 or stop == (last + 1) * size:
            return None
        own = segments[last].layers[layer]
        if segments[last].owners != 1 or own.statistics is None or own.shadow is None:
            return None
        if not sequence.held_starts[layer] <= last * size + own.coded_tokens <= stop:
            return None
        if sequence.described[layer] != self._memory.changes:
            words = self._memory.words(layer, segments)
            if words is None:
                return None
            sequence.tables.describe(layer, words, len(segments))
            sequence.described[layer] = self._memory.changes
        elif sequence.tables.coded[layer] != own.coded_tokens:
            sequence.tables.note_coded(layer, own.coded_tokens)
        return own

    def settled(
        self, layer: int, sequence: Sequence, stop: int
    ) -> tuple[ValueWords, list[NDArray[np.uint8] | None]] | None:
        """Return words of values, and the shadows, of a layer whose tables are complete; else None.

        The shadows stay while these are kept. It does not wait for whoever scores.
        """
        with self._coding:
            words = sequence.known_words(layer)
            if not self._are_complete(words, sequence) or not self.described(layer, sequence, stop):
                return None
            return words, [one.layers[layer].shadow for one in sequence.segments]

    def share(self, sequence: Sequence) -> list[Segment]:
        """Return the sequence's segments, owned once more each, for a fork of it."""
        for segment in sequence.segments:
            segment.owners += 1
        return list(sequence.segments)

    def adopt(
        self,
        sequence: Sequence,
        saved: SavedShadow,
        segments: int,
        tokens: int,
        base: ShadowBase,
    ) -> None:
        """Give an empty sequence the first segments of a saved shadow, as they were.

        Parameters
        ----------
        sequence
            Of no tokens yet.
        saved, segments
            Whose, and how many of them.
        tokens
            That the sequence is about to have.
        base
            The saved shadow's file, which is closed once nobody reads it.
        """
        size = self.spec.segment_tokens
        with self._memory.base(base) as first:
            for number, layer in product(range(segments), range(self._layers)):
                own = self._own(sequence, number).layers[layer]
                statistics = saved.statistics(number, layer)
                if statistics is None:
                    continue
                slot = None if first is None else first + saved.slot(number, layer)
                read = partial(saved.read_codes, number, layer)
                coded = int(saved.coded[number, layer])
                self._memory.adopt(own, number, statistics, coded, slot, read)
                self._memory.leave_to_device(own, (number + 1) * size, tokens)

    def share_segment(self, sequence: Sequence, segment: Segment) -> None:
        """Give a sequence its next segment, which others have too."""
        segment.owners += 1
        sequence.segments.append(segment)

    def adopt_stored(
        self,
        sequence: Sequence,
        layers: SequenceOf[tuple[ChannelStatistics, NDArray[np.uint8]]],
        tokens: int,
    ) -> Segment:
        """Give a sequence its next segment, full, and return it.

        Parameters
        ----------
        sequence
            Whose; all segments before it are there.
        layers
            Of each its statistics, and codes, uint8 (bytes,), which are copied.
        tokens
            That the sequence is about to have.
        """
        size, number = self.spec.segment_tokens, len(sequence.segments)
        segment = self._own(sequence, number)
        for own, (statistics, codes) in zip(segment.layers, layers, strict=True):

            def read(into: NDArray[np.uint8], codes: NDArray[np.uint8] = codes) -> None:
                into.reshape(-1)[:] = codes

            self._memory.adopt(own, number, statistics, size, None, read)
            self._memory.leave_to_device(own, (number + 1) * size, tokens)
        return segment

    def stored_codes(
        self, segment: Segment
    ) -> list[tuple[NDArray[np.uint8], ChannelStatistics]] | None:
        """Return codes and statistics of a full segment; None where not all of them are here."""
        found = []
        for own in segment.layers:
            shadow, statistics = own.shadow, own.statistics
            if statistics is None or own.coded_tokens < self.spec.segment_tokens:
                return None
            if shadow is None:
                if own.slot is None:
                    return None
                shadow = self._memory.whole(own).copy()
            found.append((shadow, statistics))
        return found

    def shadows(self, layer: int, sequence: Sequence) -> list[SegmentShadow]:
        """Return what is coded of a layer already, to be read in this order."""
        remake = partial(self._remake, layer, sequence)
        return self._memory.shadows(layer, sequence.segments, remake)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Drop codes from position `length` on; a cut segment keeps its statistics."""
        size = self.spec.segment_tokens
        kept = -(-length // size)
        if length % size and kept <= len(sequence.segments):
            left = length - (kept - 1) * size
            for later in sequence.segments[kept:]:
                self._memory.leave_all_to_device(later)
            if any(one.coded_tokens > left for one in sequence.segments[kept - 1].layers):
                self._memory.cut(self._own(sequence, kept - 1), left)
        while len(sequence.segments) > kept:
            self._memory.release(sequence.segments.pop())

    def _code(
        self,
        layer: int,
        sequence: Sequence,
        fresh: torch.Tensor,
        stop: int,
        fresh_values: torch.Tensor | None = None,
    ) -> None:
        size, tokens = self.spec.segment_tokens, sequence.lengths[layer]
        count = -(-stop // size)
        first = 0
        if self._memory.has_device:
            self._make_waiting(layer, sequence)
            for number, segment in enumerate(sequence.segments):
                self._recode_lost(layer, sequence, number)
                # Now, lest the shadows of a long prompt pile up until the first step scores.
                self._memory.leave_to_device(segment.layers[layer], (number + 1) * size, tokens)
        else:
            # Nothing is lost in the middle: what is to be coded lies at the end, and passing over
            # all segments would cost every step what grows with the context.
            first = count
            while first and coded_tokens(layer, sequence.segments, first - 1) < size:
                first -= 1
        for number in range(first, count):
            base, end = number * size, min((number + 1) * size, stop)
            if coded_tokens(layer, sequence.segments, number) >= end - base:
                continue
            own = self._own(sequence, number).layers[layer]
            coded = own.coded_tokens
            # Whatever may fail comes before anything of the segment changes.
            keys = self._states(layer, sequence, fresh, base + coded, end, self._key_part)
            statistics = own.statistics
            values = self._wanted_values(layer, sequence, number, fresh_values, base + coded, end)
            if statistics is None:
                before = sequence.segments[number - 1].layers[layer].statistics if number else None
                statistics = self._scorer.statistics(keys, base, before)
            shadow = self._memory.writable(own)
            own.statistics = statistics
            self._scorer.encode(keys, statistics, shadow, coded)
            own.coded_tokens = end - base
            if values is not None:
                self._keep_values(layer, sequence, number, values, base + coded)
            self._memory.note_coded(own, number)
            self._memory.leave_to_device(own, (number + 1) * size, tokens)
            # Not one by one, and not all of a long chunk at its end.
            if number % ROWS_TOGETHER == ROWS_TOGETHER - 1:
                self._make_waiting(layer, sequence)

    def _make_waiting(self, layer: int, sequence: Sequence) -> None:
        if (making := self._memory.making) is not None:
            own = layer, sequence.segments, sequence.rows, sequence.held_starts[layer]
            making.make(*own, partial(self._stored, layer, sequence, part=self._key_part))

    def _recode_lost(self, layer: int, sequence: Sequence, number: int) -> None:
        """Code a segment again that was lost with its device, with the statistics it has.

        Whoever else owns it gets the same codes.
        """
        own = sequence.segments[number].layers[layer]
        lost = self._memory.forget_lost(own, number)
        if lost:
            assert own.statistics is not None
            base = number * self.spec.segment_tokens
            keys = self._stored(layer, sequence, base, base + lost, self._key_part)
            self._scorer.encode(keys, own.statistics, self._memory.writable(own), 0)
            own.coded_tokens = lost
            self._memory.note_coded(own, number)

    def _remake(self, layer: int, sequence: Sequence, number: int) -> NDArray[np.uint8]:
        """Return the shadow of a segment whose device was just lost."""
        own = sequence.segments[number].layers[layer]
        self._recode_lost(layer, sequence, number)
        return self._memory.whole(own)

    def _states(
        self,
        layer: int,
        sequence: Sequence,
        fresh: torch.Tensor,
        start: int,
        end: int,
        part: RowPart,
    ) -> torch.Tensor:
        """Return that of start <= position < end as FP16, from `fresh` where it has them."""
        fresh_start = sequence.lengths[layer] - len(fresh)
        if start == fresh_start and end - start == len(fresh):
            return fresh
        if start >= fresh_start:
            return fresh[start - fresh_start : end - fresh_start]
        held = sequence.held_starts[layer]
        if start >= held and end <= fresh_start:
            return part.in_tail(layer, sequence, start - held, end - held)
        states = torch.empty((end - start, *fresh.shape[1:]), dtype=torch.float16)
        stored = np.arange(start, min(end, fresh_start))
        at = part.fill(self._gather.stream(layer, sequence, stored), states)
        states[at:] = fresh[: end - start - at]
        return states

    # --- values of coded tokens ---------------------------------------------------------------

    def complete_values(self, layer: int, sequence: Sequence) -> ValueWords:
        """Return what there is of the values of every segment that has codes of keys.

        Statistics of segments that a session or a store brought without are taken of their rows.
        Codes of segments that came without any are kept, one at a time.
        """
        assert self.codes is not None
        words = sequence.known_words(layer)
        if self._are_complete(words, sequence):
            return words
        for number, segment in enumerate(sequence.segments):
            own = segment.layers[layer]
            if own.statistics is None:
                break
            if own.values is None:
                base = number * self.spec.segment_tokens
                end = base + own.coded_tokens
                values = self._states(layer, sequence, self._no_keys, base, end, self.value_part)
                self._take_values(layer, sequence, number, values)
                assert own.values is not None
                self.codes.lack(own.values)
        words = sequence.known_words(layer)
        stored = partial(self._stored_values, layer, sequence)
        self.codes.complete_one(layer, words.values, stored)
        return words

    def _are_complete(self, words: ValueWords, sequence: Sequence) -> bool:
        assert self.codes is not None
        is_lacking = self.codes.lacking and self.codes.completes
        return len(words.values) == len(sequence.segments) and not is_lacking

    def _wanted_values(
        self,
        layer: int,
        sequence: Sequence,
        number: int,
        fresh: torch.Tensor | None,
        start: int,
        end: int,
    ) -> torch.Tensor | None:
        """Return values of tokens that are about to be coded, where they are looked at now.

        A segment's first tokens make its statistics. Codes of single tokens are not worth keeping
        as long as their rows are in the tail.
        """
        if self.values is None:
            return None
        is_first = sequence.segments[number].layers[layer].statistics is None
        if not is_first and (fresh is None or end - start == 1):
            return None
        fresh = self._no_keys if fresh is None else fresh
        return self._states(layer, sequence, fresh, start, end, self.value_part)

    def _take_values(
        self, layer: int, sequence: Sequence, number: int, values: torch.Tensor
    ) -> None:
        """Take the statistics of a segment's values, of its tokens so far."""
        assert self.codes is not None
        before = sequence.segments[number - 1].layers[layer].values if number else None
        base = number * self.spec.segment_tokens
        taken = self._scorer.statistics(values, base, before.statistics if before else None)
        first = np.arange(base, min(base + 1, sequence.group_count * GROUP_TOKENS))
        own = self.codes.numbered(layer, sequence.rows(first), taken)
        sequence.segments[number].layers[layer].values = own

    def forget_groups(self, groups: list[int]) -> None:
        """Keep no codes of values of groups that nobody has any more."""
        if self.codes is not None:
            self.codes.forget_groups(groups)

    def keep_filled(self, layer: int, sequence: Sequence) -> None:
        """Keep codes of values of the group in the tail, which a single token has just filled."""
        start, known = sequence.held_starts[layer], known_values(layer, sequence.segments)
        number = start // self.spec.segment_tokens
        if self.codes is not None and number < len(known):
            rows = sequence.rows(np.arange(start, start + GROUP_TOKENS))
            values = self.value_part.in_tail(layer, sequence, 0, GROUP_TOKENS)
            # Where tables of it do not fit it has none, and its tokens come as rows.
            with suppress(BudgetError):
                self.codes.keep(layer, rows, values, known[number])

    def _keep_values(
        self, layer: int, sequence: Sequence, number: int, values: torch.Tensor, start: int
    ) -> None:
        """Take a segment's value statistics if it has none, and keep codes of full groups."""
        assert self.codes is not None
        own = sequence.segments[number].layers[layer]
        if own.values is None:
            if start != number * self.spec.segment_tokens:
                # Keys of it were coded before anybody asked for values: `complete_values` does it.
                return
            if number and sequence.segments[number - 1].layers[layer].values is None:
                self.complete_values(layer, sequence)
            else:
                self._take_values(layer, sequence, number, values)
        assert own.values is not None
        # A full group that is still in the tail too: the next tokens bring others there.
        settled = min(sequence.lengths[layer], sequence.group_count * GROUP_TOKENS) & -GROUP_TOKENS
        rows = sequence.rows(np.arange(start, min(start + len(values), settled)))
        if len(rows):
            self.codes.keep(layer, rows, values[: len(rows)], own.values)

    def _stored_values(
        self, layer: int, sequence: Sequence, number: int
    ) -> tuple[NDArray[np.int64], torch.Tensor]:
        """Return row numbers and values of a segment's tokens in full groups on the drive."""
        base = number * self.spec.segment_tokens
        coded = base + sequence.segments[number].layers[layer].coded_tokens
        end = max(base, min(coded, sequence.held_starts[layer]) & -GROUP_TOKENS)
        values = self._stored(layer, sequence, base, end, self.value_part)
        return sequence.rows(np.arange(base, end)), values

    def _stored(
        self, layer: int, sequence: Sequence, start: int, end: int, part: RowPart
    ) -> torch.Tensor:
        """Return keys or values of full groups as FP16, in whatever thread.

        The device held full groups, and the thread that scores learns that it is lost while
        another attends to rows.
        """
        states = torch.empty((end - start, *self._no_keys.shape[1:]), dtype=torch.float16)
        part.fill(self._gather.from_drive(layer, sequence, start, end), states)
        return states

    def _own(self, sequence: Sequence, number: int) -> Segment:
        """Return a segment that nobody else sees, made or copied as needed."""
        if number == len(sequence.segments):
            sequence.segments.append(self._memory.segment(self._layers, sequence.segments))
        segment = sequence.segments[number]
        if segment.owners > 1:
            own = self._memory.clone(segment)
            segment.owners -= 1
            segment = sequence.segments[number] = own
        return segment
