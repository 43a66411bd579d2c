# SPDX-License-Identifier: Apache-2.0
"""Tokens are chosen by a thread of the native library while a layer computes: the same ones."""

import numpy as np
import pytest
import torch
from placement_matrix import Budget

from hillinfer.engine.queries import ChoiceAhead
from hillinfer.engine.runtime import Runtime
from hillinfer.errors import CacheUseError
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.settings import Settings

LAYERS = 3
SHAPE = ModelShape(
    layers=LAYERS,
    kv_heads=2,
    query_heads=4,
    head_dim=32,
    stored_type=StoredType.FLOAT16,
    max_positions=4096,
)
CHOSEN = Settings().changed(alpha=0.1, kept_recent=4)
SCALING = SHAPE.head_dim**-0.5


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def states(seed, tokens):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, SHAPE.kv_heads, tokens, SHAPE.head_dim, generator=generator)


def query(seed):
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.randn(SHAPE.query_heads, 1, SHAPE.head_dim, generator=generator)


class Run:
    """A runtime with room for all rows and a sequence that took one step."""

    def __init__(self, cold_dir, tokens=1100, scope="layer", exact=1.0):
        settings = CHOSEN.changed(scope=scope, exact=exact, exact_floor=20)
        byte_count = Budget.ALL_HOT.byte_count(SHAPE, settings, tokens + 100)
        self.sets = []
        self.runtime = Runtime(
            SHAPE,
            settings,
            byte_count,
            cold_dir,
            observe_selected=lambda layer, length, sets: self.sets.append(np.stack(sets)),
        )
        self.sequence = self.runtime.open_sequence()
        self.runtime.begin_step()
        for layer in range(LAYERS):
            keys, values = states(layer, tokens - 1)
            self.runtime.append(layer, self.sequence, keys.half(), values.half())
            self.runtime.code_full_segments(layer, self.sequence, keys.half())
        self.step(0)

    def step(self, number, spoil=None):
        """Announce every layer while the one before it computes, as hooks do; return outputs."""
        self.runtime.begin_step()
        outputs = []
        for layer in range(LAYERS):
            if layer + 1 < LAYERS and number:
                own = query(10 * number + layer)
                self.runtime.announce(layer + 1, self.sequence, own, SCALING)
                if spoil is not None:
                    own.fill_(spoil)
            keys, values = states(50 + 10 * number + layer, 1)
            own = layer, self.sequence
            if not self.runtime.append_token(*own, keys[None], values[None], 0):
                self.runtime.append(*own, keys.half(), values.half())
            outputs.append(
                self.runtime.attend_selected(
                    layer, self.sequence, query(70 + number), None, SCALING
                )
            )
        return torch.stack(outputs)


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path)
    yield made
    made.runtime.close()


@pytest.mark.parametrize("exact", [1.0, 0.02])
@pytest.mark.parametrize("scope", ["layer", "kv_head"])
@pytest.mark.parametrize("spoil", [None, 0.0])
@pytest.mark.usefixtures("two_threads")
def test_sets_and_outputs_are_those_of_one_thread(tmp_path, spoil, scope, exact):
    told = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        folder = tmp_path / str(threads)
        folder.mkdir()
        run = Run(folder, scope=scope, exact=exact)
        outputs = [run.step(number, spoil) for number in range(1, 4)]
        told.append((outputs, run.sets))
        run.runtime.close()
    (outputs, sets), (own_outputs, own_sets) = told
    assert all(torch.equal(*pair) for pair in zip(outputs, own_outputs, strict=True))
    assert all(np.array_equal(*pair) for pair in zip(sets, own_sets, strict=True))
    assert sets[-1].shape[0] == (1 if scope == "layer" else SHAPE.kv_heads)
    own_sets[-1][-1, -2] ^= 1
    assert not np.array_equal(sets[-1], own_sets[-1])


def announced(run, layer=1, seed=3):
    run.runtime.begin_step()
    run.runtime.announce(layer, run.sequence, query(seed), SCALING)


def choice(run, layer=1):
    own = query(3)
    return run.runtime.decode.choose_next(layer, run.sequence, own, SCALING)


def test_two_threads_choose_aside_and_one_does_not(run, threads):
    run.runtime.begin_step()
    chosen = choice(run)
    assert isinstance(chosen, ChoiceAhead) is (threads > 1)
    if threads > 1:
        chosen.drop()


@pytest.mark.usefixtures("two_threads")
def test_exact_and_coded_tokens_are_chosen_aside(tmp_path):
    told = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        folder = tmp_path / str(threads)
        folder.mkdir()
        run = Run(folder, exact=0.02)
        run.runtime.begin_step()
        chosen = run.runtime.coded.choose_next(1, run.sequence, query(3), SCALING)
        assert isinstance(chosen, ChoiceAhead) is (threads > 1)
        told.append(chosen.chosen() if threads > 1 else (chosen.sets, chosen.exact))
        run.runtime.close()
    (sets, exact), (own_sets, own_exact) = told
    assert np.array_equal(sets, own_sets)
    assert np.array_equal(exact, own_exact)
    assert set(exact[0].tolist()) < set(sets[0].tolist())
    own_exact[0][0] ^= 1
    assert not np.array_equal(exact, own_exact)


@pytest.mark.parametrize(("tokens", "aside"), [(1087, True), (1088, False), (1024, False)])
def test_where_a_group_or_a_segment_ends_the_caller_chooses(tmp_path, two_threads, tokens, aside):
    run = Run(tmp_path, tokens)
    run.runtime.begin_step()
    chosen = choice(run)
    assert isinstance(chosen, ChoiceAhead) is aside
    if aside:
        chosen.drop()
    run.runtime.close()


def test_a_query_that_is_not_finite_is_told_of_by_its_layer(run, two_threads):
    run.runtime.begin_step()
    broken = query(3)
    broken[0, 0, 0] = torch.inf
    run.runtime.announce(1, run.sequence, broken, SCALING)
    with pytest.raises(CacheUseError, match="layer 1 made a query that is not finite"):
        run.runtime.parts.pipeline.take(1, run.sequence)


def test_what_nobody_asks_for_leaves_nothing_behind(run, two_threads):
    announced(run)
    run.runtime.begin_step()
    assert run.runtime.parts.pipeline.announced(1, run.sequence) is None
    announced(run, seed=4)
    run.runtime.truncate(run.sequence, 1000)
    assert list(run.sequence.lengths) == [1000] * LAYERS


def test_closing_waits_for_what_is_being_chosen(tmp_path, two_threads):
    made = Run(tmp_path)
    announced(made)
    made.runtime.close()
