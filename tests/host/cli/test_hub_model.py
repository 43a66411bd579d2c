# SPDX-License-Identifier: Apache-2.0
"""Models of the hub, in a cache laid out as the hub's library does, without a network."""

import shutil

import pytest
from command import read_report

NAME, FIRST, SECOND = "somebody/tiny", "1" * 40, "2" * 40


@pytest.fixture
def hub(monkeypatch, tmp_path, tiny_folder, hub_cache):
    """A cache that holds two commits of a model, the second of which is `main`."""
    own = hub_cache / "models--somebody--tiny"
    for commit in (FIRST, SECOND):
        shutil.copytree(tiny_folder, own / "snapshots" / commit)
    (own / "refs").mkdir()
    (own / "refs" / "main").write_text(SECOND)
    monkeypatch.chdir(tmp_path)
    return own


@pytest.fixture
def generate(command, cold_dir, tmp_path):
    def run(model):
        report = tmp_path / "run.json"
        outcome = command(
            *("generate", "--model", model, "--prompt", "a cat sat on a mat", "--cold-dir"),
            *(cold_dir, "--max-new-tokens", 2, "--report", report, "--dram-budget", "64MiB"),
        )
        return outcome, read_report(report)["model"] if report.exists() else None

    return run


def test_a_name_without_a_commit_says_which_it_took(hub, generate):
    outcome, model = generate(NAME)
    assert outcome.code == 0, outcome.err
    said = f"model: {NAME} is commit {SECOND} now; --model {NAME}@{SECOND} keeps to it"
    assert said in outcome.err
    assert (model["name"], model["commit"]) == (NAME, SECOND)


def test_the_cache_lies_where_its_older_variable_says(hub, hub_cache, generate, monkeypatch):
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HUGGINGFACE_HUB_CACHE", str(hub_cache))
    outcome, model = generate(NAME)
    assert outcome.code == 0, outcome.err
    assert model["commit"] == SECOND


def test_a_commit_is_kept_to_and_nothing_said(hub, generate):
    outcome, model = generate(f"{NAME}@{FIRST}")
    assert outcome.code == 0, outcome.err
    assert "is commit" not in outcome.err
    assert (model["name"], model["commit"]) == (f"{NAME}@{FIRST}", FIRST)


@pytest.mark.parametrize(
    ("revision", "said"),
    [
        ("3" * 40, "the hub cannot be reached"),
        ("no-such", "cannot be reached"),
        ("", "no revision"),
    ],
)
def test_a_revision_that_is_not_there(hub, generate, revision, said):
    outcome, _ = generate(f"{NAME}@{revision}")
    assert said in outcome.error_line()


def test_weights_that_are_not_in_the_cache_are_looked_for(hub, generate):
    (hub / "snapshots" / SECOND / "model.safetensors").unlink()
    outcome, _ = generate(NAME)
    assert f"looking for {NAME} on the hub" in outcome.err
    assert "has no weights" in outcome.error_line()


def test_a_folder_of_the_name_says_so(hub, generate, tiny_folder, tmp_path):
    shutil.copytree(tiny_folder, tmp_path / NAME)
    outcome, model = generate(NAME)
    assert outcome.code == 0, outcome.err
    assert f"model: {NAME} is the folder {tmp_path / NAME}" in outcome.err
    assert f"the hub's model of that name is {NAME}@main" in outcome.err
    assert model["commit"] is None
