# SPDX-License-Identifier: Apache-2.0
"""A cache of few bits: attends as the sweep's does, the same codes everywhere, counted bytes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from rival_cases import LEFT_TO_TORCH, MULTI_HEAD, SCALING, SHAPE, Run, flip_on_drive, make_setup

from hillinfer.errors import BudgetError, SettingsError
from hillinfer.model_shape import StoredType
from hillinfer_bench.frontier.four_bit import CodedCache, code_bits
from hillinfer_bench.quality.policies import LayerQueries
from hillinfer_bench.rivals.few_bits.codes import (
    FORMS,
    NativeAttention,
    Newest,
    NumpyAttention,
    UnitForm,
    coded_attention,
)
from hillinfer_bench.rivals.few_bits.native import native_codes
from hillinfer_bench.rivals.table import make_rival

NATIVE, NUMPY = FORMS
GROUPED = replace(SHAPE, kv_heads=3, query_heads=9, head_dim=64)
PLAIN = replace(SHAPE, kv_heads=2, query_heads=2, head_dim=32, stored_type=StoredType.BFLOAT16)
NAMES = ("four-bit-memory", "four-bit-drive", "five-bit-memory", "five-bit-drive")


def bits_of(name):
    return 4 if name.startswith("four") else 5


def least_budget(setup, bits, share_units):
    """The formula of docs/rivals/few-bits.md for what is held."""
    form = UnitForm.of_whole_pages(setup.shape, bits)
    rows = 2 * setup.shape.kv_heads * 128 * setup.shape.head_dim * 4
    units = setup.units * (rows + (1 + share_units) * form.byte_count)
    return units + 2 * form.byte_count


def make_run(cold_dir, name, shape=GROUPED, prompt=734, share=1, **changes):
    setup = make_setup(cold_dir, shape, **changes)
    return Run(name, replace(setup, budget_bytes=least_budget(setup, bits_of(name), share)), prompt)


def expected(run, bits, layer, row, steps):
    """What the sweep's cache gives for the last steps, (steps, query heads, head_dim)."""
    own = slice(run.length - steps, run.length)
    keys, values = (part[layer, row, :, : run.length].transpose(0, 1) for part in
                    (run.keys, run.values))  # fmt: skip
    asked = run.queries[layer, row, :, own].transpose(0, 1)
    # As every system stores it: queries of the model in the model's type.
    given = LayerQueries(asked, keys, SCALING)
    return CodedCache(bits).attend(given, values).transpose(0, 1)


@pytest.mark.parametrize(
    ("name", "shape", "form"),
    [
        *((name, GROUPED, NATIVE) for name in NAMES),
        ("four-bit-drive", GROUPED, NUMPY),
        ("five-bit-memory", GROUPED, NUMPY),
        ("five-bit-drive", PLAIN, NATIVE),
        ("four-bit-memory", PLAIN, NATIVE),
        # Groups of values have 16 and 40 channels.
        ("four-bit-memory", SHAPE, None),
        ("five-bit-drive", MULTI_HEAD, None),
        ("four-bit-drive", LEFT_TO_TORCH, None),
    ],
)
def test_attends_as_the_cache_of_the_sweep(name, shape, form, cold_dir):
    if form == NATIVE and native_codes() is None:
        pytest.skip("no C++ compiler")
    # Keys become codes at 897 tokens, and a unit of 256 lies on the drive from 896 on.
    steps = 10
    run = make_run(cold_dir, name, shape, prompt=890, form=form)
    with run.rival:
        found = [run.step() for _ in range(steps)]
        assert (run.rival.attention.name == NATIVE) == (form == NATIVE)
    for layer, row in ((0, 0), (1, 1)):
        own = torch.stack([one[layer, row][:, 0] for one in found])
        wanted = expected(run, bits_of(name), layer, row, steps)
        assert (own - wanted).abs().max() < 2e-4
        # The twin: another number of bits attends to something else.
        other = expected(run, 9 - bits_of(name), layer, row, steps)
        assert (own - other).abs().max() > 5e-3


@pytest.mark.parametrize("prompt", [1, 127, 128, 129, 256, 257])
def test_tokens_are_coded_when_others_come(prompt, cold_dir):
    for name in ("four-bit-memory", "four-bit-drive"):
        run = make_run(cold_dir, name, prompt=prompt)
        with run.rival:
            found = [run.step()[0, 1][:, 0] for _ in range(3)]
        assert (torch.stack(found) - expected(run, 4, 0, 1, 3)).abs().max() < 2e-4


@pytest.mark.parametrize("bits", [4, 5])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e3])
def test_both_forms_make_the_same_codes(bits, scale):
    library = native_codes()
    if library is None:
        pytest.skip("no C++ compiler")
    form = UnitForm(GROUPED, bits, 256)
    generator = np.random.default_rng(7)
    rows = scale * generator.normal(size=(2, 3, 128, 64)).astype(np.float32)
    # Groups of one value, of which codes are 0.
    rows[:, 1, :, :32] = 0.125
    made = []
    for attention in (NumpyAttention(form), NativeAttention(form, library)):
        unit = np.zeros(form.byte_count, np.uint8)
        newest = Newest(*rows)
        attention.code_keys(unit, 128, newest)
        attention.code_values(unit, 128 + 5, newest, 5, 123)
        made.append(unit)
    assert np.array_equal(*made)
    assert made[0].any()
    # The twin: another row has other codes.
    NumpyAttention(form).code_values(made[0], 128, Newest(*rows), 6, 1)
    assert not np.array_equal(*made)


