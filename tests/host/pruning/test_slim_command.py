# SPDX-License-Identifier: Apache-2.0
"""`hillinfer-bench slim` with a tiny model in the real one's place."""

import json
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from tiny_folder import save_tiny
from tiny_models import TinyModel
from transformers import DynamicCache

import hillinfer
from hillinfer.errors import SettingsError
from hillinfer.models.loader import load_model
from hillinfer.pruning.profile import answer, needle_document, read
from hillinfer_bench.cli.main import main
from hillinfer_bench.slim.decoding import (
    BLOCKS,
    BLOCKS_TIGHT,
    DECODED,
    ENTER,
    FREE_TOKENS,
    LATE,
    SELECT,
    SWAP,
    TIGHT,
    decoding_way,
    measure_decoding,
    says_number,
)
from hillinfer_bench.slim.quality import FULL, Held, Way, measure_quality
from hillinfer_bench.slim.run import (
    GOOD,
    PAPERS,
    WAYS,
    ShapeTokens,
    SlimRequest,
    goals_of,
    paper_schedule,
    run,
)
from hillinfer_bench.slim.speed import (
    CACHES,
    DRIVE,
    ORDINARY,
    SpeedRow,
    measure_speed,
    parse_caches,
)
from hillinfer_bench.slim.text import TEXT_WAYS, TextPlan

# A whole read, and one that selects; the other ways take as long.
ASKED = WAYS[:2]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What a run said, and its report."""
    # One layer lies behind the deepest cut.
    folder = save_tiny(tmp_path_factory.mktemp("model"), TinyModel(layers=29))
    out = tmp_path_factory.mktemp("slim") / "new" / "slim.json"
    said = []
    request = SlimRequest(
        *(str(folder), out, (320,), 1, (200,), 1, (), ASKED, TextPlan(1, 300, 3)),
        new_tokens=(1, 3),
    )
    table = run(request, said.append)
    assert len(said) == 12 + len(ASKED) + len(TEXT_WAYS)
    return table, json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.bench
def test_every_way_is_measured_beside_what_operations_allow(report):
    table, told = report
    assert len(table.splitlines()) == len(told["goals"])
    assert told["label"] == "measured"
    assert [(row["cache"], row["schedule"], row["new_tokens"]) for row in told["rows"]] == [
        (cache, schedule, new)
        for new in (1, 3)
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
        assert (row["dram_least_bytes"] is None) == (row["cache"] != DRIVE)
        assert row["over_ordinary"] is not None
        assert 0 < (row["dram_least_bytes"] or 1) <= (row["dram_peak_bytes"] or 1)
    assert told["paper_schedule"] is None


def speed_row(shape, context, cache, schedule, speedup, peak=None, least=None):
    spent = [1.0], [1.0], speedup, 2.4, None, 2.38, 0.0, 0
    return SpeedRow(shape, 3, context, cache, schedule, 1, *spent, peak, least)


@pytest.mark.parametrize(
    ("peak", "least", "met", "said"),
    [
        (60, 58, True, None),
        (61, 59, False, None),
        (67, 62, True, "0.620 of it"),
        (69, 62, False, "0.620 of it"),
    ],
)
def test_a_peak_is_asked_for_that_rows_and_buffers_leave_room_for(peak, least, met, said):
    rows = [
        speed_row("qwen2.5-7b", 16384, DRIVE, FULL, 1.0, 100, 97),
        speed_row("qwen2.5-7b", 16384, DRIVE, "1:37.5%,2:18.75%", 2.0, peak, least),
    ]
    (goal,) = (one for one in goals_of(rows, ()) if "DRAM peak" in one["goal"])
    assert (goal["reached"], goal["met"]) == (peak / 100, met)
    assert (said or "") in goal["goal"]
    assert ("so a tenth more" in goal["goal"]) == (said is not None)


def test_the_papers_schedule_is_told_of_its_shape_with_its_layers():
    """Cuts at 10, 20 and 30 of 32 layers allow 2.52 at 32k, as the paper's figures do."""
    good = speed_row("llama-3.1-8b", 32768, DRIVE, "1:25%,2:12.5%", 1.19)
    others = [
        speed_row("llama-3.1-8b", 32768, DRIVE, FULL, 1.0),
        speed_row("llama-3.1-8b", 32768, ORDINARY, "1:25%,2:12.5%", 2.0),
        speed_row("llama-3.1-8b", 16384, DRIVE, "1:25%,2:12.5%", 2.0),
    ]
    assert paper_schedule(others) is None
    told = paper_schedule([*others, good])
    assert (told["shape"], told["context"], told["layers"]) == ("llama-3.1-8b", 32768, 3)
    assert (told["speedup"], told["flop_limit"]) == (1.19, 2.38)
    assert told["label"].startswith("measured, 3 of 32 layers")
    whole = told["all_layers"]
    assert (whole["layers"], whole["schedule"]) == (32, "10:8192,20:4096,30:2048")
    assert whole["flop_limit"] == pytest.approx(2.52, abs=0.005)
    assert whole["speedup"] == pytest.approx(whole["flop_limit"] / 2)


