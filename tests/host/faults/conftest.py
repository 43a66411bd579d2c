# SPDX-License-Identifier: Apache-2.0
"""Puts the harness, which `make faults` uses too, on the path."""

import sys
from pathlib import Path

import pytest
from drive_fixtures import threads_of_python

__all__ = ["threads_of_python"]

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def without_checksums(monkeypatch):
    """Returns what makes the cold pool believe every row, from when it is called."""
    from hillinfer.drive.checksums import RowSums

    def believe():
        for name in ("expected", "wrong_row"):
            monkeypatch.setattr(RowSums, name, lambda *_: None)

    return believe
