# SPDX-License-Identifier: Apache-2.0
"""Targets inside a model folder: configs, weights, chat templates, tokenizers."""

from __future__ import annotations

import json
import pickle
import random
import struct
from pathlib import Path
from typing import Any

from fuzzing.fuzz_input import Files
from fuzzing.model_folders import (
    DOCUMENT,
    answer,
    check_config,
    check_weights,
    load,
    prompt_ids,
    quiet,
    tiny_folder,
)
from fuzzing.mutations import dump, mutate_bytes, mutate_json, mutate_object, mutate_text, odd_value
from fuzzing.verdict import WrongAnswerError

# Settings that a config may hold and the tiny ones do not.
_SETTINGS = (
    *("auto_map", "quantization_config", "rope_scaling", "rope_theta", "rope_parameters"),
    *("torch_dtype", "dtype", "sliding_window", "layer_types", "tie_word_embeddings"),
    *("is_encoder_decoder", "num_labels", "id2label", "attn_implementation", "pruned_heads"),
    *("_attn_implementation", "architectures", "use_cache", "transformers_version", "text_config"),
    *("head_dim", "num_key_value_heads", "max_position_embeddings", "eos_token_id", "vocab_size"),
)
_PIECES = (
    *("{{ messages }}", "{% for a in range(9) %}", "{% endfor %}", "{{ 'a' * 100000000 }}"),
    *("{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",),
    *("{{ raise_exception('no') }}", "{{ messages[0]['content'] | upper }}", "{% if true %}"),
    *("{{ messages[7]['content'] }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{%"),
    *("{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}", "{{ 1 / 0 }}", "}}", "{{ x.y.z }}"),
    *("{{ 9 ** 9 ** 9 }}", "{{ range(99999) | list | string }}", "{% include 'a' %}", "\x1b[2J"),
    *("{% set ns = namespace(a=1) %}", "{{ messages | tojson }}", "{{ '%99999999d' % 1 }}", "é"),
    *("(" * 500, "{{" + "(" * 5_000, "{{ [[]] | sum(start=[]) }}", "{{ strftime_now('%Y') }}"),
    *("{{ messages[0]['content'] }}", "{{ eos_token }}", "{{ lipsum() }}", "{# open", "{% raw %}"),
    *("{% generation %}", "{% break %}", "{{ 'x'.join(range(9)) }}", "{{ [1] * 99999999 }}"),
    *("{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",),
    *("{{ 'a'.ljust(999999999) }}", "{{ 'a' | center(999999999) }}", "{{ dict(a=1) | xmlattr }}"),
)
_WEIGHTS = "model.safetensors"


class ConfigTarget:
    """config.json and generation_config.json."""

    name = "config"

    def seeds(self) -> list[Files]:
        """Return one folder of each family."""
        families = ("llama", "qwen2", "qwen3", "mistral", "opt")
        return [_with_settings(tiny_folder(family)) for family in families]

    def mutate(self, rng: random.Random, files: Files) -> Files:
        """Change one of the two files."""
        changed = dict(files)
        name = "generation_config.json" if rng.random() < 0.15 else "config.json"
        if name == "config.json" and rng.random() < 0.3:
            content = json.loads(changed[name])
            content[rng.choice(_SETTINGS)] = odd_value(rng)
            changed[name] = dump(rng, content)
        else:
            changed[name] = mutate_json(rng, changed[name])
        return changed

    def try_one(self, given: Path, other: Path) -> None:
        """Load, compare and ask."""
        loaded = load(given)
        check_weights(loaded, given)
        check_config(loaded, given)
        answer(loaded, other)


class SafetensorsTarget:
    """Weights: one file, or several with an index."""

    name = "safetensors"

    def seeds(self) -> list[Files]:
        """Return a folder with one file and one with three and an index."""
        return [tiny_folder(), _sharded(tiny_folder())]

    def mutate(self, rng: random.Random, files: Files) -> Files:
        """Change a file's header, its bytes, or the index."""
        changed = dict(files)
        index = f"{_WEIGHTS}.index.json"
        if index in files and rng.random() < 0.5:
            changed[index] = _changed_index(rng, files[index])
            return changed
        name = rng.choice([one for one in files if one.endswith(".safetensors")])
        if rng.random() < 0.04:
            del changed[name]
            changed["pytorch_model.bin"] = pickle.dumps({"lm_head.weight": [1.0]})
        elif rng.random() < 0.4:
            changed[name] = mutate_bytes(rng, files[name], rng.choice((9, 3_000, None)))
        else:
            changed[name] = _changed_tensors(rng, files[name])
        return changed

    def try_one(self, given: Path, other: Path) -> None:
        """Load, compare and ask."""
        loaded = load(given)
        check_weights(loaded, given)
        answer(loaded, other)


