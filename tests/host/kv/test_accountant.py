# SPDX-License-Identifier: Apache-2.0
"""M0 is never passed, and the parts always add up."""

import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer.errors import BudgetError
from hillinfer.kv.rows import SequenceManager
from hillinfer.kv.sequence import RowLayout
from hillinfer.memory_budget import Accountant, Part
from hillinfer.model_shape import ModelShape, StoredType


@settings(max_examples=80, deadline=None)
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(Part), st.integers(0, 60), st.booleans()), max_size=40
    ),
    elastic=st.booleans(),
)
def test_against_a_plain_sum(moves, elastic):
    accountant = Accountant(100)
    held = dict.fromkeys(Part, 0)
    peak = 0

    def give_hot_rows_up():
        surplus = max(0, held[Part.HOT] - max(0, accountant.bytes_for_hot_rows))
        held[Part.HOT] -= surplus
        accountant.give(Part.HOT, surplus)

    if elastic:
        accountant.on_shortage(give_hot_rows_up)
    for part, count, giving in moves:
        if giving:
            count = min(count, held[part])
            held[part] -= count
            accountant.give(part, count)
        else:
            held[part] += count
            try:
                accountant.take(part, count)
            except BudgetError:
                assert sum(held.values()) > 100
                held[part] -= count
        assert accountant.held() == held
        assert sum(held.values()) <= 100
        peak = max(peak, sum(held.values()))
        assert sum(accountant.peak().values()) == peak
        assert accountant.bytes_for_hot_rows == 100 - sum(held.values()) + held[Part.HOT]


def test_the_message_names_the_parts_and_the_fix():
    accountant = Accountant(3 << 20)
    accountant.take(Part.STAGING, 2 << 20)
    with pytest.raises(
        BudgetError,
        match=r"budget of 3\.0 MiB is too small: 4\.0 MiB are needed now \(hot 0 B, shadow 0 B, "
        r"staging 2\.0 MiB, other 0 B, and 2\.0 MiB more for shadow\); raise --dram-budget",
    ):
        accountant.take(Part.SHADOW, 2 << 20)
    assert accountant.held()[Part.SHADOW] == 0


def test_the_peak_shows_the_parts_of_one_moment():
    accountant = Accountant(100)
    accountant.take(Part.HOT, 60)
    accountant.give(Part.HOT, 50)
    accountant.take(Part.SHADOW, 40)
    assert accountant.peak() == {Part.HOT: 60, Part.SHADOW: 0, Part.STAGING: 0, Part.OTHER: 0}
    accountant.take(Part.OTHER, 20)
    assert accountant.peak() == {Part.HOT: 10, Part.SHADOW: 40, Part.STAGING: 0, Part.OTHER: 20}


def test_an_accountant_holds_no_manager_of_sequences():
    accountant, others = Accountant(1), [None] * 7
    shape = ModelShape(1, 1, 1, 16, StoredType.FLOAT16, 1000)
    manager = SequenceManager(shape, RowLayout(shape), *others, accountant, None)
    held = weakref.ref(manager)
    del manager
    assert held() is None, "only a garbage collection ends it"


def test_what_another_one_looks_for_room_for_is_no_reason_to_refuse():
    """It may be refused itself, and then neither had its bytes."""
    accountant, taken = Accountant(100), []
    accountant.take(Part.HOT, 60)

    def make_room():
        hot = accountant.held()[Part.HOT]
        accountant.give(Part.HOT, hot)
        if not taken:
            taken.append("begun")
            # As another thread does at that moment.
            accountant.take(Part.SHADOW, 70)
            taken.append("there")

    accountant.on_shortage(make_room)
    with pytest.raises(BudgetError, match="more for other"):
        accountant.take(Part.OTHER, 200)
    assert taken == ["begun", "there"]
    assert accountant.held() == dict.fromkeys(Part, 0) | {Part.SHADOW: 70}
    # What was refused was never held.
    assert sum(accountant.peak().values()) == 70
    # The twin: what is held is a reason.
    with pytest.raises(BudgetError):
        accountant.take(Part.OTHER, 31)
    accountant.take(Part.OTHER, 30)
    assert accountant.spare_bytes == 0


def test_of_two_that_do_not_fit_together_one_gets_its_bytes_and_the_sum_is_kept():
    accountant, second = Accountant(100), []

    def make_room():
        if not second:
            second.append(70)
            accountant.take(Part.SHADOW, 70)

    accountant.take(Part.HOT, 10)
    accountant.on_shortage(make_room)
    with pytest.raises(BudgetError):
        accountant.take(Part.OTHER, 95)
    assert sum(accountant.held().values()) == 80
    second.clear()
    with pytest.raises(BudgetError):
        accountant.take(Part.OTHER, 25)
    assert sum(accountant.held().values()) == 80
    accountant.take(Part.OTHER, 20)
    assert sum(accountant.held().values()) == sum(accountant.peak().values()) == 100
