# SPDX-License-Identifier: Apache-2.0
"""What the tests of the command share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def command(monkeypatch, capfd):
    """The `hillinfer` command, to be called with arguments."""
    from command import Command

    return Command(monkeypatch, capfd)


@pytest.fixture(scope="session")
def forked(tiny_folder, warm_python):
    """The `hillinfer` command, forked where everything is imported and struck where a test says."""
    from forked import Forked

    process = Forked(warm_python, tiny_folder)
    yield process
    process.close()


@pytest.fixture
def started(warm_python):
    """The `hillinfer` command as a process of its own, to be called with arguments."""
    from command import Started

    return Started(warm_python)


@pytest.fixture
def _no_matplotlib(monkeypatch):
    """A machine without matplotlib."""
    # Python finds no module whose name stands for none.
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture
def document(tmp_path):
    """A file of some hundred tokens for the tiny models' character tokenizer."""
    file = tmp_path / "document.txt"
    file.write_text("".join(f"cat {i} sat on mat {i * 7 % 61}. " for i in range(12)))
    return file


@pytest.fixture
def ask_tiny(command, tiny_folder, cold_dir, document, tmp_path):
    """Generate from the tiny model, without a chat, and return the outcome and the report."""
    from command import PLAIN, read_report

    def ask(*arguments, around=None):
        file = tmp_path / "run.json"
        outcome = command(
            *("generate", "--model", tiny_folder, "--prompt-file", document),
            *("--cold-dir", cold_dir, "--report", file, "--max-new-tokens", 12, *PLAIN),
            *arguments,
            around=around,
        )
        assert outcome.code == 0, outcome.err
        return outcome, read_report(file)

    return ask
