# SPDX-License-Identifier: Apache-2.0
"""Faults in the comparison of systems at equal quality."""

from __future__ import annotations

from mutants.mutant import Mutant

_FOLDER, _TESTS = "tools/hillinfer_bench/frontier", "tests/host/frontier"
_CURVE_TESTS = f"{_TESTS}/test_frontier_curve.py"
_RULE_TESTS = f"{_TESTS}/test_frontier_rules.py"
_GOAL_TESTS = f"{_TESTS}/test_frontier_goals.py"
_COMMAND_TESTS = f"{_TESTS}/test_frontier_command.py"
_RATE_TEST = (
    "tests/host/bench/test_bench_limit.py"
    "::test_a_short_measurement_reads_what_the_one_before_did_not"
)

FRONTIER: tuple[Mutant, ...] = (
    Mutant(
        "modelled-four-bits-judge",
        "A goal is met or missed by a 4-bit cache that nobody timed.",
        f"{_FOLDER}/goals.py",
        'unjudged(words, points, bound, "") if modelled else judged(words, points, bound)',
        "judged(words, points, bound)",
        (f"{_GOAL_TESTS}::test_what_was_not_timed_is_modelled_and_judges_nothing",),
    ),
    Mutant(
        "rows-of-another-sweep-are-lost",
        "Half an hour of measured rows is gone after a run with another text.",
        f"{_FOLDER}/sweep.py",
        "(known if own else others).append(record)",
        "known += [record] if own else []",
        (f"{_COMMAND_TESTS}::test_rows_of_every_sweep_stay_whatever_a_file_has_beside_them",),
    ),
    Mutant(
        "memory-as-fast-as-a-cache",
        "Each short measurement of memory reads the same part, which a large cache holds.",
        "tools/hillinfer_bench/decode/rates.py",
        "for part in parts])",
        "for part in parts[:1]])",
        (_RATE_TEST,),
    ),
    Mutant(
        "goals-judged-with-the-loop",
        "A goal counts as reached where the model's loop leaves little, though bytes allow more.",
        f"{_FOLDER}/goals.py",
        "made = cls.of(record, bound, reached, allowed.by_rates)",
        "made = cls.of(record, bound, reached, allowed.with_loop)",
        (f"{_GOAL_TESTS}::test_goals_say_what_the_models_loop_leaves_and_are_not_judged_by_it",),
    ),
    Mutant(
        "own-row-of-other-turns",
        "A rival is compared with HillInfer's row of other turns.",
        f"{_FOLDER}/times.py",
        "one.row.system == CODED and one.row.part == row.part",
        "one.row.system == CODED",
        (f"{_GOAL_TESTS}::test_a_rival_is_compared_with_the_row_of_its_own_turns",),
    ),
    Mutant(
        "loop-of-other-turns",
        "The model's loop is taken from other turns than the row's.",
        f"{_FOLDER}/times.py",
        "one.row.system == FLOOR and one.row.part == row.part",
        "one.row.system == FLOOR",
        (f"{_GOAL_TESTS}::test_goals_say_what_the_models_loop_leaves_and_are_not_judged_by_it",),
    ),
    Mutant(
        "slower-four-bits-judge",
        "HillInfer is ahead of the slower of two full caches of 4 bits.",
        f"{_FOLDER}/goals.py",
        "four = min(timed, key=lambda one: one.median_ms or 0.0)",
        "four = max(timed, key=lambda one: one.median_ms or 0.0)",
        (f"{_GOAL_TESTS}::test_the_faster_four_bit_cache_that_was_timed_judges",),
    ),
    Mutant(
        "times-of-another-kl-judge",
        "Goals are judged by times at a worse quality than HillInfer's own.",
        f"{_FOLDER}/report.py",
        "[one for one in timed if one.at_kl is None]",
        "[*timed]",
        (f"{_GOAL_TESTS}::test_other_kls_have_times_and_ratios_of_their_own_and_judge_nothing",),
    ),
    Mutant(
        "codes-written-before-they-are-made",
        "A unit of a cache of few bits goes to the drive while its values are still rows.",
        "tools/hillinfer_bench/rivals/few_bits/rivals.py",
        "if self.newest(layer, row).coded_values < first + self.form.tokens:",
        "if self.newest(layer, row).coded_keys < first + self.form.tokens:",
        ("tests/host/rivals/test_few_bits.py::test_tokens_are_coded_when_others_come",),
    ),
    Mutant(
        "kv-read-beside-the-loop",
        "What attends reads the KV while the layers before it still compute its query.",
        "tools/hillinfer_bench/report/rows.py",
        "max(self.limit_ms, floor.min_ms + from_memory)",
        "max(self.limit_ms, floor.min_ms, from_memory)",
        (f"{_GOAL_TESTS}::test_goals_say_what_the_models_loop_leaves_and_are_not_judged_by_it",),
    ),
    Mutant(
        "kl-beyond-the-settings-extrapolated",
        "A KL that no setting reaches is given the last one.",
        f"{_FOLDER}/curve.py",
        "        if wanted < self._logs[-1]:\n",
        "        wanted = max(wanted, self._logs[-1])\n        if wanted < self._logs[-1]:\n",
        (f"{_CURVE_TESTS}::test_nothing_is_said_beyond_the_settings",),
    ),
    Mutant(
        "settings-interpolated-backwards",
        "What lies between two settings is measured from the wrong one.",
        f"{_FOLDER}/curve.py",
        "left.value + part * (right.value - left.value)",
        "right.value + part * (left.value - right.value)",
        (f"{_CURVE_TESTS}::test_a_setting_between_two_is_on_the_line_over_log_kl",),
    ),
    Mutant(
        "rising-kls-not-pooled-again",
        "A pool of neighbours may rise over the one before it.",
        f"{_FOLDER}/curve.py",
        "        while pools and pools[-1][0] < mean:\n",
        "        if pools and pools[-1][0] < mean:\n",
        (f"{_CURVE_TESTS}::test_neighbours_that_rise_share_their_mean",),
    ),
    Mutant(
        "swept-tail-of-another-length",
        "Pages are ranked in the sweep that the timed rival still has in its tail.",
        f"{_FOLDER}/rival_rules.py",
        "length - GROUP_TOKENS - kept_recent) // GROUP_TOKENS)) * GROUP_TOKENS",
        "length - kept_recent) // GROUP_TOKENS)) * GROUP_TOKENS",
        (f"{_RULE_TESTS}::test_a_tail_has_33_to_96_tokens",),
    ),
    Mutant(
        "swept-h2o-forgets-the-steps",
        "What H2O drops follows from the prompt's queries alone.",
        f"{_FOLDER}/rival_rules.py",
        "            weights += torch.softmax(own, -1).sum(1)\n",
        "            weights += 0 * torch.softmax(own, -1).sum(1)\n",
        (f"{_RULE_TESTS}::test_a_rule_attends_as_its_rival",),
    ),
    Mutant(
        "newest-values-coded",
        "A cache of few bits codes its newest values too.",
        f"{_FOLDER}/four_bit.py",
        "exact_values = places >= lengths - RESIDUAL",
        "exact_values = places >= lengths",
        (f"{_RULE_TESTS}::test_codes_are_those_of_groups_and_the_newest_tokens_are_rows",),
    ),
    Mutant(
        "sweep-of-other-texts-gone-on-with",
        "Rows of another model, other texts or another length are taken for this sweep's.",
        f"{_FOLDER}/sweep.py",
        "                own = record == facts\n",
        "                own = True\n",
        (
            f"{_COMMAND_TESTS}::"
            "test_a_sweep_writes_report_rows_and_picture_and_goes_on_where_it_ended",
        ),
    ),
    Mutant(
        "best-shape-counts",
        "Of a rival's ratios on several shapes the largest stands in the report.",
        f"{_FOLDER}/report.py",
        "key=lambda one: (one.value is None, one.value or 0.0)",
        "key=lambda one: (one.value is None, -(one.value or 0.0))",
        (f"{_GOAL_TESTS}::test_the_worst_shape_counts",),
    ),
    Mutant(
        "modelled-ratio-judges",
        "A goal is met by a ratio that nobody measured.",
        f"{_FOLDER}/goals.py",
        'unjudged(words, points, bound, "") if modelled else judged(words, points, bound)',
        "judged(words, points, bound)",
        (f"{_GOAL_TESTS}::test_what_was_not_timed_is_modelled_and_judges_nothing",),
    ),
    Mutant(
        "replayed-best-not-among-the-selected",
        "Rows of a replay are the newest of the set, not the best of the recording.",
        "tools/hillinfer_bench/systems/case.py",
        "            rank = rank + np.isin(chosen, self._of(self._best, layer, row, length))\n",
        "            pass\n",
        ("tests/host/bench/test_replayed_selection.py::test_the_best_of_a_selection",),
    ),
    Mutant(
        "any-share-of-a-limit-is-enough",
        "A goal that bytes forbid counts as reached whatever was reached of its limit.",
        f"{_FOLDER}/goals.py",
        "_ENOUGH = 0.8",
        "_ENOUGH = 0.0",
        (
            f"{_GOAL_TESTS}::"
            "test_a_goal_that_bytes_forbid_is_reached_from_four_fifths_of_its_limit_on",
        ),
    ),
    Mutant(
        "flagged-limit-reached",
        "A flagged row reaches a limit.",
        f"{_FOLDER}/goals.py",
        "self.forbidden and not self.record.flagged and",
        "self.forbidden and",
        (
            f"{_GOAL_TESTS}::"
            "test_a_goal_that_bytes_forbid_is_reached_from_four_fifths_of_its_limit_on",
        ),
    ),
    Mutant(
        "worse-answers-are-as-good",
        "A way that is worse than the full cache in one length meets the goal by another.",
        f"{_FOLDER}/elsewhere.py",
        'any(one["nll"] > 2 * (one["error"] or 0.0) for one in rows)',
        'all(one["nll"] > 2 * (one["error"] or 0.0) for one in rows)',
        (f"{_TESTS}/test_frontier_elsewhere.py",),
    ),
    Mutant(
        "times-of-other-settings-are-taken",
        "Times that were taken at another KL go on in a report.",
        f"{_FOLDER}/kept_times.py",
        'line["taken_on"] == self._taken_on and ',
        "",
        (f"{_COMMAND_TESTS}::test_times_are_taken_at_the_settings_of_equal_quality",),
    ),
    Mutant(
        "a-row-is-read-alone",
        "What bytes allow counts rows, and not the sectors that they are read with.",
        f"{_FOLDER}/swept.py",
        "of_unit = (unit_bytes + size - gcd(size, unit_bytes)) / size",
        "of_unit = 1.0",
        (
            f"{_GOAL_TESTS}::"
            "test_what_bytes_allow_counts_whole_units_and_what_memory_holds_beside_rows",
        ),
    ),
)
