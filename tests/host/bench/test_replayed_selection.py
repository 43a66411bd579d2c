# SPDX-License-Identifier: Apache-2.0
"""What is replayed is what attention reads."""

import numpy as np
import pytest
import torch
from bench_cases import local_trace
from tiny_models import TinyModel

from hillinfer.devices.opening import make_scorer
from hillinfer.engine.budget_plan import BudgetPlan, kernel_spec
from hillinfer.errors import SettingsError
from hillinfer.settings import Settings
from hillinfer_bench.decode.run import attached
from hillinfer_bench.precision.key_readings import AlignedShadow
from hillinfer_bench.precision.mixed import MixedPrecision
from hillinfer_bench.precision.value_forms import ContractCodes, Split
from hillinfer_bench.quality.forced_reading import Prefix, forced_logits, selecting
from hillinfer_bench.quality.policies import SelectionPolicy
from hillinfer_bench.replay.selection_trace import SelectionTrace
from hillinfer_bench.rivals.block_attention import count, replayed_pages
from hillinfer_bench.rivals.paged import PAGE_TOKENS, PagedRival
from hillinfer_bench.rivals.rival import Rival, RivalSetup
from hillinfer_bench.rivals.table import RIVALS
from hillinfer_bench.systems.case import BenchSetting, Case, Selections
from hillinfer_bench.systems.hillinfer_system import HillInferSystem
from hillinfer_bench.systems.kv_source import PrefixKV
from hillinfer_bench.systems.shapes import SHAPES
from hillinfer_bench.systems.table import make_system

CONTEXT, STEPS, LAYERS = 600, 3, 4
# Beside the newest rows, which rivals of pages attend to whole, some pages more.
SELECTED = Settings().changed(alpha=0.3)
# Others attend to all tokens, or to what is left of them.
SYSTEMS = ["hillinfer", "hillinfer-in-memory", "hillinfer-in-memory-true", "hillinfer-bkp", *(
    name for name in RIVALS if not name.startswith(("full", "four-bit", "five-bit", "h2o-drop"))
)]  # fmt: skip


def budget(shape):
    """Return room for buffers, shadow and some of the rows."""
    settings = SELECTED.changed(dram_budget="1GiB", shadow="int4")
    plan = BudgetPlan.with_whole_shadow(shape, settings, CONTEXT + STEPS)
    return plan.required_bytes + 100_000


class _Told(SelectionPolicy):
    """Selects what it was told, layer after layer."""

    def __init__(self, positions):
        super().__init__(Settings())
        self._positions, self._layer = positions, -1

    def select(self, layer):
        self._layer += 1
        return [self._positions(self._layer, 0, length)[None] for length in layer.lengths]


