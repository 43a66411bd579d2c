# SPDX-License-Identifier: Apache-2.0
"""`hillinfer-bench study` with a tiny model in the real one's place."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench.bench_cases import measured_row
from tiny_folder import save_tiny
from tiny_models import TinyModel

from hillinfer.errors import SettingsError
from hillinfer.models.loader import load_model
from hillinfer_bench.cli.main import main
from hillinfer_bench.quality.policies import RecentOnly
from hillinfer_bench.quality.table import Configuration
from hillinfer_bench.report.bench_report import row_record
from hillinfer_bench.study.beside_full import beside_full, beside_full_table
from hillinfer_bench.study.measured import DECODE_FILE
from hillinfer_bench.study.reading import ReadPrompt
from hillinfer_bench.study.run import Part, StudyRequest, run
from hillinfer_bench.study.tasks import TaskPlan, lines, made_records
from hillinfer_bench.study.ways import (
    FLOORED,
    FULL,
    H2O,
    MIXED,
    StudyWay,
    quantised_way,
    study_ways,
)

HEAD_DIM = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("model"), TinyModel(layers=2, head_dim=16)))


@pytest.fixture(scope="module")
def loaded(folder):
    return load_model(folder)


def plan(**changes):
    small = {
        "needle_tokens": (200,),
        "needle_documents": 1,
        "line_records": 1,
        "record_lines": 8,
        "choice_tokens": 120,
        "choices": 1,
        "summary_tokens": 150,
        "summaries": 1,
        "summary_most": 3,
        "text_tokens": 200,
        "text_last": 6,
    }
    return TaskPlan(**small | changes)


def write_decode_report(beside, **changes):
    """Write a report of decode as if every system had been measured for three figures."""
    times = {"floor": 5.0, "full-drive": 80.0, "infinigen": 30.0, "hillinfer": 10.0}
    rows = [
        row_record(measured_row(name, ms, part=part, **changes))
        for part in ("figure 12, 13", "figure 14", "")
        for name, ms in times.items()
    ]
    rows += [row_record(measured_row("hillinfer-app", 12.0, part="figure 16a"))]
    kind = {"processor": "some", "processor_variant": "avx2", "number_type": "float32"}
    beside.mkdir(parents=True, exist_ok=True)
    (beside / DECODE_FILE).write_text(json.dumps({**kind, "rows": rows}), encoding="utf-8")


@pytest.fixture(scope="module")
def report(folder, tmp_path_factory):
    """What a run said, its tables and its report."""
    out = tmp_path_factory.mktemp("study") / "new" / "study.json"
    said = []
    write_decode_report(out.parent)
    request = StudyRequest(tuple(Part), folder, plan(), 60.0, 1, out)
    table = run(request, said.append)
    return said, table, json.loads(out.read_text(encoding="utf-8")), request


def test_every_task_is_scored_for_every_way(report):
    _, table, told, _ = report
    answers = told["accuracy"]["answers"]
    titles = [one["way"] for one in told["accuracy"]["ways"]]
    tasks = [one["task"] for one in answers.values()]
    assert sorted(tasks) == ["choice", "lines", "needle", "needle", "summary", "text", "text"]
    for one in answers.values():
        assert list(one["scores"]) == titles
        full = one["scores"][titles[0]]
        if one["task"] == "text":
            assert (full["kl"], full["agreement"]) == (0, 1)
        if one["task"] == "summary":
            assert full["rouge_to_full"] in (0, 1)
        if one["task"] in ("needle", "lines", "choice"):
            assert full["right"] in (0, 1)
            assert full["nll"] > 0
    for title in titles:
        # Beside the full cache stand all others once more.
        assert table.count(f"| {title} |") == 3 - (title == titles[0])
    kl = {title: answers["text, 200 tokens, 0"]["scores"][title]["kl"] for title in titles}
    assert kl["4-bit cache, all tokens"] < kl["2-bit cache, all tokens"]
    assert told["modelled"]["label"] == "modelled"
    assert told["accuracy"]["label"] == "measured"


def test_pictures_lie_beside_the_report(report):
    *_, request = report
    beside = sorted(one.name for one in request.out.parent.iterdir())
    assert beside == [DECODE_FILE, "study-batch.svg", "study-bytes.svg", "study.json"]


def test_a_run_goes_on_with_what_is_known(report):
    _, table, told, request = report
    said = []
    assert run(request, said.append) == table
    assert [one for one in said if "of a processor" in one] == []
    assert json.loads(request.out.read_text(encoding="utf-8")) == told
    # What is missing is asked, and nothing else.
    fewer = json.loads(json.dumps(told))
    del fewer["accuracy"]["answers"]["lines, 8 lines, 0"]
    request.out.write_text(json.dumps(fewer), encoding="utf-8")
    run(replace(request, parts=(Part.ACCURACY,)), said.append)
    (asked,) = [one for one in said if "of a processor" in one]
    assert "lines, 8 lines, 0" in asked
    again = json.loads(request.out.read_text(encoding="utf-8"))
    name = "lines, 8 lines, 0"
    known, new = (one["accuracy"]["answers"][name]["scores"] for one in (told, again))
    assert known == new


@pytest.mark.bench
def test_only_ways_that_are_not_known_answer(report, folder, tmp_path):
    _, _, told, _ = report
    title = "HillInfer, as the product, α = 0.2 and 0.02 exact (128 at least)"
    out = tmp_path / "study.json"
    fewer = json.loads(json.dumps(told))
    name = "lines, 8 lines, 0"
    scores = fewer["accuracy"]["answers"][name]["scores"]
    known = scores.pop(title)
    # What is known stays as it is, also where no run would say so.
    scores["full cache, full"]["nll"] = 77.0
    # A way that reads other bytes now is asked anew.
    other = fewer["accuracy"]["ways"][1]
    other["rows"] += 0.5
    out.write_text(json.dumps(fewer), encoding="utf-8")
    said, again = [], []
    asked = StudyRequest(
        (Part.ACCURACY,), folder, plan(), 60.0, 1, out, ("lines",), ("HillInfer, as",)
    )
    run(asked, said.append)
    assert len([one for one in said if "of a processor" in one]) == 1
    found = json.loads(out.read_text(encoding="utf-8"))["accuracy"]["answers"]
    assert found[name]["scores"][title] == known
    assert found[name]["scores"]["full cache, full"]["nll"] == 77.0
    assert other["way"] not in found[name]["scores"]
    # The twin: all of it is known now.
    run(asked, again.append)
    assert [one for one in again if "of a processor" in one] == []


def test_ways_are_compared_with_the_full_cache_question_by_question():
    full, own = study_ways(HEAD_DIM)[0], study_ways(HEAD_DIM)[-1]
    more = [0.5, -0.1, 0.2]
    answers = {
        str(number): {
            "task": "lines",
            "group": "40 lines",
            "scores": {
                full.title: {"right": 1.0, "nll": 1.0 + number},
                own.title: {"right": float(number > 0), "nll": 1.0 + number + one},
            },
        }
        for number, one in enumerate(more)
    }
    answers["text"] = {"task": "text", "group": "3 tokens", "scores": answers["0"]["scores"]}
    (row,) = beside_full(answers, [full, own])
    assert (row.way, row.column, row.questions) == (own.title, "lines, 40 lines", 3)
    assert row.nll == pytest.approx(0.2)
    assert row.error == pytest.approx(0.3 / 3**0.5)
    assert (row.right, row.full_right) == (2, 3)
    assert "| +0.20 ± 0.17, 2 beside 3 of 3 |" in beside_full_table([row])
    # The twin: another answer, another mean.
    answers["0"]["scores"][own.title]["nll"] += 0.3
    assert beside_full(answers, [full, own])[0].nll == pytest.approx(0.3)
    # Of a single question nothing is known of the error.
    assert beside_full({"0": answers["0"]}, [full, own])[0].error is None


@pytest.mark.bench
def test_figures_that_were_measured_stand_beside_their_claims(report, folder, tmp_path):
    _, table, told, _ = report
    rows = told["measured"]["rows"]
    assert {row["part"] for row in rows} == {"figure 12, 13", "figure 14", "figure 16a"}
    assert "Figure 12, 13, milliseconds of a step; the paper claims: latency 76.25" in table
    line = "| opt-6.7b, 2 of 32 layers | 32,768 | 1 | 20% of the KV | 5 | 80 |  | 30 |  | 10 | "
    assert f"{line}8.0 (8.0 allowed), -, 3.0 (3.0 allowed), - |" in table
    assert "| 20% of the KV |  |  |  | 12 |" in table
    # The twin: slower steps, and a row that is flagged.
    write_decode_report(tmp_path, spread=0.5)
    out = tmp_path / "study.json"
    found = run(StudyRequest((Part.MEASURED,), folder, plan(), 60.0, 1, out), print)
    assert "| 5! | 80! |  | 30! |  | 10! | 8.0! (8.0 allowed)" in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("[1]", "is no report of `hillinfer-bench decode --plan paper"),
        ('{"rows": [{"part": 3}]}', "is no report of"),
        (
            '{"rows": [], "processor": "", "processor_variant": "", "number_type": ""}',
            "has no rows of the paper's figures",
        ),
    ],
    ids=["absent", "a list", "no rows of it", "none of the paper's"],
)
def test_what_is_no_report_of_decode_is_one_line(text, message, folder, tmp_path):
    if text is not None:
        (tmp_path / DECODE_FILE).write_text(text)
    request = StudyRequest((Part.MEASURED,), folder, plan(), 60.0, 1, tmp_path / "study.json")
    with pytest.raises(SettingsError, match=message):
        run(request, print)


@pytest.mark.bench
def test_answers_to_another_plan_are_not_taken_over(report, folder, tmp_path):
    _, _, told, _ = report
    out = tmp_path / "study.json"
    out.write_text(json.dumps(told), encoding="utf-8")
    said = []
    other = StudyRequest((Part.ACCURACY,), folder, plan(text_last=5), 1e-9, 1, out)
    run(other, said.append)
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["accuracy"]["answers"] == {}
    assert found["modelled"] == told["modelled"]
    assert "minutes are over: 7 of 7 are left" in said[-1]


def test_a_way_that_selects_everything_is_the_full_cache(loaded):
    ids = torch.randint(5, 60, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    prompt, forced = ReadPrompt(loaded.model, ids[:140]), ids[140:]
    full = prompt.forced(FULL, forced)
    assert full.shape[0] == len(forced)
    for way in study_ways(HEAD_DIM):
        if way.configuration is None or way.name.endswith("cache"):
            continue
        settings = way.configuration.settings.changed(alpha=1.0)
        everything = Configuration(way.name, way.configuration.make, settings)
        if way.name in (MIXED, FLOORED):
            continue
        wide = StudyWay(way.name, "all", everything, 1.0, 0.0, way.observed)
        assert torch.allclose(prompt.forced(wide, forced), full, atol=1e-4), way.name
        sparse = prompt.forced(way, forced)
        # The first comes from the prompt.
        assert torch.equal(sparse[0], full[0])
        assert not torch.allclose(sparse[1:], full[1:], atol=1e-4), way.name


def test_tokens_one_by_one_are_what_one_pass_expects(loaded):
    ids = torch.randint(5, 60, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    prompt = ReadPrompt(loaded.model, ids)
    h2o = next(one for one in study_ways(HEAD_DIM) if one.name == H2O)
    recent = Configuration(
        "recent", lambda shape, settings: RecentOnly(settings), h2o.configuration.settings
    )
    ways = (FULL, quantised_way(4), h2o, StudyWay("recent", "", recent, 0.1, 0.0))
    for way in ways:
        written = prompt.generated(way, 8, None)
        assert len(written) == 8
        expected = prompt.forced(way, written).argmax(-1).tolist()
        assert written == expected, way.name
    assert prompt.generated(FULL, 8, written_first := prompt.generated(FULL, 1, None)[0]) == []
    assert prompt.with_more([written_first]).last.shape == prompt.last.shape


def test_a_record_of_lines_is_cut_around_the_line_that_is_asked_for(loaded):
    records = made_records(3, 40)
    for question, record in zip(lines(loaded.tokenizer, records, 8), records, strict=True):
        text = loaded.tokenizer.decode(question.prompt_ids)
        # The tiny tokenizer knows no capitals and few signs.
        name = json.loads(record)["correct_line"].split(":")[0]
        assert len(re.findall(r"line \S+-\d+", text)) == 8 + 1
        assert text.count(name) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parts", "figures"), "--parts figures: write some of modelled,measured,accuracy"),
        (("--record-lines", 0), "--record-lines 0 must be at least 1"),
        (("--ways", "h3o", "--parts", "accuracy"), "--ways h3o: no way's title begins so"),
        (("--parts", "modelled,modelled"), "each once"),
        (("--share", 0), "--share 0 must be above 0"),
        (("--minutes", 0), "--minutes 0 must be above 0"),
        (("--threads", 0), "threads=0 must be at least 1"),
        (("--longeval", "none.jsonl", "--parts", "accuracy"), "cannot read the records of lines"),
        (("--texts", "none.txt", "--parts", "accuracy"), "cannot read the text none.txt"),
        (("--out", "/dev/null/study.json"), "choose another --out"),
    ],
    ids=lambda value: value[0][2:] if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line(arguments, message, folder, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["study", "--model", folder, *arguments]
    with pytest.raises(SystemExit) as ended:
        main([str(one) for one in given])
    _, err = capfd.readouterr()
    assert ended.value.code == 2
    assert message in " ".join(err.split())


def test_a_file_that_is_no_study_stays_as_it_is(capfd, tmp_path):
    file = tmp_path / "other.json"
    file.write_text('{"rows": []}')
    with pytest.raises(SystemExit) as ended:
        main(["study", "--parts", "modelled", "--out", str(file)])
    assert ended.value.code == 2
    assert "is no report of `hillinfer-bench study`" in " ".join(capfd.readouterr().err.split())
    assert Path(file).read_text() == '{"rows": []}'
