# SPDX-License-Identifier: Apache-2.0
"""Faults of prompts that are reused from a store, and of their rows on the way."""

from __future__ import annotations

from mutants.mutant import Built, Mutant

_TESTS = "tests/host"
_EXCHANGE = "tests/host/reuse/test_session_exchange.py"
_CODES = f"{_TESTS}/reuse/test_stored_codes.py"
_RATES = f"{_TESTS}/reuse/test_known_rates.py"
_COMMAND = f"{_TESTS}/cli/test_store_command.py"
_LOST = "tests/host/faults/test_lost_rows.py"
_PLACING = f"{_TESTS}/reuse/test_row_placing.py"
_LANDED = f"{_TESTS}/reuse/test_landed_states.py"
_STREAMING = f"{_TESTS}/reuse/test_streaming.py"

REUSED_PROMPTS: tuple[Mutant, ...] = (
    Mutant(
        "a-store-keeps-no-codes",
        "No extent gets room for codes of values.",
        "host/hillinfer/reuse/stored_prompts.py",
        "        extra = self._slot.values.byte_count if has_values else 0\n",
        "        extra = self._slot.values.byte_count if has_values and not ids else 0\n",
        (f"{_CODES}::test_a_stored_prompt_brings_its_codes",),
    ),
    Mutant(
        "the-last-group-of-a-pass-has-no-codes",
        "A full group that is still in the tail gets no codes, and so its chunk none in a store.",
        "host/hillinfer/kv/sequence_shadows.py",
        "        settled = min(sequence.lengths[layer], sequence.group_count * GROUP_TOKENS) & "
        "-GROUP_TOKENS\n",
        "        settled = min(sequence.held_starts[layer], sequence.group_count * GROUP_TOKENS)\n",
        (f"{_CODES}::test_a_prompt_that_was_just_read_has_codes_of_all_its_groups",),
    ),
    Mutant(
        "nobody-gives-rates",
        "Attached models and the command read all tokens behind a stored prefix at once.",
        "host/hillinfer/reuse/model_prompts.py",
        """        if rates is None and self._reuse is not Reuse.EXACT:
            rates = self._of_machine()
""",
        "",
        (
            f"{_RATES}::test_an_attached_model_chooses_by_rates",
            f"{_COMMAND}::test_the_command_reads_behind_a_stored_document_as_rates_say",
        ),
    ),
    Mutant(
        "exact-of-any-instruction-set",
        "Exact reuse takes rows that another instruction set attended for.",
        "host/hillinfer/reuse/stored_prompts.py",
        """                "native": [native_library().variants[0].value, PROMPT_ROUNDING],
""",
        "",
        (
            f"{_TESTS}/reuse/test_prompts_of_attached_models.py::"
            "test_exact_takes_no_prompt_that_other_instructions_attended_to",
        ),
    ),
    Mutant(
        "forks-forget-the-stored-prefix",
        "Questions about a stored document are read at once whatever rates say.",
        "host/hillinfer/hf/prompts.py",
        "        twin._ways = self._ways\n",
        "",
        (f"{_RATES}::test_questions_behind_a_stored_document_are_chosen_for_by_rates",),
    ),
    Mutant(
        "lost-rows-end-a-pass",
        "A pass that meets stored rows which cannot be read ends with an error.",
        "host/hillinfer/hf/hooks.py",
        "if not isinstance(cache, AttachedCache) or not cache.regain(",
        "if cache is not None or not cache.regain(",
        (f"{_LOST}::test_a_drive_that_is_pulled_out_costs_no_token",),
    ),
    Mutant(
        "regained-by-another-is-lost",
        "A cache whose lost rows another cache had computed meanwhile gives up.",
        "host/hillinfer/hf/cache.py",
        """            if not stored:
                return True
""",
        """            if not stored:
                return False
""",
        (f"{_LOST}::test_rows_that_another_cache_had_computed_are_back_for_all",),
    ),
    Mutant(
        "found-tokens-forgotten-with-a-pass",
        "With a pass that lost rows broke off goes what the store had found for it.",
        "host/hillinfer/hf/cache.py",
        "        if plan is not None and plan.start:",
        "        if plan is not None and plan.start < 0:",
        (f"{_LOST}::test_a_drive_that_is_pulled_out_costs_no_token",),
    ),
    Mutant(
        "attached-model-is-another",
        "An attached model does not find what was stored of it while it was not.",
        "host/hillinfer/reuse/described_model.py",
        "        covered = covered.replaced\n",
        "        break\n",
        (
            f"{_TESTS}/reuse/test_prompts_of_attached_models.py::test_what_makes_other_bits_has_prompts_of_its_own",
        ),
    ),
    Mutant(
        "regained-rows-of-nobody",
        "Rows that are computed again lie beside the places where caches look for them.",
        "host/hillinfer/kv/opened_sequences.py",
        """            self._share(again, sequence.groups[: tokens // GROUP_TOKENS])
""",
        """            for group in sequence.groups[: tokens // GROUP_TOKENS]:
                again.append_groups([self._groups.take()])
                assert group >= 0
""",
        (f"{_LOST}::test_what_is_computed_anew_is_there_for_every_cache_of_the_prompt",),
    ),
    Mutant(
        "sealed-pool-beside-itself",
        "A sealed pool's seconds are divided by themselves.",
        "tools/hillinfer_bench/storing/sealed_pool.py",
        "for name in (_SEALED, _PLAIN))",
        "for name in (_SEALED, _SEALED))",
        (f"{_TESTS}/bench/test_sealed_pool_cost.py::test_pairs_are_compared_and_not_their_sums",),
    ),
    Mutant(
        "question-stored-beside-its-document",
        "A question is stored while its document's last chunk is still being filled.",
        "host/hillinfer/hf/prompts.py",
        "                writing.facts()\n",
        "                pass\n",
        (
            f"{_TESTS}/reuse/test_prompts_of_attached_models.py::"
            "test_a_question_goes_on_in_its_document_however_slow_the_drive_is",
        ),
    ),
    Mutant(
        "fork-forgets-its-document",
        "A fork stores its question without waiting for its document.",
        "host/hillinfer/hf/prompts.py",
        "        twin._before = self._reading or self._before\n",
        "",
        (
            f"{_TESTS}/reuse/test_prompts_of_attached_models.py::"
            "test_a_question_goes_on_in_its_document_however_slow_the_drive_is",
        ),
    ),
    Mutant(
        "rows-land-behind-their-end",
        "Rows that nobody wants go to places of tokens that are computed.",
        "host/hillinfer/reuse/landed_states.py",
        "count = min(len(rows), stop - position)",
        "count = len(rows)",
        (f"{_LANDED}::test_rows_become_states_as_torch_makes_them",),
    ),
    Mutant(
        "states-share-a-storage",
        "A copy of one layer has other layers with it, as they were before their rows came.",
        "host/hillinfer/reuse/landed_states.py",
        "            part = torch.from_numpy(block[at * own : at * own + byte_count])\n",
        "            part = torch.from_numpy(block)[at * own : at * own + byte_count]\n",
        (f"{_LANDED}::test_whoever_copies_states_copies_no_others",),
    ),
    Mutant(
        "rows-wait-for-no-pass",
        "Threads that read take cores from a pass that keeps all of them busy.",
        "host/hillinfer/reuse/row_placing.py",
        "if not (self._threads and self._is_computing):",
        "if True:",
        (f"{_STREAMING}::test_rows_wait_for_a_pass_that_keeps_all_cores_busy",),
    ),
    Mutant(
        "rows-wait-where-rules-say-so-alone",
        "Where nobody says what a pass has, rows take cores from one that keeps all of them busy.",
        "host/hillinfer/reuse/row_placing.py",
        "return threads_of_passes() if rules.threads is None else rules.threads",
        "return rules.threads or 0",
        (f"{_PLACING}::test_rows_wait_for_passes_that_keep_every_core_busy",),
    ),
    Mutant(
        "rows-wait-for-ever",
        "Rows wait for long for a pass that broke off.",
        "host/hillinfer/reuse/row_placing.py",
        "patience_seconds: float = 0.5",
        "patience_seconds: float = 40.0",
        (f"{_PLACING}::test_rows_that_no_pass_comes_for_are_placed_in_the_end",),
    ),
    Mutant(
        "waiting-rows-unchecked",
        "What is wrong with rows that a pass placed is told to nobody.",
        "host/hillinfer/reuse/row_placing.py",
        "                    one.check(found)\n",
        "                    one.is_checked = True\n",
        (f"{_STREAMING}::test_a_flipped_bit_is_computed_anew_behind_what_is_right",),
    ),
    Mutant(
        "dropped-caches-in-a-ring",
        "What placed the rows of a dropped cache keeps its memory until Python looks for rings.",
        "host/hillinfer/reuse/streaming.py",
        "                self._placing = None\n",
        "",
        (f"{_STREAMING}::test_memory_of_a_dropped_cache_is_used_again_at_once",),
    ),
    Mutant(
        "salts-without-layers",
        "Rows of another layer pass for those of this one.",
        "host/hillinfer/arrived_rows.py",
        'np.arange(layers, dtype="<i4")',
        'np.zeros(layers, dtype="<i4")',
        (f"{_TESTS}/store/test_crc32c.py::test_salts_of_a_whole_prefix_are_those_of_its_groups",),
    ),
    Mutant(
        "bench-loads-torch-at-once",
        "Benchmarks load torch before they say how OpenMP's threads wait.",
        "tools/hillinfer_bench/cli/frontier.py",
        "from hillinfer_bench.quality.texts import TextsRequest\n",
        "from hillinfer_bench.figures.frontier_figure import frontier_figure  # noqa: F401\n"
        "from hillinfer_bench.quality.texts import TextsRequest\n",
        (
            f"{_TESTS}/cli/test_entry.py::"
            "test_a_command_says_how_threads_wait_before_torch_is_loaded",
        ),
    ),
    Mutant(
        "sums-of-the-first-group",
        "Each group of rows that a pass places is checked as the first one.",
        "host/native/state_rows.cpp",
        "given.sums[group] = crc32c(given.salts[group], own.rows",
        "given.sums[group] = crc32c(given.salts[0], own.rows",
        (f"{_LANDED}::test_rows_are_checked_and_placed_at_once",),
        Built.NATIVE,
    ),
    Mutant(
        "sheets-of-other-tokens",
        "A sheet that is matched at once may be of other tokens.",
        "host/native/sheets.cpp",
        "                      !std::memcmp(body, ids, size_t(groups * kGroupIdBytes)) &&\n",
        "",
        (
            f"{_TESTS}/store/test_lookup.py::"
            "test_sheets_that_are_matched_at_once_are_those_that_are_read_one_by_one",
        ),
        Built.NATIVE,
    ),
    Mutant(
        "first-layer-hides",
        "The first layer's rows count as hidden behind computing.",
        "tools/hillinfer_bench/storing/first_token.py",
        "        return first + max(",
        "        return max(",
        (
            f"{_TESTS}/bench/test_store_goals.py::"
            "test_reading_hides_behind_computing_as_far_as_cores_are_idle",
        ),
    ),
    Mutant(
        "heap-keeps-what-is-free",
        "The heap keeps what is freed while tables grow, which M0 does not count.",
        "host/hillinfer/kv/hot_pools.py",
        "            give_free_memory_back()\n",
        "            pass\n",
        (
            f"{_TESTS}/kv/test_hot_pools.py::"
            "test_the_heap_keeps_nothing_that_is_free_while_tables_grow",
        ),
    ),
    Mutant(
        "rows-land-in-another-head",
        "Keys of all KV heads land in the first one's place.",
        "host/native/state_rows.cpp",
        "const int64_t head = part % given.kv_heads;",
        "const int64_t head = part / given.kv_heads;",
        (f"{_LANDED}::test_rows_become_states_as_torch_makes_them",),
        Built.NATIVE,
    ),
    Mutant(
        "rows-of-answers-imported",
        "A session's segment counts as read densely whatever its statistics are.",
        "host/hillinfer/reuse/session_exchange.py",
        """            or not np.array_equal(own.exponents, kept.exponents)
            or not np.array_equal(own.means, kept.means)
""",
        "",
        (f"{_EXCHANGE}::test_rows_of_answers_are_not_imported",),
    ),
    Mutant(
        "first-decoded-token-imported",
        "The last group before decoding shows is imported, too.",
        "host/hillinfer/reuse/session_exchange.py",
        "    return max(0, whole * size - GROUP_TOKENS)",
        "    return max(0, whole * size)",
        (f"{_EXCHANGE}::test_rows_of_answers_are_not_imported",),
    ),
    Mutant(
        "streamed-rows-unchecked",
        "Rows of a stream are not compared with their checksums.",
        "host/hillinfer/arrived_rows.py",
        "        if differs.any():\n",
        "        if False:\n",
        (
            f"{_TESTS}/reuse/test_streaming.py::test_a_flipped_bit_is_computed_anew_behind_what_is_right",
        ),
    ),
    Mutant(
        "layers-do-not-wait",
        "A layer attends to rows that are not there yet.",
        "host/hillinfer/reuse/landed_states.py",
        "        if self._arrive is not None:\n            self._arrive()",
        "        if self._arrive is not None:\n            pass",
        (f"{_TESTS}/reuse/test_streaming.py::test_layers_compute_while_later_ones_are_read",),
    ),
    Mutant(
        "native-key-of-the-group-alone",
        "A prefix' key, hashed by the library, forgets the groups in between.",
        "host/native/prefix_keys.cpp",
        "        before = keys + done * kKeyBytes;\n",
        "",
        ("tests/host/store/test_lookup.py::test_a_key_is_sha256_of_the_key_before_and_its_group",),
        Built.NATIVE,
    ),
)
