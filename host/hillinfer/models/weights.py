# SPDX-License-Identifier: Apache-2.0
"""A model's weights: what its files hold, and whether it is what its settings describe."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from hillinfer.errors import ModelError, one_line
from hillinfer.models.json_files import check_size, read_json_object
from hillinfer.values import format_bytes

# --- Tensors ---


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a weights file: its name there, and its shape as torch writes it."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return prod(self.shape)


# --- Names ---

_LETTERS = 100


def check_names(skeleton: Any, names: Iterable[str], where: object) -> None:
    """Refuse two tensors that become one weight, of which transformers would leave one out.

    transformers adds and removes the prefix of the model without its head, and renames what older
    models call otherwise. Tensors that it joins into one weight are not meant.

    `skeleton` is the model without memory, `names` are those of the stored tensors, `where` is for
    the message. Raises ModelError for the first two.
    """
    with one_line(f"name the weights in {where}", "get the model anew"):
        renamed = _renamed(skeleton, names)
    taken: dict[str, str] = {}
    for name, weight in renamed:
        if weight in taken:
            first, second = taken[weight][:_LETTERS], name[:_LETTERS]
            raise ModelError(
                f"the weights in {where} have {first} and {second}, which are both "
                f"{weight[:_LETTERS]} of the model: remove one of them, or get the model anew"
            )
        taken[weight] = name


def _renamed(skeleton: Any, names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the tensors that are weights by themselves, each with its weight."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(skeleton)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    joining = [one for one in mapping if isinstance(one, WeightConverter)]
    own, prefix = skeleton.state_dict(), skeleton.base_model_prefix
    found = []
    # In this order, because some renamings begin to work at a name.
    for name in sorted(names, key=dot_natural_key):
        weight, joined = rename_source_key(name, renamings, joining, prefix, own)
        if weight not in own and name in own:
            weight, joined = rename_source_key(name, [], [], prefix, own)
        if weight in own and joined is None:
            found.append((name, weight))
    return found


# --- Safetensors files ---

_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_INDEX_BYTES = 64 << 20
_HEADER_BYTES = 32 << 20
_FILE_BYTES = 1 << 50
_NAME_LETTERS = 255
_FLOATS = ("F32", "BF16", "F16")
# Of names in a message.
_SHOWN, _NAME_SHOWN = 3, 100


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return what the headers of a folder's weights say, without reading any weight.

    Raises ModelError where there are no safetensors files, one is missing, cut or damaged, the
    index does not fit them, a tensor is of a type that is not computed in, or its path is not
    UTF-8.
    """
    _check_path(folder)
    if (folder / _ONE_FILE).exists():
        return _tensors_of(folder / _ONE_FILE)
    if not (folder / _INDEX).exists():
        for name in _PICKLED:
            if (folder / name).exists():
                raise ModelError(
                    f"{folder} has its weights in {name}, a pickle, which may run any code when "
                    "it is read: give the model with safetensors files, or convert it"
                )
        raise ModelError(f"{folder} has no weights: {_ONE_FILE} or {_INDEX} is missing")
    return _tensors_of_shards(folder)


def _check_path(folder: Path) -> None:
    """Refuse a folder that the library cannot open, before it says that the file is no good."""
    whole = os.fsencode(folder.absolute())
    try:
        whole.decode()
    except UnicodeDecodeError as error:
        shown = whole.decode(errors="backslashreplace")
        raise ModelError(
            f"cannot read the weights in {shown}: its path is not UTF-8, which safetensors files "
            "cannot be opened with; rename the folder"
        ) from error


def _tensors_of_shards(folder: Path) -> dict[str, StoredTensor]:
    index = folder / _INDEX
    listed = read_json_object(index, _INDEX_BYTES).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(one, str) for one in listed.values()):
        raise ModelError(f"cannot read {index}: it has no weight_map from tensors to files")
    placed: dict[str, set[str]] = {}
    for key, name in listed.items():
        placed.setdefault(name, set()).add(key)
    for name in sorted(placed):
        # Another folder's file is not this model's, and some text is the name of none.
        beside = Path(name).name == name and name.isprintable() and len(name) <= _NAME_LETTERS
        if not beside or not name.endswith(".safetensors"):
            raise ModelError(
                f"{index} names the file {name!r:.80}, and weights are .safetensors files beside it"
            )
    found: dict[str, StoredTensor] = {}
    for name, keys in sorted(placed.items()):
        own = _tensors_of(folder / name)
        if own.keys() != keys:
            raise ModelError(
                f"{folder / name} and {_INDEX} do not fit: {some(own.keys() ^ keys)}; get both anew"
            )
        found |= own
    return found


