# SPDX-License-Identifier: Apache-2.0
"""GGUF files: whether they can be used, their weights as floats, and the way to safetensors."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from math import prod
from pathlib import Path
from struct import Struct
from types import SimpleNamespace
from typing import Any

import torch

from hillinfer.errors import ModelError, one_line
from hillinfer.models.json_files import check_settings, check_size
from hillinfer.models.weights import StoredTensor, check_loaded, check_stored, unused_weights

# --- The header ---

_MAGIC, _VERSIONS = 0x46554747, (2, 3)
_FILE_BYTES = 1 << 50
_STRING, _ARRAY = 8, 9
# By number of the type: u8, i8, u16, i16, u32, i32, f32, bool, u64, i64, f64.
_SCALARS = {
    number: Struct("<" + letter)
    for number, letter in zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
_U32, _U64 = Struct("<I"), Struct("<Q")
_MOST_NAMES, _MOST_DIMENSIONS, _DEPTH = 1 << 16, 4, 2
# The library makes an object of each: vocabularies of 260,000 tokens have 1.3 million with merges.
_MOST_ELEMENTS = 1 << 22
_MOST_WHOLE = 1 << 53
_ALIGNMENT = 32


class GgufHeader:
    """What a GGUF file says of itself, read once before a library believes its counts.

    `settings` are its scalars and strings by name, arrays left out, and `tensors` its tensors by
    name. Raises ModelError where the file is no GGUF file, cut, or says what cannot be.
    """

    def __init__(self, file: Path) -> None:
        check_size(file, _FILE_BYTES)
        self.settings: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self._file, self._place, self._elements = file, 0, 0
        with file.open("rb") as opened:
            if file.stat().st_size < 24:
                raise self._wrong("it is cut: get it anew")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as self._data:
                self._walk()

    def _walk(self) -> None:
        if self._number(_U32) != _MAGIC:
            raise self._wrong("it is no GGUF file")
        if (version := self._number(_U32)) not in _VERSIONS:
            raise self._wrong(f"it is of GGUF version {version}, and 2 and 3 are read")
        tensors, settings = self._number(_U64), self._number(_U64)
        for what, count in (("tensors", tensors), ("settings", settings)):
            if count > _MOST_NAMES:
                raise self._wrong(f"it says it has {count} {what}, and {_MOST_NAMES} are read")
        for _ in range(settings):
            name = self._text()
            if name in self.settings:
                raise self._wrong(f"it has the setting {name[:80]} twice")
            self.settings[name] = self._value(self._number(_U32), 0)
        places = sorted(self._tensor() for _ in range(tensors))
        alignment = self.settings.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._wrong(f"its general.alignment is {alignment!r:.40}, no power of two")
        # One after the other, so a wrong count of tensors shows: their bytes would begin elsewhere.
        end = self._place
        start = -(-end // alignment) * alignment
        for offset, size, name in places:
            begin = -(-end // alignment) * alignment
            if start + offset != begin:
                raise self._wrong(f"{name[:80]} does not begin where the tensor before it ends")
            end = begin + size
            if end > len(self._data):
                raise self._wrong(f"it is cut before the end of {name[:80]}: get it anew")
        if len(self._data) - end >= alignment:
            raise self._wrong(f"it has {len(self._data) - end} bytes more than its tensors")

    def _tensor(self) -> tuple[int, int, str]:
        """Take one tensor and return its place after the header, its bytes and its name."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._text()
        dimensions = self._number(_U32)
        if dimensions > _MOST_DIMENSIONS:
            raise self._wrong(f"{name[:80]} has {dimensions} dimensions")
        shape = tuple(reversed([self._number(_U64) for _ in range(dimensions)]))
        kind, offset = self._number(_U32), self._number(_U64)
        if name in self.tensors:
            raise self._wrong(f"it has the tensor {name[:80]} twice")
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise self._wrong(f"{name[:80]} is of type {kind}, which nobody knows") from None
        if prod(shape) > _MOST_WHOLE or (shape and shape[-1] % block):
            raise self._wrong(f"{name[:80]} has the shape {shape}, which its type cannot have")
        self.tensors[name] = StoredTensor(name, shape)
        return offset, prod(shape) // block * block_bytes, name

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise self._wrong(f"a setting is of type {kind}, which nobody knows")
            return self._number(_SCALARS[kind])
        inner, count = self._number(_U32), self._number(_U64)
        self._elements += count
        if self._elements > _MOST_ELEMENTS or depth == _DEPTH:
            raise self._wrong(f"its lists have more than {_MOST_ELEMENTS} elements")
        if inner in _SCALARS:
            self._skip(count * _SCALARS[inner].size)
        else:
            for _ in range(count):
                if inner == _STRING:
                    self._skip(self._number(_U64))
                else:
                    self._value(inner, depth + 1)
        return None

    def _text(self) -> str:
        length = self._number(_U64)
        start = self._place
        self._skip(length)
        try:
            return self._data[start : self._place].decode()
        except UnicodeDecodeError as error:
            raise self._wrong(f"a name in it is no UTF-8 ({error})") from error

    def _number(self, how: Struct) -> Any:
        start = self._place
        self._skip(how.size)
        return how.unpack_from(self._data, start)[0]

    def _skip(self, count: int) -> None:
        self._place += count
        if self._place > len(self._data):
            raise self._wrong("it is cut: get it anew")

    def _wrong(self, what: str) -> ModelError:
        return ModelError(f"cannot read the model in {self._file}: {what}")


