# SPDX-License-Identifier: Apache-2.0
"""Heads as many and as wide as those of real models, in contexts whose buffers take mebibytes.

Tiny models never fill a page of 2 MiB. Here a layer's key shadow does, wherever it lies.
"""

import pytest
import torch
from generation_runs import SETTINGS, attached_with, with_streamed_shadows
from tiny_models import TinyModel, prompts

from hillinfer.engine.budget_plan import BudgetPlan, kernel_spec
from hillinfer.model_shape import ModelShape
from hillinfer.settings import Settings
from hillinfer.shadow.store import STREAM_BUFFERS, shadow_bytes

# Heads of 128 channels; keys of a segment take 2 MiB or 1 in that shadow. Layers of the first are
# more than buffers to stream through, so each is read into anew.
SHAPES = {
    "OPT-6.7B": (TinyModel("llama", "32 of 32", torch.bfloat16, 128, 5, 5, 128), 1030, "int4"),
    "Llama-3.1-8B": (TinyModel("llama", "32 of 8", torch.bfloat16, 128, 1, 5, 128), 2100, "int8"),
}
# What is left for hot rows as a share of the KV, settings, and whether shadows are streamed.
WAYS = {
    "all hot": (2.0, {}, False),
    "least": (0.0, {}, False),
    "some hot": (0.1, {"pool_policy": "paper", "io_threads": 1}, False),
    "streamed": (0.0, {}, True),
    "streamed, sealed": (0.0, {"encrypt_cold_pool": "yes"}, True),
}
CODED = {"exact": 0.02, "exact_floor": 16, "block_rows": 64}


def opened(model, way, tokens, cold_dir, shadow):
    """Attach to a model in a way, with room for two contexts of so many tokens."""
    share, changes, streamed = WAYS[way]
    settings = SETTINGS | CODED | changes | {"shadow": shadow}
    shape = ModelShape.from_config(model.config, model.dtype)
    chosen = Settings().changed(**settings)
    plan = BudgetPlan.with_whole_shadow(shape, chosen, tokens, 2)
    budget = plan.required_bytes + int(share * 2 * tokens * shape.token_bytes)
    given = {}
    if streamed:
        budget += (STREAM_BUFFERS + 2) * shadow_bytes(kernel_spec(shape, chosen))
        given["open_runtime"] = with_streamed_shadows
    return attached_with(model, cold_dir, given, **settings | {"dram_budget": budget})


@torch.no_grad()
def said(model, cache, ids, tokens=2):
    """Read ids in passes of 512 and some tokens more, and return all last logits' bits."""
    found = [
        model(input_ids=part, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        for part in ids.split(512, dim=1)
    ]
    for _ in range(tokens):
        best = found[-1].argmax(-1, keepdim=True)
        found.append(model(input_ids=best, past_key_values=cache).logits[:, -1])
    return torch.cat(found).view(torch.int16)


def talk(model, way, length, shadow, folder):
    """Return what is said of a document, in two ends of a talk and behind a session, and counts."""
    ids, _ = prompts([length + 80], seed=3)
    document, one, other = ids.split([length, 50, 30], dim=1)
    with opened(model, way, length + 200, folder, shadow) as hill:
        cache = hill.new_cache(length + 200)
        answers = [said(model, cache, document)]
        branch = cache.fork()
        answers.append(said(model, branch, one))
        branch.crop(-60)
        answers.append(said(model, branch, other))
        statistics = hill.statistics()
        branch.close()
        cache.save_session(folder / "session")
        cache.close()
        resumed = hill.load_session(folder / "session", length + 200)
        answers.append(said(model, resumed, one))
        peak = hill.statistics().dram_peak_bytes
        resumed.close()
    assert peak <= statistics.dram_budget_bytes
    return answers, statistics


@pytest.fixture(scope="module", params=list(SHAPES))
def all_hot(request, tmp_path_factory):
    """What a talk with a wide model needs, and what it says while all is in DRAM."""
    tiny, length, shadow = SHAPES[request.param]
    model = tiny.build()
    folder = tmp_path_factory.mktemp("hot")
    answers, statistics = talk(model, "all hot", length, shadow, folder)
    assert statistics.cold_read_bytes == 0 < statistics.coded_tokens
    return model, length, shadow, answers


@pytest.mark.parametrize("way", [way for way in WAYS if way != "all hot"])
def test_wide_models_say_the_same_wherever_keys_lie(way, all_hot, tmp_path):
    model, length, shadow, expected = all_hot
    answers, statistics = talk(model, way, length, shadow, tmp_path)
    for found, wanted in zip(answers, expected, strict=True):
        assert torch.equal(found, wanted)
    # The session's answer is that of the branch which was never saved.
    assert torch.equal(answers[3], answers[1])
    assert statistics.cold_rows_read > 0
    assert (statistics.shadow_read_bytes > 0) is WAYS[way][2]


def test_another_document_says_something_else(all_hot, tmp_path):
    model, length, shadow, expected = all_hot
    answers, _ = talk(model, "all hot", length - 1, shadow, tmp_path)
    assert not torch.equal(answers[1], expected[1])
