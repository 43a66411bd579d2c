# SPDX-License-Identifier: Apache-2.0
"""The files of a model folder, looked at before a library reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hillinfer.models.config_check import check_settings
from hillinfer.models.errors import ModelError
from hillinfer.models.json_object import check_size, read_json_object
from hillinfer.models.safetensors_files import stored_tensors
from hillinfer.models.stored_tensor import StoredTensor
from hillinfer.models.tokenizer_file import check_tokenizer

CONFIG = "config.json"
_MIB = 1 << 20
_OBJECTS = {
    "generation_config.json": _MIB,
    # 65,536 tokens of sound, say, take 12 MiB here, and 2 MiB of added_tokens.json.
    "tokenizer_config.json": 16 * _MIB,
    "special_tokens_map.json": _MIB,
    "added_tokens.json": 4 * _MIB,
}
_CONFIG_BYTES, _CONFIG_VALUES = 4 * _MIB, 1 << 16
# transformers looks through all special tokens for each of them.
_MOST_SPECIAL = 1 << 14
_SPECIAL = (
    "extra_special_tokens",
    "additional_special_tokens",
    "model_specific_special_tokens",
)
# Read by libraries in native code, in seconds at these sizes; the largest of today has 33 MiB.
_OTHERS = {
    "vocab.json": 32 * _MIB,
    "vocab.txt": 32 * _MIB,
    "merges.txt": 32 * _MIB,
    "tokenizer.model": 32 * _MIB,
    "spiece.model": 32 * _MIB,
    "chat_template.jinja": _MIB,
}
_TOKENIZER = "tokenizer.json"
_ADAPTER = "adapter_config.json"


def read_config(folder: Path) -> dict[str, Any]:
    """Return a model folder's `config.json`, its settings checked.

    Raises
    ------
    ModelError
        As `read_json_object` and `check_settings` say.
    """
    settings = read_json_object(folder / CONFIG, _CONFIG_BYTES, _CONFIG_VALUES)
    check_settings(settings, folder)
    return settings


def check_folder(folder: Path) -> dict[str, StoredTensor]:
    """Check the files that transformers will read and return what the weights' headers say.

    Raises
    ------
    ModelError
        For the first file that is not what it should be, or too few weights for the layers.
    """
    settings = read_config(folder)
    if (folder / _ADAPTER).exists():
        raise ModelError(
            f"{folder} holds an adapter beside the model ({_ADAPTER}): merge them into one model, "
            "or remove the adapter's files"
        )
    for name, most in _OBJECTS.items():
        if (folder / name).exists():
            _check_special(folder / name, read_json_object(folder / name, most))
    for name, most in _OTHERS.items():
        if (folder / name).exists():
            check_size(folder / name, most)
    if (folder / _TOKENIZER).exists():
        check_tokenizer(folder / _TOKENIZER)
    templates = folder / "additional_chat_templates"
    for file in sorted(templates.iterdir()) if templates.is_dir() else ():
        check_size(file, _MIB)
    tensors = stored_tensors(folder)
    layers = settings.get("num_hidden_layers")
    if layers is not None and layers > len(tensors):
        raise ModelError(
            f"{folder} has num_hidden_layers={layers} in its config and {len(tensors)} tensors in "
            "its weights: they are not of one model, get it anew"
        )
    return tensors


def _check_special(file: Path, settings: dict[str, Any]) -> None:
    listed = [one for name in _SPECIAL if isinstance(one := settings.get(name), list | dict)]
    found = sum(map(len, listed)) + sum(name.endswith("_token") for name in settings)
    if found > _MOST_SPECIAL:
        raise ModelError(
            f"{file} has {found} special tokens, and a model has {_MOST_SPECIAL} at most: it is "
            "not what it should be, get the model anew"
        )
