# SPDX-License-Identifier: Apache-2.0
"""A model folder's weights and tokenizer as a GGUF file of FP16 or FP32, for llama.cpp."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from peers.peer_environment import PeerSkippedError

# llama.cpp's type for each of torch's: BF16 has no fast kernels without hardware for it, and FP16
# keeps a bfloat16 weight's bits down to 2^-14.
GGUF_TYPES = {"bfloat16": "float16", "float16": "float16", "float32": "float32"}


@dataclass(frozen=True)
class GgufWeights:
    """What a file holds.

    Parameters
    ----------
    kind
        Type of its matrices.
    changed_share
        Share of the matrices' weights that this type does not hold exactly.
    largest_change
        Of a weight.
    """

    kind: str
    changed_share: float
    largest_change: float


def write_gguf(model: Any, dtype: str, file: Path, tokenizer: Path | None = None) -> GgufWeights:
    """Write a Llama model.

    Parameters
    ----------
    model
        A Llama model of transformers, in the type that the other peers compute with.
    dtype
        That type's name.
    file
        Where the file goes.
    tokenizer
        Folder of the tokenizer that goes with it; without one prompts are token ids.

    Raises
    ------
    PeerSkippedError
        For other families, scaled positions, weights beyond FP16's range, and tokenizers that are
        not of bytes in GPT-2's words.
    """
    config = model.config
    if config.model_type != "llama":
        raise PeerSkippedError(
            f"only Llama models are written as GGUF and this is {config.model_type}"
        )
    if config.rope_parameters.get("rope_type", "default") != "default":
        raise PeerSkippedError(
            "only Llama models with plain rotary positions are written as GGUF and these are "
            f"{config.rope_parameters['rope_type']}"
        )
    kind = GGUF_TYPES[dtype]
    weights, changed, largest = 0, 0, 0.0
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        _add_tokenizer(writer, tokenizer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        array: NDArray[Any] = weight.to(torch.float32).numpy()
        if "q_proj" in name:
            array = _interleaved(array, config.num_attention_heads)
        if "k_proj" in name:
            array = _interleaved(array, config.num_key_value_heads)
        if array.ndim > 1 and kind == "float16":
            narrow = array.astype(np.float16)
            if not np.isfinite(narrow).all():
                raise PeerSkippedError(f"{name} has a weight beyond FP16's range: --dtype float32")
            change = np.abs(narrow - array)
            changed += np.count_nonzero(change)
            largest = max(largest, float(change.max()))
            array = narrow
        weights += array.size if array.ndim > 1 else 0
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufWeights(kind, changed / weights, largest)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, rows: int) -> None:
    """Write a tokenizer's words, and its chat template where it has one."""
    told = json.loads((folder / "tokenizer.json").read_text())
    before = told.get("pre_tokenizer") or {}
    if (told["model"]["type"], before.get("type"), before.get("add_prefix_space")) != (
        *("BPE", "ByteLevel"),
        False,
    ):
        raise PeerSkippedError(
            f"only tokenizers of bytes in GPT-2's words are written as GGUF, and {folder} has "
            "another"
        )
    words = {number: word for word, number in told["model"]["vocab"].items()}
    special = {one["id"]: one["content"] for one in told["added_tokens"] if one["special"]}
    words |= {one["id"]: one["content"] for one in told["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    # Rows that no word has are words of their own, which no text has.
    writer.add_token_list([words.get(number, f"[unused {number}]") for number in range(rows)])
    kinds = [
        gguf.TokenType.CONTROL
        if number in special
        else gguf.TokenType.NORMAL
        if number in words
        else gguf.TokenType.UNUSED
        for number in range(rows)
    ]
    writer.add_token_types(kinds)
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=rows).add_to_gguf(writer, quiet=True)
    # Templates write what begins a text themselves.
    writer.add_add_bos_token(value=False)


def _interleaved(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Order the rows of each head as llama.cpp rotates them: pairs lie side by side."""
    parts = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(parts.swapaxes(1, 2).reshape(weight.shape))