class TemplateTarget:
    """Chat templates, in a file of their own or in the tokenizer's settings."""

    name = "template"

    def seeds(self) -> list[Files]:
        """Return a folder with the template in a file, and one with it among settings."""
        own = tiny_folder()
        among = dict(own)
        settings = json.loads(among["tokenizer_config.json"])
        settings["chat_template"] = among.pop("chat_template.jinja").decode()
        among["tokenizer_config.json"] = json.dumps(settings).encode()
        return [own, among]

    def mutate(self, rng: random.Random, files: Files) -> Files:
        """Put odd pieces into the template."""
        changed = dict(files)
        if "chat_template.jinja" in files:
            text = mutate_text(rng, files["chat_template.jinja"].decode(), _PIECES)
            changed["chat_template.jinja"] = text.encode()
        else:
            settings = json.loads(files["tokenizer_config.json"])
            text = mutate_text(rng, settings["chat_template"], _PIECES)
            settings["chat_template"] = text if rng.random() < 0.8 else odd_value(rng)
            changed["tokenizer_config.json"] = dump(rng, settings)
        return changed

    def try_one(self, given: Path, other: Path) -> None:
        """Make prompts, in which the document must be."""
        from hillinfer.models.loader import ModelOutline
        from hillinfer.models.sources import ModelSource
        from hillinfer.system.machine import NumberType

        source = ModelSource.locate(str(given), quiet)
        tokenizer = ModelOutline.read(source, NumberType.AUTO).tokenizer
        document, _ = prompt_ids(tokenizer)
        if DOCUMENT.strip() not in tokenizer.decode(document):
            raise WrongAnswerError("the prompt's ids do not hold the document")


class TokenizerTarget:
    """tokenizer.json and tokenizer_config.json."""

    name = "tokenizer"

    def seeds(self) -> list[Files]:
        """Return a folder with a tokenizer of characters and one of bytes."""
        return [tiny_folder(), _with_bytes(tiny_folder())]

    def mutate(self, rng: random.Random, files: Files) -> Files:
        """Change one of the two files."""
        changed = dict(files)
        name = rng.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json"))
        changed[name] = mutate_json(rng, files[name])
        return changed

    def try_one(self, given: Path, other: Path) -> None:
        """Load and ask: ids that the model does not know must not get into it."""
        answer(load(given), other)


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header and the data of a safetensors file."""
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(header: dict[str, Any], data: bytes) -> bytes:
    """Return a safetensors file, whatever its header says."""
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + data


def _changed_tensors(rng: random.Random, data: bytes) -> bytes:
    header, content = split(data)
    names = [name for name in header if name != "__metadata__"]
    name = rng.choice(names)
    own = header[name]
    kind = rng.randrange(8)
    if kind == 0:
        del header[name]
    elif kind == 1:
        header[rng.choice(("extra.weight", name + ".x", "../x"))] = header.pop(name)
    elif kind == 2:
        own["dtype"] = rng.choice(("F64", "F16", "BF16", "I8", "BOOL", "F8_E4M3", "U4", "", "X"))
    elif kind == 3:
        own["shape"] = rng.choice(
            ([], [0], own["shape"][::-1], [2**40, 2**40], [-1], [1, *own["shape"]])
        )
    elif kind == 4:
        start, end = own["data_offsets"]
        own["data_offsets"] = rng.choice(
            ([0, end - start], [start, 2**63], [end, start], [start, end - 4], [-4, end], [start])
        )
    elif kind == 5:
        header["extra.weight"] = dict(own)
    elif kind == 6:
        header = mutate_object(rng, header)
    else:
        # Another type that fits: every weight with half or twice the bytes.
        content = content[: len(content) // 2]
        for one in names:
            header[one]["dtype"] = "F16"
            header[one]["data_offsets"] = [place // 2 for place in header[one]["data_offsets"]]
    try:
        return join(header, content)
    except (TypeError, ValueError):
        return dump(rng, header)


def _changed_index(rng: random.Random, data: bytes) -> bytes:
    content = json.loads(data)
    places = content["weight_map"]
    name = rng.choice(list(places))
    kind = rng.randrange(5)
    if kind == 0:
        places[name] = rng.choice(("../other.safetensors", "/etc/passwd", "none.safetensors", ""))
    elif kind == 1:
        del places[name]
    elif kind == 2:
        places[name + ".x"] = places[name]
    elif kind == 3:
        places[name] = rng.choice(list(places.values()))
    else:
        return mutate_json(rng, data)
    return json.dumps(content).encode()


def _sharded(files: Files) -> Files:
    header, content = split(files.pop(_WEIGHTS))
    names = [name for name in header if name != "__metadata__"]
    places = {}
    for number in range(3):
        own: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        data = b""
        for name in names[number::3]:
            start, end = header[name]["data_offsets"]
            own[name] = header[name] | {"data_offsets": [len(data), len(data) + end - start]}
            data += content[start:end]
            places[name] = f"model-{number + 1:05}-of-00003.safetensors"
        files[f"model-{number + 1:05}-of-00003.safetensors"] = join(own, data)
    index = {"metadata": {"total_size": len(content)}, "weight_map": places}
    files[f"{_WEIGHTS}.index.json"] = json.dumps(index).encode()
    return files


def _with_settings(files: Files) -> Files:
    """Return the folder with settings that are not the model's own and that lists are made from."""
    content = json.loads(files["config.json"])
    content |= {"num_labels": 2, "num_nextn_predict_layers": 0}
    files["config.json"] = json.dumps(content).encode()
    return files


def _with_bytes(files: Files) -> Files:
    """Return the folder with a tokenizer whose ids all lie within the vocabulary."""
    content = json.loads(files["tokenizer.json"])
    vocabulary = content["model"]["vocab"]
    content["model"] = {
        "type": "BPE",
        "vocab": vocabulary,
        "merges": [["c", "a"]],
        "unk_token": "<?>",
    }
    # The merged token takes the place of the last, which no prompt here needs.
    last = max(vocabulary, key=vocabulary.get)
    vocabulary["ca"] = vocabulary.pop(last)
    files["tokenizer.json"] = json.dumps(content).encode()
    return files
