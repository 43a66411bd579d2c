# SPDX-License-Identifier: Apache-2.0
"""Changes of a good model folder, each of which makes it no model: a table of cases."""

from __future__ import annotations

import json
import os
import struct

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def config(**changes):
    """Return a change of `config.json`; None removes a setting."""

    def change(folder):
        edit(folder / "config.json", **changes)

    return change


def edit(file, **changes):
    content = json.loads(file.read_text())
    for name, value in changes.items():
        content.pop(name, None)
        if value is not None:
            content[name] = value
    file.write_text(json.dumps(content))


def text(name, content):
    """Return a change that writes a file."""

    def change(folder):
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name).write_bytes(data)

    return change


def sparse(name, size):
    """Return a change that makes a file as large as it says, on no drive."""

    def change(folder):
        with (folder / name).open("wb") as file:
            file.truncate(size)

    return change


FIFTY = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 50}


def normalizer(steps):
    """Return a change of what `tokenizer.json` does to a text first."""
    return _steps("normalizer", "normalizers", steps)


def decoder(steps):
    """Return a change of what `tokenizer.json` does to an answer last."""
    return _steps("decoder", "decoders", steps)


def _steps(part, parts, steps):
    def change(folder):
        edit(folder / "tokenizer.json", **{part: {"type": "Sequence", parts: steps}})

    return change


def many(name, count):
    """Return a change that puts empty lists into a file."""

    def change(folder):
        own = (folder / name).read_text().strip().removesuffix("}")
        (folder / name).write_text(f'{own}, "note": [{"[], " * count}[]]}}')

    return change


def weights(change_them):
    """Return a change of the tensors by name."""

    def change(folder):
        tensors = load_file(folder / WEIGHTS)
        change_them(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return change


def cut(name, count):
    """Return a change that leaves the first bytes of a file, or all but the last."""

    def change(folder):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:count])

    return change


def header(change_it):
    """Return a change of a safetensors header's text, its length kept right."""

    def change(folder):
        data = (folder / WEIGHTS).read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        made = change_it(data[8 : 8 + size].decode()).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(made)) + made + data[8 + size :])

    return change


