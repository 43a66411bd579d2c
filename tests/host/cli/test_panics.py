# SPDX-License-Identifier: Apache-2.0
"""A tokenizer whose library panics: one line, and none of the library's own."""

import json

import pytest


@pytest.fixture
def panicking(tiny_folder, tmp_path):
    """A model whose tokenizer's pattern gives up over a long run of one letter."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_a_panic_is_one_line(command, panicking, cold_dir):
    outcome = command(
        *("generate", "--model", panicking, "--cold-dir", cold_dir, "--max-new-tokens", 2),
        *("--prompt", "a" * 60 + "b"),
    )
    assert "make tokens of the prompt" in outcome.error_line()
    assert "panicked" not in outcome.err.replace(outcome.error_line(), "")
    assert "onig" not in outcome.err
    assert outcome.code == 2


def test_what_is_said_without_a_panic_is_kept(command, panicking, cold_dir):
    outcome = command(
        *("generate", "--model", panicking, "--cold-dir", cold_dir, "--max-new-tokens", 2),
        *("--prompt", "a cat [UNK] sat"),
    )
    assert outcome.code == 0, outcome.err
    assert "tokens of context take about" in outcome.err