def _tensors_of(file: Path) -> dict[str, StoredTensor]:
    from safetensors import safe_open

    check_size(file, _FILE_BYTES)
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
    # The library takes more than that, and minutes for it.
    if header > _HEADER_BYTES:
        raise ModelError(
            f"cannot read {file}: its header says it has {format_bytes(header)}; get it anew"
        )
    tensors = {}
    with (
        one_line(f"read {file}", "it is cut or damaged: get it anew"),
        safe_open(str(file.absolute()), framework="pt") as opened,
    ):
        for name in opened.keys():  # noqa: SIM118 (no mapping)
            stored: Any = opened.get_slice(name)
            shape, kind = tuple(stored.get_shape()), stored.get_dtype()
            if kind not in _FLOATS and not name.endswith(("inv_freq", "position_ids")):
                raise ModelError(
                    f"{file} has {name[:80]} as {kind}: HillInfer reads {', '.join(_FLOATS)}; "
                    "convert the model to one of them"
                )
            tensors[name] = StoredTensor(name, shape)
    return tensors


def some(names: Collection[str]) -> str:
    """Return a few names and how many more there are."""
    shown = ", ".join(name[:_NAME_SHOWN] for name in sorted(names)[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


# --- Weights against settings ---

_FIX = "config and weights are not of one model, or a file is incomplete: get the model anew"


def check_stored(skeleton: Any, tensors: Mapping[str, StoredTensor], where: object) -> None:
    """Refuse weights that cannot be a model's, before any is read.

    What can only be known once they are loaded, because transformers gives some of them other
    names, `check_loaded` looks at.

    `skeleton` is the model without memory, `tensors` is what its files hold, `where` is for the
    message. Raises ModelError where a tensor has another shape than the model's of the same name,
    the model has more numbers than the files, or two tensors are one weight of it.
    """
    own = {name: tuple(weight.shape) for name, weight in skeleton.state_dict().items()}
    misshapen = [
        f"{name} is {list(tensor.shape)} in the file and {list(own[name])} in the config"
        for name, tensor in tensors.items()
        if name in own and tensor.shape != own[name]
    ]
    missing = _without_ties(skeleton, own.keys() - tensors.keys())
    unused = tensors.keys() - own.keys()
    if misshapen:
        raise ModelError(f"the weights in {where} have other shapes: {some(misshapen)}; {_FIX}")
    # Of the same names but for a few: those few are all there is to say.
    if missing and not unused and not skeleton._keys_to_ignore_on_load_missing:
        raise _missing(where, missing)
    numbers = sum(weight.numel() for weight in skeleton.parameters())
    held = sum(tensor.numel for tensor in tensors.values())
    if numbers > held and not skeleton._keys_to_ignore_on_load_missing:
        raise ModelError(
            f"the weights in {where} are too few: its config describes {numbers} numbers and its "
            f"files hold {held}, without {some(missing)}; {_FIX}"
        )
    check_names(skeleton, tensors, where)


def check_loaded(info: Mapping[str, Any], where: object) -> None:
    """Refuse a model of which transformers made up a weight, or left one out.

    `info` is what `from_pretrained` says with `output_loading_info`: tied weights, and those that
    the model's class declares to be of no matter, are not in it. `where` is for the message. Raises
    ModelError where one is missing, unused, of another shape or not readable.
    """
    if info["missing_keys"]:
        raise _missing(where, info["missing_keys"])
    if info["unexpected_keys"]:
        raise unused_weights(where, info["unexpected_keys"])
    others = [*(one[0] for one in info["mismatched_keys"]), *map(str, info["error_msgs"])]
    if others:
        raise ModelError(f"the weights in {where} do not fit: {some(others)}; {_FIX}")


def check_ties(skeleton: Any, model: Any, where: object) -> None:
    """Refuse a model whose config ties weights of which its files hold two that differ.

    `skeleton` is the model without memory, which says what its config ties; the loaded `model` has
    such weights apart, with a warning of transformers. `where` is for the message. Raises
    ModelError for the first two.
    """
    tied: Mapping[str, str] = getattr(skeleton, "all_tied_weights_keys", {})
    for second, first in tied.items():
        if model.get_parameter_or_buffer(second) is not model.get_parameter_or_buffer(first):
            raise ModelError(
                f"the weights in {where} have {second} and {first}, which differ, and its config "
                "says that they are one weight: set tie_word_embeddings to false in config.json to "
                f"use both, or remove {second} from the files"
            )


def unused_weights(where: object, names: Collection[str]) -> ModelError:
    """Return the error of weights that the model has no place for."""
    return ModelError(
        f"the weights in {where} have {len(names)} tensors that its config has no place for, "
        f"{some(names)}; {_FIX}"
    )


def _missing(where: object, names: Collection[str]) -> ModelError:
    return ModelError(
        f"the weights in {where} lack {len(names)} tensors of its config, {some(names)}; {_FIX}"
    )


def _without_ties(skeleton: Any, names: Collection[str]) -> set[str]:
    """Leave out what is another weight under a second name."""
    tied: Mapping[str, str] = getattr(skeleton, "all_tied_weights_keys", {})
    return {name for name in names if name not in tied and name not in tied.values()}