def in_pages(selections, cold_dir, shape):
    """Return what a rival of pages makes of selections: the fullest pages, and the tail."""
    setup = RivalSetup(
        shape,
        1,
        CONTEXT + STEPS,
        budget(shape),
        SELECTED.alpha,
        cold_dir,
        selections=selections.positions,
    )

    def positions(layer, row, length):
        # 96 rows fit into the tail, and 64 leave it at once.
        tail = -(-(length - 96) // 64) * 64
        wanted = max(1, -(-(count(setup, length) - (length - tail)) // PAGE_TOKENS))
        none = np.zeros(wanted, np.int64)
        pages = replayed_pages(setup, layer, row, length, PAGE_TOKENS, tail // PAGE_TOKENS, none)
        rows = (pages[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).reshape(-1)
        return np.concatenate([rows, np.arange(tail, length)])

    return positions


@pytest.fixture(scope="module")
def told():
    """A model, what it made of a text, the text, and selections to replay."""
    model = TinyModel(head_dim=16, layers=LAYERS).build()
    ids = torch.randint(1, 60, (CONTEXT + STEPS,), generator=torch.Generator().manual_seed(0))
    ids = tuple(ids.tolist())
    selections = Selections(local_trace(CONTEXT, STEPS, LAYERS, settings=SELECTED), layers=LAYERS)
    return model, Prefix.read(model, ids[:CONTEXT]), ids, selections


def decoded(told, name, cold_dir, selections, system=None):
    model, prefix, ids, _ = told
    case = Case(
        "tiny", CONTEXT, (name,), alpha=SELECTED.alpha, steps=STEPS, warm_up=0, shadow="int4"
    )
    setting = BenchSetting(case, model, prefix.shape, budget(prefix.shape), cold_dir, selections)
    source = PrefixKV(prefix, ids)
    logits = []
    with attached(model), torch.no_grad():
        opened = (system or make_system(name)).open(setting)
        try:
            for chunk in source.chunks():
                opened.fill(chunk)
            for step in range(STEPS):
                given = {"input_ids": source.step_ids(step), "past_key_values": opened.cache}
                logits.append(model(**given, use_cache=True).logits[0, -1])
            opened.settle()
            counted = opened.counted()
        finally:
            opened.close()
    return torch.stack(logits), counted


def expected(told, name, cold_dir):
    model, prefix, ids, selections = told
    paged = issubclass(RIVALS.get(name, Rival), PagedRival)
    positions = in_pages(selections, cold_dir, prefix.shape) if paged else selections.positions
    with selecting(model):
        return forced_logits(model, prefix, ids[CONTEXT:], _Told(positions))


@pytest.mark.parametrize("name", SYSTEMS)
def test_attention_reads_the_replayed_tokens(told, name, cold_dir):
    logits, _ = decoded(told, name, cold_dir, told[3])
    torch.testing.assert_close(logits, expected(told, name, cold_dir), atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("name", SYSTEMS)
def test_attention_that_read_other_tokens_would_differ(told, name, cold_dir):
    others = Selections(
        local_trace(CONTEXT, STEPS, LAYERS, settings=SELECTED, seed=1), layers=LAYERS
    )
    logits, _ = decoded(told, name, cold_dir, others)
    assert not torch.allclose(logits, expected(told, name, cold_dir), atol=2e-2, rtol=1e-1)


def test_scoring_is_done_all_the_same(told, cold_dir):
    _, counted = decoded(told, "hillinfer", cold_dir, told[3])
    layers, selected = LAYERS, len(told[3].positions(0, 0, CONTEXT + 1))
    rows = layers * STEPS * selected * told[1].shape.row_bytes
    # The shadow of every token comes on top of the selected rows.
    assert counted.dram_read_bytes > rows + layers * STEPS * CONTEXT


def test_selections_differ_between_layers_and_sequences():
    selections = Selections(
        local_trace(CONTEXT, STEPS, layers=2 * LAYERS, settings=SELECTED), layers=LAYERS
    )
    sets = [
        selections.positions(layer, row, CONTEXT + 1) for row in (0, 1) for layer in range(LAYERS)
    ]
    for number, one in enumerate(sets):
        assert not any(np.array_equal(one, other) for other in sets[:number])


EXACT = {"exact": 0.1, "exact_floor": 0}


class _ToldBest(MixedPrecision):
    """Attends to what it was told, layer after layer, the best of it as rows."""

    def __init__(self, selections, shape):
        settings = SELECTED.changed(shadow="int4")
        scorer = make_scorer("nvme", kernel_spec(shape, settings), settings.scope)
        split = Split(EXACT["exact"])
        super().__init__(scorer, scorer, settings, split, ContractCodes(), AlignedShadow())
        self._selections, self._layer = selections, -1

    def _masks(self, layer, segments):
        self._layer += 1
        exact = torch.zeros(1, 1, len(layer.queries), len(layer.keys), dtype=torch.bool)
        chosen = torch.zeros_like(exact)
        for i, length in enumerate(layer.lengths):
            own = self._selections.positions(self._layer, 0, length)
            count = self._split.exact_count(length, len(own), 36)
            chosen[..., i, own] = True
            exact[..., i, self._selections.exact(self._layer, 0, length, count)] = True
        return exact, chosen & ~exact


def with_best(told, seed):
    best = local_trace(CONTEXT, STEPS, LAYERS, settings=SELECTED.changed(alpha=0.1), seed=seed)
    return told[3].with_best(best)


def test_the_best_of_the_replayed_tokens_are_rows_and_the_others_codes(told, cold_dir):
    selections = with_best(told, seed=0)
    system = HillInferSystem("coded", EXACT | {"query": "true"}, memory_kv=2.0)
    logits, counted = decoded(told, "coded", cold_dir, selections, system)
    model, prefix, ids, _ = told

    def study(own):
        with selecting(model):
            return forced_logits(model, prefix, ids[CONTEXT:], _ToldBest(own, prefix.shape))

    near = (logits - study(selections)).abs().max()
    far = (logits - study(with_best(told, seed=5))).abs().max()
    rows = (logits - expected(told, "hillinfer", cold_dir)).abs().max()
    assert near < 5e-3
    assert min(far, rows) > 4 * near
    # Codes count as read, beside the shadow of every token and fewer rows.
    wide = decoded(told, "hillinfer-in-memory-true", cold_dir, told[3])[1]
    assert 0 < counted.dram_read_bytes < wide.dram_read_bytes


@pytest.mark.parametrize(
    ("best", "count", "expected"),
    [
        # Kept: 0 and 1, 98 and 99. Then the best that are selected, then the newest others.
        (None, 4, [0, 1, 98, 99]),
        (None, 6, [0, 1, 70, 80, 98, 99]),
        ([0, 1, 20, 60, 98, 99], 5, [0, 1, 60, 98, 99]),
        ([0, 1, 20, 60, 98, 99], 6, [0, 1, 20, 60, 98, 99]),
        ([0, 1, 20, 60, 98, 99], 7, [0, 1, 20, 60, 80, 98, 99]),
        # Nothing that is not selected.
        ([0, 1, 21, 61, 98, 99], 6, [0, 1, 70, 80, 98, 99]),
    ],
)
def test_the_best_of_a_selection(best, count, expected):
    settings = Settings().changed(alpha=0.08, kept_sinks=2, kept_recent=2)

    def trace(*sets):
        own = tuple(np.array(one, np.int32) for one in sets)
        return SelectionTrace("made", settings, 99, (own,), ((),))

    few = None if best is None else trace(best)
    selections = Selections(trace([0, 1, 20, 60, 70, 80, 98, 99]), 1, few)
    assert selections.exact(0, 0, 100, count).tolist() == expected


def test_steps_that_were_not_recorded_are_refused():
    selections = Selections(local_trace(CONTEXT, STEPS, LAYERS, settings=SELECTED), layers=LAYERS)
    with pytest.raises(SettingsError, match="record more"):
        selections.positions(0, 0, CONTEXT + STEPS + 1)


def test_the_fullest_pages_are_chosen_and_the_first(cold_dir):
    positions = np.array([0, 1, 20, 33, 34, 35, 49])
    setup = RivalSetup(
        SHAPES["tiny"].kv_shape(128, torch.float32), 1, 128, 1 << 20, 0.1, cold_dir,
        selections=lambda layer, row, length: positions,
    )  # fmt: skip
    found = [
        replayed_pages(setup, 0, 0, 64, 16, 4, np.arange(wanted)).tolist() for wanted in (1, 2, 3)
    ]
    assert found == [[0], [0, 2], [0, 2, 3]]
