# SPDX-License-Identifier: Apache-2.0
"""`hillinfer-bench frontier` and its picture, through their own entry point."""

import json
from dataclasses import fields
from math import sqrt

import pytest

from hillinfer.drive.files import IOMode, probe_io_mode
from hillinfer.settings import Settings
from hillinfer_bench.cli.main import main
from hillinfer_bench.frontier.sweep import Setting, SweepRows
from hillinfer_bench.frontier.swept import SWEPT
from hillinfer_bench.quality.table import Measures

RIVALS = ("leoam", "four-bit")
KEYS = {
    "kl_share_of_exact_alpha_01",
    "drive_bytes_share",
    "decode_speedup",
    "equal_quality",
    "goals",
    "sweep",
    "settings",
    "times",
}


@pytest.fixture
def command(capfd):
    """Run a subcommand and return exit code, standard output and error."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(one) for one in arguments])
        out, err = capfd.readouterr()
        return ended.value.code or 0, out, err

    return run


@pytest.fixture
def frontier(command, tiny_folder, tmp_path):
    """Run the sweep of a tiny model beside two rivals."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"cat {i} sat on mat {i * 7 % 61}. " for i in range(80)))
    given = ["--model", tiny_folder, "--texts", text, "--context", 400, "--last", 4]
    given += ["--threads", 1, "--systems", RIVALS[0], "--systems", RIVALS[1]]

    def run(*arguments):
        return command("frontier", *given, *arguments)

    return run


def report_of(file):
    return json.loads(file.read_text(encoding="utf-8"))


def test_a_sweep_writes_report_rows_and_picture_and_goes_on_where_it_ended(
    frontier, command, tmp_path
):
    out = tmp_path / "new" / "frontier.json"
    code, told, err = frontier("--steps", 0, "--out", out)
    assert code == 0, err
    report = report_of(out)
    assert report.keys() >= KEYS
    systems = {row["system"] for row in report["sweep"]}
    assert systems == {"hillinfer-coded", "hillinfer", *RIVALS}
    assert all(len(row["kl_of_texts"]) == 1 for row in report["sweep"])
    # Nothing was timed, and the report says so.
    assert report["times"] == []
    assert report["decode_speedup"] is report["drive_bytes_share"] is None
    assert report["equal_quality"] == dict.fromkeys(("full-drive", *RIVALS))
    reasons = [goal["row"] for goal in report["goals"] if goal["reached"] is None]
    assert "no times were taken" in reasons
    assert [equal["kl"] for equal in report["settings"]][1:] == [0.01, 0.003]
    assert "| four-bit | bits 4 |" in told
    assert out.with_suffix(".png").stat().st_size > 1000

    rows = out.with_name("frontier-rows.jsonl")
    before = rows.read_text(encoding="utf-8").splitlines()
    assert len(before) == 1 + len(report["sweep"])
    # As if it had been killed within a line, and with one KL that no model gives.
    marked = json.loads(before[1])
    marked["measures"]["kl_divergence"] = 77.0
    kept = [before[0], json.dumps(marked), *before[2:-2], before[-2][:20]]
    rows.write_text("\n".join(kept), encoding="utf-8")
    assert frontier("--steps", 0, "--out", out)[0] == 0
    again = report_of(out)
    kls = [row["kl_divergence"] for row in again["sweep"]]
    assert kls[0] == 77.0
    assert kls[1:] == pytest.approx([row["kl_divergence"] for row in report["sweep"]][1:])
    # What is behind half a line is whole again.
    whole = rows.read_text(encoding="utf-8").splitlines()
    assert len([json.loads(line) for line in whole]) == len(before)
    # The twin: rows of another length are not taken. They are not lost either.
    assert frontier("--steps", 0, "--out", out, "--last", 3)[0] == 0
    assert report_of(out)["sweep"][0]["kl_divergence"] < 77.0
    assert frontier("--steps", 0, "--out", out)[0] == 0
    assert report_of(out)["sweep"][0]["kl_divergence"] == 77.0
    # Nor are lines taken that are none of a sweep.
    header = before[0]
    rows.write_text(header + '\n{"text": "text.txt"}\n', encoding="utf-8")
    SweepRows(rows, json.loads(header))
    assert rows.read_text(encoding="utf-8").splitlines() == [header]

    picture = tmp_path / "picture.svg"
    assert command("frontier-picture", out, "--out", picture)[0] == 0
    drawn = picture.read_text(encoding="utf-8")
    assert all(name in drawn for name in ("hillinfer-coded", *RIVALS))