# --- Weights and settings ---

_ARCHITECTURE = "general.architecture"
# What transformers calls a setting, by the name that GGUF gives it after the architecture's.
_SETTINGS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}


def gguf_tensors(file: Path) -> dict[str, StoredTensor]:
    """Check a GGUF file's header and return what it says of its tensors, by their GGUF names.

    Raises ModelError where the file is none, cut, or says what cannot be or what transformers
    leaves out.
    """
    header = GgufHeader(file)
    architecture = header.settings.get(_ARCHITECTURE)
    if not isinstance(architecture, str) or not architecture:
        raise ModelError(f"cannot read the model in {file}: it names no {_ARCHITECTURE}")
    own = {
        name.removeprefix(f"{architecture}."): value
        for name, value in header.settings.items()
        if name.startswith(f"{architecture}.")
    }
    # A list there, one number per layer, is None here and not compared.
    found = {new: own[old] for old, new in _SETTINGS.items() if own.get(old) is not None}
    check_settings(found, file)
    if len(header.tensors) < found.get("num_hidden_layers", 1):
        raise ModelError(
            f"{file} says it has {found['num_hidden_layers']} layers and holds "
            f"{len(header.tensors)} tensors: it is incomplete, get it anew"
        )
    # transformers reads neither and would compute with positions that the model was not made for.
    scaling = own.get("rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in header.tensors:
        raise ModelError(
            f"{file} scales its rotary positions ({scaling if scaling != 'none' else 'rope_freqs'})"
            ", which is lost when transformers reads a GGUF file: give the model as a folder"
        )
    return header.tensors


def check_gguf(model: Any, tensors: Mapping[str, StoredTensor], file: Path) -> None:
    """Refuse a GGUF file whose tensors are not those of its model.

    transformers' older reader leaves tensors out without a word, and reads all of them before it
    compares any.

    A model without memory is enough; `tensors` is what `gguf_tensors` says. Raises ModelError where
    a tensor is missing, of another shape, or left over.
    """
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        LlamaTensorProcessor,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    if model.config.model_type in GGUF_CONFIG_ARCHS:
        return
    kind = TENSOR_PROCESSORS.get(model.config.model_type, TensorProcessor)
    # Without its parts first: looking through each of them takes seconds, and hardly any needs it.
    whole = SimpleNamespace(
        config=model.config, state_dict=model.state_dict, named_children=lambda: ()
    )
    left, names = set(tensors), dict[str, str]()
    for one in (whole, model):
        with one_line(f"name the tensors in {file}"):
            names = get_gguf_hf_weights_map(one, kind(config=model.config.to_dict()))
        left = {name for name in left if not {name, name.removesuffix(".weight")} & names.keys()}
        if not left:
            break
    # The others' tensors are joined, parted or turned.
    if kind in (TensorProcessor, LlamaTensorProcessor):
        found = {names[name]: tensor for name, tensor in tensors.items() if name in names}
        check_stored(model, found, file)
    if left:
        raise unused_weights(file, left)


def load_gguf(file: Path, dtype: torch.dtype) -> Any:
    """Return the causal language model of a GGUF file, every weight unpacked to `dtype`.

    Whether its tensors are those of the model, `check_gguf` tells before and without reading them.

    Raises ModelError where transformers does not know the file's architecture, or makes up a
    weight.
    """
    from transformers import AutoModelForCausalLM, GgufConfig

    with one_line(f"load {file}"):
        model, info = AutoModelForCausalLM.from_pretrained(
            file.parent,
            # Whole: transformers would take a bare name from the current directory first.
            gguf_file=str(file.absolute()),
            dtype=dtype,
            # Otherwise the blocks stay packed wherever a GGUF kernel happens to be installed, and
            # the same file gives other logits on another machine.
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
            output_loading_info=True,
        )
    check_loaded(info, file)
    return model.eval()


def save_as_folder(file: Path, folder: Path) -> None:
    """Write model and tokenizer of a GGUF file as an ordinary safetensors folder, in float32.

    float32 because it holds the products of block scales and codes without rounding.
    """
    from transformers import AutoTokenizer

    tensors = gguf_tensors(file)
    model = load_gguf(file, torch.float32)
    check_gguf(model, tensors, file)
    with one_line(f"read the tokenizer of {file}"):
        tokenizer = AutoTokenizer.from_pretrained(
            file.parent, gguf_file=str(file.absolute()), local_files_only=True
        )
    # The unpacked model is no longer a quantised one, but save_pretrained refuses what once was.
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
