# SPDX-License-Identifier: Apache-2.0
"""A coded step a part after the other in Python, as the native library does it in one call."""

from contextlib import closing

import numpy as np
import torch

from hillinfer.engine.coded_step import CodedStep
from hillinfer.engine.queries import Ahead, host_query
from hillinfer.native.structures import row_addresses
from hillinfer_bench.precision.coded_attention import CodedAttention, CodedSegment, CodePlaces


class PythonCodedStep(CodedStep):
    """What tests compare the native step with: no codes are kept, and nothing is found at once."""

    def __init__(self, runtime):
        self.__dict__.update(runtime.coded.__dict__)
        self.attention = CodedAttention(runtime.shape)
        self.gather, self.row_bytes = runtime.gather, runtime.shape.row_bytes
        self._weights = self._weighing.weights

    @classmethod
    def instead(cls, runtime):
        """Let a runtime attend so."""
        runtime.coded = own = cls(runtime)
        runtime.parts.pipeline._coded = own

    def step(self, *given):
        """Leave the choice to `TokenSelection`; see `CodedStep.step`."""

    def choose_next(self, *given):
        """Leave the choice to `TokenSelection`; see `CodedStep.choose_next`."""

    def choose_late(self, *given):
        """Leave the choice to `TokenSelection`; see `CodedStep.choose_late`."""

    def begin_to_read(self, layer, sequence, past, sets, exact):
        """Read nothing; see `CodedStep.begin_to_read`."""
        return Ahead(sets, None, None, exact)

    def attend(self, layer, sequence, query, sets, scaling, step, landed, exact, split=None):
        """Bring rows and code values anew, then attend set by set; see `CodedStep.attend`."""
        coded = [np.setdiff1d(*one) for one in zip(sets, exact, strict=True)]
        scaled = self._weights.scaled(host_query(query), scaling)
        with self._selection.scoring:
            own = self._shadow.complete_values(layer, sequence).values
            shadows = self._shadow.shadows(layer, sequence)
            weighed = self._weights.of_each(scaled, shadows, coded)
        rows = np.unique(np.concatenate(exact))
        copies = np.empty((len(rows), self.row_bytes), np.uint8)
        at = 0
        with closing(self.gather.in_place(layer, sequence, rows, step, landed)) as runs:
            for run in runs:
                self._library.copy_rows(run, copies[at:])
                at += len(run)
        out = torch.empty(query.shape)
        heads = self.attention.shape.kv_heads // len(sets)
        group = self.attention.shape.group_size
        for number, (one, tokens, of) in enumerate(zip(exact, coded, weighed, strict=True)):
            addresses = row_addresses(copies, np.searchsorted(rows, one))
            segments = self._coded_segments(layer, sequence, tokens, of, own)
            taken = range(number * heads, (number + 1) * heads)
            found = self.attention.attend(scaled.numpy(), addresses, segments, taken)
            rows_of = slice(taken.start * group, taken.stop * group)
            out[rows_of, 0] = torch.from_numpy(found[rows_of])
        return out.to(query.dtype)

    def _coded_segments(self, layer, sequence, tokens, weighed, own):
        """Describe a set's coded tokens, whose rows are read and coded now."""
        # Each block is there until the next one.
        stream = self.gather.stream(layer, sequence, tokens)
        states = torch.cat([self._shadow.value_part.of(rows).clone() for rows in stream])
        size, found = self._segment_tokens, []
        for number in np.unique(tokens // size).tolist():
            (inside,) = np.nonzero(tokens // size == number)
            codes = self._values.encode(states[inside], own[number])
            found.append(
                CodedSegment(
                    weighed.aligned[:, inside].copy(),
                    weighed.invalid[:, inside].copy(),
                    CodePlaces.in_rows(codes, np.arange(len(inside)), self._weights.spec),
                    own[number].statistics,
                )
            )
        return found