def test_no_bit_depends_on_how_many_threads_attend():
    library = native_codes()
    if library is None:
        pytest.skip("no C++ compiler")
    attention = NativeAttention(UnitForm(GROUPED, 4), library)
    generator = np.random.default_rng(1)
    newest = Newest(*generator.normal(size=(2, 3, 128, 64)).astype(np.float32))
    units = np.empty((21, attention.form.byte_count), np.uint8)
    for unit in units:
        attention.code_keys(unit, 0, newest)
        attention.code_values(unit, 0, newest, 0, 128)
        newest.keys *= 1.01
    newest.length = 128 * 21 + 1
    query = generator.normal(size=(9, 64)).astype(np.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5, 1):
            torch.set_num_threads(threads)
            sums = attention.begin(query)
            attention.add(sums, query, units, 0, newest, is_last=True)
            found.append(sums)
    finally:
        torch.set_num_threads(before)
    assert all(np.array_equal(found[0], one) for one in found[1:])
    # The twin: a unit less gives other sums.
    sums = attention.begin(query)
    attention.add(sums, query, units[:-1], 0, newest, is_last=True)
    assert not np.array_equal(found[0], sums)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_bit_flipped_on_the_drive_is_seen(layer, cold_dir):
    run = make_run(cold_dir, "four-bit-drive", share=0)
    whole = make_run(cold_dir, "four-bit-drive", share=0)
    with run.rival, whole.rival:
        rows = run.rival.rows
        # The last bytes of a unit are steps of values, the highest byte of each with its exponent.
        place = run.rival.form.tokens - 1
        flip_on_drive(rows, layer, 1, place, rows.row_bytes - 1)
        found, right = run.step(), whole.step()
        assert not torch.equal(found[layer, 1], right[layer, 1])
        assert torch.equal(found[1 - layer, 1], right[1 - layer, 1])
        assert torch.equal(found[layer, 0], right[layer, 0])


@pytest.mark.parametrize(
    ("name", "shape", "share"),
    [
        ("four-bit-drive", GROUPED, 0),
        ("four-bit-drive", PLAIN, 2),
        ("five-bit-drive", GROUPED, 1),
        ("five-bit-drive", GROUPED, 100),
    ],
)
def test_bytes_are_the_formula(name, shape, share, cold_dir):
    run = make_run(cold_dir, name, shape, share=share, prompt=900, context=1000)
    form = UnitForm.of_whole_pages(shape, bits_of(name))
    assert form.byte_count % 4096 == 0
    with run.rival as rival:
        held = min(share, -(-1000 // form.tokens))
        whole = (900 - 128) // form.tokens
        streamed = max(0, whole - held)
        assert rival.held_tokens == held * form.tokens
        assert rival.traffic().drive_write_bytes == run.setup.units * streamed * form.byte_count
        run.step()
        before = rival.traffic()
        run.step()
        after = rival.traffic()
        read = after.drive_read_bytes - before.drive_read_bytes
        assert read == run.setup.units * streamed * form.byte_count
        assert after.dram_peak_bytes <= run.setup.budget_bytes
        assert rival.attended_token_bytes() == shape.layers * form.token_bytes


@pytest.mark.parametrize("bits", [4, 5])
def test_a_token_has_the_bits_of_the_sweep(bits):
    for shape in (GROUPED, PLAIN):
        items = 2 * shape.kv_heads * shape.head_dim
        assert UnitForm(shape, bits).token_bytes * 8 == items * code_bits(bits)


def test_codes_in_memory_take_their_part_of_the_rows(cold_dir):
    run = make_run(cold_dir, "four-bit-memory", prompt=600, context=1024)
    with run.rival as rival:
        rows = run.setup.units * 2 * 3 * 128 * 64 * 4
        codes = run.setup.units * 1024 * rival.form.token_bytes
        assert rival.traffic().dram_bytes == rows + codes
        share = codes / (run.setup.batch * 1024 * GROUPED.token_bytes)
        assert share == pytest.approx(rival.memory_share())
        assert "4 bits" in rival.describe()
    assert rival.traffic().dram_bytes == 0


def test_what_cannot_be_made_is_refused(cold_dir):
    setup = make_setup(cold_dir, GROUPED)
    small = replace(setup, budget_bytes=least_budget(setup, 4, 0) - 1)
    with pytest.raises(BudgetError, match="too small for this rival"):
        make_rival("four-bit-drive", small)
    make_rival("four-bit-drive", replace(small, budget_bytes=small.budget_bytes + 1)).close()
    with pytest.raises(SettingsError, match="choose one of native over codes"):
        make_rival("four-bit-memory", replace(setup, form="sdpa over float32"))
    with pytest.raises(SettingsError, match="cannot be made here"):
        coded_attention(UnitForm(SHAPE, 4), NATIVE)
    with pytest.raises(SettingsError, match="needs a multiple of 8"):
        UnitForm(replace(SHAPE, head_dim=12), 4)
