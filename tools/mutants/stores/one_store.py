# SPDX-License-Identifier: Apache-2.0
"""Faults of the store on a drive: index, extents, eviction, upkeep."""

from __future__ import annotations

from mutants.mutant import Mutant

_TESTS = "tests/host"
_REUSE = f"{_TESTS}/reuse/test_opened_in_place.py"
_INTAKE = "tests/host/store/test_intake.py"
_PROMPTS = "tests/host/reuse/test_stored_prompts.py"
_CODES = f"{_TESTS}/reuse/test_stored_codes.py"
_VALUES = "host/hillinfer/extents/stored_values.py"
_ROOM = "tests/host/store/test_room.py"
_STREAMING = f"{_TESTS}/reuse/test_streaming.py"

ONE_STORE: tuple[Mutant, ...] = (
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
        "timetable-reads-nothing",
        "Doctor's timetable of a pass behind a stored prefix waits for no rows.",
        "host/hillinfer/doctor/profile.py",
        "        there += read\n",
        "        there += 0.0\n",
        (f"{_TESTS}/cli/test_doctor.py::test_doctor_profiles_a_plain_drive_when_asked_to",),
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
)
