# SPDX-License-Identifier: Apache-2.0
"""Properties of the FIFOs and AXI engines hold, and each mutant is caught by the right one.

`make formal` runs every bench; here are those that take seconds, and all mutants.
"""

import pytest

from hillinfer_hw.formal import BENCHES_TABLE, check
from hillinfer_hw.toolchain import MissingToolError

QUICK = [bench for bench in BENCHES_TABLE if "data" not in bench.name and bench.name != "axi_write"]
MUTANTS = [
    pytest.param(bench, mutant, id=f"{bench.name}-{name}")
    for bench in BENCHES_TABLE
    for name, mutant in bench.mutants.items()
]


def checked(*arguments, **options):
    try:
        return check(*arguments, **options)
    except MissingToolError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("bench", QUICK, ids=lambda bench: bench.name)
def test_properties_hold(bench):
    result = checked(bench)
    assert result.passed, result.failed_property


@pytest.mark.parametrize("bench", BENCHES_TABLE, ids=lambda bench: bench.name)
def test_assumptions_leave_something(bench):
    assert checked(bench, mode="cover").passed


@pytest.mark.parametrize(("bench", "mutant"), MUTANTS)
def test_a_mutant_is_caught(bench, mutant):
    result = checked(bench, mutant)
    assert not result.passed
    assert result.failed_property in mutant.caught_by
