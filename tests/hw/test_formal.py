# SPDX-License-Identifier: Apache-2.0
"""Properties of the FIFOs and AXI engines hold, and each has a mutant that it alone must catch.

`make formal` runs every bench; here are those that take seconds, and all mutants.
"""

import re
from collections import defaultdict

import pytest

from hillinfer_hw.formal import BENCHES, RTL, check
from hillinfer_hw.formal_benches import BENCHES_TABLE
from hillinfer_hw.toolchain import MissingToolError

SLOW = {"axi_read, data", "axi_write", "axi_write, bursts of 4"}
QUICK = [bench for bench in BENCHES_TABLE if bench.name not in SLOW]
INDUCTIVE = [bench for bench in BENCHES_TABLE if bench.induction]
MUTANTS = [
    pytest.param(bench, mutant, id=f"{bench.name}-{name}")
    for bench in BENCHES_TABLE
    for name, mutant in bench.mutants.items()
]
LABEL = re.compile(r"^.*?(?:(\w+): )?assert \(", re.MULTILINE)


def checked(*arguments, **options):
    try:
        return check(*arguments, **options)
    except MissingToolError as missing:
        pytest.skip(str(missing))


def labels(path):
    return LABEL.findall(path.read_text())


@pytest.mark.parametrize("bench", QUICK, ids=lambda bench: bench.name)
def test_properties_hold(bench):
    result = checked(bench)
    assert result.passed, result.failed_property


@pytest.mark.parametrize("bench", INDUCTIVE, ids=lambda bench: bench.name)
def test_properties_hold_for_ever(bench):
    result = checked(bench, mode="prove")
    assert result.passed, result.failed_property


def test_induction_sees_what_a_bounded_check_cannot():
    """The twin: six cycles do not fill 512 places, yet induction sees one place too many."""
    small, full = (
        next(bench for bench in BENCHES_TABLE if bench.name == name)
        for name in ("fifo", "fifo at full size")
    )
    mutant = small.mutants["takes more than it holds"]
    assert checked(full, mutant).passed
    assert not checked(full, mutant, mode="prove").passed


@pytest.mark.parametrize("bench", BENCHES_TABLE, ids=lambda bench: bench.name)
def test_assumptions_leave_something(bench):
    assert checked(bench, mode="cover").passed


@pytest.mark.parametrize(("bench", "mutant"), MUTANTS)
def test_a_mutant_is_caught_by_its_property(bench, mutant):
    result = checked(bench, mutant)
    assert not result.passed
    assert result.failed_property == mutant.caught_by


def test_every_property_has_a_name():
    for path in (*BENCHES.glob("*.sv"), *RTL.glob("*.sv")):
        assert all(labels(path)), path.name


def test_every_property_has_a_mutant_of_its_own():
    caught = defaultdict(set)
    for bench in BENCHES_TABLE:
        caught[bench.properties, bench.top] |= {each.caught_by for each in bench.mutants.values()}
    in_units = {label for path in RTL.glob("*.sv") for label in labels(path)}
    for (properties, top), own in caught.items():
        assert set(labels(BENCHES / properties)) == own - in_units, top
    assert in_units <= set().union(*caught.values())
    assert {path.name for path in BENCHES.glob("*.sv")} == {name for name, _ in caught}
