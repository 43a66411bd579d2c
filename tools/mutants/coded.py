# SPDX-License-Identifier: Apache-2.0
"""Faults of decode steps with coded tokens."""

from __future__ import annotations

from mutants.mutant import Built, Mutant

_STEP = "host/hillinfer/engine/coded_step.py"
_NATIVE = "host/native/coded_step.cpp"
_VALUES = "host/hillinfer/shadow/values.py"
_STEP_TESTS = "tests/host/engine/test_coded_step.py"
_PLACES = f"{_STEP_TESTS}::test_every_placement_gives_the_golden_models_bits"
_KINDS = f"{_STEP_TESTS}::test_every_kind_of_selection"
_TAKEN_BACK = f"{_STEP_TESTS}::test_codes_of_tokens_that_were_taken_back_are_not_taken_for_others"
_FORK = f"{_STEP_TESTS}::test_codes_of_a_fork_are_not_taken_for_those_of_its_original"
_FILE = "host/hillinfer/shadow/code_file.py"
_FILE_TESTS = "tests/host/shadow/test_code_file.py"
_LANES = "tests/host/gpu/test_coded_lanes.py"
_SESSION_TESTS = "tests/host/sessions/test_coded_sessions.py"

CODED: tuple[Mutant, ...] = (
    Mutant(
        "codes-of-other-statistics-are-found",
        "Codes are found by row number alone, whichever statistics they were coded with.",
        _VALUES,
        "np.flatnonzero((slots >= 0) & (self._numbers[slots] == numbers))",
        "np.flatnonzero(slots >= 0)",
        ("tests/host/shadow/test_value_codes.py",),
    ),
    Mutant(
        "the-library-finds-codes-of-other-statistics",
        "The library finds codes by row number alone, whichever statistics they were coded with.",
        _NATIVE,
        "slot >= 0 && slots.numbers[slot] == selection.segments[segment].number",
        "slot >= 0",
        (f"{_STEP_TESTS}::test_forks_that_took_statistics_of_their_own_find_their_own_codes",),
        Built.NATIVE,
    ),
    Mutant(
        "found-codes-give-way-before-they-are-attended-to",
        "Codes of cold tokens take the slots of codes that the library is about to attend to.",
        _STEP,
        "        out = torch.empty(query.shape)\n",
        "        came = found.rows[missing], own[0].number + 0 * missing, arrived[: len(missing)]\n"
        "        self._values.offer(layer, *given)\n"
        "        out = torch.empty(query.shape)\n",
        (_KINDS, _PLACES),
    ),
    Mutant(
        "a-tail-s-codes-are-of-the-next-row",
        "Values of a coded token in the tail are those of the row behind its own.",
        _NATIVE,
        "table.tail + (position - table.held) * table.row_bytes",
        "table.tail + (position - table.held + 1) * table.row_bytes",
        (_KINDS, _PLACES),
        Built.NATIVE,
    ),
    Mutant(
        "codes-of-groups-that-went-stay",
        "Codes of a group are found by who has its number next.",
        "host/hillinfer/kv/rows.py",
        "        self._shadow.forget_groups(given)\n",
        "        pass\n",
        (_TAKEN_BACK, _FORK),
    ),
    Mutant(
        "shadows-are-read-once-for-each-set",
        "Sets of their own ask for streamed shadows one set after the other.",
        _STEP,
        "weighed = self._weights.of_each(scaled, shadows, coded)",
        "weighed = [self._weights.of_each(scaled, shadows, [one])[0] for one in coded]",
        (f"{_STEP_TESTS}::test_streamed_shadows_that_only_some_sets_want",),
    ),
    Mutant(
        "who-asks-takes-memory",
        "Another thread than the one that attends makes room for tables of codes.",
        _VALUES,
        "            known = rows < self._covered\n",
        "            self._cover(int(rows.max()) + 1)\n            known = rows < self._covered\n",
        ("tests/host/shadow/test_value_codes.py", "tests/host/shadow/test_shortage_of_codes.py"),
    ),
    Mutant(
        "what-many-wanted-is-wanted-for-ever",
        "Sums of how often codes were wanted run into infinity.",
        _VALUES,
        "np.minimum(worth, MOST_WORTH)",
        "worth",
        ("tests/host/shadow/test_value_codes.py", "tests/host/shadow/test_shortage_of_codes.py"),
    ),
    Mutant(
        "codes-give-way-for-themselves",
        "Codes give up memory while they take some, and count what they gave.",
        _VALUES,
        "if short and not self._is_growing:",
        "if short:",
        ("tests/host/shadow/test_value_codes.py", "tests/host/shadow/test_shortage_of_codes.py"),
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
        "values = None if self.values is None else saved.values(number, layer)",
        "values = None",
        (_SESSION_TESTS,),
    ),
    Mutant(
        "sessions-forget-what-codes-are-worth",
        "How often codes were wanted is saved and not taken up again.",
        "host/hillinfer/kv/opened_sequences.py",
        "recall_codes(saved, sequence, self._shadow.values)",
        "pass",
        (_SESSION_TESTS,),
    ),
    Mutant(
        "worth-is-saved-in-the-unit-of-a-run",
        "A session keeps worth relative to the run's first step, not to its last.",
        _VALUES,
        "self._worth[rows[known]] / np.float16(self._step_worth)",
        "self._worth[rows[known]]",
        (_SESSION_TESTS, "tests/host/shadow/test_value_codes.py"),
    ),
    Mutant(
        "what-is-recalled-takes-worth-away",
        "A second session of the same rows lowers what the first has found since.",
        _VALUES,
        "np.maximum(self._worth[rows], now.astype(np.float16))",
        "now.astype(np.float16)",
        ("tests/host/shadow/test_value_codes.py",),
    ),
    Mutant(
        "sessions-hold-any-worth",
        "Worth of a session is taken whatever it says.",
        "host/hillinfer/kv/saved_sequences.py",
        "if not ((worth >= 0) & (worth <= MOST_WORTH)).all():",
        "if False:",
        (_SESSION_TESTS,),
    ),
    Mutant(
        "codes-of-a-file-are-of-any-statistics",
        "Codes of a file are taken whichever statistics they were coded with.",
        _FILE,
        "own[groups[known]] == numbers[known]",
        "own[groups[known]] >= 0",
        (_FILE_TESTS,),
    ),
    Mutant(
        "codes-of-a-file-outlive-their-group",
        "Codes of a file are found by who has a group's number next.",
        _FILE,
        "self._numbers[:, own[own < self._numbers.shape[1]]] = _NOTHING",
        "pass",
        (_FILE_TESTS, _TAKEN_BACK),
    ),
    Mutant(
        "changed-codes-of-a-file-are-taken",
        "Nobody compares codes that are read with their checksums.",
        _FILE,
        "buffer, places, self._landing, sums, starts=starts",
        "buffer, places, self._landing, None, starts=starts",
        (_FILE_TESTS,),
    ),
    Mutant(
        "layers-share-their-place-in-the-file-of-codes",
        "A layer's codes are written where another layer's are.",
        _FILE,
        "((span * self._layers + layer) * TABLE_GROWTH_ROWS + inside)",
        "(span * TABLE_GROWTH_ROWS + inside)",
        (_FILE_TESTS,),
    ),
    Mutant(
        "seats-outlive-their-step",
        "Codes that were read for a step are found in later ones, whatever lies there then.",
        "host/hillinfer/shadow/code_seats.py",
        "                pool.unseat()\n",
        "                pass\n",
        (_FILE_TESTS, _PLACES),
    ),
    Mutant(
        "coded-steps-do-not-wait-for-the-newest-row",
        "A coded step of a model on a GPU looks at a row that has not come back.",
        "host/hillinfer/engine/coded_ways.py",
        "        self._gpu.arrivals.settle()\n",
        "",
        (_LANES,),
    ),
    Mutant(
        "halves-of-code-bytes-change-places",
        "A code row's high halves are unpacked as its low ones.",
        "host/hillinfer/attention/torch_values.py",
        "torch.cat([(halves << 4) >> 4, halves >> 4], dim=3)",
        "torch.cat([halves >> 4, (halves << 4) >> 4], dim=3)",
        (_LANES,),
    ),
    Mutant(
        "codes-on-a-gpu-are-of-the-first-segments",
        "Statistics of coded tokens on a GPU are those of the first segments.",
        "host/hillinfer/gpu/coded.py",
        "[own[number].statistics for number in numbers.tolist()]",
        "[own[0].statistics for number in numbers.tolist()]",
        (_LANES,),
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
    Mutant(
        "doctor-forgets-tables-of-codes",
        "The budget that doctor names for all codes has room for those of the tokens alone.",
        "host/hillinfer/doctor/coded_need.py",
        "        return plan.required_bytes + self.all_code_bytes\n",
        "        return plan.required_bytes + self.need.all_code_bytes\n",
        ("tests/host/doctor/test_coded_need.py",),
    ),
    Mutant(
        "hot-rows-of-coded-tokens-are-read",
        "The replay of both pools counts a row of a coded token as read though it is hot.",
        "tools/hillinfer_bench/replay/code_split.py",
        "int(cold.sum())",
        "len(missing)",
        ("tests/host/replay/test_code_split.py::test_rows_of_a_trace_by_hand",),
    ),
)
