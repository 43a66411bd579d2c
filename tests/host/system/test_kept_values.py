# SPDX-License-Identifier: Apache-2.0
"""Values that are kept as far as memory goes."""

from hillinfer.system.kept_memory import KeptValues


def test_what_was_used_longest_ago_goes_first():
    kept = KeptValues(30)
    kept.keep([("a", 1, 10), ("b", 2, 10), ("c", 3, 10)])
    assert kept.get(["a"]) == [1]
    kept.keep([("d", 4, 20)])
    assert kept.get(["a", "b", "c", "d", "e"]) == [1, None, None, 4, None]
    # One that is kept stays as it is, and counts once.
    kept.keep([("d", 5, 20)])
    assert kept.get(["a", "d"]) == [1, 4]


def test_one_that_is_too_large_is_not_kept_and_none_is_once_it_is_cleared():
    kept = KeptValues(30)
    kept.keep([("a", 1, 31)])
    assert kept.get(["a"]) == [None]
    kept.keep([("b", 2, 30)])
    assert kept.get(["b"]) == [2]
    kept.clear()
    assert kept.get(["b"]) == [None]
    # Nothing of what went is counted any more.
    kept.keep([("a", 1, 15), ("b", 2, 15)])
    assert kept.get(["a", "b"]) == [1, 2]
