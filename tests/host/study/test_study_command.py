# SPDX-License-Identifier: Apache-2.0
"""`hillinfer-bench study` with a tiny model in the real one's place."""

import json
import re
from pathlib import Path

import pytest
import torch
from tiny_folder import save_tiny
from tiny_models import TinyModel

from hillinfer.models.loader import load_model
from hillinfer_bench.cli.main import main
from hillinfer_bench.quality.policies import RecentOnly
from hillinfer_bench.quality.table import Configuration
from hillinfer_bench.study.reading import ReadPrompt
from hillinfer_bench.study.run import Part, StudyRequest, run
from hillinfer_bench.study.tasks import TaskPlan, lines, made_records
from hillinfer_bench.study.ways import FULL, H2O, StudyWay, quantised_way, study_ways

HEAD_DIM = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("model"), TinyModel(layers=2, head_dim=16)))


@pytest.fixture(scope="module")
def loaded(folder):
    return load_model(folder)


def plan(**changes):
    small = {
        "needle_tokens": (400,),
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


@pytest.fixture(scope="module")
def report(folder, tmp_path_factory):
    """What a run said, its tables and its report."""
    out = tmp_path_factory.mktemp("study") / "new" / "study.json"
    said = []
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
        assert table.count(f"| {title} |") == 2
    kl = {title: answers["text, 200 tokens, 0"]["scores"][title]["kl"] for title in titles}
    assert kl["4-bit cache, all tokens"] < kl["2-bit cache, all tokens"]
    assert told["modelled"]["label"] == "modelled"
    assert told["accuracy"]["label"] == "measured"


def test_pictures_lie_beside_the_report(report):
    *_, request = report
    beside = sorted(one.name for one in request.out.parent.iterdir())
    assert beside == ["study-batch.svg", "study-bytes.svg", "study.json"]


def test_a_run_goes_on_with_what_is_known(report):
    _, table, told, request = report
    said = []
    assert run(request, said.append) == table
    assert [one for one in said if "of a processor" in one] == []
    assert json.loads(request.out.read_text(encoding="utf-8")) == told
    # What is missing is asked, and nothing else.
    fewer = json.loads(json.dumps(told))
    del fewer["accuracy"]["answers"]["choice, 120 tokens, 0"]
    request.out.write_text(json.dumps(fewer), encoding="utf-8")
    run(request, said.append)
    (asked,) = [one for one in said if "of a processor" in one]
    assert "choice, 120 tokens, 0" in asked
    again = json.loads(request.out.read_text(encoding="utf-8"))
    name = "choice, 120 tokens, 0"
    known, new = (one["accuracy"]["answers"][name]["scores"] for one in (told, again))
    assert known == new


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
        if way.name.endswith("by weight"):
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
        text = loaded.tokenizer.decode(question._prompt_ids)
        # The tiny tokenizer knows no capitals and few signs.
        name = json.loads(record)["correct_line"].split(":")[0]
        assert len(re.findall(r"line \S+-\d+", text)) == 8 + 1
        assert text.count(name) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parts", "figures"), "--parts figures: write some of modelled,accuracy"),
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
