# SPDX-License-Identifier: Apache-2.0
"""The safetensors files of a model folder: which there are, and what they say they hold."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hillinfer.byte_size import format_bytes
from hillinfer.models.errors import ModelError
from hillinfer.models.json_object import check_size, read_json_object
from hillinfer.models.library_calls import one_line
from hillinfer.models.stored_tensor import StoredTensor

_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_INDEX_BYTES = 64 << 20
_HEADER_BYTES = 32 << 20
_FILE_BYTES = 1 << 50
_NAME_LETTERS = 255
_FLOATS = ("F32", "BF16", "F16")


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return what the headers of a folder's weights say, without reading any weight.

    Raises
    ------
    ModelError
        Where there are no safetensors files, one is missing, cut or damaged, the index does not fit
        them, a tensor is of a type that is not computed in, or its path is not UTF-8.
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
                f"{folder / name} and {_INDEX} do not fit: {some(list(own.keys() ^ keys))}; get "
                "both anew"
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


def some(names: list[str]) -> str:
    """Return a few names and how many there are."""
    shown = ", ".join(name[:80] for name in sorted(names)[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
