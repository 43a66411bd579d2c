# SPDX-License-Identifier: Apache-2.0
"""How often a cold layer with coded tokens calls the native library when its turn has come."""

import os
import threading
from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
from coded_golden import SCALING, SETTINGS, SHAPE, Text
from placement_matrix import Budget, Path, Way

from hillinfer.drive.calls import DriveCalls
from hillinfer.errors import ColdPoolError, HillInferWarning
from hillinfer.native.library import native_library
from hillinfer.native.signatures import SIGNATURES

TEXT = Text(prompt=1090, steps=4)
# Blocks whose reads ahead have a buffer of their own.
OWN = SETTINGS.changed(block_rows=256)
# What keeps rows for later layers and steps.
KEEPING = ("hillinfer_pool_", "hillinfer_promote", "hillinfer_sequence_")


@contextmanager
def counted():
    """Count this thread's calls of the native library by their names."""
    calls, library, own_thread = Counter(), native_library(), threading.get_ident()

    def counting(name, call):
        def called(*given):
            is_own = threading.get_ident() == own_thread
            calls[name] += is_own and not name.startswith(KEEPING)
            return call(*given)

        return called

    def of(functions):
        own = {name: counting(name, getattr(functions, name)) for name in SIGNATURES}
        return patch.dict(vars(functions), own)

    with of(library.functions), of(library.tables):
        yield calls


class Turns:
    """Decodes a text with hardly any memory, and counts the calls of each layer's turn."""

    def __init__(self, cold_dir, forgotten=(), spoil=None, **given):
        self.calls, self.found = [], []
        way = Way(Budget.LEAST, path=Path.PREFETCHED)
        self.runtime = way.open(SHAPE, OWN, cold_dir, TEXT.prompt + TEXT.steps, **given)
        sequence = self.runtime.open_sequence()
        TEXT.read(self.runtime, sequence)
        # The open segment is coded when it is first ranked.
        self.found.append(TEXT.decode(self.runtime, sequence, 0, announced=True))
        groups = [sequence.groups[number] for number in forgotten]
        self.runtime.parts.codes_file.forget_groups(groups)
        if spoil is not None:
            spoil()
        before = self.runtime.statistics().coded_reads
        try:
            for step in range(1, TEXT.steps):
                self.found.append(self.step(sequence, step))
            self.statistics = self.runtime.statistics()
            self.coded_reads = self.statistics.coded_reads - before
        finally:
            self.runtime.close()

    def step(self, sequence, step):
        at, outs = slice(TEXT.prompt + step, TEXT.prompt + step + 1), []
        self.runtime.begin_step()
        for layer in range(SHAPE.layers):
            query = TEXT.queries[layer, step][:, None]
            self.runtime.announce(layer, sequence, query, SCALING)
            keys, values = TEXT.keys[layer, :, at], TEXT.values[layer, :, at]
            self.runtime.append(layer, sequence, keys, values)
            with counted() as calls:
                out = self.runtime.attend_selected(layer, sequence, query, keys, SCALING)
            outs.append(out[:, 0].numpy())
            self.calls.append({name: count for name, count in calls.items() if count})
        return np.stack(outs)


@pytest.fixture(scope="module")
def ahead(cold_dir):
    return Turns(cold_dir)


def test_what_was_read_ahead_is_awaited_and_attended_to_in_one_call(ahead):
    assert ahead.coded_reads > 0
    assert ahead.statistics.cold_rows_read > 0
    assert ahead.calls == [{"hillinfer_attend_split": 1}] * len(ahead.calls)


def test_tokens_without_codes_whose_rows_were_read_ahead_are_coded_in_that_call(ahead, cold_dir):
    rows = Turns(cold_dir, forgotten=range(17))
    assert rows.coded_reads == 0
    assert rows.calls == ahead.calls
    assert np.array_equal(np.stack(rows.found), np.stack(ahead.found))


class Opening(DriveCalls):
    """The operating system, and the files that it opened."""

    def __init__(self):
        self.descriptors = []

    def open(self, *given):
        self.descriptors.append(super().open(*given))
        return self.descriptors[-1]

    def clear(self, *numbers):
        """Have zeros in files that were opened with these numbers."""
        for descriptor in (self.descriptors[number] for number in numbers):
            size = os.fstat(descriptor).st_size
            os.ftruncate(descriptor, 0)
            os.ftruncate(descriptor, size)


def test_rows_that_changed_and_were_read_ahead_are_an_error(cold_dir):
    calls = Opening()
    layers = range(-1 - SHAPE.layers, -1)
    with pytest.raises(ColdPoolError, match="rows of layer 0"):
        Turns(cold_dir, spoil=lambda: calls.clear(*layers), calls=calls)


def test_instead_of_codes_that_changed_rows_are_read(ahead, cold_dir):
    calls = Opening()
    with pytest.warns(HillInferWarning, match="read as rows from here on"):
        rows = Turns(cold_dir, spoil=lambda: calls.clear(-1), calls=calls)
    assert rows.coded_reads == 0
    assert np.array_equal(np.stack(rows.found), np.stack(ahead.found))


class Seen(DriveCalls):
    """The operating system, and somebody who looks at each landing."""

    def land(self, *given):
        return super().land(*given)


def test_where_somebody_looks_at_reads_more_calls_do_the_same(ahead, cold_dir):
    """The twin: what is counted is seen."""
    seen = Turns(cold_dir, calls=Seen())
    assert all(one.get("hillinfer_end_split") == 1 for one in seen.calls)
    assert np.array_equal(np.stack(seen.found), np.stack(ahead.found))
    counts = [
        [getattr(one.statistics, name) for name in ("cold_reads", "coded_reads", "coded_arrivals")]
        for one in (ahead, seen)
    ]
    assert counts[0] == counts[1]