@pytest.mark.bench
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
        assert 0 <= row["needles_kept"] <= 2
        assert 0 < row["second_share"] < 1
    assert len(told["second_question"]) == len(others)
    named = [one["goal"] for one in told["goals"]]
    assert sum("right at least" in one for one in named) == 2
    assert sum("the needle is kept" in one or "NLL at most" in one for one in named) == 2
    assert full["needles_kept"] == 2
    assert sum("at least 0.90 of" in one for one in named) == 4
    assert sum("choosing at most 1 %" in one for one in named) == 4
    assert sum("DRAM peak at most 0.60" in one for one in named) == 1
    assert sum("as fast as the ordinary cache's" in one for one in named) == 2


@pytest.mark.bench
def test_every_text_is_read_on_in_every_way(report):
    _, told = report
    assert [row["way"] for row in told["text"]] == [way.name for way in TEXT_WAYS]
    for row in told["text"]:
        assert (row["texts"], row["read_tokens"], row["forced_tokens"]) == (1, 297, 3)
        assert row["kl"] > 0
    named = [one["goal"] for one in told["goals"] if one["goal"].startswith("text, ")]
    assert sum("the sum of pruning's and" in one for one in named) == 2
    assert len(named) == 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a tiny model that can prune and select."""
    return save_tiny(tmp_path_factory.mktemp("tiny"), TinyModel(layers=3))


@pytest.fixture(scope="module")
def decoded(folder, tmp_path_factory):
    """A report of a document whose answers were decoded in every way, and what that took."""
    out, said = tmp_path_factory.mktemp("decoded") / "slim.json", []
    ways = (Way("2:25%", "paper"),)
    began = time.perf_counter()
    run(SlimRequest(str(folder), out, (), 1, (500,), 1, (), (), decoding=ways), said.append)
    spent = time.perf_counter() - began
    told = json.loads(out.read_text(encoding="utf-8"))
    assert len(said) == len(told["decoding"])
    return told, spent


@pytest.mark.bench
def test_answers_are_decoded_in_every_way(decoded):
    told, _ = decoded
    rows = told["decoding"]
    assert [(row["way"], row["decoding"]) for row in rows] == [
        (FULL, FULL),
        *(("2:25% paper", one) for one in DECODED),
    ]
    for row in rows:
        assert row["documents"] == 1
        assert 0 <= row["free_right"] <= 1
        assert min(row["seconds"], row["cpu_seconds"], row["nll"]) > 0
        blocks = row["decoding"] in (BLOCKS, BLOCKS_TIGHT, ENTER)
        for name in ("computed", "swapping_seconds"):
            assert (row[name] > 0) == (row["decoding"] == SWAP) or row["decoding"] == ENTER
        assert (row["deciding_seconds"] > 0) == (row["decoding"] == SWAP or blocks)
        # So few blocks are forced ones, which never change.
        assert (row["swaps"] > 0) == (row["decoding"] == SWAP) or blocks
        # Reads of pages bring more than the rows that are wanted; blocks lie in memory.
        on_drive = row["decoding"] in (SELECT, BLOCKS, ENTER, TIGHT, BLOCKS_TIGHT, LATE)
        assert (row["moved_bytes"] > 0) == (on_drive or row["decoding"] == SWAP)
        assert (row["read_bytes"] > row["moved_bytes"]) == on_drive
        assert (row["waiting_seconds"] > 0) == on_drive
        # Ranking and moving are part of a token's time, and both are means over the same tokens.
        assert row["deciding_seconds"] + row["swapping_seconds"] < row["seconds"]
    moved = {row["decoding"]: row["moved_bytes"] for row in rows}
    assert moved[SELECT] <= moved[TIGHT]
    assert told["goals"] == told["quality"] == []


@pytest.fixture(scope="module")
def tiny(folder):
    """The model, its tokenizer, and the document."""
    loaded = load_model(str(folder))
    loaded.model.set_attn_implementation("sdpa")
    return loaded.model, loaded.tokenizer, needle_document(loaded.tokenizer, 500, 0)


def nothing(line):
    pass


@contextmanager
def read_by_hand(model, document, place, schedule=FULL, decoding="keep", alpha=None, **changes):
    """Give a cache that has read a prompt as a user's would, and the logits behind it."""
    question = document.questions[0]
    ids = [*document.ids, *question.ids]
    with ExitStack() as stack, torch.no_grad():
        cache = DynamicCache(config=model.config)
        if alpha is not None:
            made = hillinfer.attach(
                model, cold_dir=place, alpha=alpha, dram_budget="120%", **changes
            )
            stack.enter_context(made)
            cache = made.new_cache(expected_tokens=len(ids) + 99)
        with ExitStack() as reading:
            if schedule != FULL:
                pruning = hillinfer.prune(model, schedule, ranker="paper", decoding=decoding)
                stack.enter_context(pruning)
                reading.enter_context(pruning.prompt(len(ids), len(question.ids)))
            last = read(model, cache, ids)
        yield cache, last


