# SPDX-License-Identifier: Apache-2.0
"""Which schedules a curve allows, and `hillinfer prune-profile` through its own entry point."""

import json

import pytest
import torch
from cli.command import Command
from tiny_models import TinyModel
from transformers import DynamicCache

from hillinfer.models.loader import load_model
from hillinfer.pruning.profile import answer, candidates, make_profile, needle_document, read
from hillinfer.pruning.rankers import Ranker

SIX = TinyModel(layers=6).build()


@pytest.mark.parametrize(
    ("curve", "allowed"),
    [
        # A quarter is tried where a fifth is enough, a half where two fifths are.
        ([0.9, 0.5, 0.39, 0.3, 0.2, 0.1], ["3:50%", "5:25%"]),
        ([0.9, 0.1, 0.9, 0.9, 0.9, 0.9], ["2:25%", "2:50%"]),
        ([0.9, 0.9, 0.9, 0.9, 0.41, 0.1], []),
        # The last layer decides about nothing.
        ([0.9] * 5 + [0.0], []),
        ([0.0] * 6, ["1:25%", "1:50%"]),
    ],
)
def test_schedules_that_a_curve_allows_come_fastest_first(curve, allowed):
    assert [str(one) for one in candidates(curve, SIX, 4000)] == allowed


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    return load_model(str(tiny_folder))


@pytest.fixture
def document(tiny):
    return needle_document(tiny.tokenizer, 600, 3)


class Oracle(Ranker):
    """Knows where the number lies, or puts it last."""

    def __init__(self, document, worth):
        self._blocks = {block for one in document.questions for block in one.blocks}
        self._worth = worth

    def scores(self, deciding):
        scores = torch.zeros(deciding.blocks)
        scores[list(self._blocks)] = self._worth
        return scores


def test_a_number_lies_in_its_blocks_and_nowhere_else(document, tiny):
    tokenizer = tiny.tokenizer
    for question in document.questions:
        number = tokenizer.decode([question.answer_ids[place] for place in question.digits])
        first, last = question.blocks[0], question.blocks[-1] + 1
        assert number in tokenizer.decode(document.ids[64 * first : 64 * last])
        assert number not in tokenizer.decode(document.ids[: 64 * first])
        assert number not in tokenizer.decode(document.ids[64 * last :])


@pytest.mark.parametrize("worth", [1.0, -1.0])
def test_the_curve_is_the_share_that_keeps_the_number(document, tiny, worth):
    model = tiny.model
    said = []
    found = make_profile(model, [document], Oracle(document, worth), said.append)
    blocks = -(-(len(document.ids) + len(document.questions[0].ids)) // 64)
    held = len({block for one in document.questions for block in one.blocks})
    least = held / blocks if worth > 0 else 1.0
    assert found.least_shares == pytest.approx([least] * 2, rel=0.1)
    assert found.tried[0].schedule is None
    tried = [one.schedule for one in found.tried[1:]]
    assert tried[:1] == (["1:25%"] if least <= 0.2 else ["1:50%"] if least <= 0.4 else [])
    assert found.schedule in [None, *tried[-1:]]
    assert said[0] == "1 of 1 documents read whole"


def answered_as(whole, *tried):
    """Stand in for a model's answers: how many of four are right, and NLLs, in order of reading."""
    left = iter([whole, *tried])
    coming, asked = [], []

    def answered(model, cache, question, last):
        if not coming:
            right, nll = next(left)
            coming.extend((place < right, nll) for place in range(4))
        # A whole read is answered behind nothing, and what was pruned behind its logits.
        assert (last is None) == (len(asked) < 4)
        asked.append(question)
        return coming.pop(0)

    return answered


@pytest.mark.parametrize(
    ("whole", "tried", "named"),
    [
        # One question fewer, and 0.3 nats more, are as good; with both the faster one is taken.
        ((4, 1.0), [(3, 1.29)], "1:25%"),
        ((3, 1.0), [(4, 0.5)], "1:25%"),
        ((4, 1.0), [(2, 1.0), (3, 1.29)], "1:50%"),
        ((4, 1.0), [(4, 1.31), (4, 1.0)], "1:50%"),
        ((4, 1.0), [(2, 1.0), (4, 1.31)], None),
        # Who knows half of the numbers tells something, and who knows fewer nothing.
        ((2, 1.0), [(1, 1.0)], "1:25%"),
        ((1, 1.0), [(4, 0.5), (4, 0.5)], None),
    ],
)
def test_the_fastest_that_keeps_the_quality_is_named(whole, tried, named, tiny):
    # So long that the numbers' blocks are less than a fifth of it.
    document = needle_document(tiny.tokenizer, 1200, 3)
    oracle, said = Oracle(document, 1.0), []
    answered = answered_as(whole, *tried)
    found = make_profile(tiny.model, [document] * 2, oracle, said.append, answered)
    assert found.schedule == named
    # Nothing slower is tried behind what is good enough.
    assert [(one.right, one.nll) for one in found.tried] == [
        (right, pytest.approx(nll)) for right, nll in (whole, *tried)
    ]
    assert [one.schedule for one in found.tried[1:]] == ["1:25%", "1:50%"][: len(tried)]


def test_an_answer_is_right_where_every_digit_is_expected(document, tiny):
    """Whatever a random model expects is taken for the number, and then something else."""
    model, (question, _) = tiny.model, document.questions

    def asked(ids):
        cache = DynamicCache(config=model.config)
        read(model, cache, [*document.ids, *question.ids])
        own = type(question)(question.ids, ids, question.digits, question.blocks)
        return answer(model, cache, own, None)

    ids = list(question.answer_ids)
    for place in question.digits:
        cache = DynamicCache(config=model.config)
        last = read(model, cache, [*document.ids, *question.ids, *ids[:place]])
        ids[place] = int(last.argmax())
    right, nll = asked(ids)
    assert right
    ids[question.digits[-1]] = (ids[question.digits[-1]] + 1) % 61
    wrong, more = asked(ids)
    assert not wrong
    assert more > nll


@pytest.fixture
def command(monkeypatch, capfd):
    return Command(monkeypatch, capfd)


def test_a_table_and_the_evidence(command, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "new" / "profile.json"
    outcome = command(
        *("prune-profile", tiny_folder, "--documents", 1, "--tokens", 600, "--out", out),
    )
    assert outcome.code == 0, outcome.err
    told = json.loads(out.read_text(encoding="utf-8"))
    assert (told["label"], told["ranker"], told["documents"]) == ("measured", "weights", 1)
    assert len(told["least_shares"]) == 2
    assert told["tried"][0]["questions"] == 2
    # A random model answers nothing, so no schedule is named.
    assert told["tried"][0]["right"] == 0
    assert told["schedule"] is None
    assert outcome.out.splitlines()[-1].startswith("schedule: none")
    assert out.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--documents", 0), "--documents 0 must be at least 1"),
        (("--tokens", 200), "--tokens 200 makes too few blocks"),
        (("--ranker", "best"), "ranker='best': choose one of"),
        (("--threads", 0), "threads=0"),
        (("--out", "/dev/null/a.json"), "choose another --out"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_loaded(command, given, said):
    assert said in command("prune-profile", "nowhere", *given).error_line()
