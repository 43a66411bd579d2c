# SPDX-License-Identifier: Apache-2.0
"""What rivals are shown of a prompt's attention is what the model's own attention weighs."""

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, TinyModel

from hillinfer.model_shape import ModelShape
from hillinfer_bench.decode.measuring import Bed, _open
from hillinfer_bench.decode.run import OBSERVED_QUERIES, read_text
from hillinfer_bench.rivals.h2o import HELD_PROMPT
from hillinfer_bench.systems.case import BenchSetting, Case
from hillinfer_bench.systems.kv_source import KVSource
from hillinfer_bench.systems.table import RivalSystem
from hillinfer_model.selection import selected_count

sys.path.insert(0, str(Path(__file__).parents[1] / "rivals"))
from rival_cases import Run, make_setup

CONTEXT = 400


def text(tokens):
    return tuple(
        torch.randint(3, 60, (tokens,), generator=torch.Generator().manual_seed(5)).tolist()
    )


def weights_of_last(model, ids, count):
    """The model's own attention weights of its last queries, summed, by layer and KV head."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(torch.tensor([ids]), output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    shape = ModelShape.from_config(model.config, model.dtype)
    return [one[0, :, -count:].sum(1).view(shape.kv_heads, -1, len(ids)).sum(1) for one in found]


def heaviest(weights, setting):
    ranked = weights.clone()
    ranked[:, :4] = ranked[:, -32:] = torch.inf
    chosen = selected_count(CONTEXT, setting.case.alpha, 36, None)
    return [set(head.tolist()) for head in ranked.topk(chosen).indices]


def opened(model, source, cold_dir):
    shape = ModelShape.from_config(model.config, model.dtype)
    case = Case("tiny", CONTEXT, ("h2o-drop",), steps=4, warm_up=0, alpha=0.2)
    setting = BenchSetting(case, model, shape, 1 << 24, cold_dir, None)
    closing = ExitStack()
    return (
        closing,
        setting,
        _open(RivalSystem("h2o-drop"), Bed(setting, 2, 0, source, None), closing),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_that_the_prompt_looked_at_stay(family, cold_dir):
    heads = "mha" if family == "opt" else "gqa"
    model = TinyModel(family, heads).build()
    ids = text(CONTEXT)
    source = read_text(model, ids, CONTEXT)
    closing, setting, system = opened(model, source, cold_dir)
    with closing:
        assert system.describe() == (
            f"last {OBSERVED_QUERIES} queries of the prompt observed ({HELD_PROMPT})"
        )
        rival = system.cache.rival
        own = weights_of_last(model, ids, OBSERVED_QUERIES)
        fewer = weights_of_last(model, ids, 1)
        differ = False
        for layer, weights in enumerate(own):
            held = [set(head.tolist()) for head in rival.positions(layer, 0)]
            expected = heaviest(weights, setting)
            # Rows are rounded to 16 bits: the last of the heavy ones may be another.
            assert all(len(a ^ b) <= 4 for a, b in zip(held, expected, strict=True))
            others = heaviest(fewer[layer], setting)
            differ |= any(len(a ^ b) > 8 for a, b in zip(held, others, strict=True))
        assert differ


class WithoutQueries(KVSource):
    """The KV of a text, as from one that keeps no queries."""

    def __init__(self, source):
        self._source = source

    def chunks(self):
        return self._source.chunks()

    def step_ids(self, step):
        return self._source.step_ids(step)


def test_without_queries_the_recent_tokens_stay(cold_dir):
    model = TinyModel().build()
    source = WithoutQueries(read_text(model, text(CONTEXT), CONTEXT))
    closing, _, system = opened(model, source, cold_dir)
    with closing:
        system.cache.rival.begin_step()
        one = torch.zeros(2, 1, 8, dtype=torch.float16)
        system.cache.rival.append(0, 0, one, one)
        assert "recent tokens kept" in system.describe()
        held = set(system.cache.rival.positions(0, 0)[0].tolist())
        assert set(range(CONTEXT - 40, CONTEXT)) <= held


@pytest.mark.parametrize("first", [50, 120])
def test_random_rows_keep_the_set_that_is_replayed_first(cold_dir, first):
    chosen = torch.arange(first, first + 30).numpy()
    setup = make_setup(cold_dir, alpha=0.2)
    setup = replace(setup, selections=lambda layer, row, length: chosen)
    run = Run("h2o-drop", setup, 400, observed=4)
    # What `Run` observed counts; a prompt of its own is not observed.
    rival = run.rival.__class__(setup)
    for layer, row in run.units():
        rival.fill(layer, row, run.keys[layer, row, :, :400], run.values[layer, row, :, :400])
        new = slice(400, 401)
        rival.append(layer, row, run.keys[layer, row, :, new], run.values[layer, row, :, new])
        for head in rival.positions(layer, row):
            assert {*range(4), *range(first, first + 30)} <= set(head.tolist())
    assert rival.describe() == (
        f"prompt not observed before the first step ({HELD_PROMPT}): the set replayed first kept"
    )