def forced_by_hand(model, document, place, *schedule, **given):
    """Return what a forced answer is: whether it is right, and its NLL."""
    with read_by_hand(model, document, place, *schedule, **given) as (cache, last):
        return answer(model, cache, document.questions[0], last)


def said_by_hand(model, document, place):
    """Return what is said freely of a document that was read whole."""
    with read_by_hand(model, document, place) as (cache, last):
        said = [int(last.argmax())]
        while len(said) < FREE_TOKENS:
            said.append(int(read(model, cache, said[-1:]).argmax()))
        return said


@pytest.mark.bench
def test_decoded_answers_are_those_by_hand(decoded, tiny, tmp_path):
    model, tokenizer, document = tiny
    told, spent = decoded
    full, *others = (SimpleNamespace(**row) for row in told["decoding"])
    forced = forced_by_hand(model, document, tmp_path)
    assert tokenizer.eos_token_id not in said_by_hand(model, document, tmp_path)
    assert 0 < full.seconds * (FREE_TOKENS - 1) < spent
    assert (full.right, full.nll) == (forced[0], pytest.approx(forced[1]))
    hands = {
        "keep": {"decoding": "keep"},
        "swap:0.9": {"decoding": "swap:0.9"},
        "alpha=0.1": {"alpha": 0.1},
        "blocks:10%": {"alpha": 0.1, "decoding": "blocks:10%"},
        "enter:10%": {"alpha": 0.1, "decoding": "enter:10%"},
        "alpha=0.1 25% late": {"alpha": 0.1, "query": "true"},
    }
    forced = {
        name: forced_by_hand(model, document, tmp_path, "2:25%", **given)
        for name, given in hands.items()
    }
    # Where rows lie changes nothing.
    places = {f"{name} 25%": name for name in ("alpha=0.1", "blocks:10%")}
    forced |= {one: forced[name] for one, name in places.items()}
    assert {one.decoding for one in others} == forced.keys()
    for row in others:
        right, nll = forced[row.decoding]
        assert (row.right, row.nll) == (right, pytest.approx(nll))
    found = {row.decoding: row.nll for row in others}
    assert all(found[one] == found[name] for one, name in places.items())
    # Twins: no other is another one's, and another share of rows gives another answer. Blocks that
    # enter for this one are those that stayed.
    _, other = forced_by_hand(model, document, tmp_path, "2:25%", alpha=0.9)
    apart = sorted([full.nll, other, *(found[one] for one in found if one not in places)])
    apart.remove(found["enter:10%"])
    assert min(b - a for a, b in pairwise(apart)) > 1e-4


