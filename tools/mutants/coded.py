# SPDX-License-Identifier: Apache-2.0
"""Faults of decode steps with coded tokens."""

from __future__ import annotations

from mutants.mutant import Built, Mutant

_STEP = "host/hillinfer/engine/coded_step.py"
_VALUES = "host/hillinfer/shadow/values.py"
_STEP_TESTS = "tests/host/engine/test_coded_step.py"
_PLACES = f"{_STEP_TESTS}::test_every_placement_gives_the_golden_models_bits"
_KINDS = f"{_STEP_TESTS}::test_every_kind_of_selection"
_TAKEN_BACK = f"{_STEP_TESTS}::test_codes_of_tokens_that_were_taken_back_are_not_taken_for_others"
_SESSION_TESTS = "tests/host/sessions/test_coded_sessions.py"

CODED: tuple[Mutant, ...] = (
    Mutant(
        "codes-give-way-before-they-are-attended-to",
        "Codes of cold tokens take the slots of codes that the same step attends to.",
        _STEP,
        "        came = rows[missing], numbers[missing], arrived[: len(missing)]\n",
        "        came = rows[missing], numbers[missing], arrived[: len(missing)]\n"
        "        self._values.offer(layer, *came)\n",
        (_KINDS,),
    ),
    Mutant(
        "codes-of-other-tokens-are-found",
        "Codes are found by row number alone, whichever tokens' they are.",
        _VALUES,
        "np.flatnonzero((slots >= 0) & (self._numbers[slots] == numbers))",
        "np.flatnonzero(slots >= 0)",
        (_TAKEN_BACK,),
    ),
    Mutant(
        "a-cut-segment-keeps-its-number",
        "A segment that is cut keeps the number that codes of tokens behind the cut have.",
        "host/hillinfer/kv/shadow_keeper.py",
        "                self._forget_codes(cut)\n",
        "                pass\n",
        (_TAKEN_BACK,),
    ),
    Mutant(
        "exponents-of-another-token",
        "Exponents of a coded token are looked for one byte too far.",
        _STEP,
        "exponents = codes + np.uint64(self._code_bytes)",
        "exponents = codes + np.uint64(self._code_bytes + 1)",
        (_PLACES,),
    ),
    Mutant(
        "a-floor-that-nobody-keeps",
        "The least number of exact tokens is left out.",
        "host/hillinfer/scoring/scorer.py",
        "exact_count(context, settings.exact, settings.exact_floor, kept, selected)",
        "exact_count(context, settings.exact, 0, kept, selected)",
        (_KINDS,),
    ),
    Mutant(
        "summed-queries-weigh-coded-tokens",
        "Under raw_sum coded tokens weigh by the sum of the queries.",
        "host/hillinfer/scoring/aligned.py",
        "self.spec = replace(spec, rule=Rule.WEIGHT_SUM)",
        "self.spec = replace(spec, rule=spec.rule)",
        (_KINDS,),
    ),
    Mutant(
        "sessions-forget-statistics-of-values",
        "A resumed session takes statistics of its values anew.",
        "host/hillinfer/kv/shadow_keeper.py",
        "values = None if self._values is None else saved.values(number, layer)",
        "values = None",
        (_SESSION_TESTS,),
    ),
    Mutant(
        "a-group-has-its-first-token-twice",
        "L' of a token is that of its group's first one.",
        "host/native/sequence.cpp",
        "const size_t token = size_t(positions[i] % kGroupTokens);",
        "const size_t token = size_t(positions[first] % kGroupTokens);",
        (_PLACES,),
        Built.NATIVE,
    ),
)
