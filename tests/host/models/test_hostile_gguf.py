# SPDX-License-Identifier: Apache-2.0
"""A GGUF file is used as it says or not at all: each hostile one ends in one line, soon."""

import struct
import time

import pytest
import torch
from tiny_gguf import save_gguf
from tiny_models import TinyModel

from hillinfer.errors import ModelError
from hillinfer.models.loader import ModelOutline, load_model
from hillinfer.models.sources import ModelSource
from hillinfer.system.machine import NumberType

SECONDS = 30
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
STRING, ARRAY = 8, 9
UNSIGNED_8, UNSIGNED_32, FLOAT_32 = 0, 4, 6
LENGTH_OF_COUNTS = 24


@pytest.fixture(scope="module")
def models():
    return {layers: TinyModel(layers=layers, head_dim=16).build() for layers in (2, 3)}


@pytest.fixture(scope="module")
def files(models, tmp_path_factory):
    """The bytes of a good file of 2 layers and one of 3."""
    folder = tmp_path_factory.mktemp("gguf")
    return {n: save_gguf(folder / f"{n}.gguf", model).read_bytes() for n, model in models.items()}


def number(name, value, how=U32):
    """Return a change of the number that a setting has."""

    def change(data):
        place = data.index(name.encode()) + len(name) + 4
        return data[:place] + how.pack(value) + data[place + how.size :]

    return change


def renamed(old, new):
    """Return a change of a name to another of its length."""
    assert len(old) == len(new)
    return lambda data: data.replace(old.encode(), new.encode())


def counts(tensors=None, settings=None):
    def change(data):
        own = [U64.unpack(data[place : place + 8])[0] for place in (8, 16)]
        made = [
            one if given is None else given
            for one, given in zip(own, (tensors, settings), strict=True)
        ]
        return data[:8] + b"".join(map(U64.pack, made)) + data[LENGTH_OF_COUNTS:]

    return change


def setting(name, kind, value):
    """Return a change that adds a setting before all others."""

    def change(data):
        added = U64.pack(len(name)) + name.encode() + U32.pack(kind) + value
        count = U64.unpack(data[16:24])[0]
        made = counts(settings=count + 1)(data)
        # Tensors begin at a multiple of 32 bytes after the header, so what is added is one, too.
        pad = b"pad." + b"x" * (-(len(added) + 8 + 4 + 4 + 1) % 32)
        added += U64.pack(len(pad)) + pad + U32.pack(UNSIGNED_8) + b"\0"
        made = counts(settings=count + 2)(made)
        return made[:LENGTH_OF_COUNTS] + added + made[LENGTH_OF_COUNTS:]

    return change


def text(value):
    return U64.pack(len(value)) + value.encode()


def endless(kind, length):
    return setting("a.list", ARRAY, U32.pack(kind) + U64.pack(length))


def tensor(offset, how, value):
    """Return a change of what follows the name of the norm's tensor."""

    def change(data):
        place = data.index(b"output_norm.weight") + len("output_norm.weight") + offset
        return data[:place] + how.pack(value) + data[place + how.size :]

    return change


