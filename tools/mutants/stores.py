# SPDX-License-Identifier: Apache-2.0
"""Faults of a store: what it takes in, writes, finds and gives out."""

from __future__ import annotations

from mutants.mutant import Built, Mutant

_TESTS = "tests/host"
_REUSE = f"{_TESTS}/reuse/test_opened_in_place.py"
_INTAKE = "tests/host/store/test_intake.py"
_EXCHANGE = "tests/host/reuse/test_session_exchange.py"
_PROMPTS = "tests/host/reuse/test_stored_prompts.py"
_CODES = f"{_TESTS}/reuse/test_stored_codes.py"
_VALUES = "host/hillinfer/extents/stored_values.py"
_RATES = f"{_TESTS}/reuse/test_known_rates.py"
_COMMAND = f"{_TESTS}/cli/test_store_command.py"
_LOST = "tests/host/faults/test_lost_rows.py"
_ROOM = "tests/host/store/test_room.py"
_PLACING = f"{_TESTS}/reuse/test_row_placing.py"
_LANDED = f"{_TESTS}/reuse/test_landed_states.py"
_STREAMING = f"{_TESTS}/reuse/test_streaming.py"

STORES: tuple[Mutant, ...] = (
    Mutant(
        "codes-of-other-rows-are-taken",
        "Codes that lay in an extent before are taken for those of the chunk that lies there now.",
        _VALUES,
        "        if not is_whole or written_of != digest or size != self.slot_bytes:\n",
        "        if not is_whole or size != self.slot_bytes:\n",
        (f"{_CODES}::test_a_page_tells_sums_of_its_rows_alone",),
    ),
    Mutant(
        "stored-codes-are-not-checked",
        "Codes of values that a store gives back changed are attended to.",
        _VALUES,
        "                if _sum_of(own) != sums[layer]:\n",
        "                if sums[layer] < 0:\n",
        (f"{_CODES}::test_damaged_codes_cost_time_and_no_answer",),
    ),
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
        "extents-of-one-size-alone-are-scanned",
        "A rebuild goes on behind an extent as if all had the same room behind their planes.",
        "host/hillinfer/store/maintenance.py",
        "            if found is None or found.span.units != shape.units:\n",
        "            if found is None:\n",
        ("tests/host/store/test_lookup.py::test_extents_of_two_sizes_are_found_anew",),
    ),
    Mutant(
        "rows-of-a-store-come-in-pages",
        "A single row of a plain store is read as a whole page.",
        "host/hillinfer/extents/shared_chunks.py",
        "                unit = file.read_unit if seals is None else PAGE_BYTES\n",
        "                unit = PAGE_BYTES\n",
        (f"{_CODES}::test_single_rows_of_a_plain_store_come_in_sectors",),
    ),
    Mutant(
        "codes-in-a-store-count-as-waste",
        "What lies behind the planes of extents is counted as left empty.",
        "host/hillinfer/store/retirement.py",
        "    return rows + chunks * extra * UNIT_BYTES\n",
        "    return rows\n",
        (f"{_CODES}::test_codes_count_in_the_size_of_a_store_and_not_as_waste",),
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
        "windows-profiled-for-nothing",
        "What doctor measures of layers is not kept.",
        "host/hillinfer/doctor/windows.py",
        "            self._keep()\n",
        "",
        (
            f"{_TESTS}/cli/test_doctor.py::"
            "test_doctor_profiles_how_long_layers_compute_and_passes_correct_it",
        ),
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
        """                self._groups.share(group)
                again.append_groups([group])
""",
        """                again.append_groups([self._groups.take()])
                assert group >= 0
""",
        (f"{_LOST}::test_what_is_computed_anew_is_there_for_every_cache_of_the_prompt",),
    ),
    Mutant(
        "made-room-is-anybodys",
        "Room that a writer makes in a full store is taken by another, whose header it erases.",
        "host/hillinfer/store/retirement.py",
        "                tomb(db, int(row[0]), owner)\n",
        "                tomb(db, int(row[0]))\n",
        (f"{_ROOM}::test_another_writer_at_any_call_takes_no_room_that_was_made",),
    ),
    Mutant(
        "room-in-the-making-is-claimed",
        "Whoever gives room back takes the headers of chunks that another process is at.",
        "host/hillinfer/store/retirement.py",
        'c WHERE state = {State.TOMBED:d} AND owner IS NULL"',
        'c WHERE state = {State.TOMBED:d}"',
        (f"{_ROOM}::test_another_writer_at_any_call_takes_no_room_that_was_made",),
    ),
    Mutant(
        "room-is-cleared-by-nobody",
        "A process that closes its store clears room after it is forgotten.",
        "host/hillinfer/store/store.py",
        "            self.index.end_owner(self._owner)\n",
        "            self.index.remove_owner(self._owner)\n",
        (f"{_ROOM}::test_room_of_a_process_that_died_while_it_closed_its_store_is_everybodys",),
    ),
    Mutant(
        "dropped-room-has-two-owners",
        "A chunk that gives way and is dropped meanwhile is cleared by two processes.",
        "host/hillinfer/store/retirement.py",
        'target = NULL WHERE id = ? AND state <> ?",\n'
        "                (State.QUARANTINED, number, State.TOMBED),",
        'target = NULL WHERE id = ?",\n                (State.QUARANTINED, number),',
        (
            f"{_ROOM}::test_chunks_that_are_dropped_while_they_give_way_leave_their_room_to_the_writer",
        ),
    ),
    Mutant(
        "dropped-room-is-written-to",
        "A chunk that is dropped while it is filled gives its room away at once.",
        "host/hillinfer/store/retirement.py",
        'WHERE state = {State.QUARANTINED:d} AND owner IS NULL "',
        'WHERE state = {State.QUARANTINED:d} "',
        (f"{_ROOM}::test_a_chunk_that_is_dropped_while_it_is_filled_keeps_its_room_until_then",),
    ),
    Mutant(
        "room-that-failed-is-held",
        "Room whose headers a process cannot erase stays that process' own.",
        "host/hillinfer/store/room.py",
        "            self._retirement.disclaim(chunks, self._owner)\n",
        "",
        (f"{_ROOM}::test_room_whose_headers_cannot_be_taken_is_made_by_another_writer",),
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
        "waiting-layers-in-short-calls",
        "Each layer of a chunk that waits for a pass is read by a call of its own.",
        "host/hillinfer/store/prefix.py",
        "file.read_many(reads, buffer, piece.threads, piece.call_bytes, rows)",
        "file.read_many(reads, buffer, piece.threads, 0, rows)",
        (f"{_STREAMING}::test_layers_that_wait_for_a_pass_come_in_long_calls",),
    ),
    Mutant(
        "first-chunk-blamed",
        "Of neighbouring chunks that arrive together the first one is blamed for all.",
        "host/hillinfer/store/prefix.py",
        "self.chunks[(first + group) // CHUNK_GROUPS], what",
        "self.chunks[first // CHUNK_GROUPS], what",
        (f"{_STREAMING}::test_two_damaged_chunks_are_met_one_after_the_other",),
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
        "timetable-reads-nothing",
        "Doctor's timetable of a pass behind a stored prefix waits for no rows.",
        "host/hillinfer/doctor/profile.py",
        "        there += read\n",
        "        there += 0.0\n",
        (f"{_TESTS}/cli/test_doctor.py::test_doctor_profiles_a_plain_drive_when_asked_to",),
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
        "longer-sheets-are-taken",
        "A sheet that has more than a prompt wants is found without hashing what it has.",
        "host/hillinfer/store/extent.py",
        "        for slot in (0, 1) if min(groups) >= 0 else ():\n",
        "        for slot in (0, 1):\n",
        (
            f"{_TESTS}/store/test_lookup.py::"
            "test_a_sheet_that_has_more_than_is_wanted_is_looked_at_by_itself",
        ),
    ),
    Mutant(
        "layers-of-a-piece-lie-elsewhere",
        "Rows of the second layer that comes in a read are looked for in the first one's place.",
        "host/hillinfer/store/keys.py",
        "        places = block * len(self.chunks) + chunk - self.chunks.start\n",
        "        places = chunk - self.chunks.start\n",
        (f"{_STREAMING}::test_answers_are_those_of_a_cache_that_was_full_before",),
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
        "dropped-states-stay",
        "Memory of a cache that is dropped is not taken again.",
        "host/hillinfer/system/kept_memory.py",
        "memory = self._kept[size].pop().memory if self._kept[size] else None",
        "memory = None",
        (f"{_TESTS}/system/test_kept_memory.py::test_a_block_that_was_dropped_is_taken_again",),
    ),
    Mutant(
        "kept-memory-is-anybodys",
        "Memory is given to another while somebody still has it.",
        "host/hillinfer/system/kept_memory.py",
        "        weakref.finalize(block, self._give, memory).atexit = False\n",
        "        self._give(memory)\n",
        (f"{_TESTS}/system/test_kept_memory.py::test_a_block_that_was_dropped_is_taken_again",),
    ),
    Mutant(
        "memory-kept-without-end",
        "All memory that was dropped is kept.",
        "host/hillinfer/system/kept_memory.py",
        "if self._kept_bytes() + size > self._most:",
        "if not size:",
        (f"{_TESTS}/system/test_kept_memory.py::test_no_more_is_kept_than_is_allowed",),
    ),
    Mutant(
        "memory-kept-on-every-kernel",
        "Memory is given up and read into where reclaim may race with direct reads.",
        "host/hillinfer/system/kept_memory.py",
        'self._most = most_bytes if is_safe and hasattr(mmap, "MADV_FREE") else 0',
        "self._most = most_bytes",
        (
            f"{_TESTS}/system/test_kept_memory.py::"
            "test_nothing_is_kept_where_direct_reads_into_it_may_be_lost",
        ),
    ),
    Mutant(
        "writer-evicts-its-own",
        "What a prompt has just stored gives way to what it stores next.",
        "host/hillinfer/store/writer.py",
        "        self._room.keep([own.record.number for own in full])\n",
        "",
        (f"{_INTAKE}::test_a_writer_does_not_evict_what_it_just_stored",),
    ),
    Mutant(
        "writes-of-this-process-alone",
        "The cap on writes knows nothing of what was written before the store was opened.",
        "host/hillinfer/store/room.py",
        """                self._budget.resume(said)
                return said
""",
        """                return said
""",
        (f"{_INTAKE}::test_the_cap_holds_for_a_day_and_across_restarts",),
    ),
    Mutant(
        "what-was-seen-is-forgotten",
        "What an admission learned ends with the process.",
        "host/hillinfer/store/room.py",
        """            if said["name"] == self._name:
                made.resume(said["state"])
""",
        "            assert said\n",
        (f"{_INTAKE}::test_a_prompt_is_stored_when_it_is_seen_again",),
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
        "failed-read-not-counted",
        "A drive that fails while rows are read is neither counted nor told.",
        "host/hillinfer/store/prefix.py",
        """        except OSError as error:
            self._wrong(error)
            raise
""",
        """        except OSError:
            raise
""",
        (f"{_PROMPTS}::test_a_drive_that_fails_is_a_miss_or_an_error_where_that_is_wanted",),
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
        "extent-freed-under-its-readers",
        "An extent that could not be published is given back while a cache reads its rows there.",
        "host/hillinfer/store/writer.py",
        "if own.sheet.header.groups or not is_read(own.record.number)",
        "if own.sheet.header.groups or is_read(own.record.number)",
        (f"{_REUSE}::test_an_extent_that_is_read_stays",),
    ),
    Mutant(
        "tail-filled-twice",
        "Two caches of a process that found the same tail both go on in its extent.",
        "host/hillinfer/store/index.py",
        "AND groups = ?6 ",
        "AND ?6 > 0 ",
        (f"{_REUSE}::test_a_tail_is_filled_by_one",),
    ),
    Mutant(
        "publishing-undoes-a-drop",
        "A chunk that was dropped while it was filled is found again once it is published.",
        "host/hillinfer/store/index.py",
        "AND state IN ({State.WRITING:d}, {State.READY:d})",
        "AND state <> 0",
        (f"{_ROOM}::test_a_chunk_that_is_dropped_while_it_is_filled_stays_dropped",),
    ),
    Mutant(
        "writer-goes-on-behind-a-gap",
        "A writer whose chunk was dropped goes on with what nobody finds.",
        "host/hillinfer/store/writer.py",
        """            self._is_ended = True
            self._published = changed[done].record.position * CHUNK_GROUPS
""",
        "",
        (f"{_ROOM}::test_a_chunk_that_is_dropped_while_it_is_filled_stays_dropped",),
    ),
    Mutant(
        "second-cache-with-rows-of-its-own",
        "What another cache has open is opened once more.",
        "host/hillinfer/extents/shared_chunks.py",
        "return shared is not None and all(at in shared.groups for at in range(count))",
        "return False",
        (f"{_REUSE}::test_a_second_cache_reads_nothing_and_holds_nothing_twice",),
    ),
    Mutant(
        "sheets-read-at-every-lookup",
        "Headers and token numbers of a prompt that was found are read from the drive again.",
        "host/hillinfer/store/extent.py",
        "        found = [[] if known is None else [known] for known in self._known.get(places)]",
        "        found: list[list[tuple[int, Sheet]]] = [[] for _ in places]",
        (f"{_TESTS}/store/test_lookup.py::test_finding_again_reads_nothing",),
    ),
    Mutant(
        "killed-rebuild-stays",
        "What a process leaves that was killed while it made an index anew lies there for good.",
        "host/hillinfer/store/database.py",
        "            sweep(places.directory)\n",
        "",
        (
            f"{_TESTS}/store/test_lookup.py::test_processes_that_find_no_index_make_one_and_lose_nothing_of_each_other",
        ),
    ),
    Mutant(
        "index-not-looked-for-again",
        "A store that another process opens for the first time is one whose index is lost.",
        "host/hillinfer/store/database.py",
        "places.is_shared and not index.exists():",
        "places.is_shared:",
        (
            f"{_TESTS}/store/test_store_damage.py::test_an_index_that_another_process_makes_meanwhile_is_not_lost",
        ),
    ),
    Mutant(
        "rebuild-stops-at-another-shape",
        "Where extents of one model end, those of others behind them are lost with the index.",
        "host/hillinfer/store/maintenance.py",
        "            yield following\n            unit += following.span.units\n",
        "            yield following\n            unit += following.span.units\n        return\n",
        (
            f"{_TESTS}/store/test_lookup.py::test_extents_of_several_models_and_gaps_between_them_are_found_anew",
        ),
    ),
    Mutant(
        "rebuilt-worth-is-the-time",
        "What an index made anew holds outlives all that is stored after it.",
        "host/hillinfer/store/maintenance.py",
        "policy.worth(facts_of(header, now), age=0.0)",
        "policy.worth(facts_of(header, now), age=now)",
        (
            f"{_TESTS}/store/test_store_damage.py::test_what_an_index_made_anew_holds_does_not_outlive_all_that_comes",
        ),
    ),
    Mutant(
        "children-by-number-alone",
        "Quarantine looks for what follows by keys alone, and finds nothing of a chain.",
        "host/hillinfer/store/retirement.py",
        'JOIN below b ON c.parent_key = b.key "\n                "AND c.parent = b.id) "',
        'JOIN below b ON c.parent_key = b.id "\n                "AND c.parent = b.id) "',
        (f"{_TESTS}/store/test_lookup.py::test_what_follows_a_quarantined_chunk_goes_first",),
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
