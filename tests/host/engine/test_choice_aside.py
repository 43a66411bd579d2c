# SPDX-License-Identifier: Apache-2.0
"""Tokens of predicted queries: chosen in the layer's turn, or aside while a layer computes."""

import numpy as np
import pytest
import torch
from placement_matrix import Budget

from hillinfer.engine.coded_call import ChoiceAhead
from hillinfer.engine.queries import Prediction
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


class Unturned(Prediction):
    """A query before its position turned it, counted each time that somebody asks for it."""

    def __init__(self, before, rotary):
        self.before, self.rotary, self.asked = before, rotary, 0

    def before_positions(self):
        self.asked += 1
        return self.before, self.rotary

    def queries(self):
        self.asked += 1
        first, second = self.before.chunk(2, -1)
        cosines, sines = (one[:, None] for one in self.rotary)
        return self.before * cosines + torch.cat((-second, first), -1) * sines


def unturned(seed, dtype=torch.float32):
    # As transformers has it: heads behind tokens, seen the other way round.
    before = query(seed)[None].transpose(1, 2).contiguous().transpose(1, 2)
    angles = torch.randn(1, 1, SHAPE.head_dim, generator=torch.Generator().manual_seed(seed))
    return Unturned(before.to(dtype), (angles.cos().to(dtype), angles.sin().to(dtype)))


class Run:
    """A runtime and a sequence that took one step."""

    begins = False

    def __init__(self, cold_dir, tokens=1100, scope="layer", exact=1.0, budget=Budget.ALL_HOT):
        cold_dir.mkdir(exist_ok=True)
        settings = CHOSEN.changed(scope=scope, exact=exact, exact_floor=20)
        byte_count = budget.byte_count(SHAPE, settings, tokens + 100)
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

    def step(self, number, spoil=None, predicted=query):
        """Announce every layer while the one before it computes, as hooks do; return outputs."""
        self.runtime.begin_step()
        outputs = []
        for layer in range(LAYERS):
            if layer + 1 < LAYERS and number and predicted is not None:
                own = predicted(10 * number + layer)
                self.runtime.announce(layer + 1, self.sequence, own, SCALING)
                if spoil is not None:
                    own.fill_(spoil)
            if self.begins:
                self.runtime.decode.begin(layer, self.sequence)
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


@pytest.mark.parametrize(
    ("exact", "budget"),
    [(1.0, Budget.ALL_HOT), (0.02, Budget.ALL_HOT), (0.02, Budget.SOME_HOT), (0.02, Budget.LEAST)],
)
@pytest.mark.parametrize("scope", ["layer", "kv_head"])
@pytest.mark.parametrize("spoil", [None, 0.0])
@pytest.mark.usefixtures("two_threads")
def test_sets_and_outputs_are_those_of_one_thread(tmp_path, spoil, scope, exact, budget):
    told = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        folder = tmp_path / str(threads)
        folder.mkdir()
        run = Run(folder, scope=scope, exact=exact, budget=budget)
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


def at_once(run):
    """Let a run choose when a query is announced, and keep none for its layer's turn."""
    run.runtime.decode.keep = lambda *given: False
    return run


def in_turn(run):
    """Let a run choose when its layer attends."""
    return run


def begun(run):
    """Let another thread choose once its layer's products are made."""
    run.begins = True
    return run


@pytest.mark.parametrize("scope", ["layer", "kv_head"])
@pytest.mark.parametrize("tokens", [1100, 1084])
@pytest.mark.usefixtures("two_threads")
def test_what_is_chosen_in_its_turn_is_what_was_chosen_before(tmp_path, scope, tokens):
    """Also where the steps fill a group and begin the next one."""
    told = []
    for way in (at_once, in_turn, begun):
        folder = tmp_path / way.__name__
        folder.mkdir()
        run = way(Run(folder, tokens, scope=scope))
        outputs = [run.step(number) for number in range(1, 8)]
        counted = run.runtime.counters
        told.append((outputs, run.sets, counted.selected_tokens, counted.hot_rows_read))
        run.runtime.close()
    outputs, sets, *counted = told[0]
    for own_outputs, own_sets, *own_counted in told[1:]:
        assert all(torch.equal(*pair) for pair in zip(outputs, own_outputs, strict=True))
        assert all(np.array_equal(*pair) for pair in zip(sets, own_sets, strict=True))
        assert counted == own_counted
    # The twin: by the query at hand other tokens would be chosen.
    folder = tmp_path / "true"
    folder.mkdir()
    run = Run(folder, tokens, scope=scope)
    for number in range(1, 8):
        run.step(number, predicted=None)
    assert not all(np.array_equal(*pair) for pair in zip(sets, run.sets, strict=True))
    run.runtime.close()


