# SPDX-License-Identifier: Apache-2.0
"""A limit on address space (`ulimit -v`): what nobody touches yet need not be there."""

import json
import subprocess
import sys

import pytest

ROOM = 1 << 30
CHILD = """
import json, resource, sys, warnings
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
import hillinfer
from hillinfer.errors import HillInferError

room, budget, cold_dir = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
torch.manual_seed(0)
config = LlamaConfig(vocab_size=101, hidden_size=64, intermediate_size=64, num_hidden_layers=8,
    num_attention_heads=8, num_key_value_heads=8, head_dim=256, max_position_embeddings=131072,
    eos_token_id=None, bos_token_id=None)
model = AutoModelForCausalLM.from_config(config).eval()
ids = torch.randint(1, 101, (1, 200))
answers = []
for limited in (False, True):
    if limited:
        held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + room, held + room))
    try:
        with hillinfer.attach(model, cold_dir=cold_dir, dram_budget=budget) as hill:
            cache = hill.new_cache()
            out = model.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=4)
            answers.append(out[0].tolist())
            cache.close()
    except HillInferError as error:
        answers.append(f"{type(error).__name__}: {error}")
print(json.dumps(answers))
"""


def answers(python, room, budget, cold_dir):
    done = subprocess.run(
        [*python, "-c", CHILD, str(room), budget, cold_dir],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says how much address space is used")
def test_a_share_of_the_longest_context_is_reserved_as_far_as_it_goes(cold_dir, warm_python):
    """A quarter of 131,072 tokens is 2 GiB; three hundred times that is more than any machine's."""
    for budget in ("25%", "30000%"):
        free, limited = answers(warm_python, ROOM, budget, cold_dir)
        assert isinstance(free, list)
        assert limited == free


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says how much address space is used")
def test_a_budget_in_bytes_that_cannot_be_reserved_is_refused(cold_dir, warm_python):
    _, limited = answers(warm_python, ROOM, "4GiB", cold_dir)
    assert limited.startswith("BudgetError: this system does not let "), limited
    assert "--dram-budget" in limited
    assert "ulimit -v" in limited
