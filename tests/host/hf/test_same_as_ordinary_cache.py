# SPDX-License-Identifier: Apache-2.0
"""At α = 1 HillInfer is the ordinary cache with keys and values rounded to the stored type."""

import pytest
import torch
from generation_runs import LOGIT_TOLERANCE, attached, logits, ordinary, run
from tiny_models import DTYPES, TinyModel, every_model, prompts
from transformers import DynamicCache

# Each type with each family and with each way of sharing heads; OPT has one such way.
MODELS = [
    tiny
    for number, tiny in enumerate(every_model())
    if tiny.family == "opt" or number % 3 == (number // 3 + number // 9) % 3
]
for kind in ("family", "heads"):
    met = {(getattr(tiny, kind), tiny.dtype) for tiny in MODELS}
    assert len(met) == len({one for one, _ in met}) * len(DTYPES)


@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_the_same_logits_and_greedy_tokens_when_everything_is_selected(tiny, cold_dir):
    model = tiny.build()
    ids, _ = prompts([150])
    expected = ordinary(model, ids)
    with attached(model, cold_dir, alpha=1.0) as hill:
        cache = hill.new_cache()
        found = run(model, cache, ids)
        cache.close()
    difference = (logits(found) - logits(expected)).abs().max()
    assert difference <= LOGIT_TOLERANCE[tiny.dtype]
    assert torch.equal(found.sequences, expected.sequences)
    # Equal tokens say something only where no two tokens were about equally good.
    best = logits(expected).topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > LOGIT_TOLERANCE[tiny.dtype]


@pytest.mark.parametrize("tiny", every_model(dtypes=[torch.bfloat16]), ids=str)
def test_the_tolerance_is_tight_enough_to_see_a_smaller_selection(tiny, cold_dir):
    model = tiny.build()
    ids, _ = prompts([150])
    with attached(model, cold_dir, alpha=0.05) as hill:
        cache = hill.new_cache()
        found = run(model, cache, ids, new_tokens=2)
        cache.close()
    difference = logits(found)[1] - logits(ordinary(model, ids, new_tokens=2))[1]
    assert difference.abs().max() > 2 * LOGIT_TOLERANCE[torch.bfloat16]


def test_rounding_of_stored_rows_is_visible_in_fp32(cold_dir):
    """The reference rounds for a reason: without it the fp32 tolerance would not hold."""
    model = TinyModel().build()
    ids, _ = prompts([150])
    unrounded = run(model, DynamicCache(config=model.config), ids)
    difference = logits(unrounded) - logits(ordinary(model, ids))
    assert difference.abs().max() > LOGIT_TOLERANCE[torch.float32]


def test_fp32_values_beyond_fp16_are_saturated_and_counted(cold_dir):
    model = TinyModel().build()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(1e6)
        model.model.layers[1].self_attn.o_proj.weight.mul_(1e-6)
    ids, _ = prompts([100])
    expected = ordinary(model, ids)
    with attached(model, cold_dir, alpha=1.0) as hill:
        cache = hill.new_cache()
        with torch.no_grad():
            model(ids, past_key_values=cache)
        # A prompt's values and those of single tokens are counted in two places.
        read = cache.statistics().fp16_overflows
        cache.reset()
        found = run(model, cache, ids)
        overflows = cache.statistics().fp16_overflows
        cache.close()
    assert 0 < 2 * read < overflows
    assert (logits(found) - logits(expected)).abs().max() <= LOGIT_TOLERANCE[torch.float32]
    assert torch.equal(found.sequences, expected.sequences)
