# SPDX-License-Identifier: Apache-2.0
"""Decode steps over exact rows and coded tokens: the golden model's bits, wherever codes lie."""

import os
import weakref
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from coded_golden import SETTINGS, SHAPE, Text
from interrupts import interrupted
from placement_matrix import Budget, Path, Way, pairs
from twins.python_coded import PythonCodedStep

from hillinfer.drive.calls import DriveCalls
from hillinfer.engine.budget_plan import (
    MOST_KEPT_PRODUCT_BYTES,
    coded_bytes,
    kept_product_bytes,
    kernel_spec,
    weight_bytes,
)
from hillinfer.engine.runtime import Runtime
from hillinfer.errors import BudgetError, HillInferWarning, SettingsError
from hillinfer.memory_budget import Part
from hillinfer.model_shape import StoredType
from hillinfer.shadow.code_file import CodeFile
from hillinfer.values import format_bytes
from hillinfer_bench.figures.timeline_figures import TimelineRecord
from hillinfer_model.choices import Rule
from hillinfer_model.kernel_spec import GROUP_TOKENS

LONG = Text(prompt=1090, steps=4)


@pytest.fixture(scope="module")
def expected():
    return LONG.golden(SETTINGS)


def run(way, text, settings, cold_dir, announced=False, twin=None):
    with_runtime = way.open(text.shape, settings, cold_dir, text.prompt + text.steps)
    if twin is not None:
        twin.instead(with_runtime)
    try:
        sequences = [with_runtime.open_sequence() for _ in range(way.batch)]
        for one in sequences:
            text.read(with_runtime, one)
        found = []
        for step in range(text.steps):
            for one in sequences:
                found.append(text.decode(with_runtime, one, step, announced))
        statistics = with_runtime.statistics()
        assert statistics.dram_peak_bytes <= statistics.dram_budget_bytes
        return np.stack(found[:: way.batch]), statistics
    finally:
        with_runtime.close()


@pytest.mark.parametrize("way", pairs(), ids=str)
def test_every_placement_gives_the_golden_models_bits(way, expected, cold_dir):
    found, statistics = run(way, LONG, SETTINGS, cold_dir)
    assert np.array_equal(found.view(np.int32), expected.view(np.int32))
    assert 0 < statistics.coded_tokens < statistics.selected_tokens
    if way.budget is Budget.LEAST:
        assert statistics.coded_arrivals > 0


def test_twins_differ(expected):
    """One token exact instead of coded is seen, and one flipped bit of a coded token's values."""
    promoted = LONG.golden(SETTINGS, promoted=1)
    assert not np.array_equal(promoted.view(np.int32), expected.view(np.int32))
    ends = [0, LONG.steps - 1]
    flips = [
        not np.array_equal(
            LONG.golden(SETTINGS, ends, flip=position)[-1].view(np.int32),
            expected[-1].view(np.int32),
        )
        for position in range(100, 106)
    ]
    # Three tenths of the tokens are selected.
    assert any(flips)
    assert not all(flips)


SHORT = Text(prompt=300, steps=3, seed=5)
# Each of what the contract's sections 14 to 16 depend on.
KINDS = [
    {"scope": "kv_head"},
    {"rule": "raw_sum"},
    {"rule": "raw_sum", "scope": "kv_head"},
    {"shadow": "int8"},
    {"exact": 0.0, "exact_floor": 0},
    {"alpha": 1.0, "exact": 0.1, "exact_floor": 0},
    {"max_selected": 60},
]


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_the_library_does_what_python_does_part_by_part(changes, announced, cold_dir):
    settings = SETTINGS.changed(**changes)
    way = Way(Budget.SOME_HOT, path=Path.PREFETCHED)
    found, _ = run(way, SHORT, settings, cold_dir, announced)
    expected, _ = run(Way(), SHORT, settings, cold_dir, announced, PythonCodedStep)
    assert np.array_equal(found.view(np.int32), expected.view(np.int32))


