# SPDX-License-Identifier: Apache-2.0
"""A cache whose prompts are looked up in a store, and stored."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.generate.run_report import PassWay, StoreFacts
from hillinfer.hf.batch import left_padding
from hillinfer.hf.cache import HillInferCache
from hillinfer.hf.engine import Use
from hillinfer.hf.forward_plan import ForwardPlan
from hillinfer.hf.prompts import CachePrompts, Made, PromptCall, Prompts, ends_singly, in_place


class StoredCache(HillInferCache):
    """A cache of HillInfer on a model that was attached with a store.

    `generate`, and a forward pass that wants the last logits alone, look their prompt up when the
    cache is empty. Rows that were read densely are stored when their prompt is complete.
    """

    # Made with a store alone.
    _prompts: CachePrompts

    @property
    def read_from_store(self) -> StoreFacts | None:
        """What the store did for the prompt that this cache began with; None where it did not."""
        return self._prompts.facts

    def look_up(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None = None,
        chunk_tokens: int | None = None,
    ) -> int:
        """Take what the store has of a prompt, and store the prompt when it is complete.

        `generate`, and a forward pass that wants the last logits alone, do so by themselves. A loop
        of forward passes calls it first and leaves out the columns that it returns; the last token
        is never among them. Without a store, and where the cache holds tokens, it returns 0.

        Parameters
        ----------
        ids, mask
            (batch, tokens) that come next, left-padded, and zeros for padding, None for none.
        chunk_tokens
            Tokens of one forward pass; None: all of them.
        """
        return self._look_up(ids, mask, chunk_tokens, len(ids))

    def begin_prompt(self, ids: torch.Tensor, mask: torch.Tensor | None, call: PromptCall) -> None:
        """Learn what `generate` brings, and take what the store has of it."""
        prompts, past = self._prompts, self.get_seq_length()
        rows = len(ids) * call.copies
        if call.may_skip and not past and (mask is None or mask.shape == ids.shape):
            self._look_up(ids, mask, call.chunk_tokens, rows)
            prompts.is_tentative = True
            self._read_singly(ids, call)
            return
        is_whole = mask is None or mask.shape[1] == ids.shape[1]
        chunk_tokens = call.chunk_tokens if rows == 1 else None
        prompts.expect(ids.shape[1] + (0 if is_whole else past), chunk_tokens)

    def begin_whole(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        call: PromptCall,
    ) -> int:
        """Take what the store has of a pass to an empty cache; return how many tokens those are."""
        prompts = self._prompts
        with self._alone(Use(sys._getframe())):
            # What a pass that broke off brought is forgotten.
            length: int = self.get_seq_length()
        if length or prompts.awaits(0) or not call.may_skip:
            return 0
        pads = left_padding(mask) if mask is not None else [0] * len(ids)
        if not in_place(positions, 0, ids.shape[1], pads):
            return 0
        self.look_up(ids, mask)
        try:
            self._read_singly(ids, call)
        except BaseException:
            with self._alone(Use(sys._getframe())):
                self._forget_tokens()
            raise
        prompts.is_tentative = True
        held: int = self.get_seq_length()
        return held

    def reads_singly(self, tokens: int) -> bool:
        """Whether so many tokens that come next are sooner read one by one, behind stored ones."""
        return self._prompts.reads_singly(self.get_seq_length(), tokens)

    def question_way(self, tokens: int) -> PassWay | None:
        """Return how a question of so many tokens is best read behind what is here, by rates.

        None where no store brought it, and nobody knows.
        """
        alpha = self.settings.importance_rate
        return self._prompts.question_way(self.get_seq_length(), tokens, alpha)

    def end_forward(self) -> None:
        """Learn that the forward pass got through, and how long a single token took."""
        super().end_forward()
        self._prompts.note_step()

    def await_stored(self) -> None:
        """Wait until everybody finds what of a complete prompt is on its way to the store."""
        _ = self._prompts.facts

    def end_prompt(self) -> None:
        """Store the rows of a prompt that is complete."""
        if self._prompts.is_recording:
            self.end_recording()
        with ExitStack() as opened:
            self._prompts.keep(self._kept_rows(opened))

    def keep_read(self, tokens: int, seconds: float) -> None:
        """Store the rows of a prompt that was read in another way than by passes of all layers.

        A store that fails costs nothing but that. Parameters as in `HillInferCache.keep_read`.
        """
        self._prompts.keep_read(self, Made(tokens), seconds)

    def copy_rows(self, layer: int, start: int, out: NDArray[np.uint8]) -> None:
        """Copy rows as they are stored, for whoever stores them elsewhere.

        Parameters
        ----------
        layer, start
            Whose, and the position of the first.
        out
            uint8 (tokens, row_bytes): K of all KV heads, then V, in the stored type.

        Raises
        ------
        CacheUseError
            Where the cache holds several sequences, or padding.
        ColdPoolError
            Where they cannot be read.
        """
        with self._alone(Use(sys._getframe())):
            runtime, sequence = self._runtime, self._batch.only_sequence()
            runtime.settle()
            positions, done = np.arange(start, start + len(out)), 0
            for rows in runtime.gather.stream(layer, sequence.of(layer), positions):
                out[done : done + len(rows)] = rows
                done += len(rows)

    # --- inside ----------------------------------------------------------------------------

    def _take_tokens(
        self, ids: torch.Tensor, mask: torch.Tensor | None, use: Use, others: int = 0
    ) -> ForwardPlan:
        plan = super()._take_tokens(ids, mask, use, others)
        prompts = self._prompts
        prompts.note_pass(plan.start, plan.tokens * plan.batch)
        if prompts.is_recording and plan.tokens > 1:
            ((_, made),) = self._batch.made
            rows = plan.batch + plan.others
            made = made.after(plan.start, plan.shares[0].tokens, plan.tokens, rows)
            # Rows of a pass that is not as long as was told have other bits.
            if prompts.store.storable(made) < prompts.store.whole(made.dense):
                self._end_recordings(plan)
        return plan

    def _read_singly(self, ids: torch.Tensor, call: PromptCall) -> None:
        """Read all but the last token behind a stored prefix one by one, where that is sooner."""
        held = self.get_seq_length()
        if held and self.reads_singly(ids.shape[1] - held):
            call.read_singly(self, ids[0, held:-1].tolist())

    def _kept_rows(self, opened: ExitStack) -> Iterator[tuple[StoredCache, Made]]:
        """Yield each sequence as a cache of one row, and how its rows were made."""
        for row, made in self._batch.made:
            if len(self._batch) == 1 and not any(self._batch.pads):
                yield self, made
                return
            with self._alone(Use(sys._getframe())):
                batch = self._batch.fork_row(row)
                one = self._beside(batch)
            opened.callback(one.close)
            yield one, made

    def _look_up(
        self, ids: torch.Tensor, mask: torch.Tensor | None, chunk_tokens: int | None, rows: int
    ) -> int:
        """Learn that a prompt comes in so many rows; fill this cache where it is empty.

        Returns the length that it then has, or 0 where it held tokens before.
        """
        prompts, length = self._prompts, self.get_seq_length()
        # Products of several rows round as those of none alone, whatever their chunks are.
        prompts.expect(length + ids.shape[1], chunk_tokens if rows == 1 else None)
        if length:
            return 0
        pads = left_padding(mask) if mask is not None else [0] * len(ids)
        if rows == 1 and not pads[0]:
            # Numbers of Python for each would take longer than finding them.
            words = array("I", ids[0].to("cpu", torch.int32).numpy().tobytes())
            reading = prompts.store.open(self, words)
            told = reading.facts()
            prompts.brought(told, reading if reading.is_asked else None)
        else:
            keys = [(pad, tuple(row[pad:])) for pad, row in zip(pads, ids.tolist(), strict=True)]
            told = self._fill_rows(prompts.store, keys, chunk_tokens)
            prompts.brought(told)
        if told.is_of_another:
            self._batch.filled_by_another()
        else:
            self._batch.filled(chunk_tokens)
        held: int = self.get_seq_length()
        return held

    def _fill_rows(
        self,
        store: Prompts,
        keys: list[tuple[int, tuple[int, ...]]],
        chunk_tokens: int | None,
    ) -> StoreFacts:
        """Fill this empty cache up to the column that the store has of all its rows.

        Parameters
        ----------
        keys
            Padding and tokens of each row.
        chunk_tokens
            Columns of one forward pass; None: all of them.
        """
        distinct = sorted(set(keys))
        columns = distinct[0][0] + len(distinct[0][1])
        told, start = StoreFacts(sum(len(ids) for _, ids in distinct)), columns
        filled: list[tuple[StoredCache, tuple[int, ...]]] = []
        with ExitStack() as opened:
            for pad, ids in distinct:
                # Whoever has less padding was filled before, and as far as any will be.
                own = self._shared(filled, ids[: max(0, start - pad)])
                is_new = own is None
                own = own or self._beside(None)
                opened.callback(own.close)
                if is_new and start > pad:
                    told = _together(told, store.fill(own, ids))
                filled.append((own, ids))
                start = min(start, pad + own.get_seq_length())
            # A pass of a single column selects, the last one too where it would not be one.
            if ends_singly(columns - start, chunk_tokens) > ends_singly(columns, chunk_tokens):
                start -= 1
            lengths = [max(0, start - pad) for pad, _ in distinct]
            if any(lengths):
                for (own, _), length in zip(filled, lengths, strict=True):
                    own.crop(min(0, length - own.get_seq_length()))
                with self._alone(Use(sys._getframe())):
                    parts = [own._batch for own, _ in filled]
                    # Of a row whose first token comes later, no more than there is of the others.
                    pads = [min(pad, start) for pad, _ in distinct]
                    self._batch.take(parts, pads, [distinct.index(key) for key in keys])
                    self._settle_lengths()
        return replace(told, found_tokens=sum(lengths))

    @staticmethod
    def _shared(
        filled: list[tuple[StoredCache, tuple[int, ...]]], wanted: tuple[int, ...]
    ) -> StoredCache | None:
        """Return a fork of a cache that begins with the wanted tokens, None where none does."""
        for own, ids in filled:
            held = own.get_seq_length()
            if wanted and len(wanted) <= held and ids[: len(wanted)] == wanted:
                return own.fork()
        return None


def _together(one: StoreFacts, other: StoreFacts) -> StoreFacts:
    """Return what a store did for one row and for another, of what was asked for the first."""
    return replace(
        one,
        find_seconds=one.find_seconds + other.find_seconds,
        read_seconds=one.read_seconds + other.read_seconds,
        read_bytes=one.read_bytes + other.read_bytes,
        failure=one.failure or other.failure,
        directory=other.directory,
        made_by=other.made_by if other.is_of_another else one.made_by or other.made_by,
        not_accepted=other.not_accepted,
    )
