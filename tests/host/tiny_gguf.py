# SPDX-License-Identifier: Apache-2.0
"""A tiny model as a GGUF file, written by the gguf package."""

from __future__ import annotations

import string

from gguf import GGUFWriter, TokenType
from tiny_models import VOCABULARY

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def save_gguf(file, model):
    """Write a tiny Llama as GGUF and return the file."""
    config = model.config
    writer = GGUFWriter(str(file), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    tokens = ["<e>", "ab", *string.ascii_letters, "Ġ", ".", "?"]
    tokens += [f"<{i}>" for i in range(VOCABULARY - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL, *[TokenType.NORMAL] * (len(tokens) - 1)])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    for name, weight in model.state_dict().items():
        array = weight.float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            array = _rotary_pairs(array, config.head_dim)
        writer.add_tensor(_gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _gguf_name(name):
    if name in _NAMES:
        return _NAMES[name]
    layer, inner = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[inner]}.weight"


def _rotary_pairs(weight, head_dim):
    """Put the two channels that rotate together side by side, as GGUF has them."""
    heads = weight.shape[0] // head_dim
    pairs = weight.reshape(heads, 2, head_dim // 2, -1).swapaxes(1, 2)
    return pairs.reshape(weight.shape).copy()
