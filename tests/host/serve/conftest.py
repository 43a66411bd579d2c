# SPDX-License-Identifier: Apache-2.0
"""Servers that the tests of the room share."""

import sys
from pathlib import Path

import pytest

# The command is called as its own tests call it.
sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "faults"))


@pytest.fixture
def command(monkeypatch, capfd):
    """The `hillinfer` command, to be called with arguments."""
    from command import Command

    return Command(monkeypatch, capfd)


@pytest.fixture(scope="session")
def endless_folder(tmp_path_factory):
    """A tiny model whose answers end only where a request says so."""
    from tiny_folder import character_tokenizer, save_tiny

    tokenizer = character_tokenizer()
    tokenizer.eos_token = None
    return save_tiny(tmp_path_factory.mktemp("endless"), tokenizer=tokenizer)


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory):
    """A tiny random model of bytes, which says anything at all."""
    from servers import save_bytes

    return save_bytes(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def tiny_server(endless_folder, cold_dir):
    """A server that has no store and lets everybody in, for the tests of a module."""
    from servers import running

    with running(endless_folder, cold_dir) as server:
        yield server


@pytest.fixture
def client(tiny_server):
    """OpenAI's client of that server."""
    with tiny_server.client() as client:
        yield client
