# SPDX-License-Identifier: Apache-2.0
"""The real model's tokens and logits do not depend on where rows lie nor on who scored them."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from product_decode import only_sequence

import hillinfer
from hillinfer.engine.budget_plan import BudgetPlan
from hillinfer.model_shape import ModelShape
from hillinfer.settings import Settings
from hillinfer.statistics import CacheStatistics
from hillinfer.values import ByteSize

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("real-model-placement")]

# A full segment and an open one; not a multiple of 64, so that the open group holds rows.
PROMPT_TOKENS = 1130
NEW_TOKENS = 4


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, the bits of their logits, and what a cache did for them."""

    tokens: list[int]
    bits: torch.Tensor
    statistics: CacheStatistics


# Named, because defaults follow the device.
SETTINGS = Settings(alpha=0.1, exact=1)


def least_bytes(model):
    """The smallest budget: what must be in DRAM and no row more."""
    shape = ModelShape.from_config(model.config, model.dtype)
    context = PROMPT_TOKENS + NEW_TOKENS
    return BudgetPlan.with_whole_shadow(shape, SETTINGS, context).required_bytes


def whole_bytes(model):
    """Every row twice over, beside what must be in DRAM."""
    shape = ModelShape.from_config(model.config, model.dtype)
    return least_bytes(model) + 2 * PROMPT_TOKENS * shape.token_bytes


@dataclass(frozen=True)
class Way:
    """Where rows lie and who scores."""

    bytes_of: Callable[[object], int]
    device: str


# A prefill takes ten seconds, so these differ in both; `placement_matrix.py` has each for itself.
WAYS = {
    "hot": Way(whole_bytes, "nvme"),
    "cold": Way(least_bytes, "golden"),
}


def prompt_logits(model, cache, ids):
    output = model(ids[:, :1024], past_key_values=cache, logits_to_keep=1)
    output = model(ids[:, 1024:], past_key_values=cache, logits_to_keep=1)
    return output.logits[0, -1]


def answer(model, cache, first_logits):
    logits, tokens = [first_logits], []
    for _ in range(NEW_TOKENS):
        tokens.append(int(logits[-1].argmax()))
        output = model(torch.tensor([[tokens[-1]]]), past_key_values=cache)
        logits.append(output.logits[0, -1])
    return Answer(tokens, torch.stack(logits).view(torch.int32), cache.statistics())


def flip_a_bit(cache):
    """Change the sign of one value of the newest row, which every step attends to."""
    sequence = only_sequence(cache)
    newest = sequence.lengths[0] - 1 - sequence.tail_start(0)
    sequence.tails[0][newest, -1] ^= 0x80


@pytest.fixture(scope="module")
def answers(real_model, real_ids, cold_dir):
    """Every way, and a fork of the first with one bit of a row flipped."""
    ids = torch.tensor([real_ids[1][:PROMPT_TOKENS]])
    found = {}
    with torch.no_grad():
        for way in WAYS:
            settings = SETTINGS.changed(
                device=WAYS[way].device,
                cold_dir=cold_dir,
                dram_budget=ByteSize(WAYS[way].bytes_of(real_model)),
            )
            with hillinfer.attach(real_model, settings) as attachment:
                cache = attachment.new_cache()
                first = prompt_logits(real_model, cache, ids)
                spoilt = cache.fork() if not found else None
                found[way] = answer(real_model, cache, first)
                if spoilt is not None:
                    flip_a_bit(spoilt)
                    flipped = answer(real_model, spoilt, first)
                    spoilt.close()
                cache.close()
    found["flipped"] = flipped
    return found


def test_same_tokens_and_bits(answers):
    assert answers["cold"].tokens == answers["hot"].tokens
    assert torch.equal(answers["cold"].bits, answers["hot"].bits)


def test_the_budgets_differ_in_what_is_hot(answers):
    hot, cold = answers["hot"].statistics, answers["cold"].statistics
    assert hot.hot_hit_rate == 1.0
    assert cold.hot_hit_rate < 0.9
    assert cold.selected_share == pytest.approx(0.1, abs=0.001)


def test_a_flipped_bit_of_a_row_is_noticed(answers):
    reference = answers["hot"]
    assert not torch.equal(answers["flipped"].bits, reference.bits)
