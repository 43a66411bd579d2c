# SPDX-License-Identifier: Apache-2.0
"""Tiny models of transformers whose attention is not plain causal attention over all tokens."""

import transformers as hf

_TEXT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_HEADS = {**_TEXT, "head_dim": 8}
_OLD = {"vocab_size": 61, "pad_token_id": 0}
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}


def sliding_mistral():
    return hf.MistralForCausalLM(hf.MistralConfig(**_HEADS, sliding_window=4096))


def soft_capped_gemma2():
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**_HEADS))


def soft_capped_gemma2_without_sliding_layers():
    config = hf.Gemma2Config(**_HEADS, sliding_window=16, layer_types=["full_attention"] * 2)
    return hf.Gemma2ForCausalLM(config)


def doge_that_adds_to_its_scores():
    return hf.DogeForCausalLM(hf.DogeConfig(**_TEXT, keep_window_size=4))


def mixtral():
    return hf.MixtralForCausalLM(hf.MixtralConfig(**_TEXT, **_EXPERTS))


def qwen3_moe():
    config = hf.Qwen3MoeConfig(
        **_HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    )
    return hf.Qwen3MoeForCausalLM(config)


def diffllama_with_differential_attention():
    return hf.DiffLlamaForCausalLM(hf.DiffLlamaConfig(**_HEADS))


def gpt_oss_with_sinks():
    return hf.GptOssForCausalLM(hf.GptOssConfig(**_HEADS, **_EXPERTS))


def chunked_llama4():
    config = hf.Llama4TextConfig(
        **_HEADS, num_local_experts=2, intermediate_size_mlp=32, attention_chunk_size=16
    )
    return hf.Llama4ForCausalLM(config)


def gemma3n_with_shared_layers():
    config = hf.Gemma3nTextConfig(
        **{**_HEADS, "num_hidden_layers": 4},
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=61,
        hidden_size_per_layer_input=8,
        layer_types=["full_attention"] * 4,
        activation_sparsity_pattern=[0.0] * 4,
        laurel_rank=4,
        altup_num_inputs=2,
        sliding_window=16,
    )
    return hf.Gemma3nForCausalLM(config)


def deepseek_with_latent_attention():
    config = hf.DeepseekV3Config(
        **{**_TEXT, "num_key_value_heads": 4},
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        q_lora_rank=None,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    return hf.DeepseekV3ForCausalLM(config)


def bloom_with_alibi():
    return hf.BloomForCausalLM(hf.BloomConfig(**_OLD, hidden_size=32, n_layer=2, n_head=4))


def falcon_with_alibi():
    config = hf.FalconConfig(
        **_OLD, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
    )
    return hf.FalconForCausalLM(config)


def mpt_with_alibi():
    return hf.MptForCausalLM(hf.MptConfig(**_OLD, d_model=32, n_layers=2, n_heads=4))


def gptj_with_attention_of_its_own():
    config = hf.GPTJConfig(**_OLD, n_embd=32, n_layer=2, n_head=4, rotary_dim=8)
    return hf.GPTJForCausalLM(config)


def t5_encoder_decoder():
    config = hf.T5Config(
        **_OLD, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config)


def bart_encoder_decoder():
    config = hf.BartConfig(
        **_OLD,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        decoder_start_token_id=0,
    )
    return hf.BartForConditionalGeneration(config)


def hybrid_jamba():
    config = hf.JambaConfig(
        **_TEXT,
        attn_layer_period=2,
        attn_layer_offset=1,
        use_mamba_kernels=False,
        mamba_d_state=4,
        mamba_dt_rank=4,
    )
    return hf.JambaForCausalLM(config)


def linear_mamba():
    config = hf.MambaConfig(**_OLD, hidden_size=32, num_hidden_layers=2, state_size=4)
    return hf.MambaForCausalLM(config)


def hybrid_qwen3_next():
    config = hf.Qwen3NextConfig(
        **_HEADS,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    )
    return hf.Qwen3NextForCausalLM(config)


def llava_with_images():
    vision = hf.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    config = hf.LlavaConfig(text_config=hf.LlamaConfig(**_TEXT), vision_config=vision)
    return hf.LlavaForConditionalGeneration(config)


# What only the attention of a first pass shows, and what its refusal must name.
REFUSED_BY_FIRST_PASS = {
    diffllama_with_differential_attention: r"layer 0 attends twice.*ordinary cache",
    doge_that_adds_to_its_scores: r"adds to its scores.*ordinary cache",
}

# What makes a model, and what its refusal must name: the feature and the way out.
REFUSED = {
    sliding_mistral: r"mistral.*sliding.*ordinary cache.*config\.sliding_window = None",
    soft_capped_gemma2: r"gemma2.*sliding.*ordinary cache",
    gpt_oss_with_sinks: r"gpt_oss.*sliding.*ordinary cache",
    chunked_llama4: r"llama4.*chunked.*ordinary cache",
    gemma3n_with_shared_layers: r"gemma3n.*shared attention.*ordinary cache",
    deepseek_with_latent_attention: r"deepseek_v3.*latent attention \(MLA\).*ordinary cache",
    bloom_with_alibi: r"bloom.*attention interface \(ALiBi.*ordinary cache",
    falcon_with_alibi: r"falcon.*attention interface \(ALiBi.*ordinary cache",
    mpt_with_alibi: r"mpt.*attention interface \(ALiBi.*ordinary cache",
    gptj_with_attention_of_its_own: r"gptj.*attention interface.*older.*ordinary cache",
    t5_encoder_decoder: r"t5.*encoder-decoders.*decoder-only",
    bart_encoder_decoder: r"bart.*encoder-decoders.*decoder-only",
    hybrid_jamba: r"jamba.*LinearAttention.*ordinary cache",
    linear_mamba: r"mamba.*linear.*ordinary cache",
    hybrid_qwen3_next: r"qwen3_next.*LinearAttention.*ordinary cache",
    llava_with_images: r"llava.*images.*text model",
}
