# SPDX-License-Identifier: Apache-2.0
"""Faults in how stored areas are told from those of other sources."""

from __future__ import annotations

from mutants.mutant import Mutant

_TABLE = "tools/hillinfer_hw/area_table.py"
_TESTS = "tests/hw/test_area_table.py"

AREAS: tuple[Mutant, ...] = (
    Mutant(
        "area-of-the-top-alone",
        "What lies below a kernel's top is no part of its mark.",
        _TABLE,
        "return fingerprint([*sources_of(part, files),",
        "return fingerprint([*sources_of(part, files)[:1],",
        (f"{_TESTS}::test_a_change_anywhere_below_a_kernel_is_another_mark[fifo]",),
    ),
    Mutant(
        "area-of-any-parameters",
        "A core's parameters are no part of its mark.",
        _TABLE,
        "values = json.dumps(parameters, sort_keys=True)",
        'values = ""',
        (f"{_TESTS}::test_cores_differ_by_their_parameters",),
    ),
    Mutant(
        "area-without-a-mark",
        "Counts that were stored without a mark are taken for today's.",
        _TABLE,
        'if line.get("sources") != case.mark():',
        'if line.get("sources", case.mark()) != case.mark():',
        (f"{_TESTS}::test_counts_of_other_sources_are_told",),
    ),
)
