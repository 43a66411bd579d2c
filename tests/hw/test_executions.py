# SPDX-License-Identifier: Apache-2.0
"""Every execution equals golden (and golden the exact fractions), byte for byte.

Shapes, key modes, rules, scopes and cases are chosen so that every two of them meet in some test.
"""

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from executions import EXECUTIONS, GoldenExecution, execution_of
from launch_cases import SCORE_CASES, SHADOW_CASES
from launch_flips import visible_flip
from pairwise import pairwise

from hillinfer_model.choices import KeyMode, Rule, Scope

SHADOW_MODES = [mode for mode in KeyMode if mode is not KeyMode.FP16]


def same_build(spec):
    """Tests of one spec run in one process, so that its kernels are built once."""
    return pytest.mark.xdist_group(spec.digest().hex())


def score_choices(entry):
    """Rows of shape, key mode, rule, scope and case, of builds that the entry allows."""
    factors = [list(entry.shapes), list(KeyMode), list(Rule), list(Scope), list(SCORE_CASES)]
    rows = {}
    for shape, mode, wished, scope, case in pairwise(factors):
        allowed = entry.rules(shape, mode)
        # Rows that the change of rule made equal are one.
        rows[shape, mode, wished if wished in allowed else allowed[0], scope, case] = None
    # A change of rule can part a rule from a case or scope: they meet in a build of that rule.
    builds = {
        rule: [
            (shape, mode)
            for shape in entry.shapes
            for mode in KeyMode
            if rule in entry.rules(shape, mode)
        ]
        for rule in Rule
    }
    met = {(rule, scope, case) for _, _, rule, scope, case in rows}
    for number, (rule, scope, case) in enumerate(product(Rule, Scope, SCORE_CASES)):
        if builds[rule] and (rule, scope, case) not in met:
            shape, mode = builds[rule][number % len(builds[rule])]
            rows[shape, mode, rule, scope, case] = None
    return list(rows)


def score_rows():
    for entry in EXECUTIONS:
        for shape, mode, rule, scope, case in score_choices(entry):
            spec = entry.spec_of(shape, mode, rule)
            name = "-".join((entry.name, shape, mode, rule, scope, case))
            yield pytest.param(entry, spec, scope, case, id=name, marks=same_build(spec))


def shadow_rows():
    for entry in EXECUTIONS:
        for shape, mode, case in pairwise([list(entry.shapes), SHADOW_MODES, list(SHADOW_CASES)]):
            # make_shadow knows no rule, but the spec's hash in its status beats does: that of the
            # kernel that scores, so that test_launch_chain.py finds both built.
            spec = entry.spec_of(shape, mode, entry.rules(shape, mode)[0])
            name = "-".join((entry.name, shape, mode, case))
            yield pytest.param(entry, spec, case, id=name, marks=same_build(spec))


def flipped_rows(rows):
    """Return the rows in which flipped bits must show.

    Of golden one for each case: it is what flipped launches are compared with, so that no shape or
    mode can make a difference.
    """
    met = set()
    for row in rows:
        entry, *_, case = row.values
        if entry.name != "golden":
            yield row
        elif case not in met:
            met.add(case)
            yield row


def same(one, other):
    return np.array_equal(one.output, other.output) and np.array_equal(one.status, other.status)


def assert_same(found, expected):
    """Fail with the first places that differ, as beat and byte."""
    for name in ("status", "output"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        differing = np.argwhere(one != other)
        assert not differing.size, (
            f"{name}: {len(differing)} bytes differ, first at (beat, byte) "
            f"{differing[:4].tolist()}: {one[one != other][:4]}, not {other[one != other][:4]}"
        )


def flipped(array, generator):
    """A copy with one bit flipped, anywhere."""
    copy = array.copy()
    copy.reshape(-1)[generator.integers(0, copy.size)] ^= np.uint8(1 << generator.integers(0, 8))
    return copy


def assert_flips_show(entry, spec, launch, kernel):
    """The twin of an equality: a flipped bit of input or output must be seen."""
    run, golden = getattr(execution_of(entry.name), kernel), getattr(GoldenExecution(), kernel)
    expected = golden(spec, launch)
    flip = visible_flip(spec, launch, golden, same)
    if flip is not None:
        found = run(spec, flip)
        assert_differ(found, expected)
        assert_same(found, golden(spec, flip))
    # And in what a run gives, which the tests of equality find to be this.
    generator = np.random.default_rng(1)
    assert_differ(replace(expected, output=flipped(expected.output, generator)), expected)
    if expected.status.size:
        assert_differ(replace(expected, status=flipped(expected.status, generator)), expected)


def assert_differ(found, expected):
    """The twin of `assert_same`: it must fail."""
    with pytest.raises(AssertionError, match="bytes differ"):
        assert_same(found, expected)


@pytest.mark.parametrize("entry", EXECUTIONS, ids=lambda entry: entry.name)
def test_every_two_choices_meet(entry):
    """Of shape, mode, rule, scope and case; and every rule, scope and case together."""
    rows = score_choices(entry)
    factors = [list(entry.shapes), list(KeyMode), list(Rule), list(Scope), list(SCORE_CASES)]
    for a, b in combinations(range(5), 2):
        wanted = set(product(factors[a], factors[b]))
        assert {(row[a], row[b]) for row in rows} == wanted
    assert {row[2:] for row in rows} == set(product(*factors[2:]))


@pytest.mark.parametrize(("entry", "spec", "scope", "case"), [*score_rows()])
def test_scores_are_equal(entry, spec, scope, case):
    launch = SCORE_CASES[case](spec, scope, entry.tokens(spec))
    expected = entry.reference().score(spec, launch)
    assert_same(execution_of(entry.name).score(spec, launch), expected)


@pytest.mark.parametrize(("entry", "spec", "scope", "case"), [*flipped_rows(score_rows())])
def test_a_flipped_bit_of_a_score_launch_shows(entry, spec, scope, case):
    launch = SCORE_CASES[case](spec, scope, entry.tokens(spec))
    assert_flips_show(entry, spec, launch, "score")


@pytest.mark.parametrize(("entry", "spec", "case"), [*shadow_rows()])
def test_shadows_are_equal(entry, spec, case):
    launch = SHADOW_CASES[case](spec, entry.tokens(spec))
    expected = entry.reference().make_shadow(spec, launch)
    assert_same(execution_of(entry.name).make_shadow(spec, launch), expected)


@pytest.mark.parametrize(("entry", "spec", "case"), [*flipped_rows(shadow_rows())])
def test_a_flipped_bit_of_a_shadow_launch_shows(entry, spec, case):
    assert_flips_show(entry, spec, SHADOW_CASES[case](spec, entry.tokens(spec)), "make_shadow")
