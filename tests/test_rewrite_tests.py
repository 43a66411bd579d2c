# SPDX-License-Identifier: Apache-2.0
"""What tools/rewrite_tests.py writes is what pytest's processes read in place of a test's file."""

import pytest
from _pytest.assertion.rewrite import _read_pyc

import rewrite_tests


def told(file):
    """What the one test of a file says of its assertion, by the bytecode that is read for it."""
    scope = {}
    exec(_read_pyc(file, rewrite_tests.rewritten(file)), scope)
    with pytest.raises(AssertionError) as failed:
        scope["test"]()
    return str(failed.value).splitlines()[0]


def test_assertions_tell_values_and_a_changed_file_is_written_anew(tmp_path):
    file = tmp_path / "test_made_up.py"
    file.write_text("def test():\n    found = 1\n    assert found == 2\n")
    assert told(file) == "assert 1 == 2"
    file.write_text("def test():\n    found = 'a'\n    assert found == 'b'\n")
    assert told(file) == "assert 'a' == 'b'"


def test_every_file_with_tests_is_among_them(collected_tests):
    assert {one.path for one in collected_tests} <= set(rewrite_tests.files_of_tests())
