# SPDX-License-Identifier: Apache-2.0
"""Faults of passes and batches, and of what they count."""

from __future__ import annotations

from mutants.mutant import Equivalent, Mutant

_TESTS = "tests/host"
_REUSE = f"{_TESTS}/reuse/test_opened_in_place.py"
_SLOW = f"{_TESTS}/hf/test_slow_promotions.py::test_late_promotions_change_nothing"
_GROWING = f"{_TESTS}/system/test_growing_tables.py"

PASSES: tuple[Mutant, ...] = (
    Mutant(
        "cache-of-another-model",
        "A cache goes on with another attached model, whose rows mean something else.",
        "host/hillinfer/hf/cache_pass.py",
        "if self._model is not None and self._model.model() is not model:",
        "if self._model is None and model is None:",
        (f"{_TESTS}/hf/test_untold_passes.py::test_a_cache_of_another_attached_model",),
    ),
    Mutant(
        "pads-not-cut",
        "A crop that reaches into padding leaves it as long as it was.",
        "host/hillinfer/hf/batch.py",
        "self._pads = [min(pad, length) for pad in self._pads]",
        "self._pads = list(self._pads)",
        (f"{_TESTS}/hf/test_cache_operations.py::test_a_crop_that_reaches_into_padding_cuts_it",),
    ),
    Mutant(
        "padding-of-copies-shifted",
        "Where rows have copies, the padding of one row is taken for that of the next.",
        "host/hillinfer/hf/batch.py",
        "pads = self._pads[::copies] if",
        "pads = self._pads[: len(ids)] if",
        (
            f"{_TESTS}/hf/test_ways_of_decoding.py::test_copies_of_a_padded_batch_keep_their_padding",
        ),
    ),
    Mutant(
        "ids-of-copies-shifted",
        "Where rows have copies, each is compared with the prompt of another row.",
        "host/hillinfer/hf/batch.py",
        "ids[i // copies, own:past]",
        "ids[i % len(ids), own:past]",
        (
            f"{_TESTS}/hf/test_ways_of_decoding.py::test_copies_of_a_padded_batch_keep_their_padding",
        ),
    ),
    Mutant(
        "observed-queries-not-verified",
        "Damage to a session's observed queries is not noticed.",
        "host/hillinfer/sessions/opening.py",
        "if digest != self.manifest.digests[file.name]:",
        "if file.name != 'observed.bin' and digest != self.manifest.digests[file.name]:",
        (f"{_TESTS}/sessions/test_refused.py::test_every_damage_to_observed_queries",),
    ),
    Mutant(
        "golden-kept-one-fewer",
        "The golden model keeps one sink fewer.",
        "sw_model/hillinfer_model/selection.py",
        "    head = min(sinks, length)",
        "    head = min(max(0, sinks - 1), length)",
        ("tests/sw_model/test_selection.py::test_kept_positions",),
    ),
    Mutant(
        "golden-kept-one-more",
        "The golden model keeps one recent token more.",
        "sw_model/hillinfer_model/selection.py",
        "tail = max(length - recent, head)",
        "tail = max(length - recent - 1, head)",
        ("tests/sw_model/test_selection.py::test_kept_positions",),
    ),
    Mutant(
        "rows-ahead-counted-in-bytes-of-groups",
        "Where kernels can read keys from rows, as many rows are read ahead as blocks have bytes.",
        "host/hillinfer/engine/opening.py",
        "            places = RowPlaces(\n",
        """            ahead = ahead // size * (GROUP_TOKENS * shape.row_bytes)
            places = RowPlaces(
""",
        (
            f"{_TESTS}/attention/test_look_ahead.py::"
            "test_behind_rows_that_stay_hot_no_more_is_looked_at_than_eight_times_what_lands[1]",
        ),
    ),
    Mutant(
        "merge-takes-the-maximum",
        "The merge of two blocks takes the larger log-sum for the log of both.",
        "host/hillinfer/attention/kernels.py",
        "torch.logaddexp(old, log_sum)",
        "torch.maximum(old, log_sum)",
        (f"{_TESTS}/attention/test_softmax_merge.py",),
    ),
    Mutant(
        "session-of-another-model",
        "A session is loaded whatever model and settings it was saved with.",
        "host/hillinfer/hf/attach.py",
        "        manifest.fingerprint.check(found, saved.directory)\n",
        "",
        (f"{_TESTS}/sessions/test_refused.py::test_another_model_or_shadow",),
    ),
    Mutant(
        "truncate-ignores-padding",
        "A crop of a padded batch cuts too few tokens of the rows that are padded.",
        "host/hillinfer/hf/batch.py",
        "max(0, length - pads[id(sequence)])",
        "max(0, length)",
        (f"{_TESTS}/hf/test_cache_operations.py::test_cropping_a_padded_batch",),
    ),
    Mutant(
        "a-demand-is-left-for-good",
        "Ctrl-C as a demand is taken back keeps everybody from reading ahead.",
        "host/hillinfer/engine/runtime.py",
        "            turns.forget_demands()\n",
        "            pass\n",
        (f"{_TESTS}/engine/test_cold_calls.py",),
    ),
    Mutant(
        "what-nobody-noted-is-not-waited-for",
        "Ctrl-C as a layer is announced leaves a thread scoring tables that change.",
        "host/hillinfer/engine/selection.py",
        "        if self._is_announcing:\n",
        "        if False:\n",
        (f"{_TESTS}/engine/test_prefetch_pipeline.py",),
    ),
    Mutant(
        "score-tuples-not-counted",
        "Memory of scores is not counted in M0.",
        "host/hillinfer/engine/selection.py",
        "self._accountant.take(Part.OTHER, needed - self._score_bytes)",
        "pass",
        (f"{_TESTS}/engine/test_runtime_points.py::test_scores_of_a_step_count",),
    ),
    Mutant(
        "overflow-of-values-not-counted",
        "Values too large for FP16 are not counted, only keys.",
        "host/hillinfer/hf/cache_pass.py",
        "sum(overflows for _, overflows in own)",
        "own[0][1]",
        (
            f"{_TESTS}/hf/test_same_as_ordinary_cache.py::test_fp32_values_beyond_fp16_are_saturated_and_counted",
        ),
    ),
    Mutant(
        "pads-in-old-order",
        "Padding stays where it was when beams are reordered.",
        "host/hillinfer/hf/batch.py",
        "pads, made = [self._pads[i] for i in indices],",
        "pads, made = self._pads[: len(indices)],",
        (
            f"{_TESTS}/hf/test_ways_of_decoding.py::test_copies_of_a_padded_batch_keep_their_padding",
        ),
    ),
    Mutant(
        "selected-rows-are-stored",
        "Rows that were made under selection go to the store, too.",
        "host/hillinfer/hf/cache_pass.py",
        "        if plan.tokens == 1 or self.takes_one_set:\n            # Its rows",
        "        if plan.tokens == 0:\n            # Its rows",
        (f"{_REUSE}::test_rows_made_under_selection_are_not_stored",),
    ),
    Mutant(
        "another-file-in-a-sessions-place",
        "A file of a session is opened again whatever has come in its place.",
        "host/hillinfer/sessions/session_file.py",
        "if found != self.identity:",
        "if False:",
        (
            f"{_TESTS}/sessions/test_several_sessions.py::test_thirty_sessions_of_a_deep_model_need_few_descriptors",
        ),
    ),
    Mutant(
        "session-of-another-shadow-joins",
        "A session joins caches that code keys otherwise.",
        "host/hillinfer/hf/attach.py",
        "            _check_shadow(saved, engine)\n",
        "",
        (
            f"{_TESTS}/sessions/test_several_sessions.py::test_a_session_with_another_shadow_than_the_caches_that_are_open",
        ),
    ),
    Mutant(
        "rows-part-by-their-first-token",
        "Rows of a batch part only where their first new tokens differ.",
        "host/hillinfer/hf/batch.py",
        "key = (id(sequence), tuple(new_ids[i]))",
        "key = (id(sequence), tuple(new_ids[i][:1]))",
        (
            f"{_TESTS}/hf/test_ways_of_decoding.py::test_a_batch_that_shares_a_beginning_stores_it_once",
        ),
    ),
    Mutant(
        "steps-together-counted-by-no-cache",
        "What a cache's rows do in steps of several caches is missing in its statistics.",
        "host/hillinfer/hf/engine.py",
        "            part.credit()\n",
        "            pass\n",
        (
            f"{_TESTS}/hf/test_joined_caches.py::test_each_cache_counts_its_own_rows_of_steps_together",
        ),
    ),
    Mutant(
        "steps-together-one-row-at-a-time",
        "Caches that take a step together attend one after the other, each in calls of its own.",
        "host/hillinfer/hf/joined_cache.py",
        "        self._together = {row: lone[row] for row in taken}",
        "        self._together = {}",
        (
            f"{_TESTS}/hf/test_step_depth.py::test_a_step_of_joined_caches_makes_no_call_for_each_row",
        ),
    ),
    Mutant(
        "tokens-of-steps-together-of-the-first-row",
        "A row of a step together is counted with the length of the first one.",
        "host/hillinfer/engine/joined_step.py",
        "sequence, length, table = part.sequence, part.past + 1,",
        "sequence, length, table = part.sequence, self.parts[0].past + 1,",
        (
            f"{_TESTS}/engine/test_joined_step.py::"
            "test_rows_together_have_the_bits_sets_and_counts_of_rows_alone",
        ),
    ),
    Mutant(
        "joined-at-a-groups-end",
        "A row whose token fills its group is stored with others, and does not go to the drive.",
        "host/hillinfer/engine/joined_step.py",
        "past % GROUP_TOKENS < GROUP_TOKENS - 1",
        "past % GROUP_TOKENS < GROUP_TOKENS",
        (
            f"{_TESTS}/engine/test_joined_step.py::test_rows_whose_group_begins_or_ends_go_by_themselves",
        ),
    ),
    Mutant(
        "statistics-of-half-a-step",
        "Statistics are taken in the middle of another thread's step.",
        "host/hillinfer/hf/engine.py",
        "        if self.turns.is_own:\n            return self._statistics(family)",
        "        if True:\n            return self._statistics(family)",
        (f"{_TESTS}/hf/test_threads.py::test_an_attachment_tells_of_whole_steps_of_other_threads",),
    ),
    Mutant(
        "tables-move-with-each-growth",
        "A table that grows is copied each time, and its old place stays in the heap.",
        "host/hillinfer/system/growing_tables.py",
        "size = (1 << (pages - 1).bit_length()) * mmap.PAGESIZE",
        "size = pages * mmap.PAGESIZE",
        (f"{_GROWING}::test_tables_move_a_few_times_and_not_with_each_growth",),
    ),
    Mutant(
        "slots-that-were-given-up-stay-memory",
        "Pages behind the last entry of a table that was cut stay.",
        "host/hillinfer/system/growing_tables.py",
        "        if self._memory is not None and start < stop:",
        "        if self._memory is None and start < stop:",
        (f"{_GROWING}::test_room_is_no_memory_and_what_is_cut_is_none_any_more",),
    ),
    Mutant(
        "growth-that-was-broken-off-forgets-entries",
        "A table that moved and was not taken, because of an interrupt, is empty from then on.",
        "host/hillinfer/system/growing_tables.py",
        "if count and before.ctypes.data != self._room.ctypes.data:",
        "if count and before.ctypes.data == self._room.ctypes.data:",
        (f"{_GROWING}::test_a_growth_that_nobody_took_is_made_again",),
    ),
    Mutant(
        "tables-without-address-space-end",
        "A table that finds no address space for twice as many entries does not grow.",
        "host/hillinfer/system/growing_tables.py",
        "        except OSError:\n            room",
        "        except KeyError:\n            room",
        (f"{_GROWING}::test_where_no_address_space_is_left_the_heap_has_the_entries",),
    ),
    Mutant(
        "tables-that-did-not-grow-counted",
        "Tables that the system had no memory for stay counted.",
        "host/hillinfer/memory_budget.py",
        "            self.give(part, byte_count + passing)\n",
        "",
        (
            f"{_GROWING}::test_sums_that_the_system_has_no_memory_for_are_not_counted",
            f"{_GROWING}::test_codes_tables_that_the_system_has_no_memory_for_are_not_counted",
        ),
    ),
    Mutant(
        "tables-of-codes-that-did-not-grow-counted",
        "Tables of codes that the system had no memory for stay counted.",
        "host/hillinfer/shadow/values.py",
        "            with self._accountant.taking(Part.OTHER, more):\n",
        "            self._accountant.take(Part.OTHER, more)\n            if True:\n",
        (f"{_GROWING}::test_codes_tables_that_the_system_has_no_memory_for_are_not_counted",),
    ),
    Mutant(
        "pool-looked-at-too-early",
        "A step looks for hot rows while some are being promoted.",
        "host/hillinfer/engine/queries.py",
        """        self._pools.settle(layer)
        if length > len(""",
        """        if length > len(""",
        (f"{_SLOW}[rows are selected again-most]",),
    ),
    Mutant(
        "shadows-stay-beside-a-device",
        "DRAM keeps its copy of every shadow that a device holds.",
        "host/hillinfer/shadow/memory.py",
        "        if end + RECENT_TOKENS <= tokens:",
        "        if end + RECENT_TOKENS <= 0:",
        (
            f"{_TESTS}/devices/test_device_memory.py::test_the_shadow_of_a_long_prompt_does_not_pile_up_in_dram",
        ),
    ),
    Mutant(
        "small-weights-of-a-merge-lost",
        "A block that weighs less than a thousandth adds nothing to a merge.",
        "host/hillinfer/attention/kernels.py",
        "weight = torch.sigmoid(log_sum - old)",
        "weight = torch.sigmoid(log_sum - old).where(log_sum - old < 6.9, 1)",
        (
            f"{_TESTS}/attention/test_softmax_merge.py::test_a_block_that_weighs_a_thousandth_counts",
        ),
    ),
    Mutant(
        "caches-of-an-attachment-that-is-off",
        "An attachment that is off its model makes caches, which nothing can go on with.",
        "host/hillinfer/hf/features.py",
        "        if not self.attached:\n            raise CacheUseError(",
        "        if False:\n            raise CacheUseError(",
        (
            f"{_TESTS}/hf/test_untold_passes.py::test_an_attachment_that_is_off_its_model_makes_no_caches",
        ),
    ),
)

EQUIVALENT: tuple[Equivalent, ...] = (
    Equivalent(
        "pad-not-in-key",
        "Rows of the same ids share a sequence though they are padded differently.",
        "Of the same ids one row takes more tokens than the other then, and rows part in the same "
        "call as soon as what they bring differs (`Batch._part`); two rows that are padding from "
        "end to end are padded alike.",
    ),
)
