# SPDX-License-Identifier: Apache-2.0
"""The whole quick plan through the command, with a tiny model in the real one's place."""

import json
from functools import partial
from itertools import groupby

import pytest
from cli.command import Command
from tiny_folder import save_tiny
from tiny_models import TinyModel

from hillinfer.drive.files import IOMode, probe_io_mode
from hillinfer.system.machine import NumberType
from hillinfer.trace.recorder import Lane
from hillinfer_bench.decode.rates import RateProbe
from hillinfer_bench.decode.request import BenchRequest, Chosen
from hillinfer_bench.decode.run import run
from hillinfer_bench.figures.trace_figures import TraceRecord
from hillinfer_bench.report.report_check import report_faults
from hillinfer_bench.rivals.h2o import HELD_PROMPT
from hillinfer_bench.systems.table import make_system

# They share two runs.
pytestmark = pytest.mark.xdist_group("bench-run")
# More than modelled shapes have, and KV beside which HillInfer's buffers are small.
LAYERS = 6
# Of a gigabyte and a half the same is read, in six seconds at first and again before each turn.
small_probe = partial(
    RateProbe, memory_bytes=64 << 20, drive_bytes=64 << 20, cache_bytes=0, held_seconds=0
)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, cold_dir):
    """The table and the report of one run, where they lie and what was said."""
    if probe_io_mode(cold_dir) is not IOMode.DIRECT:
        pytest.skip(f"{cold_dir} has no direct I/O: set TMPDIR to a directory on a drive")
    folder = save_tiny(
        tmp_path_factory.mktemp("model"), TinyModel(heads="mha", head_dim=64, layers=LAYERS)
    )
    out = tmp_path_factory.mktemp("bench") / "reports" / "bench.json"
    said = []
    table = run(
        BenchRequest("quick", str(folder), NumberType.AUTO, Chosen(steps=4), 1, cold_dir, out),
        said.append,
        _QuietStage,
        small_probe,
    )
    return table, json.loads(out.read_text(encoding="utf-8")), out, said


@pytest.fixture(scope="module")
def bench(whole_run):
    """The table and the report of one run."""
    return whole_run[:3]


@pytest.fixture(scope="module")
def traced(tmp_path_factory, cold_dir):
    """The trace and the report of a run that has one."""
    if probe_io_mode(cold_dir) is not IOMode.DIRECT:
        pytest.skip(f"{cold_dir} has no direct I/O: set TMPDIR to a directory on a drive")
    folder = tmp_path_factory.mktemp("traced")
    model = save_tiny(folder / "model", TinyModel(heads="mha", head_dim=64, layers=2))
    out, trace = folder / "bench.json", folder / "new" / "trace.json"
    chosen = Chosen(systems=("hillinfer", "full-drive"), models=("tiny",), steps=3)
    request = BenchRequest(
        "quick", str(model), NumberType.AUTO, chosen, 1, cold_dir, out, trace=trace
    )
    run(request, lambda line: None, _QuietStage, small_probe)
    return trace, json.loads(out.read_text(encoding="utf-8"))


class _QuietStage:
    def __init__(self, name, total):
        self._total = total

    def __enter__(self):
        def advance(done):
            assert 0 < done <= self._total

        return advance

    def __exit__(self, *error):
        pass


@pytest.mark.bench
def test_the_report_is_valid_and_every_system_was_measured(bench):
    _, report, _ = bench
    assert report_faults(report) == []
    assert [row["name"] for row in report["rows"] if row["skipped"]] == []
    alone = [row for row in report["rows"] if not row["part"]]
    for _, own in groupby(alone, key=lambda row: row["model"]):
        names = {row["system"] for row in own}
        assert {"floor", "hillinfer", "full-memory", "full-drive", "transformers-dynamic"} <= names


