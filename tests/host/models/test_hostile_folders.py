# SPDX-License-Identifier: Apache-2.0
"""A model is used as its files say or not at all: each hostile folder ends in one line, soon."""

import os
import shutil
import time

import pytest
import torch
from hostile_folders import CASES, config, scaled, sharded, tokenizer, weights
from tiny_models import FAMILIES, TinyModel

from hillinfer.errors import ModelError
from hillinfer.models.loader import load_model
from hillinfer.models.sources import check_folder

# Of a busy machine; none takes a second by itself.
SECONDS = 30


@pytest.fixture
def folder(tiny_folder, tmp_path):
    """A copy of the tiny model that a test may spoil."""
    return shutil.copytree(tiny_folder, tmp_path / "model")


@pytest.mark.parametrize(
    ("change", "said"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_a_hostile_folder_ends_in_one_line(folder, change, said):
    change(folder)
    started = time.monotonic()
    with pytest.raises(ModelError) as refused:
        load_model(str(folder), say=print)
    assert time.monotonic() - started < SECONDS
    message = str(refused.value)
    assert said in message
    assert len(message.splitlines()) == 1
    assert len(message) < 1000


def test_shards_are_the_model_they_were_made_of(folder, tiny_folder):
    sharded()(folder)
    ids = torch.arange(1, 40)[None]
    whole, parts = (load_model(str(one), say=print).model for one in (tiny_folder, folder))
    with torch.no_grad():
        assert torch.equal(parts(ids).logits, whole(ids).logits)


def test_tied_weights_that_are_there_twice_load(folder):
    def copied(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    weights(copied)(folder)
    config(tie_word_embeddings=True)(folder)
    model = load_model(str(folder), say=print).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_weights_without_the_prefix_load(folder, tiny_folder):
    def shortened(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    weights(shortened)(folder)
    ids = torch.arange(1, 40)[None]
    whole, short = (load_model(str(one), say=print).model for one in (tiny_folder, folder))
    with torch.no_grad():
        assert torch.equal(short(ids).logits, whole(ids).logits)


def test_scaled_rotary_positions_load(folder):
    scaled()(folder)
    assert load_model(str(folder), say=print).config.rope_parameters["factor"] == 2.0


@pytest.mark.parametrize("name", [".", None], ids=["from within", "by its path"])
def test_a_folder_whose_name_is_no_text_is_to_be_renamed(tiny_folder, tmp_path, monkeypatch, name):
    folder = shutil.copytree(tiny_folder, os.fsdecode(os.fsencode(tmp_path) + b"/m\xff"))
    monkeypatch.chdir(folder)
    with pytest.raises(ModelError, match="rename the folder") as refused:
        load_model(name or folder, say=print)
    assert r"/m\xff: its path is not UTF-8" in str(refused.value)


def test_tokens_of_sound_are_no_reason(folder):
    """65,536 added tokens, as models of speech have them: 11 MB of settings."""
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    added = {str(61 + i): {"content": f"<|s_{i}|>", **flags, "special": True} for i in range(65536)}
    tokenizer(added_tokens_decoder=added)(folder)
    check_folder(folder)


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_good_folders_of_every_family_load(family, tied, tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    model = TinyModel(family, "mha", head_dim=16).build()
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.save_pretrained(folder)
    ids = torch.arange(1, 40)[None]
    loaded = load_model(str(folder), say=print).model
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_code_in_the_folder_is_not_run(folder, tmp_path):
    from hostile_folders import text

    marker = tmp_path / "marker"
    text("evil.py", f"open({str(marker)!r}, 'w').write('ran')\n")(folder)
    config(auto_map={"AutoConfig": "evil.A", "AutoModelForCausalLM": "evil.B"})(folder)
    tokenizer(auto_map={"AutoTokenizer": ["evil.C", "evil.D"]})(folder)
    load_model(str(folder), say=print)
    assert not marker.exists()
