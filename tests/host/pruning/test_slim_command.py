# SPDX-License-Identifier: Apache-2.0
"""`hillinfer-bench slim` with a tiny model in the real one's place."""

import json

import pytest
from tiny_folder import save_tiny
from tiny_models import TinyModel

from hillinfer.errors import SettingsError
from hillinfer.models.loader import load_model
from hillinfer.pruning.needles import needle_document
from hillinfer_bench.slim.decoding import KEEP, SELECT, SWAP
from hillinfer_bench.slim.quality import FULL, Held, Way
from hillinfer_bench.slim.run import GOOD, PAPERS, WAYS, ShapeTokens, SlimRequest, run
from hillinfer_bench.slim.speed import CACHES, DRIVE
from hillinfer_bench.slim.text import TEXT_WAYS, TextPlan

# A whole read, and one that selects; the other ways take as long.
ASKED = WAYS[:2]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What a run said, and its report."""
    folder = save_tiny(tmp_path_factory.mktemp("model"), TinyModel(layers=30))
    out = tmp_path_factory.mktemp("slim") / "new" / "slim.json"
    said = []
    request = SlimRequest(str(folder), out, (320,), 1, (200,), 1, (), ASKED, TextPlan(1, 300, 3))
    table = run(request, said.append)
    assert len(said) == 12 + len(ASKED) + len(TEXT_WAYS)
    return table, json.loads(out.read_text(encoding="utf-8"))


def test_every_way_is_measured_beside_what_operations_allow(report):
    table, told = report
    assert len(table.splitlines()) == len(told["goals"])
    assert told["label"] == "measured"
    assert [(row["cache"], row["schedule"], row["new_tokens"]) for row in told["rows"]] == [
        (cache, schedule, new)
        for new in (1, 16)
        for cache in CACHES
        for schedule in (FULL, GOOD, PAPERS)
    ]
    for row in told["rows"]:
        assert len(row["seconds"]) == 1
        assert row["context"] == 320
        assert (row["flop_limit"] > 1.2) == (row["schedule"] != FULL)
        assert row["share_of_limit"] == pytest.approx(row["speedup"] / row["flop_limit"])
        states = 320 * 32 * 4
        assert row["boundary_bytes"] == (0 if row["schedule"] == FULL else states)
        assert (row["dram_peak_bytes"] is None) == (row["cache"] != DRIVE)
    assert told["paper_schedule"] is None


def test_every_way_is_asked_about_every_needle(report):
    _, told = report
    assert [row["way"] for row in told["quality"]] == [way.name for way in ASKED]
    full, *others = told["quality"]
    assert (full["flop_limit"], full["kept_share"], full["second_share"]) == (1, 1, None)
    for row in others:
        assert row["documents"] == 1
        assert 0 <= row["right"] <= 1
        assert row["nll"] > 0
        assert 0 < row["kept_share"] < 1
        assert 0 < row["second_share"] < 1
    assert len(told["second_question"]) == len(others)
    named = [one["goal"] for one in told["goals"]]
    assert sum("right at least" in one for one in named) == 2
    assert sum("at least 0.90 of" in one for one in named) == 4
    assert sum("choosing at most 1 %" in one for one in named) == 4
    assert sum("DRAM peak at most 0.60" in one for one in named) == 1
    assert sum("as fast as the ordinary cache's" in one for one in named) == 2


def test_every_text_is_read_on_in_every_way(report):
    _, told = report
    assert [row["way"] for row in told["text"]] == [way.name for way in TEXT_WAYS]
    for row in told["text"]:
        assert (row["texts"], row["read_tokens"], row["forced_tokens"]) == (1, 297, 3)
        assert row["kl"] > 0
    named = [one["goal"] for one in told["goals"] if one["goal"].startswith("text, ")]
    assert sum("the sum of pruning's and" in one for one in named) == 2
    assert len(named) == 4


def test_answers_are_decoded_in_every_way(tmp_path):
    folder, out = save_tiny(tmp_path / "model", TinyModel(layers=5)), tmp_path / "slim.json"
    said, way = [], Way("2:25%", "paper")
    request = SlimRequest(str(folder), out, (), 2, (500,), 1, (), (), decoding=(way,))
    run(request, said.append)
    told = json.loads(out.read_text(encoding="utf-8"))
    rows = told["decoding"]
    assert [(row["way"], row["decoding"]) for row in rows] == [
        (FULL, FULL),
        *((way.name, one) for one in (KEEP, SWAP, SELECT)),
    ]
    assert len(said) == len(rows)
    for row in rows:
        assert row["documents"] == 2
        assert 0 <= row["free_right"] <= 2
        assert min(row["seconds"], row["cpu_seconds"], row["nll"]) > 0
        for name in ("swaps", "computed", "deciding_seconds", "swapping_seconds"):
            assert (row[name] > 0) == (row["decoding"] == SWAP)
    assert told["goals"] == told["quality"] == []


@pytest.mark.parametrize("way", [*WAYS, *TEXT_WAYS, Way("15:mass=95%", "weights")])
def test_a_way_is_written_as_tables_call_it(way):
    assert Way.parse(way.name) == way


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("half", "'half' is no cut"),
        ("15:50% best", "ranker='best'"),
        ("15:mass=95% paper", "do not add up"),
        ("15:50% weights completed drive", "ranker='weights completed'"),
        ("full completed", "neither chosen from nor completed"),
        ("full weights", "neither chosen from nor completed"),
        ("drive", "'' is no cut"),
    ],
)
def test_what_is_no_way_is_refused(text, said):
    with pytest.raises(SettingsError, match=said):
        Way.parse(text)
    assert Way.parse("15:50%") == Way("15:50%", "weights")
    assert Way.parse("15:50% drive") == Way("15:50%", "weights", Held.DRIVE)


def test_a_shape_is_timed_at_both_lengths_or_at_one():
    assert [one.tokens for one in ShapeTokens.parse("qwen2.5-7b")] == [16384, 32768]
    assert ShapeTokens.parse("llama-3.1-8b:4096") == (ShapeTokens("llama-3.1-8b", 4096),)


@pytest.mark.parametrize(
    ("text", "said"), [("gpt-2", "no shape 'gpt-2'"), ("llama-3.1-8b:16k", "'16k' is no number")]
)
def test_what_is_no_shape_is_refused(text, said):
    with pytest.raises(SettingsError, match=said):
        ShapeTokens.parse(text)


def test_documents_are_the_same_for_the_same_seed(tiny_folder):
    tokenizer = load_model(str(tiny_folder)).tokenizer
    first, again, other = (needle_document(tokenizer, 1500, seed) for seed in (1, 1, 2))
    assert first == again != other
    text = tokenizer.decode(first.ids)
    for question in first.questions:
        number = tokenizer.decode([question.answer_ids[place] for place in question.digits])
        assert number.isdigit()
        assert number in text
