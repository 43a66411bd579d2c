# SPDX-License-Identifier: Apache-2.0
"""What others of a model kept is expected of a document too, unless its own probes say worse."""

from dataclasses import replace

import pytest

from hillinfer.catalogue.planning import PlanRules, make_plan
from hillinfer.catalogue.records import (
    DocumentUse,
    KnownDocument,
    MeasuredForm,
    RestingTimes,
    with_expected_forms,
)

REST = RestingTimes(text=4.0, rows=1.0, token=0.01)
HELD = MeasuredForm("held", 1000, 1.0, 1.0, 1.0, 0.0, 0.05, 0.01)


def measured(form, agreement, lower, size=280):
    return MeasuredForm(form, size, agreement, agreement, lower, 0.01, 0.02, 0.01)


def document(number, *forms, tokens=256, **changes):
    every = (*forms, HELD)
    key = bytes([number]) * 32
    one = KnownDocument(key, f"d{number}", "m", b"n", tokens, float(number), REST, measured=every)
    return replace(one, **changes)


def others(form="int4", agreements=(0.99, 0.98, 1.0, 0.99)):
    return [document(10 + at, measured(form, own, 0.9)) for at, own in enumerate(agreements)]


def expected(own, known, form="int4"):
    return with_expected_forms([own, *known])[0].of_form(form)


def test_a_wide_interval_gives_way_to_what_others_kept():
    known = others()
    own = expected(document(1, measured("int4", 1.0, 0.85)), known)
    assert 0.93 < own.lower < 0.97
    assert (own.agreement, own.is_expected) == (1.0, False)
    # The twin: of others that differ, no more is expected than its own interval says.
    differ = others(agreements=(0.6, 1.0, 0.7, 1.0))
    assert expected(document(1, measured("int4", 1.0, 0.85)), differ).lower == 0.85


def test_what_its_own_probes_say_is_never_passed():
    assert expected(document(1, measured("int4", 0.88, 0.7)), others()).lower == 0.88
    assert expected(document(1, measured("int4", 0.98, 0.975)), others()).lower == 0.975


def test_a_form_that_was_not_measured_is_expected_to_keep_what_others_keep():
    own = expected(document(1, tokens=512), others())
    assert own.is_expected
    assert 0.93 < own.lower == own.agreement < 0.97
    assert own.byte_count == 560
    assert own.opening_seconds == pytest.approx(0.04)


@pytest.mark.parametrize(
    "known",
    [
        others()[:2],
        others("knorm-0.5"),
        others("of-another-version"),
        [replace(one, namespace=b"other weights") for one in others()],
        [replace(one, resting=None) for one in others()],
    ],
    ids=["two others", "dropped", "unknown", "another model", "not measured"],
)
def test_what_says_nothing_of_it_changes_nothing(known):
    form = known[0].measured[0].form
    bare, own = document(1), document(1, measured(form, 1.0, 0.85))
    assert with_expected_forms([bare, *known])[0].of_form(form) is None
    assert with_expected_forms([own, *known])[0] == own


def test_what_is_expected_says_nothing_of_others():
    told = [replace(one.measured[0], is_expected=True) for one in others()]
    known = [document(20 + at, one) for at, one in enumerate(told)]
    assert expected(document(1), known) is None


def test_of_many_others_the_newest_count():
    older = [document(10 + at, measured("int4", 0.5, 0.4)) for at in range(40)]
    newer = [document(60 + at, measured("int4", 0.99, 0.9)) for at in range(32)]
    assert expected(document(1), [*older, *newer]).lower > 0.95
    assert expected(document(1), [*newer[:31], *older]).lower < 0.95


def test_a_plan_chooses_a_form_that_others_kept():
    known = [document(1), *others()]
    uses = {one.key: DocumentUse(0.001, 0.001, 0.0, 10) for one in known}
    uses[known[0].key] = DocumentUse(9.0, 9.0, 0.0, 10)
    assert make_plan(known, uses, PlanRules(300)).documents[0].after == "int4"
    assert make_plan(known[:2], uses, PlanRules(300)).documents[0].after == "rows"
