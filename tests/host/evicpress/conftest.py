# SPDX-License-Identifier: Apache-2.0
"""The command, as its own tests have it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))


@pytest.fixture
def command(monkeypatch, capfd):
    """The `hillinfer-bench` command, to be called with arguments."""
    from command import Command

    return Command(monkeypatch, capfd)