# Name, layers of the file, change, a part of the message.
CASES = [
    ("layer too many", 2, number("llama.block_count", 3), "lack 9 tensors"),
    ("layer too few", 3, number("llama.block_count", 2), "has no place for"),
    ("tensor renamed", 2, renamed("blk.1.ffn_up", "blk.1.ffn_xx"), "lack 1 tensors"),
    ("tensor twice", 2, renamed("blk.1.ffn_up", "blk.0.ffn_up"), "twice"),
    ("tensor unknown", 3, renamed("blk.2.ffn_up", "blk.9.ffn_up"), "lack 1 tensors"),
    ("layers", 2, number("llama.block_count", 10**7), "num_hidden_layers=10000000"),
    ("more layers than tensors", 2, number("llama.block_count", 100), "holds 21 tensors"),
    ("no layers", 2, number("llama.block_count", 0), "num_hidden_layers=0"),
    ("no heads", 2, number("llama.attention.head_count", 0), "num_attention_heads=0"),
    ("heads", 2, number("llama.attention.head_count", 3), "no multiple"),
    ("KV heads", 2, number("llama.attention.head_count_kv", 4), "have other shapes"),
    ("width", 2, number("llama.embedding_length", 128), "have other shapes"),
    ("widest", 2, number("llama.embedding_length", 1 << 31), "hidden_size="),
    ("positions", 2, number("llama.context_length", 0), "max_position_embeddings=0"),
    ("architecture", 2, renamed("general.architecture", "general.architectur2"), "names no"),
    ("scaled", 2, setting("llama.rope.scaling.type", STRING, text("yarn")), "scales its rotary"),
    ("alignment", 2, setting("general.alignment", UNSIGNED_32, U32.pack(7)), "no power of two"),
    ("magic", 2, lambda data: b"GGML" + data[4:], "no GGUF file"),
    ("empty", 2, lambda data: b"", "is cut"),
    ("version", 2, lambda data: data[:4] + U32.pack(99) + data[8:], "GGUF version 99"),
    ("byte order", 2, lambda data: data[:4] + data[7:3:-1] + data[8:], "GGUF version"),
    ("tensors", 2, counts(tensors=1 << 60), "1152921504606846976 tensors"),
    ("settings", 2, counts(settings=1 << 60), "1152921504606846976 settings"),
    ("one tensor more", 2, counts(tensors=22), ""),
    ("one tensor less", 2, counts(tensors=20), "bytes more than its tensors"),
    ("list of bytes", 2, endless(UNSIGNED_8, 1 << 60), "more than 4194304 elements"),
    ("list of text", 2, endless(STRING, 1 << 60), "more than 4194304 elements"),
    ("list of lists", 2, endless(ARRAY, 1 << 20), ""),
    ("list of nothing known", 2, endless(99, 1 << 20), "type 99"),
    ("list longer than the file", 2, endless(UNSIGNED_8, 1 << 21), "cut"),
    ("text longer than the file", 2, setting("a", STRING, U64.pack(1 << 60)), "cut"),
    ("dimensions", 2, tensor(0, U32, 1 << 30), "dimensions"),
    ("shape", 2, tensor(4, U64, 1 << 60), "which its type cannot have"),
    ("shape past the end", 2, tensor(4, U64, 1 << 30), ""),
    ("other shape", 2, tensor(4, U64, 32), "does not begin where"),
    ("type", 2, tensor(12, U32, 77), "of type 77"),
    ("place", 2, tensor(16, U64, 1 << 62), "does not begin where"),
    *((f"cut to {size}", 2, lambda data, size=size: data[:size], "cut") for size in (10, 30, 900)),
    ("cut by a byte", 2, lambda data: data[:-1], "cut before the end"),
]


@pytest.mark.parametrize(
    ("layers", "change", "said"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_a_hostile_file_ends_in_one_line(files, tmp_path, layers, change, said):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(change(files[layers]))
    started = time.monotonic()
    with pytest.raises(ModelError) as refused:
        load_model(str(file), say=print)
    assert time.monotonic() - started < SECONDS
    message = str(refused.value)
    assert said in message
    assert len(message.splitlines()) == 1
    assert len(message) < 1000


# Whose tensors do not fit the settings: told from the header, with no tensor read.
UNFIT = ("layer too many", "layer too few", "tensor renamed", "KV heads", "width")


@pytest.mark.parametrize(
    ("layers", "change", "said"),
    [case[1:] for case in CASES if case[0] in UNFIT],
    ids=[case[0] for case in CASES if case[0] in UNFIT],
)
def test_what_does_not_fit_is_refused_before_it_is_read(files, tmp_path, layers, change, said):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(change(files[layers]))
    source = ModelSource.locate(str(file), print)
    with pytest.raises(ModelError, match=said):
        ModelOutline.read(source, NumberType.AUTO)


def test_the_same_changes_of_what_does_not_matter_load(files, models, tmp_path):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(setting("a.note", STRING, text("harmless"))(files[2]))
    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        loaded = load_model(str(file), say=print).model(ids).logits
        assert torch.equal(loaded, models[2](ids).logits)