@pytest.mark.bench
def test_rows_have_each_measured_step(bench):
    _, report, _ = bench
    for row in report["rows"]:
        steps = 4
        assert (row["steps"], len(row["step_ms"])) == (steps, steps)
        assert min(row["step_ms"]) == pytest.approx(row["min_ms"], abs=1e-4)
        ordered = sorted(row["step_ms"])
        assert ordered[steps // 2 - 1] - 1e-4 <= row["median_ms"] <= ordered[steps // 2] + 1e-4


@pytest.mark.bench
def test_what_the_plan_needs_is_said_before_anything_is_measured(whole_run):
    said = whole_run[3]
    (needs,) = [line for line in said if line.startswith("the largest cases need ")]
    assert "of memory" in needs
    assert "on the drive" in needs
    assert said.index(needs) < said.index("measuring memory and drive")


def test_the_trace_has_every_step_of_hillinfer_and_none_of_a_rival(traced):
    trace, report = traced
    record = TraceRecord.read(trace)
    warm_up = 4
    assert len(record.decode_steps) == warm_up + 3
    rows = {row["system"]: row for row in report["rows"]}
    assert rows["hillinfer"]["chosen"].endswith(", traced")
    assert "traced" not in rows["full-drive"]["chosen"]
    # Each traced step lies within a measured one, which has the model's own start besides.
    measured_steps = rows["hillinfer"]["step_ms"]
    for span, measured in zip(record.decode_steps[warm_up:], measured_steps, strict=True):
        assert (span.stop - span.start) / 1e6 <= measured
    lanes = {one.lane for one in record.step(record.median_step).spans}
    assert {Lane.COMPUTE, Lane.HOST_SCORING} <= lanes


@pytest.mark.bench
def test_without_a_trace_no_row_says_that_it_was_traced(bench):
    _, report, _ = bench
    assert not any("traced" in row["chosen"] for row in report["rows"])


@pytest.mark.bench
def test_rows_say_what_was_measured_and_what_was_modelled(bench):
    _, report, _ = bench
    labels = {
        row["model"].split("/")[-1][:4]: row["selection"]
        for row in report["rows"]
        if not row["part"]
    }
    assert labels["tiny"] == "modelled selection"
    real = [row for row in report["rows"] if row["selection"] == "measured selection"]
    real = [row for row in real if not row["part"]]
    assert {row["context"] for row in real} == {2048}
    checks = report["selections"]["checks"]
    assert {check["context"] for check in checks} == {8192}
    for check in checks:
        assert check["stretched"]["overlap"] == pytest.approx(
            check["recorded"]["overlap"], abs=check["tolerance"]
        )


@pytest.mark.bench
def test_quality_stands_beside_the_time_where_weights_are_real(bench):
    _, report, _ = bench
    for row in report["rows"]:
        real = row["selection"] == "measured selection" and row["system"] != "floor"
        # Joined caches answer as alone, so no quality of their own is measured.
        real = real and row["part"] != "joined"
        assert (row["perplexity"] is not None) == real
        assert (row["agreement"] is not None) == real
    full = [row for row in report["rows"] if row["system"].startswith(("full", "transformers"))]
    agreements = [row["agreement"] for row in full if row["agreement"] is not None]
    assert agreements
    assert min(agreements) == 1.0


@pytest.mark.bench
def test_drives_are_read_past_the_page_cache_and_budgets_are_kept(bench):
    _, report, _ = bench
    kept = set()
    for row in report["rows"]:
        if row["part"] == "joined":
            assert row["held_bytes"] <= row["budget_bytes"], row["name"]
            continue
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


@pytest.mark.bench
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


@pytest.mark.bench
def test_other_benchmarks_figures_or_reasons_are_there(bench):
    _, report, _ = bench
    assert report["beta"] is None
    for name in ("beta_regret", "scorer_gbps", "fio_gbps"):
        assert report[name] is None
        assert "run make" in report["scalars"][name]["row"]
    assert report["drive_gbps"] > 0
    assert report["machine_read_gbps"] > 0


def drive_limit_ms(row):
    """The least milliseconds of a row's step that reading from the drive alone takes."""
    return (
        row["drive_read_bytes"] / row["drive_gbps"] / 1e6
        + row["drive_reads"] * row["read_us"] / 1e3
    )


@pytest.mark.bench
def test_joined_caches_are_measured_in_two_budgets_beside_what_is_allowed(bench):
    table, report, _ = bench
    rows = [row for row in report["rows"] if row["part"] == "joined"]
    assert [row["system"] for row in rows] == ["hillinfer-joined", "hillinfer-alone", "floor"] * 2
    floors = rows[2::3]
    assert all(row["drive_read_bytes"] == row["dram_read_bytes"] == 0 for row in floors)
    rows = [row for row in rows if row not in floors]
    in_dram, on_drive = rows[:2], rows[2:]
    assert all(row["drive_read_bytes"] == 0 for row in in_dram)
    assert all(row["drive_read_bytes"] > 0 for row in on_drive)
    ratios = [one for one in report["ratios"] if one["name"] == "joined_speedup"]
    assert len(ratios) == 2
    for one, joined, alone, floor in zip(ratios, rows[::2], rows[1::2], floors, strict=True):
        assert one["row"] in table
        assert (one["row"], one["against"]) == (joined["name"], alone["name"])
        modelled = alone["limit_ms"] / joined["limit_ms"]
        of_loop = alone["median_ms"] / floor["median_ms"]
        assert one["allowed"] == pytest.approx(min(modelled, of_loop), rel=1e-3)
        # What joining saves is weights: it shows where memory bounds each step by itself, and not
        # where the drive does, from which rows come in any case.
        of_memory = [row["limit_ms"] > drive_limit_ms(row) * 1.001 for row in (joined, alone)]
        assert all(of_memory) or alone in on_drive
        if all(of_memory):
            assert modelled > 1


@pytest.mark.bench
def test_rows_say_how_many_layers_were_predicted(bench):
    _, report, _ = bench
    real = {row["system"]: row for row in report["rows"] if row["layers"] == LAYERS}
    found = {name: row["predicted_layers"] for name, row in real.items()}
    assert found["hillinfer"] == found["infinigen"] == found["leoam"] == LAYERS - 2
    assert found["full-memory"] == found["floor"] == 0


@pytest.mark.bench
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
        (("--steps", "0"), "steps=0"),
        (("--batches", "3"), "for --batches 3; it has batches: 1, 2, 4"),
        (("--budgets", "0.3"), "for --budgets 0.3; it has budgets: 1.0, 2.0, 6.0, 12.0"),
        (("--shadows", "int3"), "for --shadows int3; it has shadows: auto"),
        (("--trace", "t.json"), "--trace writes one file, of one HillInfer system in one case"),
        (("--trace", "build/reports/bench.json"), "is where the report goes"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_loaded(command, given, told):
    assert told in command("decode", "--model", "nowhere", *given).error_line()
