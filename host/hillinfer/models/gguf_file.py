# SPDX-License-Identifier: Apache-2.0
"""GGUF files: whether they can be used, their weights as floats, and the way to safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from hillinfer.models.config_check import check_settings
from hillinfer.models.errors import ModelError
from hillinfer.models.gguf_header import GgufHeader
from hillinfer.models.library_calls import one_line
from hillinfer.models.stored_tensor import StoredTensor
from hillinfer.models.weights_fit import check_loaded, check_stored, unused_weights

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

    Raises
    ------
    ModelError
        Where the file is none, cut, or says what cannot be or what transformers leaves out.
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

    Parameters
    ----------
    model
        The file's; without memory is enough.
    tensors
        What `gguf_tensors` says.
    file
        The file.

    Raises
    ------
    ModelError
        Where a tensor is missing, of another shape, or left over.
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

    Raises
    ------
    ModelError
        Where transformers does not know the file's architecture, or makes up a weight.
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
