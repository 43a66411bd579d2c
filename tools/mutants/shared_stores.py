# SPDX-License-Identifier: Apache-2.0
"""Faults of a store that several processes have: what one of them takes from all."""

from __future__ import annotations

from mutants.mutant import Mutant

_SHARED = "tests/host/store/test_shared_stores.py"
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
        "a-broken-index-goes-before-there-is-a-new-one",
        "A broken index is taken away before a new one is there.",
        _DATABASE,
        "            sweep(places.directory)\n            scratch = ",
        "            sweep(places.directory)\n            path.unlink(missing_ok=True)\n"
        "            scratch = ",
        (f"{_SHARED}::test_a_broken_index_stays_in_its_place_until_there_is_a_new_one",),
    ),
)
