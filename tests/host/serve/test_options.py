# SPDX-License-Identifier: Apache-2.0
"""Every option of an answer does what OpenAI's description says, or is refused."""

import math

import openai
import pytest
import torch
from servers import CHAT, HTTP, running
from tokenizers import decoders

from hillinfer.serve.answers import WishedTokens
from hillinfer.serve.requests import chat_request


def text(answer, number=0):
    return answer.choices[number].message.content


@pytest.fixture
def ask(tiny_server, client):
    return lambda **options: tiny_server.ask(CHAT, client, **options)


@pytest.fixture(scope="module")
def plain(tiny_server):
    """The greedy answer of 24 tokens."""
    with tiny_server.client() as client:
        return tiny_server.ask(CHAT, client, max_tokens=24)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stop_text_ends_an_answer_and_never_comes(ask, plain, streamed, length):
    """Texts of several tokens too: each token is a character here."""
    whole = text(plain)
    stop = whole[6 : 6 + length]
    options = {"max_tokens": 24, "stop": [stop, "never in it"]}
    if streamed:
        chunks = [one.choices[0] for one in ask(stream=True, **options)]
        found = "".join(one.delta.content or "" for one in chunks)
        finish = chunks[-1].finish_reason
    else:
        answer = ask(**options)
        found, finish = text(answer), answer.choices[0].finish_reason
    assert found == whole[: whole.index(stop)]
    assert finish == "stop"


def test_what_looked_like_a_stop_comes_all_the_same(ask, plain):
    whole = text(plain)
    # Its first characters come, its last one never.
    assert text(ask(max_tokens=24, stop=whole[3:6] + "\u00ff")) == whole


def test_a_seed_repeats_an_answer(ask):
    hot = {"temperature": 1.5, "max_tokens": 24}
    first = text(ask(seed=5, **hot))
    assert text(ask(seed=5, **hot)) == first
    assert text(ask(seed=6, **hot)) != first
    assert len({text(ask(**hot)) for _ in range(4)}) > 1


def test_the_likeliest_alone_is_greedy(ask, plain):
    whole = text(plain)
    assert text(ask(temperature=2, top_p=1e-9, max_tokens=24)) == whole
    assert text(ask(temperature=2, top_p=0, max_tokens=24)) == whole
    assert text(ask(temperature=1e-308, max_tokens=24)) == whole
    assert text(ask(temperature=2, extra_body={"top_k": 1}, max_tokens=24)) == whole
    assert text(ask(temperature=2, seed=1, max_tokens=24)) != whole


@pytest.mark.parametrize("streamed", [False, True])
def test_logprobs(ask, streamed):
    options = {"logprobs": True, "top_logprobs": 3, "max_tokens": 5}
    if streamed:
        chunks = [one.choices[0] for one in ask(stream=True, **options)]
        tokens = [one for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content]
    else:
        tokens = ask(**options).choices[0].logprobs.content
    assert len(tokens) == 5
    for one in tokens:
        # Greedy: the chosen one is the likeliest.
        assert one.token == one.top_logprobs[0].token
        assert one.logprob == one.top_logprobs[0].logprob
        assert [-math.inf, 0] != sorted(top.logprob for top in one.top_logprobs)
        assert sum(math.exp(top.logprob) for top in one.top_logprobs) <= 1 + 1e-6
        assert bytes(one.bytes).decode() == one.token


def test_logprobs_of_a_text(client):
    given = {"model": "tiny", "prompt": "the cat", "temperature": 0, "max_tokens": 4}
    told = client.completions.create(logprobs=2, **given).choices[0]
    assert [len(one) for one in told.logprobs.top_logprobs] == [2] * 4
    shown = [one if len(one) == 1 else "" for one in told.logprobs.tokens]
    assert "".join(shown) == told.text
    assert told.logprobs.text_offset == [len("".join(shown[:place])) for place in range(4)]