def test_who_says_a_number_by_itself_is_right(tiny, tmp_path):
    model, tokenizer, document = tiny
    said = said_by_hand(model, document, tmp_path)
    # What the model says anyway is asked for, and in the twin another last digit.
    first, second = document.questions
    known = replace(first, answer_ids=said[:4], digits=[0, 1, 2, 3])
    other = replace(known, answer_ids=[*said[:3], said[3] + 1])
    asked = [replace(document, questions=(one, second)) for one in (known, other)]
    (row,) = measure_decoding(model, tokenizer, asked, [], nothing)
    assert (row.documents, row.right, row.free_right) == (2, 1, 1)
    assert [says_number(tokenizer, one, said) for one in (known, other)] == [True, False]
    # Of several documents the mean is told.
    nlls = [forced_by_hand(model, one, tmp_path)[1] for one in asked]
    assert nlls[0] < row.nll < nlls[1]
    assert row.nll == pytest.approx(sum(nlls) / 2)


def test_a_number_is_looked_for_in_all_that_is_said(tiny):
    _, tokenizer, document = tiny
    question = document.questions[0]
    number = tokenizer.decode([question.answer_ids[place] for place in question.digits])
    assert number.isdecimal()
    other = number[:-1] + str((int(number[-1]) + 1) % 10)
    for said, right in ((f"it is {number}, i think.", True), (f"it is {other}, i think.", False)):
        assert says_number(tokenizer, question, tokenizer(said)["input_ids"]) is right
    assert not says_number(tokenizer, question, [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("15:50% completed", "write '15:50%', without completed"),
        ("15:50% paper drive", "write '15:50% paper', without drive"),
        ("full", "write a schedule alone, such as 15:50%"),
        ("full drive", "write a schedule alone, such as 15:50%"),
        ("drive", "'' is no cut"),
        ("15:50% best", "ranker='best'"),
    ],
)
def test_what_cannot_be_decoded_in_every_way_is_refused(text, said, capfd):
    with pytest.raises(SettingsError, match=said):
        decoding_way(text)
    # The command refuses it before it loads a model.
    with pytest.raises(SystemExit) as ended:
        main(["slim", "--model", "nowhere", "--decoding", text])
    assert ended.value.code
    _, err = capfd.readouterr()
    assert said in " ".join(err.split())
    assert decoding_way("15:50%") == Way("15:50%", "weights")
    assert decoding_way("15:50% paper") == Way("15:50%", "paper")


@pytest.mark.parametrize("way", [*WAYS, *TEXT_WAYS, Way("15:mass=95%", "weights")])
def test_a_way_is_written_as_tables_call_it(way):
    assert Way.parse(way.name) == way


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("half", "'half' is no cut"),
        ("15:50% best", "ranker='best'"),
        ("15:mass=95% paper", "ranker='paper' gives scores that do not add up"),
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


