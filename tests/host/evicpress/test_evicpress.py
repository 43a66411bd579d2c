# SPDX-License-Identifier: Apache-2.0
"""The study of many documents in little memory: small, whole, and with what its goals name."""

import json
from xml.etree import ElementTree

import pytest

from hillinfer.errors import SettingsError
from hillinfer_bench.evicpress import harness
from hillinfer_bench.evicpress.harness import Harness
from hillinfer_bench.evicpress.played import Played, first_tokens_at, rate_curve
from hillinfer_bench.evicpress.rivals import rivals
from hillinfer_bench.evicpress.run import GOALS, EvicPressRequest, compared
from hillinfer_bench.evicpress.workload import WorkloadSize, mooncake_workload
from hillinfer_bench.figures.evicpress_figure import StudyRecordError, read_rivals

KEYS = {*GOALS, "kills", "wrong_tokens"}


def test_what_is_no_report_is_not_drawn(tmp_path):
    file = tmp_path / "report.json"
    row = {"rival": "one", "first_token_p50": 1.0, "agreement": 1.0, "rate_curve": [[1, 2]]}
    file.write_text(json.dumps({"rows": [row]}))
    assert read_rivals(file)[0].curve == ((1.0, 2.0),)
    for changes in ({"rate_curve": [[1]]}, {"agreement": -1}, {"first_token_p50": "1"}):
        file.write_text(json.dumps({"rows": [row | changes]}))
        with pytest.raises(StudyRecordError, match="is not of hillinfer-bench evicpress"):
            read_rivals(file)
    with pytest.raises(StudyRecordError, match="cannot read"):
        read_rivals(tmp_path / "none")


def interrupted(*_, **__):
    raise KeyboardInterrupt


def test_a_small_study_plays_every_rival_within_the_budget(
    command, tiny_folder, tmp_path, monkeypatch
):
    pytest.importorskip("matplotlib", reason="pip install 'hillinfer[figures]'")
    out = tmp_path / "evicpress.json"
    arguments = (
        *("evicpress", "--model", tiny_folder, "--dir", tmp_path, "--documents", 2),
        *("--requests", 6, "--shortest", 128, "--longest", 192, "--budget", 0.4, "--alpha", 1),
        *("--probes", 1, "--questions", 1, "--kills", 2, "--out", out),
        *("--picture", tmp_path / "evicpress.svg", "--sized", 1),
    )
    # It breaks off in its middle, and goes on where it was.
    with monkeypatch.context() as broken:
        broken.setattr(Harness, "play_all_held", interrupted)
        assert command(*arguments).code == 130
    notes = (tmp_path / "evicpress" / "notes.jsonl").read_text()
    assert not out.exists()
    with monkeypatch.context() as refused:
        # Nothing is read, measured or played anew.
        refused.setattr(Harness, "play", interrupted)
        refused.setattr(harness, "measure_document", interrupted)
        outcome = command(*arguments)
    assert outcome.code == 0, outcome.err
    assert '"part": "optimum, \\u03b1 1"' in notes
    report = json.loads(out.read_text())
    assert report["figures"].keys() >= KEYS
    assert (report["figures"]["kills"], report["figures"]["wrong_tokens"]) == (2, 0)
    rows = {row["rival"]: row for row in report["rows"]}
    # What the engine's buffers take is more than the budget of so few tokens.
    assert rows.keys() == {one.name for one in rivals((1.0,)) if not one.is_served}
    for name, row in rows.items():
        assert row["dram_peak_bytes"] <= report["budget_bytes"] < report["all_bytes"], name
        assert sum(row["forms"].values()) == 6
        assert 0 < row["first_token_p50"] <= row["first_token_p95"]
    assert rows["recompute"]["forms"] == {"text": 6}
    assert rows["recompute"]["agreement"] == rows["held + LRU"]["agreement"] == 1.0
    assert rows["held + LRU"]["read_bytes"] > 0 == rows["recompute"]["read_bytes"]
    assert rows["int4 + LRU"]["forms"].keys() <= {"rows", "int4"}
    assert rows["int4 + LRU"]["moves"] > 0
    assert rows["IMPRESS-like, 0.5"]["read_bytes"] > 0
    assert rows["IMPRESS-like, 0.5"]["forms"] == {"important-0.5": 6}
    for row in rows.values():
        rates, seconds = zip(*row["rate_curve"], strict=True)
        assert list(rates) == sorted(rates)
        assert min(seconds) >= row["first_token_p50"] * 0.99
    sized = report["sized"]
    assert sized["all_bytes"] == 131072 * sum(one["tokens"] for one in report["documents"])
    for row in sized["rows"]:
        assert row["dram_peak_bytes"] <= sized["budget_bytes"], row
        assert row["first_token_p50"] > 0
    assert min(sized["bytes_a_second"].values()) > 0
    drawn = ElementTree.parse(tmp_path / "evicpress.svg").getroot()
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    (lru,) = (one for one in read_rivals(out) if one.name == "held + LRU")
    assert (lru.agreement, len(lru.curve)) == (1.0, 9)
    assert not (tmp_path / "evicpress").exists()
    for name in ("share_of_optimum", "ttft_vs_int8_lru"):
        assert f"{name}: " in outcome.out


