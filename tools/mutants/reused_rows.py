# SPDX-License-Identifier: Apache-2.0
"""Faults in whose rows a prompt is given and stored as, and in what of a store it lets go."""

from __future__ import annotations

from mutants.mutant import Mutant

_REUSE = "host/hillinfer/reuse"
_TESTS = "tests/host/reuse"
_WEIGHTS = f"{_TESTS}/test_described_model.py::test_weights"

REUSED_ROWS: tuple[Mutant, ...] = (
    Mutant(
        "weights-in-freed-memory",
        "Weights in the place of others that are gone are taken for these.",
        f"{_REUSE}/described_model.py",
        " or self._memory() is not tensor.untyped_storage()",
        "",
        (f"{_WEIGHTS}_that_were_of_another_type_have_another_name",),
    ),
    Mutant(
        "weights-whose-counter-began-anew",
        "Weights that were written and then taken over by another tensor are not hashed again.",
        f"{_REUSE}/described_model.py",
        "self._tensor() is not tensor or ",
        "",
        (f"{_WEIGHTS}_in_the_place_of_others_have_another_name[counter_anew]",),
    ),
    Mutant(
        "weights-without-counters-hashed-once",
        "Weights made under inference mode are hashed once, whatever is written to them.",
        f"{_REUSE}/described_model.py",
        "bytes_digest(one) if one.is_inference()",
        "0 if one.is_inference()",
        (f"{_WEIGHTS}_without_counters_are_looked_at_each_time",),
    ),
    Mutant(
        "refused-prompt-kept-for-ever",
        "Chunks of a prompt that the budget refuses stay leased.",
        f"{_REUSE}/other_makers.py",
        "leased.enter_context(found)",
        "found",
        (f"{_TESTS}/test_let_go.py::test_what_the_budget_refuses_keeps_no_chunk",),
    ),
)
