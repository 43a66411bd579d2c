# SPDX-License-Identifier: Apache-2.0
"""Every scored token is behind selected ones; at α 1 that is the ordinary model's likelihood."""

from pydoc_data.topics import topics

import pytest
import torch
from generation_runs import CHUNK, SETTINGS
from tiny_models import VOCABULARY

from hillinfer.errors import SettingsError
from hillinfer.harness.selected_model import Asked, Likelihood, SelectedModel
from hillinfer.harness.tasks import made_texts
from hillinfer.models.loader import load_model
from hillinfer.settings import Settings

# Rows are kept in FP16: what single tokens differ by adds up.
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def loaded(tiny_folder):
    return load_model(str(tiny_folder), say=lambda line: None)


def tokens(count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(4, VOCABULARY, (count,), generator=draw).tolist())


def selected(loaded, cold_dir, asked, alpha):
    settings = Settings().changed(cold_dir=cold_dir, **(SETTINGS | {"alpha": alpha}))
    own = SelectedModel(loaded, settings, CHUNK)
    try:
        return own.likelihoods(asked)
    finally:
        own.close()


def ordinary(loaded, one):
    """What the model says without HillInfer, all tokens in one pass."""
    ids = torch.tensor([[*one.context, *one.continuation]])
    with torch.no_grad():
        logits = loaded.model(ids).logits[0, len(one.context) - 1 : -1].float()
    wanted = torch.tensor(one.continuation)
    found = logits.log_softmax(-1).gather(1, wanted[:, None])
    return Likelihood(float(found.sum()), bool((logits.argmax(-1) == wanted).all()))


def greedy(loaded, context, count):
    ids = list(context)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(loaded.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(context) :])


def cases(loaded):
    context = tokens(150)
    return [
        Asked(context, tokens(5, 1)),
        Asked(tokens(1, 2), tokens(120, 3)),
        Asked(context, tokens(1, 4)),
        Asked(context, greedy(loaded, context, 3)),
    ]


def test_at_alpha_one_they_are_the_ordinary_models(loaded, cold_dir):
    asked = cases(loaded)
    found = selected(loaded, cold_dir, asked, 1.0)
    expected = [ordinary(loaded, one) for one in asked]
    assert [one.total for one in found] == pytest.approx(
        [one.total for one in expected], rel=1e-5, abs=TOLERANCE
    )
    assert [one.greedy for one in found] == [one.greedy for one in expected]
    assert [one.greedy for one in found] == [False, False, False, True]


def test_with_fewer_tokens_they_differ_for_one_token_too(loaded, cold_dir):
    asked = cases(loaded)
    found = selected(loaded, cold_dir, asked, 0.05)
    for one, own in zip(asked, found, strict=True):
        assert abs(own.total - ordinary(loaded, one).total) > 5 * TOLERANCE, one


def test_a_context_that_is_read_once_answers_as_when_it_is_read_for_each(loaded, cold_dir):
    asked = cases(loaded)
    together = selected(loaded, cold_dir, asked, 0.2)
    assert together == [selected(loaded, cold_dir, [one], 0.2)[0] for one in asked]


def test_the_model_is_left_as_it_was(loaded, cold_dir):
    before = ordinary(loaded, cases(loaded)[0])
    selected(loaded, cold_dir, cases(loaded)[:1], 0.2)
    assert ordinary(loaded, cases(loaded)[0]) == before


def test_the_oldest_tokens_of_what_is_too_long_are_left_out():
    # The last token is scored and not read: 7 of 8 tokens need positions.
    assert Asked.within([1, 2, 3, 4, 5], [6, 7, 8], 7) == Asked((1, 2, 3, 4, 5), (6, 7, 8))
    assert Asked.within([1, 2, 3, 4, 5], [6, 7, 8], 5) == Asked((3, 4, 5), (6, 7, 8))
    assert Asked.within([1, 2, 3, 4, 5], [6, 7, 8], 5).read_tokens == 5


@pytest.mark.parametrize(
    ("context", "continuation"), [([1], [2] * 8), ([1, 2, 3], [4] * 9), ([], [1]), ([1], [])]
)
def test_what_cannot_be_scored_is_refused_and_not_cut_in_the_middle(context, continuation):
    with pytest.raises(SettingsError, match="cannot be scored"):
        Asked.within(context, continuation, 7)
    assert Asked.within([1], [2] * 7, 7) == Asked((1,), (2,) * 7)


# --- texts of the tasks ---


@pytest.mark.parametrize(
    "make", [made_texts.needles, made_texts.lines, made_texts.choices, made_texts.pages]
)
def test_texts_are_the_same_every_time(make):
    assert make(questions=2, version=1.0) == make(questions=2)
    assert len(make(questions=2)["test"]) == 2


def test_what_is_asked_for_stands_in_the_text_once():
    for one in made_texts.needles(words=80, questions=4)["test"]:
        assert one["text"].count(f"The number of the {one['name']} is {one['value']}.") == 1
        assert len(one["text"].split()) == 88
    for one in made_texts.lines(lines_each=12, questions=4)["test"]:
        assert one["record"].count(f"line {one['name']}: REGISTER_CONTENT is <{one['value']}>") == 1


def test_the_right_choice_follows_the_passage_and_the_others_do_not():
    text = " ".join(" ".join(topics[name] for name in sorted(topics)).split())
    for one in made_texts.choices(words=60, questions=4)["test"]:
        assert len(set(one["choices"])) == 4
        assert len(one["passage"].split()) >= 60
        assert one["choices"][one["right"]] in text


def test_words_and_bytes_of_a_page_are_counted():
    counted = made_texts.page_results({"page": "one two ü"}, (-3.0,))
    assert counted["word_perplexity"] == (-3.0, 3)
    assert counted["byte_perplexity"] == counted["bits_per_byte"] == (-3.0, 10)