def test_rows_of_every_sweep_stay_whatever_a_file_has_beside_them(tmp_path):
    file, setting = tmp_path / "rows.jsonl", Setting(SWEPT["hillinfer"], 0.1)
    sweeps = {0.1: {"last": 8}, 0.2: {"last": 3}}
    for kl, facts in sweeps.items():
        SweepRows(file, facts).add("text.txt", setting, Measures(1.0, kl, 1.0))
    header, row, *rest = file.read_text(encoding="utf-8").splitlines()
    spoiled = ["{", header, "7", row, '{"text": "text.txt"}', *rest, row[:9]]
    file.write_text("\n".join(spoiled), encoding="utf-8")
    for kl, facts in (*sweeps.items(), *sweeps.items()):
        found = SweepRows(file, facts).of("text.txt", setting)
        assert found is not None
        assert found.kl_divergence == kl
    # The twin: nothing is known of another sweep.
    assert SweepRows(file, {"last": 5}).of("text.txt", setting) is None


def test_times_are_taken_at_the_settings_of_equal_quality(frontier, tmp_path, cold_dir):
    if probe_io_mode(cold_dir) is not IOMode.DIRECT:
        pytest.skip(f"{cold_dir} has no direct I/O: set TMPDIR to a directory on a drive")
    out = tmp_path / "frontier.json"
    assert frontier("--steps", 0, "--out", out)[0] == 0
    coded = [row for row in report_of(out)["sweep"] if row["system"] == "hillinfer-coded"]
    # Between two settings, and below what any setting reaches.
    reached = sqrt(coded[0]["kl_divergence"] * coded[-1]["kl_divergence"])
    unreached = coded[-1]["kl_divergence"] / 3
    given = ["--steps", 2, "--real-context", 600, "--real-budget", 40, "--cold-dir", cold_dir]
    given += ["--shapes", 0, "--at-kl", reached, "--at-kl", unreached]
    code, told, err = frontier("--out", out, *given)
    assert code == 0, err
    report = report_of(out)
    own_kl = report["settings"][0]["kl"]
    assert {row["at_kl"] for row in report["times"]} == {own_kl, reached}
    assert f"at a KL of {unreached:g}: hillinfer-coded: not reached by any setting" in err
    at = {row["system"]: row for row in report["times"] if row["at_kl"] == reached}
    crossing = next(one for one in report["settings"] if one["kl"] == reached)
    value = crossing["systems"]["hillinfer-coded"]["value"]
    assert at["hillinfer-coded"]["alpha"] == at["hillinfer-coded-in-memory"]["alpha"] == value
    assert at["hillinfer-coded"]["median_ms"] > 0
    assert "hillinfer-today" not in at
    assert list(report["equal_quality_at"]) == [f"{reached:g}"]
    assert report["equal_quality_at"][f"{reached:g}"][report["model"]]["full-drive"]["value"] > 0
    rows = {row["system"]: row for row in reversed(report["times"]) if row["at_kl"] == own_kl}
    assert rows.keys() >= {"floor", "hillinfer-today", "full-drive", "full-memory", "leoam"}
    # A 4-bit cache at its own quality, both ways; what a KL takes is there on the drive, too.
    assert rows["four-bit-memory"]["median_ms"] > 0
    assert rows["hillinfer-all-coded-in-memory"]["alpha"] == 1.0
    assert rows["hillinfer-all-coded-in-memory"]["median_ms"] > 0
    bits = report["settings"][0]["systems"]["four-bit"]["value"]
    if bits in (4, 5):
        name = {4: "four-bit", 5: "five-bit"}[bits]
        assert rows[f"{name}-drive"]["stands_for"].startswith(f"{bits:g} bits: ")
        assert rows[f"{name}-drive"]["median_ms"] > 0
        assert rows[f"{name}-memory"]["median_ms"] > 0
    else:
        assert rows["four-bit"]["skipped"]
    assert rows["hillinfer-today"]["alpha"] == 0.1
    crossing = report["settings"][0]["systems"]["leoam"]
    if crossing["value"] is None:
        assert rows["leoam"]["skipped"] == crossing["why"]
        assert report["equal_quality"]["leoam"] is None
    else:
        assert rows["leoam"]["alpha"] == pytest.approx(crossing["value"])
        assert "with a KL of" in rows["leoam"]["stands_for"]
        assert report["equal_quality"]["leoam"] > 0
    assert rows["full-drive"]["median_ms"] > 0
    assert rows["full-drive"]["agreement"] == 1.0
    own = rows["hillinfer-coded"]
    if "exact" in {one.name for one in fields(Settings)}:
        assert own["median_ms"] > 0
        assert report["decode_speedup"] > 0
        assert report["equal_quality_from"]["full-drive"]["source"].startswith("measured")
    else:
        assert own["skipped"] == "hillinfer-coded needs the setting exact, which is not there"
        assert report["decode_speedup"] is None
        assert report["equal_quality_from"]["full-drive"]["source"].startswith("modelled")
    modelled = report["sweep"][0]["modelled_ms"]
    assert all(place.endswith("on the drive") for place in modelled)
    # Rivals two at a time, and what is in memory, have turns, HillInfer and a floor of their own.
    own = [row for row in report["times"] if row["at_kl"] == own_kl]
    parts = {row["part"]: row["system"] for row in own}
    floors = [row["median_ms"] for row in own if row["system"] == "floor"]
    assert len(floors) == len(parts) > 3
    rivals = [part for part in parts if part.startswith("beside ")]
    assert {"", "in memory", "in memory, coded", *rivals} == parts.keys()
    beside = [row["part"] for row in own if row["system"] == "hillinfer-coded"]
    assert beside == ["", *rivals]
    assert min(modelled.values()) > floors[0]
    four = [row for row in report["sweep"] if row["system"] == "four-bit"]
    assert {place.split(", ")[1] for row in four for place in row["modelled_ms"]} == {
        "on the drive",
        "in memory",
    }
    assert "not judged" in told

    # Another sitting goes on with these times, and says so.
    given[given.index("--real-context") + 1] = 0
    code, _, err = frontier("--out", out, *given)
    assert code == 0
    assert "of an earlier run" in err
    again = report_of(out)
    assert again["times"] == report["times"]
    assert again["decode_speedup"] == report["decode_speedup"]
    model = report["model"]
    assert list(again["earlier_times"]) == [model, f"{model} at a KL of {reached:g}"]
    # The twin: times at other settings are not taken.
    kept = out.with_name("frontier-times.jsonl")
    line = json.loads(kept.read_text(encoding="utf-8").splitlines()[0])
    line["taken_on"]["settings"]["leoam"] = 0.123
    kept.write_text(json.dumps(line) + "\n", encoding="utf-8")
    assert frontier("--out", out, *given)[0] == 0
    assert report_of(out)["times"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--systems", "h3o"), "system='h3o': choose one of hillinfer-coded"),
        (("--shapes", "gpt-9"), "shape='gpt-9': choose one of"),
        (("--steps", -1), "steps=-1 must not be negative"),
        (("--shape-budget", 0), "all must be above 0"),
        (("--real-context", 9000), "9016 tokens are longer than the 4096 positions"),
        (("--at-kl", 2), "KL 2: times are taken at one between 0 and 1"),
        (("--last", 400), "last=400 must be at least 1 and below context=400"),
        (("--out", "/dev/null/frontier.json"), "choose another --out"),
    ],
    ids=lambda value: value[0][2:] if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line(arguments, message, frontier):
    code, out, err = frontier(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.splitlines()[-1].startswith("hillinfer: error: ")


@pytest.mark.parametrize("text", ["{", "[]", '{"sweep": []}', '{"sweep": [{"system": 1}]}'])
def test_no_picture_of_another_file(command, tmp_path, text):
    file = tmp_path / "other.json"
    file.write_text(text, encoding="utf-8")
    code, out, err = command("frontier-picture", file, "--out", tmp_path / "picture.png")
    assert (code, out) == (2, "")
    assert "other.json" in err.splitlines()[-1]
    assert not (tmp_path / "picture.png").exists()