def pickled(folder):
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def sharded(**changes):
    """Return a change to two shards and an index that `changes` may spoil."""

    def change(folder):
        tensors = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        names = sorted(tensors)
        files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, own in files.items():
            save_file({n: tensors[n] for n in own}, folder / file, metadata={"format": "pt"})
        listed = {name: file for file, own in files.items() for name in own}
        first = names[0]
        if "place" in changes:
            listed[first] = changes["place"]
        if "drop" in changes:
            (folder / changes["drop"]).unlink()
        if "ghost" in changes:
            listed["ghost"] = "a.safetensors"
        if "unlisted" in changes:
            del listed[first]
        if "both" in changes:
            save_file({first: tensors[first]}, folder / "a.safetensors")
        index = {"metadata": {"total_size": 1}, "weight_map": listed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def pipe(name):
    """Return a change that puts a pipe, which never ends, in a file's place."""

    def change(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def without(name):
    def change(tensors):
        del tensors[name]

    return change


def added(tensors):
    tensors["model.layers.0.extra.weight"] = torch.ones(3)


def twice(name, second):
    def change(tensors):
        tensors[second] = torch.zeros_like(tensors[name])

    return change


def misshapen(tensors):
    tensors["model.norm.weight"] = torch.ones(3)


def doubles(tensors):
    for name, tensor in tensors.items():
        tensors[name] = tensor.double()


def whole_numbers(tensors):
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int64)


def tokenizer(**changes):
    def change(folder):
        edit(folder / "tokenizer_config.json", **changes)

    return change


def scaled(**changes):
    """Return a change to scaled rotary positions, which load, but for `changes`."""
    return config(rope_scaling={"type": "linear", "factor": 2.0, "rope_theta": 1e4, **changes})


# Values of rotary parameters that transformers takes with a warning, or none.
ROTARY = {
    "factor": (-4.0, 0, 0.5, 1e300, "4", [4], True),
    "attention_factor": (0, -1.0, 1e9, "1"),
    "beta_fast": (-1, "32", 1e300),
    "beta_slow": (-1, [1]),
    "low_freq_factor": (0, -1.0, "1"),
    "high_freq_factor": (0, -1.0, {}),
    "mscale": (-1.0, "1"),
    "mscale_all_dim": (-1.0, 1e300),
    "truncate": (1, "no"),
    "short_factor": ([], [1.0], 1.0, "12345678"),
    "long_factor": ({}, [2.0]),
}
TOKENS = [f"<{i}>" for i in range(20_000)]
DEEP = "[" * 100_000 + "]" * 100_000
NORM = "model.norm.weight"
# Name, change, a part of the message.
CASES = [
    # Weights that are not the config's.
    ("tensor missing", weights(without("model.layers.1.mlp.up_proj.weight")), "lack 1 tensors"),
    ("norm missing", weights(without(NORM)), NORM),
    ("head missing", weights(without("lm_head.weight")), "lm_head.weight"),
    ("layer too many", config(num_hidden_layers=3), "lack 9 tensors"),
    ("layer too few", config(num_hidden_layers=1), "has no place for"),
    ("tensor added", weights(added), "has no place for"),
    (
        "weight twice",
        weights(twice("model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight")),
        "have layers.0.mlp.up_proj.weight and model.layers.0.mlp.up_proj.weight",
    ),
    (
        "head twice",
        weights(twice("lm_head.weight", "model.lm_head.weight")),
        "have lm_head.weight and model.lm_head.weight",
    ),
    ("tied and apart", config(tie_word_embeddings=True), "set tie_word_embeddings to false"),
    ("other shape", weights(misshapen), "model.norm.weight is [3] in the file and [64]"),
    ("wider", config(hidden_size=128), "have other shapes"),
    ("more words", config(vocab_size=99), "have other shapes"),
    ("float64", weights(doubles), "as F64"),
    ("int64", weights(whole_numbers), "as I64"),
    ("pickle", pickled, "a pickle"),
    ("no weights", lambda folder: (folder / WEIGHTS).unlink(), "has no weights"),
    ("adapter", text("adapter_config.json", "{}"), "holds an adapter"),
    # Safetensors.
    ("empty", text(WEIGHTS, ""), "cut or damaged"),
    ("cut in the header", cut(WEIGHTS, 100), "cut or damaged"),
    ("cut at the end", cut(WEIGHTS, -1), "cut or damaged"),
    ("no header", text(WEIGHTS, bytes(64)), "cut or damaged"),
    ("huge header", text(WEIGHTS, struct.pack("<Q", 1 << 60)), "its header says"),
    ("header of 90 MB", text(WEIGHTS, struct.pack("<Q", 90_000_000)), "its header says"),
    ("header is a list", header(lambda own: "[]" + " " * 8), "cut or damaged"),
    ("header is deep", header(lambda own: '{"a":' + DEEP + "}"), "cut or damaged"),
    ("other type", header(lambda own: own.replace('"F32"', '"F99"', 1)), "cut or damaged"),
    ("overlap", header(lambda own: own.replace("[0,", "[4,", 1)), "cut or damaged"),
    ("directory", lambda folder: ((folder / WEIGHTS).unlink(), (folder / WEIGHTS).mkdir()), "not"),
    ("pipe", pipe(WEIGHTS), "not an ordinary file"),
    # Shards.
    ("shard elsewhere", sharded(place="../a.safetensors"), "files beside it"),
    ("shard of the machine", sharded(place="/etc/passwd"), "files beside it"),
    ("shard of no text", sharded(place="\ud800.safetensors"), "files beside it"),
    ("shard of no path", sharded(place="a\0.safetensors"), "files beside it"),
    ("shard of a long name", sharded(place="a" * 5_000 + ".safetensors"), "files beside it"),
    ("shard is none", sharded(place="config.json"), "files beside it"),
    ("shard missing", sharded(drop="b.safetensors"), "b.safetensors"),
    ("shard of another", sharded(place="b.safetensors"), "do not fit"),
    ("tensor in no shard", sharded(ghost=1), "do not fit: ghost"),
    ("tensor not in the index", sharded(unlisted=1), "do not fit"),
    ("shard overwritten", sharded(both=1), "do not fit"),
    # config.json.
    ("no object", text("config.json", "[]"), "not a JSON object"),
    ("deep", text("config.json", "[" * 50_000), "nested too deeply"),
    ("no UTF-8", text("config.json", b'{"model_type": "\xff"}'), "not JSON in UTF-8"),
    ("byte order mark", text("config.json", b"\xef\xbb\xbf{}"), "not JSON in UTF-8"),
    ("twice", text("config.json", '{"model_type": "llama", "model_type": "opt"}'), "there twice"),
    ("a gigabyte", sparse("config.json", 1 << 30), "such a file has"),
    ("a pipe", pipe("config.json"), "not an ordinary file"),
    ("NaN", text("config.json", '{"model_type": "llama", "rms_norm_eps": NaN}'), "no number"),
    ("infinite", text("config.json", '{"model_type": "llama", "a": 1e999}'), "too large"),
    ("endless", text("config.json", '{"a": ' + "9" * 5000 + "}"), "not JSON in UTF-8"),
    ("no type", config(model_type=None), "model type 'None'"),
    ("type is a list", config(model_type=["llama"]), "model type"),
    ("type of another", config(model_type="gpt2"), "are too few"),
    ("type of vision", config(model_type="vit"), "cannot"),
    ("types of layers", config(layer_types=["full_attention"]), "cannot"),
    ("type of numbers", config(dtype="float99"), "cannot"),
    ("numbers of a kind", config(dtype="int8"), "dtype"),
    ("quantised", config(quantization_config={"quant_method": "gptq", "bits": 4}), "quantised"),
    ("other weights", config(transformers_weights="../b.safetensors"), "transformers_weights"),
    ("fused", config(fusion_config={}), "fusion_config"),
    ("kernel of a hub", config(_attn_implementation="someone/kernel"), "code of a hub"),
    ("activation", config(hidden_act="os.system"), "cannot"),
    ("rotation", config(rope_parameters={"rope_type": "made up", "rope_theta": 1.0}), "cannot"),
    ("rotation is a list", config(rope_parameters=[1]), "cannot"),
    ("theta", config(rope_parameters={"rope_type": "default", "rope_theta": -1.0}), "rope_theta"),
    *(
        (f"rotary {name} {value!r:.12}", scaled(**{name: value}), f"rope_scaling.{name}")
        for name, values in ROTARY.items()
        for value in values
    ),
    ("rotary of positions", scaled(original_max_position_embeddings=0), "original_max_position"),
    ("rotary share", scaled(partial_rotary_factor=1.5), "partial_rotary_factor=1.5"),
    (
        "rotary of version 5",
        config(rope_parameters={"rope_type": "linear", "factor": -4.0, "rope_theta": 1e4}),
        "rope_parameters.factor=-4.0",
    ),
    (
        "rotary of a type of layer",
        config(rope_parameters={"full_attention": {"rope_type": "linear", "factor": 0.5}}),
        "rope_parameters.full_attention.factor=0.5",
    ),
    ("rotary swapped", scaled(low_freq_factor=4.0, high_freq_factor=1.0), "they are swapped"),
    ("rotary of YaRN swapped", scaled(beta_slow=32, beta_fast=1), "they are swapped"),
    ("rotary slow alone", scaled(beta_slow=33), "above its beta_fast=32"),
    ("rotary list", scaled(short_factor=[1.0, 2.0, 0.0]), "rope_scaling.short_factor[2]=0.0"),
    ("rotary lists", scaled(short_factor=[1.0] * 8, long_factor=[2.0] * 9), "long_factor 9"),
    (
        "rotary lists too short",
        scaled(type="longrope", short_factor=[1.0] * 7, long_factor=[1.0] * 7),
        "cannot build",
    ),
    ("epsilon", config(rms_norm_eps=-1.0), "rms_norm_eps=-1.0"),
    ("epsilon is text", config(rms_norm_eps="small"), "rms_norm_eps='small'"),
    ("heads and KV heads", config(num_key_value_heads=3), "no multiple"),
    ("heads and width", config(num_attention_heads=7, head_dim=None), "no multiple"),
    *(
        (f"{name} {value!r:.12}", config(**{name: value}), name)
        for name in (
            *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
            *("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"),
        )
        for value in (0, -1, 10**7 if "layers" in name else 10**12, 1.5, "2", [2], True)
    ),
    ("window", config(sliding_window="llama"), "sliding_window='llama'"),
    ("chunks", config(attention_chunk_size=[8]), "attention_chunk_size=[8]"),
    # Lists as long as a number says are made while a config is read.
    *(
        (f"{name} {value}", config(**{name: value}), name)
        for name in ("num_labels", "first_k_dense_replace", "num_nextn_predict_layers")
        for value in (-(10**12), 10**12, 10**9, "2")
    ),
    ("labels in a part", config(text_config={"num_labels": 10**12}), "num_labels"),
    (
        "types of attention",
        config(attention_types=[[["global"], 10**12]], model_type="gpt_neo"),
        "attention_types",
    ),
    # Other JSON and the tokenizer.
    ("generation config", text("generation_config.json", "[1]"), "generation_config.json"),
    ("generation is deep", text("generation_config.json", '{"a":' + DEEP + "}"), "deeply"),
    ("end of text", text("generation_config.json", '{"eos_token_id": "x"}'), "eos_token_id"),
    ("ends of text", text("generation_config.json", '{"eos_token_id": [[2]]}'), "eos_token_id"),
    ("no tokenizer", lambda folder: (folder / "tokenizer.json").unlink(), "cannot read the model"),
    ("tokenizer cut", cut("tokenizer.json", 300), "not JSON"),
    ("tokenizer empty", text("tokenizer.json", "{}"), "cannot read the model"),
    ("tokenizer is a number", text("tokenizer.json", "7"), "not a JSON object"),
    ("tokenizer is deep", text("tokenizer.json", DEEP), "nested too deeply"),
    ("tokenizer is large", sparse("tokenizer.json", 1 << 30), "such a file has"),
    ("tokenizer is a pipe", pipe("tokenizer.json"), "not an ordinary file"),
    ("tokenizer repeats", normalizer([FIFTY] * 8), "its normalizer makes up to"),
    (
        "tokenizer repeats within",
        normalizer([{"type": "Sequence", "normalizers": [FIFTY] * 4}] * 2),
        "its normalizer makes up to",
    ),
    ("answers repeat", decoder([FIFTY] * 8), "its decoder makes up to"),
    ("tokenizer puts in front", normalizer([{"type": "Prepend", "prepend": "a" * 10**6}]), "up to"),
    ("tokens", tokenizer(added_tokens_decoder={"0": 5}), "cannot read the model"),
    ("tokenizer of nothing", many("tokenizer.json", 5_000_000), "values"),
    ("many settings of a tokenizer", many("tokenizer_config.json", 600_000), "values"),
    ("many settings", many("config.json", 40_000), "config.json has"),
    ("many added tokens", sparse("added_tokens.json", 5 << 20), "such a file has"),
    ("special tokens", tokenizer(extra_special_tokens=TOKENS), "special tokens, and"),
    ("other special tokens", tokenizer(additional_special_tokens=TOKENS), "special tokens, and"),
    ("named special tokens", tokenizer(**{f"{n}_token": "a" for n in TOKENS}), "special tokens"),
    ("tokens are text", tokenizer(added_tokens_decoder="x"), "cannot read the model"),
    ("token numbers", tokenizer(added_tokens_decoder={"x": {"content": "a"}}), "cannot read"),
    ("tokenizer class", tokenizer(tokenizer_class=["x"]), "cannot read the model"),
    ("template is a pipe", pipe("chat_template.jinja"), "not an ordinary file"),
    ("template is large", sparse("chat_template.jinja", 1 << 30), "such a file has"),
]
