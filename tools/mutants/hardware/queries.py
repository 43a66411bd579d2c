# SPDX-License-Identifier: Apache-2.0
"""Faults of passes over the keys that several queries share, from golden to joined batches."""

from __future__ import annotations

from mutants.mutant import Mutant

_QUERIES = "tests/hw/test_queries.py"
_GOLDEN = f"{_QUERIES}::test_every_query_has_the_scores_that_it_has_alone"
_EQUAL = f"{_QUERIES}::test_every_execution_is_golden"
_PASSES = "tests/host/devices/test_shared_passes.py"
_JOINED = "tests/host/hf/test_joined_on_device.py"

QUERIES: tuple[Mutant, ...] = (
    Mutant(
        "golden-one-query-block",
        "Every query of a segment is scored by the first one's block.",
        "sw_model/hillinfer_model/golden_launch.py",
        "block = descriptor.query + number * query_beats(shape)",
        "block = descriptor.query",
        (f"{_GOLDEN}[small-layer-2]",),
    ),
    Mutant(
        "hls-queries-merged-backwards",
        "Of 16 tokens the tuples of the queries behind come first.",
        "hw/hls/share.h",
        "if (place < own) {",
        "if (place >= all - own) {",
        (f"{_EQUAL}[csim-small-layer-2]",),
    ),
    Mutant(
        "rtl-queries-share-tuples",
        "The tuples of every query are those of the first.",
        "hw/rtl/score_cores.sv",
        "assign out_data = core_data[turn*512+:512];",
        "assign out_data = core_data[0+:512];",
        (f"{_EQUAL}[rtl-small-layer-2]",),
    ),
    Mutant(
        "rtl-queries-not-counted",
        "A launch of more queries than the kernel has goes on.",
        "hw/rtl/fetch.sv",
        "wrong_scope <= scope[7:1] != 0 || scope[31:8] >= QUERIES;",
        "wrong_scope <= scope[7:1] != 0;",
        (f"{_QUERIES}::test_more_queries_than_the_kernel_knows_end_the_launch[1024-rtl]",),
    ),
    Mutant(
        "core-one-query",
        "A core that plays a device scores every query of a pass by the first one.",
        "host/hillinfer/devices/opening.py",
        "Piece(each * number + query, ",
        "Piece(each * number, ",
        (f"{_PASSES}::test_what_is_begun_together_is_chosen_as_alone[core-layer]",),
    ),
    Mutant(
        "begun-for-another",
        "What a pass found for one query is taken for the next that asks, whichever it is.",
        "host/hillinfer/devices/device_scorer.py",
        "if one.query is query:",
        "if number == 0:",
        (f"{_PASSES}::test_what_is_begun_together_is_chosen_as_alone[core-layer]",),
    ),
    Mutant(
        "joined-rows-apart",
        "Every row of a joined batch has a pass of its own over what they share.",
        "host/hillinfer/engine/selection.py",
        "if len(asked) > 1 and self._begin_together is not None:",
        "if len(asked) > 9 and self._begin_together is not None:",
        (f"{_JOINED}::test_forks_of_a_document_answer_as_without_a_device[true]",),
    ),
    Mutant(
        "passes-write-once",
        "The cycle model writes the scores of a pass's first query alone.",
        "sw_model/hillinfer_model/cycle_model.py",
        "lambda shape: score_writes(shape, spec, scope, queries),",
        "lambda shape: score_writes(shape, spec, scope),",
        ("tests/sw_model/test_pass_figures.py::test_the_limit_is_that_of_the_beats",),
    ),
    Mutant(
        "one-query-in-the-large-kernel",
        "A launch of one query runs in the kernel of several.",
        "host/hillinfer/devices/slots.py",
        "replace(spec, queries=1) if is_single else spec",
        "spec if is_single else spec",
        (f"{_PASSES}::test_launches_of_one_query_run_in_a_kernel_of_one",),
    ),
)
