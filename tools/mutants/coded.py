# SPDX-License-Identifier: Apache-2.0
"""Faults of decode steps with coded tokens."""

from __future__ import annotations

from mutants.mutant import Built, Mutant

_STEP = "host/hillinfer/engine/coded_step.py"
_NATIVE = "host/native/coded_step.cpp"
_SPLIT = "host/native/coded_split.cpp"
_SLOTS = "host/native/coded_slots.cpp"
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

_DEFAULTS = "tests/host/engine/test_precision_defaults.py"
_SETTINGS = "host/hillinfer/settings.py"

CODED: tuple[Mutant, ...] = (
    Mutant(
        "an-alpha-of-one-s-own-codes-tokens",
        "Whoever chose alpha alone gets coded tokens, and other bits than before.",
        _SETTINGS,
        "self.alpha is None and self.device in HOST_DEVICES",
        "self.device in HOST_DEVICES",
        (_DEFAULTS,),
    ),
    Mutant(
        "codes-kept-where-none-is-wanted",
        "Codes are kept where as large a share is exact as is selected.",
        _SETTINGS,
        "and self.exact_share >= self.alpha",
        "and self.exact_share > 1",
        (_DEFAULTS,),
    ),
    Mutant(
        "exact-alone-selects-twice-as-much",
        "With all tokens exact a fifth is selected.",
        _SETTINGS,
        "return CODED_ALPHA if self.has_coded_tokens else EXACT_ALPHA",
        "return CODED_ALPHA",
        (_DEFAULTS,),
    ),
    Mutant(
        "coded-tokens-in-too-small-a-budget",
        "Tokens are coded by default where shadow and tables of codes do not fit.",
        "host/hillinfer/engine/budget_growth.py",
        "if fits and choice.settings.has_coded_tokens:",
        "if choice.settings.has_coded_tokens:",
        ("tests/host/engine/test_shadow_choice.py",),
    ),
    Mutant(
        "codes-of-other-statistics-are-found",
        "Codes are found by row number alone, whichever statistics they were coded with.",
        _VALUES,
        "np.flatnonzero((slots >= 0) & (self.columns.numbers[slots] == numbers))",
        "np.flatnonzero(slots >= 0)",
        ("tests/host/shadow/test_value_codes.py",),
    ),
    Mutant(
        "the-library-finds-codes-of-other-statistics",
        "The library finds codes by row number alone, whichever statistics they were coded with.",
        _SLOTS,
        "slot >= 0 && slots.numbers[slot] == number",
        "slot >= 0",
        (f"{_STEP_TESTS}::test_forks_that_took_statistics_of_their_own_find_their_own_codes",),
        Built.NATIVE,
    ),
    Mutant(
        "found-codes-give-way-before-they-are-attended-to",
        "Codes of cold tokens take the slots of codes that the library is about to attend to.",
        _NATIVE,
        "    if (!SplitAttention(variant, table, step, split).run(out)) {\n"
        "        return false;\n"
        "    }\n"
        "    if (split.missing_count) {\n"
        "        offer(slots, split);\n"
        "    }\n"
        "    return true;\n",
        "    if (split.missing_count) {\n"
        "        offer(slots, split);\n"
        "    }\n"
        "    return SplitAttention(variant, table, step, split).run(out);\n",
        (f"{_STEP_TESTS}::test_codes_that_came_do_not_push_out_what_is_attended_to",),
        Built.NATIVE,
    ),
    Mutant(
        "codes-take-the-place-of-their-equals",
        "What is offered pushes out what is wanted as much.",
        _SLOTS,
        "fresh[i].worth > lowest[i].worth",
        "fresh[i].worth >= lowest[i].worth",
        ("tests/host/shadow/test_value_codes.py",),
        Built.NATIVE,
    ),
    Mutant(
        "the-most-wanted-codes-give-way",
        "Codes give way to others in the wrong order.",
        _SLOTS,
        "return a.worth < b.worth;",
        "return a.worth > b.worth;",
        ("tests/host/shadow/test_value_codes.py",),
        Built.NATIVE,
    ),
    Mutant(
        "codes-of-a-row-that-landed-beside",
        "A token without codes is coded by the row that landed behind its own.",
        _SPLIT,
        "landed.landed_places[next] * table.row_bytes",
        "(landed.landed_places[next] + 1) * table.row_bytes",
        (f"{_STEP_TESTS}::test_queries_that_were_announced_give_the_same_bits",),
        Built.NATIVE,
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
        "host/hillinfer/engine/coded_call.py",
        "found = self.weights.of_each(scaled, shadows(), coded)",
        "found = [self.weights.of_each(scaled, shadows(), [one])[0] for one in coded]",
        (f"{_STEP_TESTS}::test_streamed_shadows_that_only_some_sets_want",),
    ),
    Mutant(
        "what-many-wanted-is-wanted-for-ever",
        "Sums of how often codes were wanted run into infinity.",
        _SLOTS,
        "std::min(worth_of(own) + slots.step_worth, slots.most_worth)",
        "worth_of(own) + slots.step_worth",
        ("tests/host/shadow/test_value_codes.py", "tests/host/shadow/test_shortage_of_codes.py"),
        Built.NATIVE,
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
        _NATIVE,
        "codes[i] + shape.code_row_bytes()",
        "codes[i] + shape.code_row_bytes() + 1",
        (_PLACES,),
        Built.NATIVE,
    ),
    Mutant(
        "a-floor-that-nobody-keeps",
        "The least number of exact tokens is left out.",
        "host/hillinfer/scoring/scorer.py",
        "exact_count(context, self._exact_share, settings.exact_floor, kept, selected)",
        "exact_count(context, self._exact_share, 0, kept, selected)",
        (_KINDS,),
    ),
    Mutant(
        "summed-queries-weigh-coded-tokens",
        "Under raw_sum coded tokens weigh by the sum of the queries.",
        "host/hillinfer/scoring/coded.py",
        "self.spec = replace(spec, rule=Rule.WEIGHT_SUM)",
        "self.spec = replace(spec, rule=spec.rule)",
        (_KINDS,),
    ),
    Mutant(
        "sessions-forget-statistics-of-values",
        "A resumed session takes statistics of its values anew.",
        "host/hillinfer/kv/shadow_keeper.py",
        "own.values = self._codes.adopted(saved.values(number, layer))",
        "own.values = None",
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
        "self.columns.worth[rows[known]] / np.float16(self._step_worth)",
        "self.columns.worth[rows[known]]",
        (_SESSION_TESTS, "tests/host/shadow/test_value_codes.py"),
    ),
    Mutant(
        "what-is-recalled-takes-worth-away",
        "A second session of the same rows lowers what the first has found since.",
        _VALUES,
        "np.maximum(self.columns.worth[rows], now.astype(np.float16))",
        "now.astype(np.float16)",
        ("tests/host/shadow/test_value_codes.py",),
    ),
    Mutant(
        "codes-are-counted-as-before-an-interrupt",
        "What Ctrl-C left half given up is not looked at again.",
        _VALUES,
        "if is_changed or not self._is_whole:",
        "if is_changed:",
        ("tests/host/shadow/test_value_codes.py",),
    ),
    Mutant(
        "an-interrupt-leaves-the-library-behind",
        "After Ctrl-C the library goes on with columns that were replaced.",
        _VALUES,
        "if self._seen is not self._next:",
        "if False:",
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
        "codes-of-a-file-go-to-their-neighbours",
        "What was begun to be read is taken in another order than it was.",
        _FILE,
        "at = order[np.minimum(at, len(order) - 1)]",
        "at = np.minimum(at, len(order) - 1)",
        (_FILE_TESTS,),
    ),
    Mutant(
        "codes-are-read-on-after-a-failure",
        "Codes are asked of a file that has failed, again and again.",
        _FILE,
        "self._is_written = self._is_read = False",
        "self._is_written = False",
        (_FILE_TESTS,),
    ),
    Mutant(
        "codes-land-in-buffers-that-are-being-replaced",
        "While buffers grow, codes of more tokens than the old ones hold are read to them.",
        _FILE,
        "self._tokens, self._free, self._landing = 0, [], self._landing[:0].copy()",
        "self._tokens = tokens",
        (_FILE_TESTS,),
    ),
    Mutant(
        "a-table-that-grows-goes-while-the-library-looks",
        "What says which rows are hot is given back under the thread that lists cold ones.",
        "host/hillinfer/engine/coded_step.py",
        "kept = hot.slot_of_row",
        "kept = None",
        (f"{_STEP_TESTS}::test_tables_that_grow_stay_while_the_library_looks",),
    ),
    Mutant(
        "exact-rows-come-as-codes",
        "Exact tokens that are cold are read of the file of codes, and their rows on demand.",
        "host/native/coded_split.cpp",
        "list(position, row, kNoNumber);",
        "list(position, row, split.segments[0].number);",
        (f"{_STEP_TESTS}::test_exact_rows_are_not_read_of_the_file_of_codes",),
        Built.NATIVE,
    ),
    Mutant(
        "cold-tokens-are-coded-into-others-places",
        "Rows that stay to be read, once codes came of a file, are coded to the first places.",
        "host/hillinfer/native/selected.py",
        "            column[: len(own)] = column[own]\n",
        "            pass\n",
        (_PLACES, f"{_STEP_TESTS}::test_tokens_that_the_file_lacks_come_as_rows"),
    ),
    Mutant(
        "coded-steps-do-not-wait-for-the-newest-row",
        "A coded step of a model on a GPU looks at a row that has not come back.",
        "host/hillinfer/engine/gpu_coded_step.py",
        "        self._gpu.arrivals.settle()\n",
        "",
        (_LANES,),
    ),
    Mutant(
        "halves-of-code-bytes-change-places",
        "A code row's high halves are unpacked as its low ones.",
        "host/hillinfer/attention/torch_coded.py",
        "torch.cat([(halves << 4) >> 4, halves >> 4], dim=3)",
        "torch.cat([halves >> 4, (halves << 4) >> 4], dim=3)",
        (_LANES,),
    ),
    Mutant(
        "rows-that-were-sent-ahead-are-held",
        "Copies to a GPU that are over stay among those that are under way.",
        "host/hillinfer/gpu/copies.py",
        "        copied.add_done_callback(self._under_way.discard)\n",
        "",
        (
            "tests/host/gpu/test_gpu_runtime.py::test_rows_that_a_layer_attended_to_do_not_stay_in_the_gpus_memory",
        ),
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
        "a-group-has-its-first-token-alone",
        "Of a group's tokens only the first one is weighed.",
        "host/native/aligned_tokens.cpp",
        "uint64_t(1) << (positions[i] % kGroupTokens);",
        "uint64_t(1) << (positions[groups.back().first] % kGroupTokens);",
        (_PLACES,),
        Built.NATIVE,
    ),
    Mutant(
        "doctor-forgets-tables-of-codes",
        "The budget that doctor names for all codes has room for those of the tokens alone.",
        "host/hillinfer/doctor/profile.py",
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
    Mutant(
        "decoded-groups-have-no-codes",
        "A group that decoding fills has no codes in the file.",
        "host/hillinfer/kv/rows.py",
        "            self._shadow.keep_filled(layer, sequence)\n",
        "",
        (f"{_STEP_TESTS}::test_groups_that_decoding_filled_have_codes_in_the_file",),
    ),
    Mutant(
        "sessions-get-no-codes-in-the-file",
        "Segments that a session brought stay without codes in the file.",
        "host/hillinfer/shadow/kept_codes.py",
        "            self._lacking.add(own.number)\n",
        "            pass\n",
        (
            f"{_SESSION_TESTS}::"
            "test_a_session_gets_codes_in_the_file_where_dram_has_no_room_for_all",
        ),
    ),
    Mutant(
        "rows-that-cannot-be-coded-end-the-step",
        "Rows of a session that cannot be read for their codes are an error of the step.",
        "host/hillinfer/shadow/kept_codes.py",
        "                except HillInferError:\n                    return\n",
        "                except BudgetError:\n                    return\n",
        (f"{_SESSION_TESTS}::test_rows_that_cannot_be_read_for_codes_cost_no_answer",),
    ),
    Mutant(
        "rows-that-did-not-land-are-there",
        "What a thread of the library could not read counts as there.",
        "host/hillinfer/drive/read_engines.py",
        "        if table.landed < table.count:\n            # What came",
        "        if table.landed > table.count:\n            # What came",
        ("tests/host/drive/test_row_lander.py",),
    ),
    Mutant(
        "huge-pages-beyond-a-buffer",
        "A buffer asks for a huge page that it does not fill, which nobody counts.",
        "host/hillinfer/drive/files.py",
        "mapping.madvise(advice, start, size // HUGE_BYTES * HUGE_BYTES)",
        "mapping.madvise(advice, start)",
        ("tests/host/drive/test_cold_file.py",),
    ),
    Mutant(
        "buffers-in-small-pages",
        "A buffer that drives read into asks for no huge page.",
        "host/hillinfer/drive/files.py",
        "        mapping.madvise(advice, start, size",
        "        mapping.madvise(mmap.MADV_NOHUGEPAGE, start, size",
        ("tests/host/drive/test_cold_file.py",),
    ),
)
