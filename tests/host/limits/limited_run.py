# SPDX-License-Identifier: Apache-2.0
"""A child process: generate over a long random prompt; prints tokens and peak memory as JSON.

Its arguments are `hillinfer` or `ordinary`, the directory of the cold pool, and the file of a
control group's processes, to which it goes before it does anything. The peak is what it takes
beyond what it begins with, which a process that forked it may have been charged for.
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import hillinfer

# A little computation and a large KV cache: 128 KiB per token in fp32, 64 KiB as stored.
CONFIG = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
}
PROMPT, NEW = 1700, 6


@torch.no_grad()
def main(kind, cold_dir, processes=None):
    if processes is not None:
        Path(processes).write_text(str(os.getpid()))
    begun = own_bytes("VmRSS")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).eval()
    # Large enough weights that attention decides about tokens.
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=1.0 if "embed" in name else weight.shape[1] ** -0.5)
    ids = torch.randint(1, 101, (1, PROMPT))
    options = {"max_new_tokens": NEW, "do_sample": False, "prefill_chunk_size": 256}
    if kind == "ordinary":
        cache = DynamicCache(config=model.config)
        out = model.generate(ids, past_key_values=cache, pad_token_id=0, **options)
    else:
        with hillinfer.attach(
            model, alpha=0.1, shadow="int4", block_rows=128, dram_budget="48MiB", cold_dir=cold_dir
        ) as attached:
            cache = attached.new_cache(expected_tokens=PROMPT + NEW)
            out = model.generate(ids, past_key_values=cache, pad_token_id=0, **options)
    peak = own_bytes("VmHWM") - begun
    print(json.dumps({"tokens": out[0, PROMPT:].tolist(), "peak_bytes": peak}))


def own_bytes(name):
    """Return memory without pages of files, which the kernel takes back and may not charge.

    Of this program alone: `ru_maxrss` would tell of the process that started it, too.
    """
    facts = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return (int(facts[name].split()[0]) - int(facts["RssFile"].split()[0])) * 1024


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
