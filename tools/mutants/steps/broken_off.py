# SPDX-License-Identifier: Apache-2.0
"""Faults in what is there once something broke off, or went on for long."""

from __future__ import annotations

from mutants.mutant import Mutant

_DROPPED = "tests/host/hf/test_dropped_caches.py"
_THREADS = "tests/host/hf/test_threads.py"
_USED = "tests/host/hf/test_used_caches.py"
_OTHERS = f"{_USED}::test_no_cache_has_rows_of_one_that_an_interrupt_left_half_freed"
_LEFT = f"{_USED}::test_the_next_use_frees_what_an_interrupt_left_of_a_closed_cache"
_LOST = "tests/host/faults/test_lost_rows.py"
_APPENDS = "tests/host/kv/test_broken_appends.py"
_TABLES = "tests/host/system/test_growing_tables.py"
_STEPS = "tests/host/engine/test_broken_steps.py"
_TAKEN_AGAIN = "test_a_step_that_broke_off_making_room_is_taken_again_as_it_was"
_INTERRUPTED = "test_an_interrupt_leaves_rows_and_buffers_as_they_were"

BROKEN_OFF = (
    Mutant(
        "a-cache-collected-within-its-store",
        "A cache's engine is closed where the garbage collector comes, in the middle of its store.",
        "host/hillinfer/hf/engine.py",
        "startswith(RUNTIME_THREADS) or _is_within_a_store():",
        "startswith(RUNTIME_THREADS):",
        (f"{_DROPPED}::test_a_last_cache_that_is_collected_within_its_store_stops_nobody",),
    ),
    Mutant(
        "rings-that-go-before-their-readers",
        "At the end of a program rings are let go while threads still read in them.",
        "host/hillinfer/drive/engine_table.py",
        "        self.close.atexit = False\n",
        "",
        (
            "tests/host/drive/test_read_engines.py::"
            "test_a_program_may_end_while_a_thread_reads_in_a_ring",
        ),
    ),
    Mutant(
        "threads-looked-at-by-several-at-once",
        "Threads that look at others at once leave the garbage collector off for good.",
        "host/hillinfer/hf/engine.py",
        "    with _LOOKING:\n",
        "    if thread:\n",
        (f"{_THREADS}::test_threads_that_look_at_others_at_once_leave_garbage_collected",),
    ),
    Mutant(
        "an-interrupt-before-garbage-is-collected-again",
        "Ctrl-C while another thread is looked at leaves the garbage collector off for good.",
        "host/hillinfer/hf/engine.py",
        "        try:\n            gc.disable()\n",
        "        gc.disable()\n        try:\n",
        (
            f"{_THREADS}::"
            "test_an_interrupt_while_another_thread_is_looked_at_leaves_garbage_collected",
        ),
    ),
    Mutant(
        "numbers-given-before-their-rows-are-forgotten",
        "Ctrl-C while a cache is freed leaves hot rows by numbers that the next cache gets.",
        "host/hillinfer/kv/rows.py",
        "        given = self._groups.of_one_owner(self._going)\n",
        "        given = [one for one in self._going if self._groups.give(one)]\n"
        "        self._going.clear()\n",
        (f"{_OTHERS}[crop]",),
    ),
    Mutant(
        "a-cache-half-freed-for-good",
        "What Ctrl-C leaves of a closed cache is counted until the last one is closed.",
        "host/hillinfer/hf/batch.py",
        "        self._gone = _distinct([*self._gone, *self._sequences])\n",
        "        self._gone = _distinct([*self._sequences])\n",
        (f"{_LEFT}[release]",),
    ),
    Mutant(
        "a-fork-broken-off-that-keeps-its-rows",
        "Rows of a fork that Ctrl-C broke off are counted until the last cache is closed.",
        "host/hillinfer/hf/cache.py",
        "                batch.clear()\n                raise\n",
        "                raise\n",
        (f"{_USED}::test_rows_of_a_fork_that_an_interrupt_broke_off_are_freed",),
    ),
    Mutant(
        "a-shadow-that-was-not-made-is-counted",
        "A shadow is counted for good where Ctrl-C, or want of memory, keeps it from being made.",
        "host/hillinfer/shadow/memory.py",
        "        with self._accountant.taking(Part.SHADOW, self._store.slot_bytes):\n"
        "            return self._store.view(own.arena.take())\n",
        "        self._accountant.take(Part.SHADOW, self._store.slot_bytes)\n"
        "        return self._store.view(own.arena.take())\n",
        (f"{_USED}::test_a_shadow_that_an_interrupt_kept_from_being_made_is_not_counted",),
    ),
    Mutant(
        "a-sequence-freed-twice",
        "A sequence that was freed when Ctrl-C came is freed once more.",
        "host/hillinfer/kv/rows.py",
        "        if sequence not in self.sequences:\n            return\n",
        "",
        (f"{_LEFT}[release]",),
    ),
    Mutant(
        "one-failed-end-for-all",
        "The first prompt that a strict store cannot end leaves all others without an end.",
        "host/hillinfer/extents/shared_chunks.py",
        "                ends.callback(end)\n",
        "                end()\n",
        ("tests/host/reuse/test_ends_of_recordings.py",),
    ),
    Mutant(
        "a-sequence-left-by-an-interrupt",
        "A sequence that was to compute lost rows again stays where Ctrl-C comes before it does.",
        "host/hillinfer/kv/opened_sequences.py",
        "            self._rows.release(again)\n",
        "",
        (f"{_LOST}::test_an_interrupt_before_rows_are_computed_again_leaves_no_sequence",),
    ),
    Mutant(
        "open-group-lost-to-an-error",
        "The open group is replaced before what may fail is done.",
        "host/hillinfer/kv/rows.py",
        "            promoting, elsewhere = None, None\n",
        "            promoting, elsewhere = None, None\n"
        "            if done + taken == tokens:\n"
        "                tail[:] = buffer[taken + filled - GROUP_TOKENS : taken + filled]\n",
        (f"{_APPENDS}::test_an_error_leaves_the_open_group_as_it_was",),
    ),
    Mutant(
        "open-group-lost-to-an-interrupt",
        "What was written is looked for in the open group, where others come meanwhile.",
        "host/hillinfer/kv/rows.py",
        "sequence.set_length(layer, length, length - is_last * GROUP_TOKENS)",
        "sequence.set_length(layer, length, sequence.held_starts[layer])",
        (f"{_APPENDS}::{_INTERRUPTED}[pack-110]",),
    ),
    Mutant(
        "buffer-lost-to-an-interrupt",
        "A buffer that an interrupt left unsent is given to nobody any more.",
        "host/hillinfer/kv/rows.py",
        "        return self._buffers[self._is_sent.index(False)]\n",
        "        which = self._is_sent.index(False)\n"
        "        self._is_sent[which] = True\n"
        "        return self._buffers[which]\n",
        (f"{_APPENDS}::{_INTERRUPTED}[append-92]",),
    ),
    Mutant(
        "room-told-before-it-is-there",
        "A step that breaks off while it makes room leaves the library to write behind it.",
        "host/hillinfer/engine/decode_step.py",
        "        selected = SelectedRows(self._sets, room, longest)\n",
        "        self._room, self._longest = room, longest\n"
        "        selected = SelectedRows(self._sets, room, longest)\n",
        (f"{_STEPS}::{_TAKEN_AGAIN}[call]",),
    ),
    Mutant(
        "asked-before-there-is-room",
        "A step that breaks off while it makes room is taken for one that has made it.",
        "host/hillinfer/engine/decode_step.py",
        "        self._selection.make_room(length)\n        # First",
        "        self._selection.make_room(length)\n"
        "        self._both.tell(asked, 0, wanted)\n        # First",
        (f"{_STEPS}::{_TAKEN_AGAIN}[return]",),
    ),
    Mutant(
        "slots-without-memory-counted",
        "Tables of slots that the system had no memory for are counted in M0 for good.",
        "host/hillinfer/kv/hot_pools.py",
        "            with self._accountant.taking(Part.OTHER, added, old):\n"
        "                pool.cover(grown)\n",
        "            self._accountant.take(Part.OTHER, added + old)\n"
        "            pool.cover(grown)\n"
        "            self._accountant.give(Part.OTHER, old)\n",
        (f"{_TABLES}::test_slots_of_rows_that_the_system_has_no_memory_for_are_not_counted",),
    ),
    Mutant(
        "slots-that-grew-not-counted",
        "What of tables of slots grew before one did not is in no account.",
        "host/hillinfer/kv/hot_pools.py",
        "            added = max(0, grown * pool.slot_of_row.itemsize - old)\n",
        "            added = max(0, grown * pool.slot_of_row.itemsize - old)\n"
        "            added = len(self.layers) * added if pool is self.layers[-1] else 0\n",
        (f"{_TABLES}::test_slots_of_rows_that_the_system_has_no_memory_for_are_not_counted",),
    ),
    Mutant(
        "hits-without-memory-counted",
        "A table of hits that the system had no memory for is counted in M0 for good.",
        "host/hillinfer/kv/hot_pools.py",
        "            with self._accountant.taking(Part.OTHER, added, old):\n"
        "                hits.cover(layer, tokens)\n",
        "            self._accountant.take(Part.OTHER, added + old)\n"
        "            hits.cover(layer, tokens)\n"
        "            self._accountant.give(Part.OTHER, old)\n",
        (f"{_TABLES}::test_hits_that_the_system_has_no_memory_for_are_not_counted",),
    ),
    Mutant(
        "rows-of-a-step-without-memory-counted",
        "Rows of a step that the system had no memory for are counted in M0 for good.",
        "host/hillinfer/native/split.py",
        "            with self._accountant.taking(Part.STAGING, more):\n"
        "                self._memory = np.zeros((rows, self._row_bytes), np.uint8)\n",
        "            self._accountant.take(Part.STAGING, more)\n"
        "            self._memory = np.zeros((rows, self._row_bytes), np.uint8)\n",
        (f"{_TABLES}::test_rows_of_a_step_that_the_system_has_no_memory_for_are_not_counted",),
    ),
    Mutant(
        "as-many-files-as-two-bytes-count",
        "An engine that has had 32,768 files of others opens no more.",
        "host/hillinfer/drive/regions.py",
        "files = np.full((layers, room), OWN_FILE, np.int32)",
        "files = np.full((layers, room), OWN_FILE, np.int16)",
        (
            "tests/host/drive/test_placed_groups.py::"
            "test_files_are_told_apart_however_many_came_and_went",
        ),
    ),
    Mutant(
        "budget-thought-to-be-raised",
        "A budget that follows the context is thought to be raised before it is.",
        "host/hillinfer/engine/budget_growth.py",
        "        covered = round_up(tokens, GROWTH_TOKENS)\n",
        "        self.covered = covered = round_up(tokens, GROWTH_TOKENS)\n",
        (
            "tests/host/engine/test_following_budget.py::"
            "test_a_budget_that_was_not_raised_is_raised_by_the_next_token",
        ),
    ),
)
