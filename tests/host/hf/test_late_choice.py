# SPDX-License-Identifier: Apache-2.0
"""Coded tokens that are chosen beside their layer's own products are those chosen a layer ahead."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from generation_runs import attached_with, bits, run
from placement_cases import ALL_HOT, Case
from tiny_models import TinyModel, prompts

from hillinfer.engine.queries import Prediction
from hillinfer.engine.runtime import Runtime

SELECTION = {
    "alpha": 0.5,
    "exact": 0.2,
    "exact_floor": 12,
    "kept_recent": 4,
    "block_rows": 64,
    "query": "predicted",
}
TINY = TinyModel(layers=4)
IDS, _ = prompts([200])
# Behind steps in which something was cold it is chosen ahead for a while.
NEW = 18
# Of what is planned: so little a model leaves room in its lists, in which all rows would be hot.
FEW = 0.97


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Noted(Prediction):
    """A prediction that notes who asks for it behind its announcement."""

    def __init__(self, own, late):
        self._own, self._late, self.is_announced = own, late, False

    def queries(self):
        return self._own.queries()

    def before_positions(self):
        if self.is_announced:
            self._late.append(self)
        return self._own.before_positions()


class Watched(Runtime):
    """Notes choices that waited for their layer's products, in a list.

    What is announced to it is turned by a factor.
    """

    def __init__(self, *given, late, factor=1, **named):
        super().__init__(*given, **named)
        self._late, self._factor = late, factor

    def announce(self, layer, sequence, query, scaling):
        noted = Noted(query, self._late) if isinstance(query, Prediction) else query
        super().announce(layer, sequence, noted, self._factor * scaling)
        if noted is not query:
            noted.is_announced = True


def watched(model, cold_dir, late, budget, **named):
    """Attach so that choices are noted."""
    opened = partial(Watched, late=late, **named)
    return attached_with(model, cold_dir, {"open_runtime": opened}, **SELECTION, dram_budget=budget)


def played(cold_dir, budget, late, planned=True, **named):
    model = TINY.build()
    with watched(model, cold_dir, late, budget, **named) as hill:
        cache = hill.new_cache(len(IDS[0]) + NEW, 2) if planned else hill.new_cache()
        outputs = [run(model, cache, IDS, new_tokens=NEW)]
        # Another sequence asks in between, of another length.
        with cache.fork() as fork:
            fork.crop(-40)
            again = torch.cat([torch.tensor(fork.token_ids), IDS[:, :1]], dim=1)
            outputs.append(run(model, fork, again, new_tokens=NEW))
    return [bits(output) for output in outputs]


def test_late_choices_change_no_bit(cold_dir, two_threads):
    late = []
    found = played(cold_dir, ALL_HOT, late)
    # Layers 0 and 1 take their true queries.
    assert len(late) > NEW
    few = Case(TINY, (len(IDS[0]) + NEW,) * 2, None, 0, SELECTION).least_bytes()
    early = []
    cold = played(cold_dir, int(FEW * few), early, planned=False)
    assert early == []
    for one, other in zip(found, cold, strict=True):
        assert torch.equal(one, other)
    # The twin: a choice by another query is another one.
    assert not torch.equal(played(cold_dir, ALL_HOT, late, factor=-1)[0], found[0])


# What compiles takes seconds to import, so one process does it.
@pytest.mark.xdist_group("compiled")
@torch.no_grad()
def test_a_compiled_model_chooses_late_as_if_the_new_token_was_not_there(cold_dir, two_threads):
    """No hook begins there before the layer's turn, in which the token is stored first."""
    # What compiles takes its time for every layer.
    model = replace(TINY, layers=3).build()
    late, begun = [], []
    with watched(model, cold_dir, late, ALL_HOT) as hill:
        fast = torch.compile(model, backend="eager")
        with hill.new_cache(len(IDS[0]) + NEW, 2) as own, hill.new_cache() as compiled:
            for cache in own, compiled:
                run(model, cache, IDS)
            late.clear()
            for token in IDS[0, :6].reshape(-1, 1, 1):
                logits = []
                for call, cache in (model, own), (fast, compiled):
                    before = len(late)
                    logits.append(call(token, past_key_values=cache).logits)
                    begun.append(len(late) - before)
                assert torch.equal(*logits)
        # Layer 2 of every step, however it was made.
        assert begun[-8:] == [1] * 8
