# SPDX-License-Identifier: Apache-2.0
"""From what a user types to a loaded model."""

from dataclasses import replace

import pytest
import torch
from tiny_gguf import save_gguf
from tiny_models import TinyModel

from hillinfer.errors import ModelError
from hillinfer.models.loader import ModelOutline, load_model
from hillinfer.models.sources import ModelSource
from hillinfer.system.machine import NumberType


def silent(line):
    raise AssertionError(f"nothing takes time here, but it said: {line}")


@pytest.fixture(scope="module")
def tiny():
    return replace(TinyModel(), head_dim=16).build()


@pytest.fixture(scope="module")
def gguf(tiny, tmp_path_factory):
    return save_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny)


@pytest.mark.parametrize("named", ["file", "folder"])
def test_gguf_has_the_logits_of_the_model_it_was_made_from(tiny, gguf, named):
    name = gguf if named == "file" else gguf.parent
    loaded = load_model(str(name), say=silent)
    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, tiny(ids).logits)
        assert not torch.equal(loaded.model(ids.flip(1)).logits, tiny(ids).logits)
    assert loaded.tokenizer("ab c.").input_ids == [1, 54, 4, 55]


def test_folder_has_the_logits_of_the_model_it_was_saved_from(tiny, tiny_folder):
    loaded = load_model(str(tiny_folder), say=silent)
    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, tiny(ids).logits)
    assert loaded.name == str(tiny_folder)
    assert loaded.stop_ids == {2}
    assert not loaded.model.training


def test_folder_of_several_gguf_files_needs_a_name(gguf, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(gguf.read_bytes())
    with pytest.raises(ModelError, match=r"holds 2 .gguf files: name one of them"):
        ModelSource.locate(str(tmp_path), silent)
    assert ModelSource.locate(str(tmp_path / "b.gguf"), silent).gguf_file == "b.gguf"


def test_gguf_that_is_none(tmp_path):
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ModelError, match="cannot read the model in"):
        load_model(str(file), say=silent)


def test_outline_counts_weights_without_loading_them(tiny, tiny_folder):
    outline = ModelOutline.read(ModelSource.locate(str(tiny_folder), silent), NumberType.BFLOAT16)
    assert outline.weight_bytes == 2 * sum(weight.numel() for weight in tiny.parameters())
    assert all(weight.is_meta for weight in outline.skeleton.parameters())
    assert (outline.shape.kv_heads, outline.shape.head_dim, outline.shape.layers) == (2, 16, 2)
    assert outline.load().model.dtype is torch.bfloat16


@pytest.mark.usefixtures("hub_cache")
def test_hub_name_without_a_network_is_one_sentence():
    with pytest.raises(ModelError, match="the hub cannot be reached"):
        ModelSource.locate("somebody/some-model", lambda line: None)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./gone", "there is no model at ./gone"),
        ("/gone", "there is no model at /gone"),
        ("gone.gguf", "there is no model at gone.gguf"),
        ("a/b/c", "there is no model at a/b/c"),
        ("gone", "neither a folder, a .gguf file nor a registry model"),
        ("bad name/x y", "neither a path nor a model that the hub gives out"),
    ],
)
def test_names_that_lead_nowhere(name, said, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=said):
        ModelSource.locate(name, lambda line: None)
