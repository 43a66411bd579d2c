# SPDX-License-Identifier: Apache-2.0
"""Figures of two kinds of machine in one table, each with its kind."""

import json
from dataclasses import replace

import pytest
import torch
from bench_cases import measured_row
from cli.command import Command

from hillinfer.native.library import native_library
from hillinfer_bench.report.bench_report import bench_report
from hillinfer_bench.report.kinds import KindsError, MachineKind, kinds_table, read_reports
from hillinfer_bench.report.rows import MachineRates

AVX2 = MachineKind("Small Chip", "avx2", "float32")
AVX512 = MachineKind("Large Chip", "avx512vnni", "bfloat16")


@pytest.fixture
def reports(tmp_path):
    """A report of each kind; one row and one number type are of the second alone."""

    def made(kind, rows, name):
        facts = {"plan": "goals", **kind.as_record()}
        own = [replace(row, type=kind.number_type) for row in rows]
        out = tmp_path / name / "bench.json"
        out.parent.mkdir()
        found = bench_report(own, facts, MachineRates(1e10, 1e9), [], out)
        out.write_text(json.dumps(found))
        return out

    small = [measured_row("hillinfer", 131.0), measured_row("floor", 44.0)]
    large = [
        measured_row("hillinfer", 90.0, spread=0.5), measured_row("floor", 30.0),
        replace(measured_row("quest"), median_ms=None, min_ms=None, skipped="no room"),
    ]  # fmt: skip
    return [made(AVX2, small, "small"), made(AVX512, large, "large")]


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_two_reports_make_one_table_that_says_from_which_kind_each_figure_is(reports):
    named, rows, goals, told = kinds_table(read_reports(reports)).split("\n\n")
    assert named.splitlines() == [
        "- avx2, float32: Small Chip",
        "- avx512vnni, bfloat16: Large Chip",
    ]
    head, _, *lines = rows.splitlines()
    assert cells(head)[-4:] == [
        "avx2, float32: type", "avx2, float32: median ms",
        "avx512vnni, bfloat16: type", "avx512vnni, bfloat16: median ms",
    ]  # fmt: skip
    found = {cells(line)[6]: cells(line)[7:] for line in lines}
    assert found == {
        "hillinfer": ["float32", "131.00", "bfloat16", "90.00!"],
        "floor": ["float32", "44.00", "bfloat16", "30.00"],
        "quest": ["", "", "bfloat16", "not measured"],
    }
    assert "times the loop's floor" in goals
    assert told.startswith("! marks flagged rows")


def test_reports_of_one_kind_are_told_apart(reports):
    first, _ = read_reports(reports)
    twin = first | {"processor": "Other Chip"}
    assert "avx2, float32, Other Chip: median ms" in kinds_table([first, twin])
    assert "| 2: avx2, float32, Small Chip: type |" in kinds_table([first, first])


def test_this_machine_has_a_kind():
    here = MachineKind.here(torch.bfloat16)
    variant = native_library().variants[0].value
    assert (here.variant, here.number_type) == (variant, "bfloat16")
    assert MachineKind.of(here.as_record()) == here


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda found: found.pop("processor_variant"), "KeyError"),
        (lambda found: found.update(processor=3), "no texts"),
        (lambda found: found["rows"].append(7), "TypeError"),
        (lambda found: found["rows"][0].pop("type"), "KeyError"),
        (lambda found: found["goals"].append({}), "KeyError"),
        (lambda found: found.update(rows=None), "TypeError"),
    ],
)
def test_other_files_are_refused_by_name(reports, spoil, told):
    found = json.loads(reports[0].read_text())
    spoil(found)
    reports[0].write_text(json.dumps(found))
    with pytest.raises(KindsError, match=f"bench.json is no report.*{told}"):
        read_reports(reports)


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(KindsError, match=r"cannot read the report .*No such file"):
        read_reports([tmp_path / "none.json"])


def test_no_cell_ends_a_row_or_moves_a_cursor(reports):
    found = json.loads(reports[0].read_text())
    found["rows"][0]["model"] = "evil|\x1b[2J"
    reports[0].write_text(json.dumps(found))
    table = kinds_table(read_reports(reports))
    assert "evil??[2J" in table
    assert "\x1b" not in table


def test_the_command_prints_the_table(reports, monkeypatch, capfd):
    outcome = Command(monkeypatch, capfd)("compare", *reports)
    assert outcome.code == 0, outcome.err
    assert outcome.out.rstrip("\n") == kinds_table(read_reports(reports))
