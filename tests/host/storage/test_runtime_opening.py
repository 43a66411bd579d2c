# SPDX-License-Identifier: Apache-2.0
"""A runtime that cannot be opened holds nothing of the drive."""

from contextlib import closing, suppress
from pathlib import Path

import pytest
from runtime_rows import SETTINGS, SHAPE

from hillinfer import runtime_opening
from hillinfer.errors import ColdPoolError
from hillinfer.pools.budget_plan import staging_bytes
from hillinfer.runtime import Runtime


def opened(cold_dir, **options):
    return Runtime(SHAPE, SETTINGS, staging_bytes(SHAPE, SETTINGS) + (1 << 20), cold_dir, **options)


def descriptors():
    found = set()
    for one in Path("/proc/self/fd").iterdir():
        # One of them is that of this very look.
        with suppress(FileNotFoundError):
            found.add((one.name, str(one.readlink())))
    return found


@pytest.mark.parametrize("part", ["ColdStore", "ShadowStore", "RowKeeper", "PrefetchPipeline"])
def test_what_was_opened_before_an_error_is_closed(part, cold_dir, monkeypatch):
    before = descriptors()
    with closing(opened(cold_dir)):
        # The twin: a runtime holds files.
        assert descriptors() > before
    assert descriptors() == before

    def raises(*_):
        raise ColdPoolError("no more room")

    monkeypatch.setattr(runtime_opening, part, raises)
    # Its traceback keeps all that was made: what is closed is closed, and not garbage.
    with pytest.raises(ColdPoolError, match="no more room"):
        opened(cold_dir)
    assert descriptors() == before


def test_every_entry_is_told_to_who_observes_and_to_the_timeline():
    class Timeline:
        def __init__(self):
            self.entries = []

        def observe(self, entry):
            self.entries.append(entry)

    timeline, seen = Timeline(), []
    entry = object()
    runtime_opening._told(seen.append, timeline)(entry)
    assert timeline.entries == seen == [entry]
    runtime_opening._told(seen.append, None)(entry)
    assert (len(timeline.entries), len(seen)) == (1, 2)
