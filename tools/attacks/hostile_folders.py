# SPDX-License-Identifier: Apache-2.0
"""Makes model folders that contradict themselves, lack files, or ask for too much memory."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from fuzzing.fuzz_input import Files
from fuzzing.model_folders import tiny_folder
from fuzzing.model_targets import _sharded, join, split

WEIGHTS = "model.safetensors"
_DEEP = "@deep@"


class Fate(StrEnum):
    """What may become of a folder."""

    REFUSED = "refused"
    SAME = "refused or the same answer"
    ANY = "refused or any answer"


@dataclass(frozen=True)
class Hostile:
    """One folder.

    Parameters
    ----------
    name
        What is wrong with it.
    fate
        What may become of it.
    files
        Its content.
    spoil
        What is done to the folder once it is written, for what no content can say.
    """

    name: str
    fate: Fate
    files: Files
    spoil: Callable[[Path], None] = lambda folder: None


def hostile_folders() -> list[Hostile]:
    """Return all of them, each made from a tiny model that works."""
    return [
        *_configs(),
        *_weights(),
        *_shards(),
        *_templates(),
        *_tokenizers(),
        *_places(),
    ]


_CONFIGS: tuple[tuple[str, Any, Fate], ...] = (
    *(("num_hidden_layers", value, Fate.REFUSED) for value in (0, -1, 2, 1e7, 10**7, "1", [], 1.5)),
    *(("hidden_size", value, Fate.REFUSED) for value in (0, -8, 1, 16, 10**9, "a", 10**30)),
    *(("num_attention_heads", value, Fate.REFUSED) for value in (0, -1, 3, 10**7, "x", {}, 2**63)),
    *(("num_key_value_heads", value, Fate.REFUSED) for value in (0, -1, 3, 10**7, "x")),
    *(("head_dim", value, Fate.REFUSED) for value in (0, -1, 3, 7, 10**9, "x")),
    *(("vocab_size", value, Fate.REFUSED) for value in (0, -1, 60, 62, 10**12, "x", [61])),
    *(("intermediate_size", value, Fate.REFUSED) for value in (0, -1, 10**9, "x")),
    *(("rms_norm_eps", value, Fate.REFUSED) for value in (float("nan"), float("inf"), "x", [])),
    *(("rms_norm_eps", value, Fate.ANY) for value in (0, -1, 1e300)),
    *(("max_position_embeddings", value, Fate.ANY) for value in (0, -1, 1, 2**62, "x", 0.5)),
    *(("hidden_act", value, Fate.REFUSED) for value in ("none", 5, None, "os.system")),
    *(("model_type", value, Fate.REFUSED) for value in ("gpt2", "mamba", "x", None, 5, "", ["a"])),
    *(("rope_parameters", value, Fate.ANY) for value in (5, [], {"rope_theta": float("nan")})),
    *(("rope_parameters", value, Fate.ANY) for value in ({"rope_theta": 0}, {"rope_type": "x"})),
    *(("rope_scaling", value, Fate.ANY) for value in ({"type": "yarn"}, {"factor": -1}, "x")),
    *(("quantization_config", value, Fate.ANY) for value in ({}, {"quant_method": "x"}, 5)),
    *(("dtype", value, Fate.ANY) for value in ("float64", "x", 5, "load", "__class__", "int8")),
    *(("eos_token_id", value, Fate.ANY) for value in ("x", -1, 10**12, [[]], {})),
    *(("architectures", value, Fate.ANY) for value in (["GPT2LMHeadModel"], "x", [5], [])),
    *(("layer_types", value, Fate.ANY) for value in (["x"], [], 5, ["full_attention"] * 9)),
    ("auto_map", {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}, Fate.SAME),
    ("tie_word_embeddings", "x", Fate.ANY),
    ("tie_word_embeddings", True, Fate.ANY),
    ("text_config", {"model_type": "llama"}, Fate.ANY),
    ("vision_config", {}, Fate.ANY),
    ("note", _DEEP, Fate.SAME),
    ("note", "A" * 10_000_000, Fate.SAME),
    ("_name_or_path", "../../../../etc/passwd", Fate.SAME),
)


def _configs() -> Iterator[Hostile]:
    for key, value, fate in _CONFIGS:
        files = tiny_folder()
        content = {**json.loads(files["config.json"]), key: value}
        text = json.dumps(content).replace(f'"{_DEEP}"', "[" * 100_000 + "]" * 100_000)
        files["config.json"] = text.encode()
        yield Hostile(f"config {key}={str(value)[:40]}", fate, files)
    for name, text in (
        *(("empty", ""), ("a list", "[]"), ("a number", "7"), ("cut", '{"model_type": "lla')),
        *(("no text", "\xff\xfe"), ("deep", "[" * 100_000), ("null", "null"), ("nothing", "{}")),
    ):
        data = text.encode("latin-1")
        yield Hostile(f"config {name}", Fate.REFUSED, {**tiny_folder(), "config.json": data})
    for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"):
        files = tiny_folder()
        content = json.loads(files["config.json"])
        del content[key]
        files["config.json"] = json.dumps(content).encode()
        yield Hostile(f"config without {key}", Fate.REFUSED, files)
    for text in ("", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": -5}', "[" * 100_000):
        files = {**tiny_folder(), "generation_config.json": text.encode()}
        yield Hostile(f"generation_config {text[:20]!a}", Fate.ANY, files)


def _weights() -> Iterator[Hostile]:
    files = tiny_folder()
    own = files[WEIGHTS]
    header, data = split(own)

    def with_weights(name: str, content: bytes, fate: Fate = Fate.REFUSED) -> Hostile:
        return Hostile(f"weights {name}", fate, {**files, WEIGHTS: content})

    for name in [one for one in header if one != "__metadata__"]:
        less = {key: value for key, value in header.items() if key != name}
        yield with_weights(f"without {name}", join(less, data))
    for length in (0, 4, 8, 100, len(own) // 2, len(own) - 1):
        yield with_weights(f"cut after {length} bytes", own[:length])
    yield with_weights("with more bytes", own + b"\0" * 16)
    for length in (0, 2**63, 2**64 - 1, 10**8):
        yield with_weights(f"whose header has {length} bytes", struct.pack("<Q", length) + own[8:])
    first = next(iter(key for key in header if key.endswith("q_proj.weight")))
    place = header[first]["data_offsets"]
    for key, value in (
        *(("shape", one) for one in ([], [2**40, 2**40], [-1, 4], [1], ["a"])),
        *(("dtype", one) for one in ("F64", "X", "BOOL", None, "U4")),
        *(("data_offsets", one) for one in ([0, 2**63], place[::-1], [-4, 4], [0], "x")),
    ):
        changed = {**header, first: {**header[first], key: value}}
        yield with_weights(f"{key} {value}", join(changed, data))
    extra = {**header, "extra.weight": header[first]}
    yield with_weights("with a weight more, in the same place", join(extra, data))
    end = max(one["data_offsets"][1] for key, one in header.items() if key != "__metadata__")
    behind = {"dtype": "F32", "shape": [1], "data_offsets": [end, end + 4]}
    yield with_weights("with a weight more", join({**header, "extra.w": behind}, data + b"\0" * 4))
    swapped = {**header, first: {**header[first], "shape": header[first]["shape"][::-1]}}
    square = header[first]["shape"][0] == header[first]["shape"][1]
    fate = Fate.SAME if square else Fate.REFUSED
    yield with_weights("of another shape", join(swapped, data), fate)
    yield with_weights("all of them NaN", join(header, b"\xff\xff\xc0\x7f" * (len(data) // 4)))
    yield with_weights("pickled", pickle.dumps({"a": 1}))
    half = {
        key: {**one, "dtype": "F16", "data_offsets": [place // 2 for place in one["data_offsets"]]}
        for key, one in header.items()
        if key != "__metadata__"
    }
    yield with_weights("in half the bytes", join(half, b"\0\x3c" * (len(data) // 4)), Fate.ANY)
    double = {
        key: {**one, "dtype": "F64", "data_offsets": [2 * place for place in one["data_offsets"]]}
        for key, one in header.items()
        if key != "__metadata__"
    }
    yield with_weights("in float64", join(double, bytes(2 * len(data))), Fate.ANY)
    for name in ("pytorch_model.bin", "model.pt", "adapter_model.safetensors"):
        moved = {key: value for key, value in files.items() if key != WEIGHTS}
        content = _planted_pickle() if name != "adapter_model.safetensors" else own
        yield Hostile(f"weights in {name}", Fate.REFUSED, {**moved, name: content})
    adapter = json.dumps({"base_model_name_or_path": "/etc", "peft_type": "LORA"}).encode()
    yield Hostile("an adapter beside", Fate.SAME, {**files, "adapter_config.json": adapter})


class _Planted:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch planted-by-pickle",)


def _planted_pickle() -> bytes:
    return pickle.dumps(_Planted())


def _shards() -> Iterator[Hostile]:
    files = _sharded(tiny_folder())
    name = f"{WEIGHTS}.index.json"
    content = json.loads(files[name])
    first = next(iter(content["weight_map"]))
    yield Hostile("shards as they should be", Fate.SAME, files)
    for value in (
        *("../model/model.safetensors", "/etc/passwd", "none.safetensors", "", ".", "config.json"),
        *(None, 5, [], "model-00001-of-00003.safetensors\0"),
    ):
        places = {**content["weight_map"], first: value}
        changed = json.dumps({**content, "weight_map": places}).encode()
        yield Hostile(f"index says {value!a}", Fate.REFUSED, {**files, name: changed})
    for value in (None, 5, [], "x", {}):
        changed = json.dumps({**content, "weight_map": value}).encode()
        yield Hostile(f"index with map {value!a}", Fate.REFUSED, {**files, name: changed})
    for text in ("", "[]", "{", "[" * 100_000, "{}"):
        fate = Fate.REFUSED
        yield Hostile(f"index {text[:10]!a}", fate, {**files, name: text.encode()})
    shard = "model-00002-of-00003.safetensors"
    less = {key: value for key, value in files.items() if key != shard}
    yield Hostile("a shard is missing", Fate.REFUSED, less)
    cut = {**files, shard: files[shard][:-5]}
    yield Hostile("a shard is cut", Fate.REFUSED, cut)


_TEMPLATES = (
    *("{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",),
    *("{{ 'a' * 10000000000 }}", "{{ 9 ** 9 ** 9 }}", "{{ 'a'.ljust(9999999999) }}", "{{"),
    *("{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}", "{{ 1 / 0 }}", "{% endfor %}"),
    *("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% include '/etc/passwd' %}"),
    *("{{ raise_exception('no') }}", "{{ messages[9].content }}", "{{ messages | length }}"),
    *("{{" + "(" * 20_000 + "1" + ")" * 20_000 + "}}", "{% if 1 %}" * 5_000, "no place for text"),
    *("{{ range(99999) | list | string * 9999 }}", "{{ cycler.__init__.__globals__ }}"),
    *("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "\x1b[2J\x07"),
    *("{{ messages[0].content }}{{ messages[0].content }}", "{{ '%9999999999d' % 1 }}"),
    *("{% set a = [1] %}{% for i in range(99) %}{% set a = a + a %}{% endfor %}",),
    *("{% for i in range(60) %}{{ 'x' * 2 ** loop.index }}{% endfor %}",),
)


def _templates() -> Iterator[Hostile]:
    for text in _TEMPLATES:
        files = {**tiny_folder(), "chat_template.jinja": text.encode()}
        yield Hostile(f"template {text[:60]!a}", Fate.ANY, files)
    for value in (5, [], {}, {"default": 5}, [{"name": "x"}], "{{"):
        files = tiny_folder()
        del files["chat_template.jinja"]
        content = {**json.loads(files["tokenizer_config.json"]), "chat_template": value}
        files["tokenizer_config.json"] = json.dumps(content).encode()
        yield Hostile(f"template setting {value!a}", Fate.ANY, files)


def _tokenizers() -> Iterator[Hostile]:
    files = tiny_folder()
    content = json.loads(files["tokenizer.json"])
    for key in list(content):
        for value in (None, 5, []):
            changed = json.dumps({**content, key: value}).encode()
            yield Hostile(
                f"tokenizer {key}={value}", Fate.ANY, {**files, "tokenizer.json": changed}
            )
    for text in ("", "{}", "[]", "{", "[" * 100_000, "\0" * 100):
        yield Hostile(
            f"tokenizer {text[:10]!a}", Fate.REFUSED, {**files, "tokenizer.json": text.encode()}
        )
    far = {
        **content["model"],
        "vocab": {key: 10**6 + i for key, i in content["model"]["vocab"].items()},
    }
    changed = json.dumps({**content, "model": far}).encode()
    yield Hostile(
        "tokenizer whose ids no model has", Fate.REFUSED, {**files, "tokenizer.json": changed}
    )
    settings = json.loads(files["tokenizer_config.json"])
    for key, value in (
        ("tokenizer_class", "os"),
        ("tokenizer_class", 5),
        ("auto_map", {"AutoTokenizer": ["evil.Evil", None]}),
        ("model_max_length", "x"),
        ("eos_token", 5),
        ("additional_special_tokens", 5),
        ("added_tokens_decoder", {"x": 5}),
    ):
        changed = json.dumps({**settings, key: value}).encode()
        yield Hostile(
            f"tokenizer setting {key}={value!a}",
            Fate.ANY,
            {**files, "tokenizer_config.json": changed},
        )
    less = {key: value for key, value in files.items() if not key.startswith("tokenizer")}
    yield Hostile("without a tokenizer", Fate.REFUSED, less)


def _places() -> Iterator[Hostile]:
    whole = tiny_folder()
    for name in ("config.json", WEIGHTS, "tokenizer.json", "chat_template.jinja"):
        fate = Fate.ANY if name == "chat_template.jinja" else Fate.REFUSED
        for what, spoil in (
            ("is missing", _gone),
            ("is a folder", _folder),
            ("is a pipe", _pipe),
            ("is a link to itself", _loop),
            ("is a link to /dev/zero", _zero),
            ("has a terabyte", _terabyte),
        ):
            yield Hostile(f"{name} {what}", fate, whole, _on(spoil, name))
    for name in ("evil.py", "modeling_llama.py", "tokenization_llama.py", "configuration_llama.py"):
        planted = b"open('planted-by-folder', 'w')\n"
        yield Hostile(f"{name} beside", Fate.SAME, {**whole, name: planted})
    yield Hostile("an empty folder", Fate.REFUSED, {})
    yield Hostile("two GGUF files", Fate.REFUSED, {"a.gguf": b"GGUF", "b.gguf": b"GGUF"})
    for data in (b"", b"GGUF", b"GGUF\3\0\0\0" + b"\xff" * 16, b"GGUF\3\0\0\0" + b"\0" * 16):
        yield Hostile(f"GGUF {data[:12]!a}", Fate.REFUSED, {"a.gguf": data})


def _on(spoil: Callable[[Path], None], name: str) -> Callable[[Path], None]:
    def spoiled(folder: Path) -> None:
        (folder / name).unlink()
        spoil(folder / name)

    return spoiled


def _gone(file: Path) -> None:
    """Leave it away."""


def _folder(file: Path) -> None:
    file.mkdir()


def _pipe(file: Path) -> None:
    os.mkfifo(file)


def _loop(file: Path) -> None:
    file.symlink_to(file.name)


def _zero(file: Path) -> None:
    file.symlink_to("/dev/zero")


def _terabyte(file: Path) -> None:
    with file.open("wb") as made:
        made.truncate(1 << 40)
