# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of a prompt's own tokens: `echo` with `logprobs`, as evaluations ask."""

import json

import openai
import pytest
import torch
from servers import HTTP, running

from hillinfer.models.loader import load_model

PROMPT = "the cat sat on the mat and the dog sat on the cat " * 2
ASKED = {"model": "tiny", "echo": True, "logprobs": 2, "temperature": 0}


@pytest.fixture(scope="module")
def dense(endless_folder, cold_dir):
    """A server whose steps select every token."""
    with running(endless_folder, cold_dir, made={"alpha": 1.0}) as server:
        yield server


@pytest.fixture(scope="module")
def expected(endless_folder):
    """Log-probabilities of each token by one ordinary pass, (tokens - 1, vocabulary)."""
    loaded = load_model(str(endless_folder))
    ids = torch.tensor([loaded.tokenizer(PROMPT).input_ids])
    with torch.no_grad():
        logits = loaded.model(ids).logits[0]
    return ids[0].tolist(), logits.float().log_softmax(-1)


def scores(server, **options):
    with server.client() as client:
        return client.completions.create(**({"prompt": PROMPT, "max_tokens": 1} | ASKED | options))


@pytest.fixture(scope="module")
def answer(dense):
    """What the dense server says of the prompt."""
    return scores(dense)


def test_a_prompts_tokens_are_worth_what_an_ordinary_pass_says(answer, expected):
    ids, logprobs = expected
    told = answer.choices[0].logprobs
    assert len(told.tokens) == len(ids) + 1
    assert told.token_logprobs[0] is None
    assert told.top_logprobs[0] is None
    own = [float(logprobs[place - 1, one]) for place, one in enumerate(ids) if place]
    # Rows are kept in 16 bits.
    assert told.token_logprobs[1:-1] == pytest.approx(own, abs=2e-2)
    greedy = [int(one) for one in logprobs[: len(ids) - 1].argmax(-1)]
    found = [max(one.values()) for one in told.top_logprobs[1:-1]]
    best = [float(logprobs[place, one]) for place, one in enumerate(greedy)]
    assert found == pytest.approx(best, abs=2e-2)
    # Its text is the prompt, and offsets say where in it.
    text = answer.choices[0].text
    assert text.startswith(PROMPT)
    spans = zip(told.text_offset, told.tokens, strict=True)
    assert all(text[begin : begin + len(one)] == one for begin, one in spans)
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.completion_tokens == 1


def test_scores_go_through_selection(answer, tiny_server):
    """Selected tokens alone give others than all of them, and not for the first few."""
    whole = answer.choices[0].logprobs.token_logprobs
    few = scores(tiny_server).choices[0].logprobs.token_logprobs
    assert few[1:4] == pytest.approx(whole[1:4], abs=2e-2)
    assert few[1:] != pytest.approx(whole[1:], abs=2e-2)


def test_nothing_need_follow_a_scored_prompt(dense, expected):
    ids, _ = expected
    answer = scores(dense, max_tokens=0)
    assert answer.choices[0].text == PROMPT
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].logprobs.tokens) == len(ids)
    assert answer.usage.completion_tokens == 0
    alone = scores(dense, prompt=[ids[:1]], max_tokens=0).choices[0]
    assert alone.logprobs.token_logprobs == [None]
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        scores(dense, max_tokens=0, echo=False)


def test_a_stream_has_the_same_scores(dense, answer):
    whole = answer.choices[0]
    body = {"prompt": PROMPT, "max_tokens": 1, "stream": True} | ASKED
    said = HTTP.post(f"{dense.url}/v1/completions", json=body).text
    data = [one.removeprefix("data: ") for one in said.split("\n\n") if one.startswith("data: {")]
    choices = [json.loads(one)["choices"][0] for one in data]
    assert "".join(one["text"] for one in choices) == whole.text
    told = [one["logprobs"] for one in choices if one["logprobs"]]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [each for one in told for each in one[name]] == getattr(whole.logprobs, name)


def test_scored_prompts_take_steps_with_others(endless_folder, cold_dir):
    """Two that are scored at once have two rows in one pass, and the scores that each has alone."""
    from concurrent.futures import ThreadPoolExecutor

    prompts = [PROMPT, "a dog " * 20]
    with running(endless_folder, cold_dir, parallel=2) as server:
        alone = [scores(server, prompt=one).choices[0].logprobs for one in prompts]
        server.passes.columns.clear()
        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(lambda one: scores(server, prompt=one), prompts))
        assert (2, 1) in server.passes.columns
    for own, together in zip(alone, both, strict=True):
        found = together.choices[0].logprobs.token_logprobs
        assert found[1:] == pytest.approx(own.token_logprobs[1:], abs=1e-3)
