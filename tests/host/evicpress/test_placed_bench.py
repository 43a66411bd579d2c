# SPDX-License-Identifier: Apache-2.0
"""The times of a server's documents are of the forms that they say."""

import json

import placed_bench


def test_each_form_is_opened_and_timed(tiny_folder, tmp_path):
    out = tmp_path / "placed.json"
    asked = ["--model", str(tiny_folder), "--dir", str(tmp_path / "dir"), "--out", str(out)]
    asked += ["--tokens", "256", "--rounds", "1", "--dram-budget", "64MiB"]
    assert placed_bench.main(asked) == 0
    rows = {row["form"]: row for row in json.loads(out.read_text())["rows"]}
    assert {form: row["opened"] for form, row in rows.items()} == {
        form: form for form in placed_bench.FORMS
    }
    assert min(row["first_token_p50"] for row in rows.values()) > 0
    # Forms in memory read nothing.
    assert rows["held"]["read_bytes_p50"] == rows["int8"]["read_bytes_p50"] == 0
