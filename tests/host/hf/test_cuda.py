# SPDX-License-Identifier: Apache-2.0
"""The same on a GPU: the model and attention there, rows and scoring on the host."""

import pytest
import torch
from generation_runs import LOGIT_TOLERANCE, attached, bits, logits, ordinary, run
from tiny_models import DTYPES, TinyModel, prompts

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA GPU: run on a machine with one, with torch built for CUDA "
        "(pytorch.org says how to install it)",
    ),
]


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ordinary_cache_when_everything_is_selected(family, dtype, cold_dir):
    model = TinyModel(family, "mha" if family == "opt" else "gqa", dtype).build().cuda()
    ids, mask = (states.cuda() for states in prompts([150, 60]))
    with attached(model, cold_dir, alpha=1.0) as hill:
        cache = hill.new_cache()
        found = run(model, cache, ids, mask, new_tokens=3)
        statistics = cache.statistics()
        cache.close()
    expected = ordinary(model, ids, mask, new_tokens=3)
    same = (found.sequences == expected.sequences).all(0)[150:].long()
    steps = int(same.cumprod(0).sum())
    difference = (logits(found) - logits(expected))[: steps + 1]
    assert difference.abs().max() <= LOGIT_TOLERANCE[dtype]
    assert statistics.host_to_device_bytes > 0
    assert statistics.device_to_host_bytes > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scope", ["layer", "kv_head"])
def test_placement_changes_nothing(dtype, scope, cold_dir, least_budget):
    tiny = TinyModel(dtype=dtype)
    model = tiny.build().cuda()
    ids, _ = prompts([250])
    outputs = []
    for budget, device in (
        ("24MiB", "nvme"),
        (least_budget(tiny, 260), "nvme"),
        (least_budget(tiny, 260), "golden"),
    ):
        with attached(model, cold_dir, scope=scope, dram_budget=budget, device=device) as hill:
            cache = hill.new_cache()
            outputs.append(run(model, cache, ids.cuda()))
            cache.close()
    for output in outputs[1:]:
        assert torch.equal(bits(output), bits(outputs[0]))
