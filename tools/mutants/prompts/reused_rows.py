# SPDX-License-Identifier: Apache-2.0
"""Faults in whose rows a prompt is given and stored as, and in what of a store it lets go."""

from __future__ import annotations

from mutants.mutant import Mutant

_REUSE = "host/hillinfer/reuse"
_TESTS = "tests/host/reuse"
_OTHERS = f"{_TESTS}/test_other_makers.py"
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
    Mutant(
        "maker-of-what-is-found-later",
        "Whose rows were opened is asked of what is found after some of them turned out wrong.",
        f"{_REUSE}/stored_prompts.py",
        "made_by=made_by,",
        'made_by=self._prompts.maker(found) if opened.tokens else "",',
        (f"{_OTHERS}::test_nobody_goes_on_storing_behind_rows_of_others_that_turn_out_wrong",),
    ),
    Mutant(
        "recorded-behind-others",
        "What comes behind another engine's rows is recorded where the model has as much itself.",
        f"{_REUSE}/stored_prompts.py",
        "not facts.is_of_another and ",
        "",
        (f"{_OTHERS}::test_nobody_goes_on_storing_behind_rows_of_others_that_turn_out_wrong",),
    ),
    Mutant(
        "rows-beside-other-caches-are-stored-as-alone",
        "Rows that were made in a pass with those of other caches are stored as made alone.",
        "host/hillinfer/hf/joined_cache.py",
        "one.cache.begin_joined(own_ids, own, use, len(ids) - len(own_ids))",
        "one.cache.begin_joined(own_ids, own, use, 0)",
        (
            f"{_TESTS}/test_prompts_of_attached_models.py::"
            "test_exact_stores_no_rows_that_were_made_beside_those_of_other_caches",
        ),
    ),
    Mutant(
        "padding-behind-what-the-rows-have",
        "A row that begins behind what a store brought to others counts as longer than they are.",
        "host/hillinfer/hf/stored_cache.py",
        "pads = [min(pad, start) for pad, _ in distinct]",
        "pads = [pad for pad, _ in distinct]",
        (
            f"{_TESTS}/test_prompts_of_attached_models.py::"
            "test_a_first_row_that_begins_behind_what_others_take_loses_them_no_token",
        ),
    ),
)
