# SPDX-License-Identifier: Apache-2.0
"""The whole quick plan through the command, with a tiny model in the real one's place."""

import json
from itertools import groupby

import pytest
from cli.command import Command
from tiny_folder import save_tiny
from tiny_models import TinyModel

from hillinfer.bench.report_check import report_faults
from hillinfer.bench.request import BenchRequest
from hillinfer.bench.run import run
from hillinfer.bench.systems.table import make_system
from hillinfer.models.number_type import NumberType
from hillinfer.rivals.h2o_drop import HELD_PROMPT
from hillinfer.storage.cold_file import IOMode, probe_io_mode


@pytest.fixture(scope="module")
def bench(tmp_path_factory, cold_dir):
    """The table and the report of one run."""
    if probe_io_mode(cold_dir) is not IOMode.DIRECT:
        pytest.skip(f"{cold_dir} has no direct I/O: set TMPDIR to a directory on a drive")
    folder = save_tiny(
        tmp_path_factory.mktemp("model"), TinyModel(heads="mha", head_dim=64, layers=12)
    )
    out = tmp_path_factory.mktemp("bench") / "reports" / "bench.json"
    said = []
    table = run(
        BenchRequest("quick", str(folder), NumberType.AUTO, (), (), (), (), 1, cold_dir, out),
        said.append,
        _QuietStage,
    )
    return table, json.loads(out.read_text(encoding="utf-8")), out


class _QuietStage:
    def __init__(self, name, total):
        self._total = total

    def __enter__(self):
        def advance(done):
            assert 0 < done <= self._total

        return advance

    def __exit__(self, *error):
        pass


def test_the_report_is_valid_and_every_system_was_measured(bench):
    _, report, _ = bench
    assert report_faults(report) == []
    assert [row["name"] for row in report["rows"] if row["skipped"]] == []
    for _, own in groupby(report["rows"], key=lambda row: row["model"]):
        names = {row["system"] for row in own}
        assert {"floor", "hillinfer", "full-memory", "full-drive", "transformers-dynamic"} <= names


def test_rows_say_what_was_measured_and_what_was_modelled(bench):
    _, report, _ = bench
    labels = {row["model"].split("/")[-1][:4]: row["selection"] for row in report["rows"]}
    assert labels["tiny"] == "modelled selection"
    real = [row for row in report["rows"] if row["selection"] == "measured selection"]
    assert {row["context"] for row in real} == {2048}
    checks = report["selections"]["checks"]
    assert {check["context"] for check in checks} == {8192}
    for check in checks:
        assert check["stretched"]["overlap"] == pytest.approx(
            check["recorded"]["overlap"], abs=check["tolerance"]
        )


def test_quality_stands_beside_the_time_where_weights_are_real(bench):
    _, report, _ = bench
    for row in report["rows"]:
        real = row["selection"] == "measured selection" and row["system"] != "floor"
        assert (row["perplexity"] is not None) == real
        assert (row["agreement"] is not None) == real
    full = [row for row in report["rows"] if row["system"].startswith(("full", "transformers"))]
    agreements = [row["agreement"] for row in full if row["agreement"] is not None]
    assert agreements
    assert min(agreements) == 1.0


def test_drives_are_read_past_the_page_cache_and_budgets_are_kept(bench):
    _, report, _ = bench
    kept = set()
    for row in report["rows"]:
        if row["system"] in ("hillinfer", "full-drive"):
            assert row["io_mode"] == "direct"
        if row["system"] == "h2o-drop":
            assert HELD_PROMPT in row["chosen"]
        elif make_system(row["system"]).bounded:
            kept.add(row["system"])
            assert row["held_bytes"] <= row["budget_bytes"], row["name"]
    assert kept >= {"hillinfer", "full-drive", "h2o-all-keys", "infinigen", "leoam"}
    read = {row["system"]: row["drive_read_bytes"] for row in report["rows"][:20]}
    assert read["full-memory"] == 0


def test_rows_say_what_h2o_observed(bench):
    _, report, _ = bench
    told = {
        row["selection"]: row["chosen"] for row in report["rows"] if row["system"] == "h2o-drop"
    }
    assert told == {
        "measured selection": f"last 64 queries of the prompt observed ({HELD_PROMPT})",
        "modelled selection": f"prompt not observed before the first step ({HELD_PROMPT}): "
        "the set replayed first kept",
    }


def test_other_benchmarks_figures_or_reasons_are_there(bench):
    _, report, _ = bench
    assert report["beta"] is None
    for name in ("beta_regret", "scorer_gbps", "fio_gbps"):
        assert report[name] is None
        assert "run make" in report["scalars"][name]["row"]
    assert report["drive_gbps"] > 0
    assert report["machine_read_gbps"] > 0


def test_rows_say_how_many_layers_were_predicted(bench):
    _, report, _ = bench
    real = {row["system"]: row for row in report["rows"] if row["layers"] == 12}
    found = {name: row["predicted_layers"] for name, row in real.items()}
    assert found["hillinfer"] == found["infinigen"] == found["leoam"] == 10
    assert found["full-memory"] == found["floor"] == 0


def test_pictures_and_table_go_with_the_report(bench):
    table, report, out = bench
    assert out.with_name("bench-latency.png").stat().st_size > 1000
    assert out.with_name("bench-speedup.png").stat().st_size > 1000
    for row in report["rows"]:
        assert row["system"] in table
    assert "modelled selection" in table


@pytest.fixture
def command(monkeypatch, capfd):
    return Command(monkeypatch, capfd)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--plan", "slow"), "plan='slow': choose one of"),
        (("--systems", "h3o"), "nothing is left of the plan"),
        (("--out", "table.txt"), "out=table.txt is for JSON"),
        (("--threads", "0"), "threads=0"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_loaded(command, given, told):
    assert told in command("bench", "--model", "nowhere", *given).error_line()
