# SPDX-License-Identifier: Apache-2.0
"""JSON of models is read in time that grows with its size, and refused in one line."""

import time

import pytest

from hillinfer.errors import ModelError
from hillinfer.models.json_files import read_json_object

# Of a busy machine; each takes less than a second by itself.
SECONDS = 20


def test_a_key_twice_after_many_is_found_at_once(tmp_path):
    file = tmp_path / "config.json"
    names = [*(f"{i:x}" for i in range(200_000)), "30d3f"]
    file.write_text("{" + ",".join(f'"{name}":0' for name in names) + "}")
    started = time.monotonic()
    with pytest.raises(ModelError, match="'30d3f' is there twice"):
        read_json_object(file, 1 << 26)
    assert time.monotonic() - started < SECONDS


def test_values_are_counted_before_they_are_made(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"a": [1, 2, {"b": []}]}')
    assert read_json_object(file, 100, 6) == {"a": [1, 2, {"b": []}]}
    with pytest.raises(ModelError, match="has 6 values, and such a file has 5 at most"):
        read_json_object(file, 100, 5)
