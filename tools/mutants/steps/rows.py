# SPDX-License-Identifier: Apache-2.0
"""Faults of rows: stored, hot, read ahead, promoted and cut back."""

from __future__ import annotations

from mutants.mutant import Mutant

_TESTS = "tests/host"
_REUSE = f"{_TESTS}/reuse/test_opened_in_place.py"
_INTERRUPTED = (
    f"{_TESTS}/engine/test_prefetch_pipeline.py::"
    "test_an_interrupt_at_any_moment_leaves_no_block_taken"
)
_SLOW = f"{_TESTS}/hf/test_slow_promotions.py::test_late_promotions_change_nothing"
_GROWING = f"{_TESTS}/system/test_growing_tables.py"
_PENDING = f"{_TESTS}/kv/test_pending_hits.py"

ROWS: tuple[Mutant, ...] = (
    Mutant(
        "tail-written-while-promoted",
        "The tail of a group that is full is written again while its rows are being promoted.",
        "host/hillinfer/kv/rows.py",
        """            # The next token writes to the tail.
            self._pools.settle(layer)
""",
        "",
        (f"{_SLOW}[a group is filled-all]",),
    ),
    Mutant(
        "negative-overflow-alone",
        "Values below what FP16 holds are seen only beside others above it.",
        "host/hillinfer/kv/sequence.py",
        "float(least) >= -_FP16_MAX and float(most)",
        "float(most)",
        (f"{_TESTS}/kv/test_row_layout.py::test_overflow_to_one_side_alone_saturates_and_counts",),
    ),
    Mutant(
        "truncate-buffer-not-counted",
        "The rows that a truncate reads back are not counted in M0.",
        "host/hillinfer/kv/rows.py",
        "size = len(reopened) * (length - start) * self._shape.row_bytes",
        "size = 0",
        (f"{_TESTS}/engine/test_runtime_points.py::test_rows_that_a_truncate_reads_back_count",),
    ),
    Mutant(
        "observed-queries-without-end",
        "Observed queries that are no numbers are taken from a session.",
        "host/hillinfer/kv/saved_sequences.py",
        "if not np.isfinite(queries).all():",
        "if False:",
        (f"{_TESTS}/sessions/test_refused.py::test_observed_queries_that_are_no_numbers",),
    ),
    Mutant(
        "observed-queries-given-back-twice",
        "The memory of a sequence's observed queries is given back twice.",
        "host/hillinfer/kv/rows.py",
        "counted = sequence.hits.byte_count + self._observed_bytes",
        "counted = sequence.hits.byte_count + 2 * self._observed_bytes",
        (
            f"{_TESTS}/engine/test_runtime_points.py::test_as_many_sequences_fit_after_others_came_and_went",
        ),
    ),
    Mutant(
        "values-at-a-wrong-offset",
        "Torch takes values from one KV head too early in a row.",
        "host/hillinfer/kv/sequence.py",
        "return self._part(rows, self._items)",
        "return self._part(rows, self._items - self._head_dim)",
        (f"{_TESTS}/kv/test_row_layout.py::test_every_bit_pattern_survives",),
    ),
    Mutant(
        "freed-groups-not-forgotten",
        "Rows of groups that are free again stay hot.",
        "host/hillinfer/kv/rows.py",
        "self._pools.forget_group(group)",
        "pass",
        (f"{_TESTS}/hf/test_cache_operations.py::test_cropped_tokens_leave_nothing_behind",),
    ),
    Mutant(
        "last-row-of-a-freed-group-not-forgotten",
        "The last row of a group that is free again stays hot.",
        "host/hillinfer/kv/hot_pools.py",
        "pool.forget(group * GROUP_TOKENS, (group + 1) * GROUP_TOKENS)",
        "pool.forget(group * GROUP_TOKENS, (group + 1) * GROUP_TOKENS - 1)",
        (
            f"{_TESTS}/kv/test_hot_pools.py::test_forgetting_a_group_empties_its_slots_in_all_layers",
        ),
    ),
    Mutant(
        "forgotten-while-promoted",
        "Groups are forgotten while rows of theirs are being promoted.",
        "host/hillinfer/kv/hot_pools.py",
        """        self.promotions.end()
        for pool in self.layers:
            pool.forget(""",
        """        for pool in self.layers:
            pool.forget(""",
        (f"{_SLOW}[forks take turns-most]",),
    ),
    Mutant(
        "hits-overflow",
        "Hit counts begin anew where 2 bytes are full.",
        "host/hillinfer/kv/pool_policies.py",
        "np.uint16(MOST_HITS - hit), out=hits",
        "np.uint16(MOST_HITS), out=hits",
        (f"{_TESTS}/kv/test_pool_policies.py::test_a_tally_saturates",),
    ),
    Mutant(
        "rows-landed-by-a-thread-of-pythons-alone",
        "Rows read ahead wait for Python's lock, though nobody looks at their reads.",
        "host/hillinfer/kv/prefetch_buffer.py",
        "            if is_next and self._lands_at_once(",
        "            if is_next < 0 and self._lands_at_once(",
        (
            f"{_TESTS}/kv/test_prefetch_buffer.py::"
            "test_the_librarys_thread_brings_what_pythons_does",
        ),
    ),
    Mutant(
        "a-program-waits-for-rows-that-have-no-room",
        "A program does not end after a prompt broke off while rows of it waited for room.",
        "host/hillinfer/kv/prefetch_buffer.py",
        'name="hillinfer-land", daemon=True)',
        'name="hillinfer-land")',
        (f"{_TESTS}/hf/test_dropped_caches.py::test_a_program_ends_that_a_prompt_breaks_off_in",),
    ),
    Mutant(
        "rows-are-free-while-they-are-promoted",
        "An attention that breaks off gives up rows that a promotion still copies from.",
        "host/hillinfer/kv/pool_manager.py",
        "            if kind is not None and not issubclass(kind, GeneratorExit):\n",
        "            if False:\n",
        (
            f"{_TESTS}/engine/test_prefetch_pipeline.py::"
            "test_an_interrupt_while_a_promotion_begins_waits_for_it",
        ),
    ),
    Mutant(
        "blocks-that-an-interrupt-left-stay-taken",
        "Ctrl-C as attention ends leaves the blocks that it looked at taken for good.",
        "host/hillinfer/kv/prefetch_buffer.py",
        "            self._claimed.append(landed)\n",
        "",
        (_INTERRUPTED,),
    ),
    Mutant(
        "a-block-is-forgotten-before-it-is-free",
        "Ctrl-C while a block is freed leaves it taken for good.",
        "host/hillinfer/kv/prefetch_buffer.py",
        "(self.landing.give_all if landed.ahead is None else self.landing.free_all)(landed.blocks)",
        "while landed.blocks:\n            self.landing.give(landed.blocks.pop())",
        (_INTERRUPTED,),
    ),
    Mutant(
        "what-is-left-in-line-takes-a-turn",
        "Ctrl-C before the thread that reads is told leaves a set that takes the next one's call.",
        "host/hillinfer/kv/prefetch_buffer.py",
        "if (one := self._line.popleft()).landed.reading.set_running_or_notify_cancel():\n"
        "                    together.append(one)\n",
        "together.append(self._line.popleft())\n"
        "        together = [one for one in together "
        "if one.landed.reading.set_running_or_notify_cancel()]\n",
        (f"{_TESTS}/kv/test_prefetch_buffer.py",),
    ),
    Mutant(
        "rows-land-while-they-are-written",
        "Rows that are not on the drive yet are landed by the library's thread.",
        "host/hillinfer/kv/cold_store.py",
        "any(np.isin(groups, one).any() for one in writing)",
        "False",
        (
            f"{_TESTS}/kv/test_prefetch_buffer.py::"
            "test_rows_that_the_library_cannot_reach_are_read_by_python",
        ),
    ),
    Mutant(
        "errors-told-to-all-that-land-together",
        "What went wrong with the rows of one set read ahead is told of those beside it.",
        "host/hillinfer/kv/prefetch_buffer.py",
        """            self._fill([part])
        if len(parts) == 1:""",
        """            part.of.landed.reading.set_exception(error)
        if len(parts) == 1:""",
        (f"{_TESTS}/kv/test_prefetch_buffer.py::test_an_error_is_told_to_whom_it_concerns",),
    ),
    Mutant(
        "reads-ahead-do-not-give-way",
        "Reads ahead go on while attention waits for rows.",
        "host/hillinfer/drive/read_turns.py",
        "if rank[0] is IOClass.AHEAD and self.demands:",
        "if False:",
        (
            f"{_TESTS}/drive/test_read_turns.py"
            "::test_between_demands_of_one_reader_nobody_reads_ahead",
        ),
    ),
    Mutant(
        "turns-by-arrival",
        "Who came first has the drive next, whatever for.",
        "host/hillinfer/drive/read_turns.py",
        "return all(self._rank(one) >= rank for one in self._turns if _waits(one))",
        "return all(one.number >= turn.number for one in self._turns if _waits(one))",
        (
            f"{_TESTS}/drive/test_read_turns.py::test_whoever_demands_has_the_next_turn",
            f"{_TESTS}/drive/test_read_turns.py"
            "::test_four_classes_and_deadlines_order_those_who_wait",
        ),
    ),
    Mutant(
        "writers-starve",
        "A write that nobody waits for is never a spill.",
        "host/hillinfer/drive/read_turns.py",
        "if not self._hurries and waited < self._patience.slack_seconds:",
        "if not self._hurries:",
        (f"{_TESTS}/drive/test_read_turns.py::test_a_writer_never_starves",),
    ),
    Mutant(
        "reads-pass-queued-writes",
        "Rows are read before they are written.",
        "host/hillinfer/kv/cold_store.py",
        """        self.settle(wanted.layer, wanted.groups)
        return self.turns""",
        """        return self.turns""",
        (f"{_TESTS}/kv/test_cold_store.py::test_rows_that_are_still_being_written_are_waited_for",),
    ),
    Mutant(
        "run-over-base-and-own-file",
        "Groups of the base and of the own file are read as one run.",
        "host/hillinfer/kv/cold_store.py",
        "(np.diff(starts) != self._group_bytes) | (np.diff(files) != 0)",
        "np.diff(starts) != self._group_bytes",
        (f"{_TESTS}/kv/test_cold_store.py::test_frozen_groups_are_read_and_never_written",),
    ),
    Mutant(
        "base-from-the-first-group",
        "Rows of a session are read as if its groups were the first of all.",
        "host/hillinfer/drive/regions.py",
        "np.tile((groups - first) * self._group_bytes",
        "np.tile(groups * self._group_bytes",
        (
            f"{_TESTS}/kv/test_cold_store.py::test_rows_of_several_bases_and_of_the_own_files_come_together",
        ),
    ),
    Mutant(
        "rows-come-to-memory-that-nobody-counts",
        "Rows of a stored tail come to memory of their own while their checksums are taken.",
        "host/hillinfer/kv/opened_sequences.py",
        "memory = self._buffers.take_both()\n        at_once",
        "memory = RowBuffers(self._buffers.rows, self._buffers.row_bytes).take_both()\n"
        "        at_once",
        (f"{_REUSE}::test_rows_whose_checksums_are_taken_come_through_counted_buffers",),
    ),
    Mutant(
        "a-tail-has-checksums-of-its-beginning",
        "Where a stored tail comes in several reads, rows of the first are read again and again.",
        "host/hillinfer/kv/opened_sequences.py",
        "stored.prefix.read_groups(part.chunk, layer, first, rows)",
        "stored.prefix.read_groups(part.chunk, layer, 0, rows)",
        (f"{_REUSE}::test_rows_whose_checksums_are_taken_come_through_counted_buffers[12]",),
    ),
    Mutant(
        "rows-of-a-store-with-other-checksums",
        "Checksums of rows that a store has are taken for others.",
        "host/hillinfer/kv/opened_sequences.py",
        "shadow.sums[: part.count * GROUP_TOKENS]",
        "0 * shadow.sums[: part.count * GROUP_TOKENS]",
        (f"{_REUSE}::test_a_flipped_bit_reaches_no_token",),
    ),
    Mutant(
        "base-closed-under-its-forks",
        "The files of a session are closed while a cache has rows in them.",
        "host/hillinfer/drive/regions.py",
        "if not region.in_use and not region.holds]",
        "if not region.holds]",
        (f"{_TESTS}/sessions/test_several_sessions.py::test_caches_that_are_closed_in_any_order",),
    ),
    Mutant(
        "sums-of-a-base-at-the-first-group",
        "Checksums of a session's rows are taken for those of the first rows of all.",
        "host/hillinfer/kv/cold_store.py",
        "                start = first * GROUP_TOKENS\n",
        "                start = 0\n",
        (
            f"{_TESTS}/sessions/test_several_sessions.py::test_sessions_and_a_new_cache_that_take_turns",
        ),
    ),
    Mutant(
        "last-token-of-a-cut-resume",
        "The last row of a session that is resumed in part is not read.",
        "host/hillinfer/kv/opened_sequences.py",
        "open_rows = np.arange(groups * GROUP_TOKENS, tokens)",
        "open_rows = np.arange(groups * GROUP_TOKENS, tokens - 1)",
        (f"{_TESTS}/sessions/test_prefix.py::test_what_is_read_on_equals_an_unbroken_run",),
    ),
    Mutant(
        "hits-of-an-idle-document-stay",
        "Hits of a sequence that takes no steps never fade.",
        "host/hillinfer/kv/hot_pools.py",
        "is_other, one.fades = fades != one.fades or sequence in noted, fades",
        "is_other, one.fades = fades < one.fades or sequence in noted, fades",
        (f"{_PENDING}::test_hits_of_an_idle_sequence_fade_by_rounds_of_the_others",),
    ),
    Mutant(
        "hits-fade-between-turns",
        "Hits fade while sequences take turns by single steps.",
        "host/hillinfer/kv/hot_pools.py",
        "max(0, rounds - _GRACE_ROUNDS) // _FADING_ROUNDS",
        "rounds",
        (f"{_PENDING}::test_no_hits_fade_while_sequences_take_turns_by_single_steps",),
    ),
    Mutant(
        "hits-that-fade-change-untold",
        "Hits of an idle sequence change before the pool was told how they had faded.",
        "host/hillinfer/kv/hot_pools.py",
        "            if one.of() is sequence:\n                #",
        "            if sequence in self._pending[layer]:\n                #",
        (f"{_PENDING}::test_pools_told_late_hold_what_pools_told_at_once_hold",),
    ),
    Mutant(
        "hits-that-were-tallied-stay-untold",
        "What hits became that nobody noted the pool hears or not, by when it was told of others.",
        "host/hillinfer/kv/hot_pools.py",
        "one.fades = -1",
        "pass",
        (f"{_PENDING}::test_pools_told_late_hold_what_pools_told_at_once_hold",),
    ),
    Mutant(
        "shared-rows-have-hits-of-who-faded",
        "Of shared rows the hits of a sequence that faded count, and not those noted last.",
        "host/hillinfer/kv/hot_pools.py",
        "if is_other or any(sequence.shares_groups(before) for before, _ in changed):",
        "if is_other:",
        (f"{_PENDING}::test_of_shared_rows_the_hits_noted_last_count_whoever_fades",),
    ),
    Mutant(
        "hits-come-back-with-another-document",
        "Hits of an idle document that have faded come back when one more takes a step.",
        "host/hillinfer/kv/hot_pools.py",
        "return max(self.rounds, (clock - self.at) // others) if others else self.rounds",
        "return (clock - self.at) // others if others else 0",
        (f"{_PENDING}::test_hits_that_have_faded_do_not_come_back_when_another_document_steps",),
    ),
    Mutant(
        "steps-of-closed-documents-make-rounds-of-others",
        "Steps of a document that is closed become rounds of those that are left.",
        "host/hillinfer/kv/hot_pools.py",
        "one.rounds, one.at = max(one.rounds, rounds), clock - rounds * others",
        "pass",
        (f"{_PENDING}::test_a_document_that_is_closed_takes_part_in_no_round",),
    ),
    Mutant(
        "closed-documents-take-part-in-rounds",
        "A sequence that was released stays one of those whose steps make a round.",
        "host/hillinfer/kv/rows.py",
        "            self._pools.hits.forget(sequence)\n",
        "",
        (f"{_TESTS}/kv/test_reading_in_place.py::test_rounds_are_those_of_open_sequences",),
    ),
    Mutant(
        "sums-that-did-not-grow-stay-memory",
        "Checksums of some layers stay long where the system had no memory for those of others.",
        "host/hillinfer/drive/checksums.py",
        "self._tables[layer] = own.cut(self._tables[layer], self._covered_rows)",
        "pass",
        (f"{_GROWING}::test_sums_that_the_system_has_no_memory_for_are_not_counted",),
    ),
    Mutant(
        "accountant-holds-who-shares-it",
        "Whoever tells the accountant how many sequences share it is held by it.",
        "host/hillinfer/kv/rows.py",
        "sum(one.band.start == 0 for one in sequences)",
        "sum(one.band.start == 0 for one in self.sequences)",
        (f"{_TESTS}/kv/test_accountant.py::test_an_accountant_holds_no_manager_of_sequences",),
    ),
    Mutant(
        "sums-that-move-counted-once",
        "While checksums move nobody counts the place they leave.",
        "host/hillinfer/drive/checksums.py",
        "self._accountant.taking(Part.OTHER, added, twice)",
        "self._accountant.taking(Part.OTHER, added)",
        (f"{_GROWING}::test_what_moves_is_counted_twice_while_it_does",),
    ),
    Mutant(
        "rows-of-this-step-demoted",
        "Rows that a step selected may be demoted before it has read them.",
        "host/hillinfer/kv/pool_manager.py",
        "entry.layer, sequence, candidates, entry.step, entry.step, note",
        "entry.layer, sequence, candidates, entry.step, entry.step + 1, note",
        (
            f"{_TESTS}/kv/test_pool_manager.py::test_what_a_step_selected_gives_way_in_the_next_at_the_earliest",
        ),
    ),
    Mutant(
        "pool-looked-at-too-early-ahead",
        "What is read ahead is chosen while rows are being promoted.",
        "host/hillinfer/kv/gather.py",
        """        self._pools.wait_for(layer)
        rows = sequence.rows(settled :=""",
        """        rows = sequence.rows(settled :=""",
        (f"{_SLOW}[rows are read ahead-most]",),
    ),
    Mutant(
        "statistics-retaken-at-zero-codes",
        "A segment that was cut to no codes takes its statistics anew.",
        "host/hillinfer/kv/sequence_shadows.py",
        "            if statistics is None:\n                before",
        "            if statistics is None or not coded:\n                before",
        (
            f"{_TESTS}/devices/test_device_shadows.py::test_a_device_that_fails_is_reported_and_no_output_changes[read-0]",
        ),
    ),
    Mutant(
        "who-shares-a-budget-is-not-named",
        "A budget that ends in the middle of use does not name who else has of it.",
        "host/hillinfer/kv/rows.py",
        "sum(one.band.start == 0 for one in sequences)",
        "0",
        (f"{_TESTS}/hf/test_engine.py::test_a_budget_that_ends_in_the_middle_names_who_shares_it",),
    ),
)