@pytest.mark.parametrize("way", [in_turn, begun])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("two_threads")
def test_a_query_is_turned_as_transformers_turns_it(tmp_path, dtype, way):
    told = []
    for number, predicted in enumerate(
        (
            lambda seed: unturned(seed, dtype),
            lambda seed: unturned(seed, dtype).queries()[0],
            lambda seed: unturned(seed, dtype).before[0],
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        run = way(Run(folder))
        told.append([run.step(step, predicted=predicted) for step in (1, 2)])
        run.runtime.close()
    by_library, by_torch, not_at_all = told
    assert all(torch.equal(*pair) for pair in zip(by_library, by_torch, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(by_library, not_at_all, strict=True))


def test_a_query_is_computed_in_its_layers_turn(run):
    run.runtime.begin_step()
    predicted = unturned(3)
    run.runtime.announce(1, run.sequence, predicted, SCALING)
    assert not predicted.asked
    keys, values = states(50, 1)
    run.runtime.append_token(1, run.sequence, keys[None], values[None], 0)
    run.runtime.attend_selected(1, run.sequence, query(4), None, SCALING)
    assert predicted.asked == 1


def test_where_rows_were_cold_a_query_is_computed_at_once(run):
    run.runtime.parts.pools.layers[1].forget(0, 1024)
    run.step(1)
    run.runtime.begin_step()
    predicted = unturned(3)
    run.runtime.announce(1, run.sequence, predicted, SCALING)
    assert predicted.asked == 1


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
        ahead = chosen.ahead() if threads > 1 else chosen
        told.append((ahead.sets, ahead.exact))
        run.runtime.close()
    (sets, exact), (own_sets, own_exact) = told
    assert np.array_equal(sets, own_sets)
    assert np.array_equal(exact, own_exact)
    assert set(exact[0].tolist()) < set(sets[0].tolist())
    own_exact[0][0] ^= 1
    assert not np.array_equal(exact, own_exact)


@pytest.mark.usefixtures("two_threads")
def test_what_is_cold_of_a_choice_aside_is_read_while_the_layer_before_attends(tmp_path):
    run = Run(tmp_path, exact=0.02, budget=Budget.LEAST)
    run.runtime.begin_step()
    unclaimed = run.runtime.parts.prefetch.unclaimed
    run.runtime.announce(1, run.sequence, query(3), SCALING)
    assert not unclaimed
    for layer in range(2):
        keys, values = states(50 + layer, 1)
        run.runtime.append_token(layer, run.sequence, keys[None], values[None], 0)
        run.runtime.attend_selected(layer, run.sequence, query(4), None, SCALING)
        assert len(unclaimed) == (layer == 0)
    run.runtime.close()


@pytest.mark.parametrize(
    ("tokens", "kept"), [(1086, True), (1087, False), (1088, False), (1089, True), (1024, False)]
)
def test_where_a_group_or_a_segment_ends_tokens_are_chosen_at_once(tmp_path, tokens, kept):
    run = Run(tmp_path, tokens)
    run.runtime.begin_step()
    assert run.runtime.decode.keep(1, run.sequence, query(3), SCALING) is kept
    run.runtime.close()


@pytest.mark.parametrize(("tokens", "aside"), [(1087, True), (1088, False), (1024, False)])
def test_where_a_group_or_a_segment_ends_the_caller_chooses(tmp_path, two_threads, tokens, aside):
    run = Run(tmp_path, tokens, exact=0.02)
    run.runtime.begin_step()
    chosen = run.runtime.coded.choose_next(1, run.sequence, query(3), SCALING)
    assert isinstance(chosen, ChoiceAhead) is aside
    if aside:
        chosen.drop()
    run.runtime.close()


@pytest.mark.parametrize(
    ("exact", "budget"), [(1.0, Budget.ALL_HOT), (0.02, Budget.ALL_HOT), (0.02, Budget.LEAST)]
)
@pytest.mark.usefixtures("two_threads")
def test_a_query_that_is_not_finite_is_told_of_by_its_layer(tmp_path, exact, budget):
    run = Run(tmp_path, exact=exact, budget=budget)
    run.runtime.begin_step()
    broken = query(3)
    broken[0, 0, 0] = torch.inf
    run.runtime.announce(1, run.sequence, broken, SCALING)
    for layer in range(2):
        keys, values = states(50, 1)
        run.runtime.append_token(layer, run.sequence, keys[None], values[None], 0)
        if layer:
            with pytest.raises(CacheUseError, match="layer 1 made a query that is not finite"):
                run.runtime.attend_selected(layer, run.sequence, query(4), None, SCALING)
        else:
            run.runtime.attend_selected(layer, run.sequence, query(4), None, SCALING)
    run.runtime.close()


def test_a_choice_that_failed_is_over_for_whoever_asks_again(run, two_threads):
    """The library has forgotten it, and would wait for nothing."""
    broken = query(3)
    broken[0, 0, 0] = torch.inf
    asked = 0, run.sequence, query(4), None, SCALING

    def begin(own):
        run.runtime.begin_step()
        run.runtime.announce(0, run.sequence, own, SCALING)
        run.runtime.decode.begin(0, run.sequence)
        assert run.runtime.decode.kept
        keys, values = states(50, 1)
        run.runtime.append_token(0, run.sequence, keys[None], values[None], 0)

    begin(broken)
    for _ in range(2):
        with pytest.raises(CacheUseError, match="layer 0 made a query that is not finite"):
            run.runtime.attend_selected(*asked)
    # The twin: a finite one is answered.
    begin(query(3))
    assert run.runtime.attend_selected(*asked).isfinite().all()


def test_what_nobody_asks_for_leaves_nothing_behind(run, two_threads):
    announced(run)
    run.runtime.begin_step()
    assert run.runtime.parts.pipeline.announced(1, run.sequence) is None
    assert not run.runtime.decode.kept
    announced(run, seed=4)
    run.runtime.truncate(run.sequence, 1000)
    assert list(run.sequence.lengths) == [1000] * LAYERS


def test_what_is_being_chosen_is_ended_where_a_pass_breaks_off(tmp_path, two_threads):
    run, expected = Run(tmp_path / "run"), Run(tmp_path / "expected")
    announced(run)
    run.runtime.decode.begin(1, run.sequence)
    (kept,) = run.runtime.decode.kept.values()
    assert kept.choice
    # A second one would be written over it.
    run.runtime.announce(2, run.sequence, query(5), SCALING)
    run.runtime.decode.begin(2, run.sequence)
    assert [bool(one.choice) for one in run.runtime.decode.kept.values()] == [True, False]
    assert torch.equal(begun(run).step(1), expected.step(1))
    announced(run)
    run.runtime.decode.begin(1, run.sequence)
    for one in (run, expected):
        one.runtime.close()
    assert not run.runtime.decode.kept
