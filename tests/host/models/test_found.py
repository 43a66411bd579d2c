# SPDX-License-Identifier: Apache-2.0
"""`hillinfer models` finds what lies on this machine, and stumbles over nothing."""

import json
import os
import shutil

import pytest

from hillinfer.models.sources import FoundModel, found_models

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def model(folder, family="llama", weights=100):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    (folder / "model.safetensors").write_bytes(b"x" * weights)
    return folder


@pytest.fixture
def here(tmp_path):
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


def test_models_of_the_hub_have_the_names_that_are_taken(tmp_path, here):
    snapshots = tmp_path / "hub" / "models--org--name.v1" / "snapshots"
    model(snapshots / COMMIT, "qwen2", 7)
    model(tmp_path / "hub" / "datasets--org--name" / "snapshots" / COMMIT)
    model(snapshots / "no-commit")
    expected = [FoundModel(f"org/name.v1@{COMMIT}", "qwen2", 7, "in the hub's cache")]
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        assert found_models(here, {name: str(tmp_path / "hub")}) == expected
    shutil.move(tmp_path / "hub", tmp_path / "home" / "hub")
    assert found_models(here, {"HF_HOME": str(tmp_path / "home")}) == expected
    shutil.move(tmp_path / "home", tmp_path / "cache" / "huggingface")
    assert found_models(here, {"XDG_CACHE_HOME": str(tmp_path / "cache")}) == expected


def test_a_variable_may_name_another(tmp_path, here, monkeypatch):
    """As the hub's library reads it."""
    monkeypatch.setenv("SOMEWHERE", str(tmp_path))
    model(tmp_path / "hub" / "models--org--name" / "snapshots" / COMMIT)
    for name, path in (("HF_HUB_CACHE", "$SOMEWHERE/hub"), ("HF_HOME", "${SOMEWHERE}")):
        assert len(found_models(here, {name: path})) == 1


def test_folders_and_files_here_are_found(tmp_path, here):
    model(here / "mine", "opt", 5)
    (here / "other.gguf").write_bytes(b"GGUF")
    assert found_models(here, {"HF_HOME": str(tmp_path / "none")}) == [
        FoundModel("./mine", "opt", 5, "a folder here"),
        FoundModel("./other.gguf", "GGUF", 4, "a file here"),
    ]


def test_what_is_no_model_is_left_out(tmp_path, here):
    model(here / "broken")
    (here / "broken" / "config.json").write_text("{")
    (model(here / "bare") / "model.safetensors").unlink()
    model(here / "loud", "\x1b[2J")
    model(here / "li\x1bst")
    (here / "file").write_text("x")
    closed = model(here / "closed")
    (closed / "config.json").chmod(0)
    found = found_models(here, {"HF_HOME": str(tmp_path / "none")})
    assert [one.name for one in found] == (["./closed"] if os.geteuid() == 0 else [])


def test_what_cannot_be_looked_at_is_left_out(tmp_path, here):
    (here / "far.gguf").symlink_to("a" * 300)
    (here / "round.gguf").symlink_to("round.gguf")
    os.mkfifo(here / "waits.gguf")
    model(here / "folder.gguf")
    found = found_models(here, {"HF_HOME": str(tmp_path / "none")})
    assert [one.name for one in found] == ["./folder.gguf"]


@pytest.mark.parametrize("name", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_a_home_of_nobody_is_an_empty_cache(here, name):
    assert found_models(here, {name: "~nobody-of-this-name/x"}) == []