def test_a_text_goes_on_with_its_space(endless_folder, cold_dir):
    """Decoders of Llama's kind leave out the space that a text begins with; a chat begins anew."""

    def of_llamas_kind(own):
        own.backend_tokenizer.decoder = decoders.Sequence(
            [decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        return own

    with (
        running(endless_folder, cold_dir, tokenizer=of_llamas_kind) as server,
        server.client() as client,
    ):
        (space,) = HTTP.post(f"{server.url}/tokenize", json={"prompt": " "}).json()["tokens"]
        options = {"max_tokens": 3, "logit_bias": {str(space): 100}, "temperature": 0}
        asked = {"model": "tiny", "prompt": "the cat", "echo": True, **options}
        assert client.completions.create(**asked).choices[0].text == "the cat   "
        chunks = client.completions.create(**asked, stream=True)
        assert "".join(one.choices[0].text for one in chunks) == "the cat   "
        assert text(server.ask(CHAT, client, **options)) == "  "
        # So do its tokens, one by one.
        told = client.completions.create(**asked, logprobs=1).choices[0].logprobs
        assert "".join(told.tokens) == "the cat   "
        assert told.text_offset == list(range(10))
        assert " " in told.top_logprobs[-1]
        chat = server.ask(CHAT, client, **options, logprobs=True, top_logprobs=1)
        assert [one.token for one in chat.choices[0].logprobs.content] == ["", " ", " "]


def test_the_token_that_came_is_told_with_the_likeliest_of_a_text(client):
    given = {"model": "tiny", "prompt": "the cat", "temperature": 2, "seed": 1, "max_tokens": 12}
    for most in (0, 1):
        told = client.completions.create(logprobs=most, **given).choices[0].logprobs
        own = zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True)
        assert all(top[token] == logprob for token, logprob, top in own)
        # Beside the likeliest, where it is none of them: some are and some are not.
        assert max(map(len, told.top_logprobs)) == most + 1


def test_several_answers_are_those_of_seeds_that_follow(ask):
    hot = {"temperature": 1.5, "max_tokens": 12}
    three = ask(n=3, seed=40, **hot)
    assert [one.index for one in three.choices] == [0, 1, 2]
    assert three.usage.completion_tokens == 36
    assert [text(three, i) for i in range(3)] == [text(ask(seed=40 + i, **hot)) for i in range(3)]


def test_a_bias_decides(tiny_server, ask, plain):
    wanted = 7
    letter = tiny_server.inference.served.prompts.text_of([wanted])
    assert text(ask(logit_bias={wanted: 100}, max_tokens=4)) == 4 * letter
    first = text(plain)[0]
    (token,) = tiny_server.inference.served.prompts.of_text(first)
    assert text(ask(logit_bias={str(token): -100}, max_tokens=4))[0] != first


@pytest.mark.parametrize(
    ("penalties", "expected"),
    [
        ({}, [1, 1, 1, 1]),
        ({"presence_penalty": 0.6}, [1, 2, 1, 1]),
        ({"frequency_penalty": 0.6}, [1, 2, 1, 0]),
        ({"presence_penalty": -1}, [1, 1, 1, 1]),
    ],
)
def test_penalties_take_from_what_was_said(penalties, expected):
    """Once, or for each time; logits are the same at each step."""
    asked = chat_request({"model": "tiny", "messages": CHAT, "temperature": 0} | penalties)
    tokens = WishedTokens(asked.wishes, 0, torch.device("cpu"))
    logits = torch.tensor([0.0, 1.0, 0.5])
    assert [tokens.choose(logits).token_id for _ in expected] == expected
    assert logits.tolist() == [0.0, 1.0, 0.5]


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_penalties_change_an_answer(ask, penalty):
    biased = {"logit_bias": {7: 100, 8: 99}, "max_tokens": 8}
    assert text(ask(**biased, **{penalty: 2})) != text(ask(**biased, **{penalty: -2}))


def test_the_older_name_of_the_bound(ask):
    assert ask(max_tokens=3).usage.completion_tokens == 3
    both = ask(max_tokens=openai.omit, max_completion_tokens=4)
    assert both.usage.completion_tokens == 4


REFUSED = [
    ({"temperature": 3}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -1}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"logit_bias": {"cat": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"61": 1}}, "logit_bias"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"seed": "x"}, "seed"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, None),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=[str(one[0])[:40] for one in REFUSED])
def test_what_is_not_done_is_refused(tiny_server, body, param):
    import json

    given = {"model": "tiny", "messages": CHAT, "max_tokens": 1} | body
    answer = HTTP.post(
        f"{tiny_server.url}/v1/chat/completions",
        content=json.dumps(given),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param


def test_what_asks_for_nothing_is_taken(ask):
    answer = ask(
        max_tokens=1,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        metadata={"a": "b"},
        user="u",
        service_tier="auto",
        stop=None,
    )
    assert answer.usage.completion_tokens == 1


def test_parts_of_a_message_are_one_text(tiny_server, client):
    parts = [{"type": "text", "text": "the cat"}, {"type": "text", "text": "sat"}]
    joined = tiny_server.ask([{"role": "user", "content": parts}], client)
    assert text(joined) == text(tiny_server.ask("the cat\nsat", client))


def test_prompts_that_are_none(client):
    for prompt in (["a", "b"], [[1], [2]], [1.5], [-1], [61], ""):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="tiny", prompt=prompt)
