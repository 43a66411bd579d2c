# SPDX-License-Identifier: Apache-2.0
"""Faults of a store that several processes have: what one of them takes from all."""

from __future__ import annotations

from mutants.mutant import Mutant

_SHARED = "tests/host/store/test_shared_stores.py"
_INDEX = "host/hillinfer/store/index.py"
_DATABASE = "host/hillinfer/store/database.py"

SHARED_STORES: tuple[Mutant, ...] = (
    Mutant(
        "an-index-that-cannot-be-opened-is-made-anew",
        "An index that cannot be opened for want of descriptors is taken for a broken one.",
        _DATABASE,
        "        if not is_broken(error.__cause__):\n",
        "        if not isinstance(error.__cause__, sqlite3.DatabaseError):\n",
        (f"{_SHARED}::test_an_index_that_cannot_be_opened_for_a_while_is_kept",),
    ),
    Mutant(
        "an-index-broken-in-use-stays",
        "An index that failed in use is opened again with the quick look that did not see it.",
        "host/hillinfer/system/sqlite_file.py",
        '            self._check("integrity_check")\n            # Where',
        '            self._check("quick_check")\n            # Where',
        (
            "tests/host/store/test_store_damage.py::"
            "test_an_index_that_is_found_broken_in_use_is_made_anew_when_it_is_opened_next",
        ),
    ),
    Mutant(
        "a-broken-index-goes-before-there-is-a-new-one",
        "A broken index is taken away before a new one is there.",
        _DATABASE,
        "            sweep(places.directory)\n            scratch = ",
        "            sweep(places.directory)\n            path.unlink(missing_ok=True)\n"
        "            scratch = ",
        (f"{_SHARED}::test_a_broken_index_stays_in_its_place_until_there_is_a_new_one",),
    ),
    Mutant(
        "a-child-closes-its-parents-store",
        "A forked child that closes a store ends its parent's leases and removes its token.",
        "host/hillinfer/store/store.py",
        "        if self.database.is_inherited:\n            self._opened.pop_all()\n",
        "        if not self.files:\n            self._opened.pop_all()\n",
        (f"{_SHARED}::test_a_child_that_closes_a_store_takes_nothing_from_its_parent[the child]",),
    ),
    Mutant(
        "a-child-changes-its-parents-index",
        "A forked child uses the connection to the index that its parent opened.",
        "host/hillinfer/system/sqlite_file.py",
        "        return os.getpid() != self._pid\n",
        "        return not self._pid\n",
        (
            f"{_SHARED}::test_a_child_that_closes_a_store_takes_nothing_from_its_parent[the child]",
            f"{_SHARED}::test_a_child_opens_a_store_anew",
        ),
    ),
    Mutant(
        "a-chain-goes-on-in-another-prompt",
        "What came before a chunk is taken by its number alone, which another chunk may have now.",
        "host/hillinfer/store/maintenance.py",
        "ON c.id = u.parent AND c.key = u.parent_key AND c.state",
        "ON c.id = u.parent AND c.state",
        (f"{_SHARED}::test_what_a_damaged_chunk_leaves_is_named_and_removed[another's]",),
    ),
    Mutant(
        "ids-of-a-prompt-without-its-beginning",
        "The tokens of what is left of a damaged prompt are given out as the prompt's.",
        "host/hillinfer/store_namespaces.py",
        '            "WHERE c.id = ? AND c.position = ?",\n            (number, position),\n',
        '            "WHERE c.id = ? AND c.position >= ?",\n            (number, position),\n',
        (f"{_SHARED}::test_what_a_damaged_chunk_leaves_is_named_and_removed[forgotten]",),
    ),
    Mutant(
        "a-number-that-goes-is-still-named",
        "A chunk goes, and what followed it still names its number, which another one may get.",
        "host/hillinfer/store/retirement.py",
        "(SELECT key FROM chunk WHERE id = ?1) AND parent = ?1",
        "(SELECT key FROM chunk WHERE id = ?1) AND parent < 0 AND id = ?1",
        (f"{_SHARED}::test_what_a_damaged_chunk_leaves_is_named_and_removed[forgotten]",),
    ),
    Mutant(
        "two-whole-chunks-of-one-key",
        "A process fills its chunk up to what another one has stored already.",
        _INDEX,
        '"SELECT 1 FROM prefix WHERE hash = ?3)",\n',
        '"SELECT 1 FROM prefix WHERE hash = ?3 AND groups < 0)",\n',
        (f"{_SHARED}::test_no_chunk_is_extended_to_what_another_process_has_stored",),
    ),
    Mutant(
        "a-chunk-that-is-going-is-adopted",
        "A chunk that is stored again counts one after it whose room is being cleared.",
        _INDEX,
        '        f"AND state <> {State.TOMBED:d}",\n',
        '        f"AND state <> {-State.TOMBED:d}",\n',
        (f"{_SHARED}::test_a_chunk_that_is_going_follows_no_new_one",),
    ),
    Mutant(
        "unreachable-and-worth-keeping",
        "What follows a damaged chunk is worth what it was when it was looked up.",
        _INDEX,
        "                [(*one, UNREACHABLE) for one in worths],\n",
        "                [(*one, 2 * UNREACHABLE) for one in worths],\n",
        (f"{_SHARED}::test_what_a_damaged_chunk_leaves_goes_first_until_it_is_found_again[False]",),
    ),
    Mutant(
        "found-again-and-worth-nothing",
        "What can be found again behind a chunk that was damaged is the first to go.",
        _INDEX,
        "        (number, worth, UNREACHABLE),\n",
        "        (number, worth, 2 * UNREACHABLE),\n",
        (f"{_SHARED}::test_what_a_damaged_chunk_leaves_goes_first_until_it_is_found_again[True]",),
    ),
    Mutant(
        "rows-take-the-last-of-a-drive",
        "Rows take all that a drive has, and the index cannot be opened any more.",
        "host/hillinfer/store/pool_files.py",
        "self._calls.free_bytes(self._descriptor) - _INDEX_LEAST",
        "self._calls.free_bytes(self._descriptor)",
        ("tests/host/store/test_room.py::test_rows_leave_the_index_some_of_a_drive",),
    ),
    Mutant(
        "two-make-one-store",
        "Of two processes that make a store at once, one's files replace some of the other's.",
        "host/hillinfer/store/pool_files.py",
        "            with alone_in(directory, calls):",
        "            with suppress(BlockingIOError):",
        (f"{_SHARED}::test_of_two_that_make_a_store_at_once_one_does",),
    ),
    Mutant(
        "a-mount-point-gets-a-file",
        "The file of a drive that is not mounted is made anew on another drive.",
        "host/hillinfer/store/pool_files.py",
        "(0 if is_used else os.O_CREAT)",
        "(os.O_CREAT if is_used else os.O_CREAT)",
        (f"{_SHARED}::test_no_file_is_made_where_a_drive_is_not_mounted",),
    ),
    Mutant(
        "without-an-index-nothing-was-held",
        "A store whose index is lost gets a file for a drive that is not mounted.",
        "host/hillinfer/store/pool_files.py",
        "self.index.exists() or any(grown)",
        "self.index.exists() or (False and any(grown))",
        (f"{_SHARED}::test_no_file_is_made_where_a_drive_is_not_mounted[a drive and the index]",),
    ),
)