def test_the_twin_gives_the_golden_models_bits(cold_dir):
    found, _ = run(Way(), SHORT, SETTINGS, cold_dir, twin=PythonCodedStep)
    assert np.array_equal(found.view(np.int32), SHORT.golden(SETTINGS).view(np.int32))
    others = SHORT.golden(SETTINGS.changed(exact_floor=21))
    assert not np.array_equal(found.view(np.int32), others.view(np.int32))


@pytest.mark.parametrize("budget", [Budget.ALL_HOT, Budget.LEAST])
@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_every_kind_of_selection(changes, budget, cold_dir):
    settings = SETTINGS.changed(**changes)
    path = Path.HOT if budget is Budget.ALL_HOT else Path.COLD
    found, statistics = run(Way(budget, path=path), SHORT, settings, cold_dir)
    expected = SHORT.golden(settings)
    assert np.array_equal(found.view(np.int32), expected.view(np.int32))
    assert statistics.coded_tokens > 0


def test_streamed_shadows_that_only_some_sets_want(cold_dir):
    """One KV head codes tokens of the first half, the other those of the second."""
    settings = SETTINGS.changed(scope="kv_head", alpha=0.03, exact=0.0, exact_floor=0)
    text = Text(prompt=2 * kernel_spec(SHAPE, settings).segment_tokens + 100, steps=2)
    text.queries[:] = text.queries[:1, :1]
    half, group = text.prompt // 2, SHAPE.group_size
    for head, sign in enumerate((-1, 1)):
        towards = text.queries[0, 0, group * head : group * (head + 1)].sum(dim=0).half()
        text.keys[:, head, :half] += sign * 3 * towards
        text.keys[:, head, half:] -= sign * 3 * towards
    way = Way(Budget.LEAST, path=Path.STREAMED)
    found, statistics = run(way, text, settings, cold_dir)
    assert way.was_taken(statistics)
    # A step reads what is streamed at most twice, to rank and to weigh, for all sets together.
    most = 2 * text.steps * statistics.shadow_write_bytes
    assert statistics.shadow_read_bytes <= most
    expected, _ = run(Way(), text, settings, cold_dir)
    assert np.array_equal(found.view(np.int32), expected.view(np.int32))
    text.keys[:, 1] = text.keys[:, 0]
    others, _ = run(Way(), text, settings, cold_dir)
    assert not np.array_equal(others.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("stored", [StoredType.FLOAT16, StoredType.BFLOAT16])
def test_queries_that_were_announced_give_the_same_bits(stored, cold_dir):
    """The tokens are ranked without the newest one's key, so these are no golden bits."""
    text = Text(prompt=1090, steps=4, shape=replace(SHAPE, stored_type=stored))
    ways = [
        Way(Budget.LEAST, path=Path.PREFETCHED),
        Way(),
        Way(Budget.SOME_HOT, "core", path=Path.COLD),
    ]
    runs = [run(way, text, SETTINGS, cold_dir, announced=True) for way in ways]
    for found, statistics in runs:
        assert np.array_equal(found.view(np.int32), runs[0][0].view(np.int32))
        assert statistics.coded_tokens == runs[0][1].coded_tokens > 0


@pytest.mark.parametrize("kept", [700, 1030, 1024])
def test_codes_of_tokens_that_were_taken_back_are_not_taken_for_others(kept, cold_dir):
    """Other tokens get the same groups, in a segment that keeps its statistics or loses them."""
    other = Text(prompt=1090, steps=3, seed=9)

    def outputs(way):
        runtime = way.open(SHAPE, SETTINGS, cold_dir, LONG.prompt + LONG.steps)
        sequence = runtime.open_sequence()
        LONG.read(runtime, sequence)
        for step in range(2):
            LONG.decode(runtime, sequence, step)
        groups = sequence.groups
        runtime.truncate(sequence, kept)
        other.read(runtime, sequence, first=kept)
        assert sequence.groups == groups
        found = [other.decode(runtime, sequence, step) for step in range(other.steps)]
        runtime.close()
        return np.stack(found)

    expected = outputs(Way(Budget.LEAST, path=Path.COLD))
    assert np.array_equal(outputs(Way()).view(np.int32), expected.view(np.int32))


def test_a_segment_that_is_made_anew_is_coded_by_its_own_values(cold_dir):
    """And not by those of the one that was taken back, which the library was told of."""
    before, other = Text(prompt=1090, steps=2), Text(prompt=1090, steps=3, seed=9)
    for own, others in ((before.keys, other.keys), (before.values, other.values)):
        own[:, :, :1024] = others[:, :, :1024]
    runtime = Way().open(SHAPE, SETTINGS, cold_dir, other.prompt + other.steps)
    sequence = runtime.open_sequence()
    before.read(runtime, sequence)
    for step in range(before.steps):
        before.decode(runtime, sequence, step)
    runtime.truncate(sequence, 1024)
    other.read(runtime, sequence, first=1024)
    found = np.stack([other.decode(runtime, sequence, step) for step in range(other.steps)])
    runtime.close()
    assert np.array_equal(found.view(np.int32), other.golden(SETTINGS).view(np.int32))


def test_a_segment_that_is_full_when_it_is_asked_for_has_its_own_values(cold_dir):
    """It was coded as it was read, and nobody asked for values since it was taken back."""
    before, other = Text(prompt=1090, steps=2), Text(prompt=2048, steps=2, seed=9)
    for own, others in ((before.keys, other.keys), (before.values, other.values)):
        own[:, :, :1024] = others[:, :, :1024]
    found = []
    for taken_back in (False, True):
        runtime = Way().open(SHAPE, SETTINGS, cold_dir, other.prompt + other.steps)
        sequence = runtime.open_sequence()
        if taken_back:
            before.read(runtime, sequence)
            for step in range(before.steps):
                before.decode(runtime, sequence, step)
            runtime.truncate(sequence, 1024)
        other.read(runtime, sequence, first=sequence.tokens)
        steps = range(other.steps)
        found.append(np.stack([other.decode(runtime, sequence, one, True) for one in steps]))
        runtime.close()
    assert np.array_equal(*(one.view(np.int32) for one in found))


def test_codes_of_a_fork_are_not_taken_for_those_of_its_original(cold_dir):
    """Both go on in a segment that they shared, and one gets groups that the other gave back."""
    others = Text(prompt=1000, steps=3, seed=9)
    own = replace(others, seed=10)

    def outputs(steps):
        """Of the fork, after so many steps of the original, whose codes are kept."""
        runtime = Way(batch=2).open(SHAPE, SETTINGS, cold_dir, LONG.prompt)
        sequence = runtime.open_sequence()
        replace(LONG, prompt=700).read(runtime, sequence)
        replace(LONG, prompt=700).decode(runtime, sequence, 0)
        runtime.truncate(sequence, 700)
        fork = runtime.fork(sequence)
        others.read(runtime, sequence, first=700)
        for step in range(steps):
            others.decode(runtime, sequence, step)
        groups, shared = set(sequence.groups), len(fork.groups)
        runtime.release(sequence)
        own.read(runtime, fork, first=700)
        assert groups.issuperset(fork.groups[shared:])
        found = [own.decode(runtime, fork, step) for step in range(own.steps)]
        runtime.close()
        return np.stack(found)

    assert np.array_equal(outputs(others.steps).view(np.int32), outputs(0).view(np.int32))


def forked(runtime, text, steps):
    """Return a sequence and a fork of it, with as many steps before."""
    sequence = runtime.open_sequence()
    text.read(runtime, sequence)
    for step in range(steps):
        text.decode(runtime, sequence, step)
    return sequence, runtime.fork(sequence)


def test_forks_that_took_statistics_of_their_own_find_their_own_codes(cold_dir):
    """Nobody had ranked their open segment, and one has more tokens of it than the other."""
    text = Text(prompt=700, steps=2)
    more = Text(prompt=1000, steps=2, seed=9)

    def outputs(steps):
        runtime = Way(batch=2).open(SHAPE, SETTINGS, cold_dir, 1100)
        sequence, fork = forked(runtime, text, 0)
        more.read(runtime, sequence, first=700)
        more.decode(runtime, sequence, 0)
        for step in range(steps):
            text.decode(runtime, fork, step)
        found = more.decode(runtime, sequence, 1)
        runtime.close()
        return found

    assert np.array_equal(outputs(2).view(np.int32), outputs(0).view(np.int32))


def test_forks_of_an_open_segment_share_its_codes(cold_dir):
    text = Text(prompt=1000, steps=6)
    runtime = Way(batch=2).open(SHAPE, SETTINGS, cold_dir, 1100)
    both = forked(runtime, text, 2)
    before = runtime.statistics()
    for step in range(2, 6):
        for one in both:
            text.decode(runtime, one, step)
    now = runtime.statistics()
    runtime.close()
    assert now.coded_tokens - before.coded_tokens > 3000
    assert now.coded_arrivals - before.coded_arrivals < 300


# By how many bytes codes give way, at first and then twice more. A mutant shows that each is seen.
@pytest.mark.parametrize(
    ("first", "later"), [(33_000, 9_600), (41_000, 6_400), (41_000, 9_600), (41_000, 14_000)]
)
def test_codes_that_came_do_not_push_out_what_is_attended_to(first, later, cold_dir):
    """Something else takes memory, and with it codes that were wanted more often than others.

    So when these come again they take slots of codes that are attended to in the same step.
    """
    text = Text(prompt=700, steps=13, seed=3)
    # Two kinds of query: some tokens are wanted by both.
    text.queries[:, :8], text.queries[:, 8:] = text.queries[:, :1], text.queries[:, 8:9]
    way = Way(Budget.LEAST, path=Path.COLD)
    budget = way.budget.byte_count(SHAPE, SETTINGS, text.prompt + text.steps) + 8_000
    runtime = Runtime(SHAPE, way.settings(SETTINGS), budget, cold_dir)
    sequence = runtime.open_sequence()
    text.read(runtime, sequence)
    takes = {1: first, 9: later, 10: later}
    found, arrived = [], []
    for step in range(text.steps):
        runtime.parts.accountant.take(Part.OTHER, takes.get(step, 0))
        found.append(text.decode(runtime, sequence, step))
        arrived.append(runtime.statistics().coded_arrivals)
    runtime.close()
    # Some were kept of what was wanted again, and others went with their memory.
    assert arrived[3] == arrived[2] < arrived[8] < arrived[9] < arrived[10]
    expected = text.golden(SETTINGS)
    assert np.array_equal(np.stack(found).view(np.int32), expected.view(np.int32))


def test_with_exact_1_or_int2_nothing_is_coded(cold_dir):
    found, statistics = run(Way(), SHORT, SETTINGS.changed(exact=1), cold_dir)
    assert statistics.coded_tokens == 0
    others = SHORT.golden(SETTINGS)
    assert not np.array_equal(found.view(np.int32), others.view(np.int32))
    _, statistics = run(Way(), SHORT, SETTINGS.changed(shadow="int2"), cold_dir)
    assert statistics.coded_tokens == 0


@pytest.mark.parametrize("changes", [{"exact": -0.1}, {"exact": 1.5}, {"exact_floor": -1}], ids=str)
def test_settings_out_of_range_are_named(changes):
    with pytest.raises(SettingsError, match=next(iter(changes))):
        SETTINGS.changed(**changes)


def test_weights_of_coded_tokens_are_counted(cold_dir):
    """Each set has L' of its own of all query heads, and the plan knows of them."""
    settings = SETTINGS.changed(scope="kv_head")
    _, few = run(Way(), SHORT, settings, cold_dir)
    _, many = run(Way(), SHORT, settings.changed(alpha=0.9), cold_dir)
    tokens = SHORT.prompt + SHORT.steps
    of_each = weight_bytes(kernel_spec(SHAPE, settings))
    assert of_each > SHAPE.query_heads * 4
    more = 2 * (round(0.9 * tokens) - round(0.3 * tokens)) * of_each
    grown = many.staging_bytes - few.staging_bytes
    assert grown >= more


@pytest.mark.parametrize("rule", ["weight_sum", "raw_sum"])
def test_products_that_ranked_weigh_and_are_counted(rule, cold_dir):
    """Those of summed queries weigh nothing, nor do those of a token that is not there yet."""
    settings = SETTINGS.changed(rule=rule)
    of_token = SHAPE.query_heads * 4
    spec, tokens = kernel_spec(SHAPE, settings), SHORT.prompt + SHORT.steps
    most = MOST_KEPT_PRODUCT_BYTES // of_token
    kept = [kept_product_bytes(spec, count) for count in (tokens, most, most + 1)]
    groups = -(-tokens // GROUP_TOKENS) * GROUP_TOKENS
    own = groups * of_token, most * of_token
    assert kept == ([*own, 0] if rule == "weight_sum" else [0, 0, 0])

    _, counted = run(Way(), SHORT, settings, cold_dir)
    _, without = run(Way(), SHORT, settings, cold_dir, announced=True)
    assert counted.staging_bytes - without.staging_bytes == kept[0]
    for count, planned in ((tokens, kept[0]), (most, kept[1]), (2 * most, kept[1])):
        summed = replace(spec, rule=Rule.RAW_SUM)
        plans = [coded_bytes(SHAPE, one, settings, count) for one in (spec, summed)]
        assert plans[0] - plans[1] == planned


def hold_the_rest(accountant, left):
    """Have something else hold all memory that can give way, but so much; return what it holds."""
    held, size = 0, accountant.budget_bytes
    while size:
        try:
            accountant.take(Part.OTHER, size)
        except BudgetError:
            size //= 2
        else:
            held += size
    accountant.give(Part.OTHER, left)
    return held - left


def test_products_are_counted_after_a_refusal(cold_dir):
    """A step whose products find no memory counts nothing of them, and the next one all."""
    kept = kept_product_bytes(kernel_spec(SHAPE, SETTINGS), LONG.prompt + 2)
    found = []
    for is_refused in (False, True):
        runtime = Way().open(SHAPE, SETTINGS, cold_dir, LONG.prompt + LONG.steps)
        accountant = runtime.parts.accountant
        try:
            sequence = runtime.open_sequence()
            LONG.read(runtime, sequence)
            # The open segment is coded when it is first ranked, and products are not kept yet.
            LONG.decode(runtime, sequence, 0)
            before = accountant.held()[Part.STAGING]
            if is_refused:
                rest = hold_the_rest(accountant, kept // 2)
                with pytest.raises(BudgetError, match=f"{format_bytes(kept)} more for staging"):
                    LONG.decode(runtime, sequence, 1)
                assert accountant.held()[Part.STAGING] == before
                runtime.truncate(sequence, LONG.prompt + 1)
                accountant.give(Part.OTHER, rest)
            found.append(LONG.decode(runtime, sequence, 1).view(np.int32))
            assert accountant.held()[Part.STAGING] - before == kept > 0
        finally:
            runtime.close()
    assert np.array_equal(*found)


# --- cold codes of a file -----------------------------------------------------------------


def filed(cold_dir, announced=False, forgotten=(), settings=SETTINGS):
    """Decode with hardly any memory, codes of some groups forgotten; outputs, counts and begun."""
    way = Way(Budget.LEAST, path=Path.PREFETCHED if announced else Path.COLD)
    runtime = way.open(SHAPE, settings, cold_dir, LONG.prompt + LONG.steps)
    file, begun = runtime.parts.codes_file, []

    def noting(begin):
        def noted(*given):
            chosen = begin(*given)
            begun.append(int(chosen.sum()))
            return chosen

        return noted

    try:
        sequence = runtime.open_sequence()
        LONG.read(runtime, sequence)
        # The open segment is coded when it is first ranked.
        found = [LONG.decode(runtime, sequence, 0, announced)]
        file.forget_groups([sequence.groups[number] for number in forgotten])
        before = runtime.statistics()

        # Ahead of a layer, and in its turn.
        file.begin, file.begin_first = noting(file.begin), noting(file.begin_first)
        found += [LONG.decode(runtime, sequence, step, announced) for step in range(1, LONG.steps)]
        now = runtime.statistics()
    finally:
        runtime.close()
    names = "coded_reads", "coded_arrivals"
    return np.stack(found), sum(begun), [getattr(now, one) - getattr(before, one) for one in names]


def test_cold_codes_come_of_a_file(expected, cold_dir):
    found, begun, (read, arrived) = filed(cold_dir)
    assert np.array_equal(found.view(np.int32), expected.view(np.int32))
    assert begun == read > 0
    assert read <= arrived


@pytest.mark.parametrize("announced", [False, True])
def test_tokens_that_the_file_lacks_come_as_rows(announced, cold_dir):
    whole, _, (read, arrived) = filed(cold_dir, announced)
    some, _, (fewer, as_many) = filed(cold_dir, announced, range(1, 17, 2))
    none, _, (no, _) = filed(cold_dir, announced, range(17))
    for one in (some, none):
        assert np.array_equal(one.view(np.int32), whole.view(np.int32))
    assert read > fewer > no == 0
    assert arrived == as_many


def test_exact_rows_are_not_read_of_the_file_of_codes(cold_dir):
    """What is begun to be read ahead is what coded tokens lack, and all of it is used."""
    settings = SETTINGS.changed(exact_floor=150)
    _, begun, (read, _) = filed(cold_dir, announced=True, settings=settings)
    assert begun == read > 0


@pytest.mark.parametrize(("way", "some"), [(Way(), 1), (Way(Budget.LEAST, path=Path.COLD), 2)])
def test_the_timeline_has_coded_tokens_and_missing_codes(way, some, cold_dir, tmp_path):
    """Where all is in DRAM no codes are missing."""
    file = tmp_path / "pools.csv"
    _, statistics = run(way, LONG, SETTINGS.changed(pool_timeline=file), cold_dir)
    columns, names = TimelineRecord.read(file).columns, ("coded_tokens", "coded_arrivals")
    told = [int(np.nansum(columns[name])) for name in names]
    assert told == [getattr(statistics, name) for name in names]
    assert sum(count > 0 for count in told) == some


def test_codes_that_a_pass_began_to_read_are_dropped_when_it_breaks_off(cold_dir):
    """Their buffers are wanted by the next pass, whose sequence may have the same id."""
    runtime = Way(Budget.LEAST, path=Path.COLD).open(SHAPE, SETTINGS, cold_dir, 1096)
    with closing(runtime):
        sequence, file = runtime.open_sequence(), runtime.parts.codes_file
        LONG.read(runtime, sequence)
        LONG.decode(runtime, sequence, 0)
        with pytest.raises(KeyboardInterrupt), interrupted(CodeFile.took, "call"):
            LONG.decode(runtime, sequence, 1)
        assert file.has_begun(0, id(sequence))
        runtime.begin_step()
        assert not file.has_begun(0, id(sequence))


class Seen(DriveCalls):
    """The operating system, and somebody who looks at each landing: call by call."""

    def land(self, *given):
        return super().land(*given)


@pytest.mark.parametrize("kind", [DriveCalls, Seen])
def test_buffers_of_codes_are_free_once_attention_has_looked(kind, cold_dir):
    way = Way(Budget.LEAST, path=Path.COLD)
    runtime = way.open(SHAPE, SETTINGS, cold_dir, 1096, calls=kind())
    with closing(runtime):
        sequence = runtime.open_sequence()
        LONG.read(runtime, sequence)
        LONG.decode(runtime, sequence, 0)
        before = runtime.statistics().coded_reads
        LONG.decode(runtime, sequence, 1)
        assert runtime.statistics().coded_reads > before
        file, row = runtime.parts.codes_file, sequence.rows(np.array([0]))
        number = np.full(1, sequence.segments[0].layers[0].values.number)
        begun = [file.begin(0, key, row, number).all() for key in "abc"]
        assert begun == [True, True, False]


# One group is begun by the prompt, and the other is decoded from its first token.
FILLING = Text(prompt=690, steps=86)


def decoded(cold_dir, forgotten=()):
    """Decode two groups full and 8 steps more; outputs, whether codes are filed, and codes read."""
    text = FILLING
    runtime = Way(Budget.LEAST, path=Path.COLD).open(SHAPE, SETTINGS, cold_dir, 780)
    file = runtime.parts.codes_file
    try:
        sequence = runtime.open_sequence()
        text.read(runtime, sequence)
        found = [text.decode(runtime, sequence, step) for step in range(78)]
        rows = sequence.rows(np.arange(640, 768))
        are_filed = [
            file.covers(layer, rows, np.full(128, own.values.number)).all()
            for layer, own in enumerate(sequence.segments[0].layers)
        ]
        file.forget_groups([sequence.groups[number] for number in forgotten])
        before = runtime.statistics().coded_reads
        found += [text.decode(runtime, sequence, step) for step in range(78, text.steps)]
        return np.stack(found), all(are_filed), runtime.statistics().coded_reads - before
    finally:
        runtime.close()


def test_groups_that_decoding_filled_have_codes_in_the_file(cold_dir):
    found, are_filed, read = decoded(cold_dir)
    # While either group is open, when it is just full, and where both come of the file.
    steps = [0, 13, 14, 45, 77, 78, 79, 85]
    golden = FILLING.golden(SETTINGS, steps)
    assert np.array_equal(found[steps].view(np.int32), golden.view(np.int32))
    assert are_filed
    # The twin: without these fewer codes are read, and the bits are the same.
    others, _, fewer = decoded(cold_dir, (10, 11))
    assert np.array_equal(others.view(np.int32), found.view(np.int32))
    assert read > fewer


def test_sealed_rows_have_no_codes_beside_them(expected, cold_dir):
    settings = SETTINGS.changed(encrypt_cold_pool="yes")
    found, statistics = run(Way(Budget.LEAST, path=Path.COLD), LONG, settings, cold_dir)
    assert np.array_equal(found.view(np.int32), expected.view(np.int32))
    assert statistics.coded_arrivals > statistics.coded_reads == 0


class Opening(DriveCalls):
    """The operating system, and the file that it opened last."""

    descriptor = -1

    def open(self, *given):
        self.descriptor = super().open(*given)
        return self.descriptor


@pytest.mark.parametrize("announced", [False, True])
def test_a_file_of_codes_that_fails_costs_no_answer(announced, cold_dir):
    """Rows have all that codes have: the user is warned, and gets the same bits."""
    whole, _, (read, _) = filed(cold_dir, announced)
    calls = Opening()
    way = Way(Budget.LEAST, path=Path.PREFETCHED if announced else Path.COLD)
    runtime = way.open(SHAPE, SETTINGS, cold_dir, LONG.prompt + LONG.steps, calls=calls)
    # Codes have the last file of all that a runtime opens.
    codes = calls.descriptor
    try:
        sequence = runtime.open_sequence()
        LONG.read(runtime, sequence)
        found = [LONG.decode(runtime, sequence, 0, announced)]
        os.ftruncate(codes, 0)
        with pytest.warns(HillInferWarning, match="read as rows from here on"):
            found += [
                LONG.decode(runtime, sequence, step, announced) for step in range(1, LONG.steps)
            ]
        arrived = runtime.statistics()
    finally:
        runtime.close()
    assert np.array_equal(np.stack(found).view(np.int32), whole.view(np.int32))
    assert arrived.coded_reads < read
    assert arrived.coded_arrivals > arrived.coded_reads


def test_tables_that_grow_stay_while_the_library_looks(cold_dir):
    """Another thread lists what is cold of a layer, and meanwhile a group begins."""
    way = Way(Budget.LEAST, path=Path.PREFETCHED)
    runtime = way.open(SHAPE, SETTINGS, cold_dir, LONG.prompt + LONG.steps)
    try:
        sequence = runtime.open_sequence()
        LONG.read(runtime, sequence)
        LONG.decode(runtime, sequence, 0)
        hot, values = runtime.parts.pools.layers[1], runtime.parts.values
        look = values.look
        stays = []

        def grown(layer, call):
            before = weakref.ref(hot.slot_of_row)
            hot.cover(len(hot.slot_of_row) + 4096)
            stays.append(before() is not None)
            return look(layer, call)

        values.look = grown
        positions = np.arange(300)
        past = LONG.prompt + 1
        runtime.coded.begin_to_read(1, sequence, past, [positions], [positions[:40]])
    finally:
        runtime.close()
    assert stays == [True]