def test_who_waits_waits_for_those_before():
    # The second comes while the first is answered, the third when all is done.
    assert first_tokens_at([0.0, 1.0, 10.0], [0.5, 0.5, 0.5], [2.0, 2.0, 2.0]) == [0.5, 1.5, 0.5]
    curve = rate_curve([5.0, 6.0, 7.0, 8.0], [1.0] * 4, [1.0] * 4)
    assert [round(rate, 6) for rate, _ in curve] == [round(n / 10, 6) for n in range(1, 10)]
    # Arrivals in even steps never wait below the rate that one answers at.
    assert {seconds for _, seconds in curve[:6]} == {1.0}


def test_identities_come_back_in_the_order_of_the_trace(tiny_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    size = WorkloadSize(5, 40, 128, 512)
    workload = mooncake_workload(tokenizer, size)
    assert len(workload.documents) == 5
    assert all(128 <= len(one.ids) <= 512 and not len(one.ids) % 64 for one in workload.documents)
    times = [one.time for one in workload.requests]
    assert times == sorted(times)
    assert {one.document for one in workload.requests} <= set(range(5))
    assert len(workload.requests) > len({one.document for one in workload.requests})
    assert workload == mooncake_workload(tokenizer, size)
    # The twin: other identities with another seed.
    assert (
        workload.requests != mooncake_workload(tokenizer, WorkloadSize(5, 40, 128, 512, 1)).requests
    )
    with pytest.raises(SettingsError, match="documents=100000: the trace has"):
        mooncake_workload(tokenizer, WorkloadSize(100000))


def played(first_token, agreement):
    return Played([first_token] * 4, [0.1] * 4, [agreement] * 4, [0, 1, 2, 3], ["held"] * 4)


def test_figures_are_of_the_soonest_that_agrees_enough():
    found = {}
    for rival in rivals((0.3, 3.0)):
        found[rival] = played(1.0, 1.0)
        if rival.name == "ours, α 0.3":
            found[rival] = played(0.1, 0.9)
        elif rival.name == "ours, α 3":
            found[rival] = played(0.25, 0.98)
        elif rival.name == "int8 + LRU":
            found[rival] = played(0.5, 1.0)
        elif rival.name == "optimum, α 3":
            found[rival] = played(0.2, 1.0)
        elif rival.name == "recompute":
            found[rival] = played(4.0, 1.0)
    figures = compared(found)
    assert figures["ours"] == "ours, α 3"
    assert figures["ttft_vs_lru_p50"] == figures["ttft_vs_lru_p95"] == 4.0
    assert figures["ttft_vs_int8_lru"] == 2.0
    assert figures["worst_tenth_agreement"] == 0.98
    gained, possible = 3 * 0.98 - 0.25 + 1.0, 3 - 0.2 + 1.0
    assert figures["share_of_optimum"] == pytest.approx(gained / possible)
    # Where none agrees enough, the one that agrees most.
    for rival in found:
        if rival.name.startswith("ours, α"):
            found[rival] = played(0.1, 0.5 + rival.alpha / 100)
    assert compared(found)["ours"] == "ours, α 3"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budget_part": 0.0}, "budget=0.0 is no share"),
        ({"alphas": (-1.0,)}, "must be one number of seconds"),
        ({"kills": -1}, "kills=-1, sized=2: give 1 or more"),
    ],
)
def test_requests_that_mean_nothing_are_refused(changes, said, tmp_path):
    with pytest.raises(SettingsError, match=said):
        EvicPressRequest("m", tmp_path, tmp_path / "out", WorkloadSize(), **changes)
    for size in ({"documents": 0}, {"shortest": 10}, {"shortest": 900, "longest": 800}):
        with pytest.raises(SettingsError):
            WorkloadSize(**size)