def test_one_cache_can_be_timed_by_itself(tmp_path, capfd):
    """Of a shape that takes minutes, without the rows of the other cache."""
    assert parse_caches(None) == CACHES
    assert parse_caches(["drive", "ordinary"]) == CACHES
    assert parse_caches(["drive"]) == (DRIVE,)
    with pytest.raises(SettingsError, match="--caches disk: choose of ordinary and drive"):
        parse_caches(["drive", "disk"])
    with pytest.raises(SystemExit) as ended:
        main(["slim", "--model", "nowhere", "--caches", "drive", "--caches", "disk"])
    assert ended.value.code
    assert "--caches disk: choose of" in " ".join(capfd.readouterr().err.split())
    folder, out = save_tiny(tmp_path / "model", TinyModel(layers=29)), tmp_path / "slim.json"
    given = ["slim", "--model", str(folder), "--rounds", "1", "--texts", "0", "--out", str(out)]
    # Without documents, in either way to say so.
    for contexts, no in (("320", "documents"), ("0", "lengths")):
        with pytest.raises(SystemExit) as ended:
            main([*given, "--contexts", contexts, f"--{no}", "0", "--caches", ORDINARY])
        assert ended.value.code == 0
        told = json.loads(out.read_text(encoding="utf-8"))
        rows = [(row["cache"], row["new_tokens"]) for row in told["rows"]]
        assert rows == ([(ORDINARY, 1)] * 3 + [(ORDINARY, 16)] * 3 if contexts != "0" else [])
        assert all(row["speedup"] > 0 for row in told["rows"])
        assert told["quality"] == []
        assert not [one for one in told["goals"] if "ordinary cache's" in one["goal"]]


def test_what_is_over_the_ordinary_cache_takes_it(tiny):
    """And a goal takes both: see the report of both."""
    model, _, document = tiny
    for cache in CACHES:
        rows = measure_speed(
            "tiny", model, document.ids[:200], ["2:50%"], 1, 1, 200, nothing, (cache,)
        )
        assert [(row.cache, row.schedule) for row in rows] == [(cache, FULL), (cache, "2:50%")]
        assert all(row.speedup > 0 for row in rows)
        assert all((row.over_ordinary is None) == (cache == DRIVE) for row in rows)
        assert not [one for one in goals_of(rows, ()) if "ordinary cache's" in one["goal"]]


def test_needles_are_kept_where_their_blocks_are(tiny):
    """The most recent blocks keep none of a document's beginning; blocks of both numbers, both."""
    model, tokenizer, _ = tiny
    # Where needles lie follows from the text, which is not that of every Python.
    documents = (needle_document(tokenizer, 500, seed) for seed in range(50))
    document = next(one for one in documents if all(max(each.blocks) < 4 for each in one.questions))
    # What is answered does not matter here.
    there = [replace(one, answer_ids=one.answer_ids[:1], digits=[0]) for one in document.questions]
    last = len(document.ids) // 64
    moved = [replace(one, blocks=range(last - 2, last)) for one in there]
    for questions, kept in (
        (there, 0),
        ((there[0], moved[1]), 1),
        (moved, 2),
    ):
        asked = replace(document, questions=tuple(questions))
        ways = [Way(FULL), Way("2:50%", "recent")]
        full, row = measure_quality(model, [asked], ways, nothing)
        assert (full.needles_kept, row.needles_kept) == (2, kept)


def test_documents_are_the_same_for_the_same_seed(tiny_folder):
    tokenizer = load_model(str(tiny_folder)).tokenizer
    first, again, other = (needle_document(tokenizer, 1500, seed) for seed in (1, 1, 2))
    assert first == again != other
    text = tokenizer.decode(first.ids)
    for question in first.questions:
        number = tokenizer.decode([question.answer_ids[place] for place in question.digits])
        assert number.isdigit()
        assert number in text
