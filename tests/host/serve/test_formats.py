# SPDX-License-Identifier: Apache-2.0
"""Answers of a form that was asked for: JSON of a schema and calls, with OpenAI's own client."""

import asyncio
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import openai
import pydantic
import pytest
from servers import HTTP, running, save_bytes

from hillinfer.serve.fields import parsed
from hillinfer.serve.formats import read_call
from hillinfer.serve.http.gate import FewAtOnce
from hillinfer.serve.refusals import ApiError
from hillinfer.serve.requests import chat_request

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["colour", "count"],
    "additionalProperties": False,
}
ASKED = {"type": "json_schema", "json_schema": {"name": "own", "schema": SCHEMA, "strict": True}}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "clock", "description": "tells the time"}},
]
QUESTION = [{"role": "user", "content": "what is it"}]


@pytest.fixture(scope="module")
def server(byte_folder, cold_dir):
    with running(byte_folder, cold_dir) as server:
        yield server


@pytest.fixture
def ask(server):
    with server.client() as client:

        def ask(**options):
            chosen = {"messages": QUESTION, "max_tokens": 96, "temperature": 1.0, "seed": 1}
            return client.chat.completions.create(model="tiny", **(chosen | options))

        yield ask


def brace(server):
    (token,) = server.inference.served.prompts.of_text("{")
    return str(token)


# --- JSON ---


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_have_the_schema_and_end(ask, temperature):
    answer = ask(response_format=ASKED, temperature=temperature, n=4)
    found = [json.loads(one.message.content) for one in answer.choices]
    for one in found:
        assert one.keys() == {"colour", "count"}
        assert one["colour"] in ("red", "green")
        assert 0 <= one["count"] <= 99
    assert [one.finish_reason for one in answer.choices] == ["stop"] * 4
    if temperature:
        assert len({one["count"] for one in found}) > 1


def test_without_the_schema_the_model_says_anything(ask):
    for one in ask(n=4).choices:
        with pytest.raises(ValueError, match=r"Expecting|Extra|Invalid|Unterminated"):
            json.loads(one.message.content)


def test_a_stream_has_the_same_text(ask):
    whole = ask(response_format=ASKED).choices[0].message.content
    pieces = [one.choices[0].delta.content or "" for one in ask(response_format=ASKED, stream=True)]
    assert "".join(pieces) == whole
    assert len(pieces) > 5


def test_a_class_is_read_back(server):
    class Bag(pydantic.BaseModel):
        colour: Literal["red", "green"]
        count: Literal[1, 2, 3]

    with server.client() as client:
        answer = client.chat.completions.parse(
            model="tiny", messages=QUESTION, max_tokens=96, response_format=Bag
        )
    assert isinstance(answer.choices[0].message.parsed, Bag)


def test_any_object_begins_as_one(ask):
    answer = ask(response_format={"type": "json_object"}, max_tokens=16)
    assert answer.choices[0].message.content.startswith("{")


def test_logprobs_stay_the_models_own(ask):
    (choice,) = ask(response_format=ASKED, logprobs=True, top_logprobs=3).choices
    first = choice.logprobs.content[0]
    assert first.token == "{"
    assert all(other.token != "{" for other in first.top_logprobs)


def test_a_stop_text_ends_it_sooner(ask):
    (choice,) = ask(response_format=ASKED, stop=['"count"']).choices
    assert choice.finish_reason == "stop"
    assert choice.message.content.endswith('", ')


# --- calls ---


def test_a_call_that_must_come(ask):
    answer = ask(tools=TOOLS, tool_choice="required", n=6)
    names = set()
    for choice in answer.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls
        arguments = json.loads(call.function.arguments)
        names.add(call.function.name)
        if call.function.name == "weather":
            assert arguments["city"] in ("Rome", "Oslo")
        else:
            assert arguments == {}
    assert names == {"weather", "clock"}


def test_a_function_that_is_named_is_the_one(ask):
    named = {"type": "function", "function": {"name": "clock"}}
    answer = ask(tools=TOOLS, tool_choice=named, n=4)
    assert {one.message.tool_calls[0].function.name for one in answer.choices} == {"clock"}


def test_a_stream_has_the_call_whole(ask):
    whole = ask(tools=TOOLS, tool_choice="required").choices[0].message.tool_calls[0]
    chunks = [one.choices[0] for one in ask(tools=TOOLS, tool_choice="required", stream=True)]
    (call,) = [one for chunk in chunks for one in chunk.delta.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == (
        whole.function.name,
        whole.function.arguments,
    )
    assert not any(chunk.delta.content for chunk in chunks)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]


def test_the_model_chooses_words_or_a_call(ask, server):
    """A bias makes the tiny model want one of them."""
    token = brace(server)
    called = ask(tools=TOOLS, logit_bias={token: 100}).choices[0]
    assert called.finish_reason == "tool_calls"
    worded = ask(tools=TOOLS, logit_bias={token: -100}, max_tokens=12).choices[0]
    assert worded.message.tool_calls is None
    assert worded.message.content
    pieces = ask(tools=TOOLS, logit_bias={token: -100}, max_tokens=12, stream=True)
    texts = [one.choices[0].delta.content or "" for one in pieces]
    assert "".join(texts) == worded.message.content
    assert len(texts) > 4
    never = ask(tools=TOOLS, tool_choice="none", logit_bias={token: 100}, max_tokens=4).choices[0]
    assert never.message.content == "{" * 4


def test_a_call_that_is_cut_is_a_text(ask):
    (choice,) = ask(tools=TOOLS, tool_choice="required", max_tokens=8).choices
    assert choice.finish_reason == "length"
    assert choice.message.content == '{"name":'[:8]
    assert choice.message.tool_calls is None


def test_results_go_back_to_the_model(ask):
    (choice,) = ask(tools=TOOLS, tool_choice="required").choices
    call = choice.message.tool_calls[0]
    messages = [
        *QUESTION,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "it rains"},
    ]
    longer = ask(tools=TOOLS, messages=messages, tool_choice="required").usage.prompt_tokens
    shorter = ask(tools=TOOLS, messages=messages[:1], tool_choice="required").usage.prompt_tokens
    written = f'{{"name": "{call.function.name}", "arguments": {call.function.arguments}}}'
    assert longer - shorter == len(f"assistant: {written}\nuser: The function returned: it rains\n")


class Place(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]


class Trip(pydantic.BaseModel):
    """Its schema names that of a place by a reference, as schemas of nested classes do."""

    model_config = pydantic.ConfigDict(extra="forbid")
    begin: Place
    end: Place


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_schema_may_refer_to_its_own_parts(ask, server, choice):
    tools = [TOOLS[1], openai.pydantic_function_tool(Trip)]
    assert "$ref" in json.dumps(tools)
    token = brace(server)
    answer = ask(tools=tools, tool_choice=choice, logit_bias={token: 100}, n=3, max_tokens=200)
    calls = [one.message.tool_calls[0].function for one in answer.choices]
    trips = [call for call in calls if call.name == "Trip"]
    assert trips
    for call in trips:
        Trip.model_validate_json(call.arguments)


def test_what_looks_like_a_reference_in_data_stays(ask):
    given = {"const": {"$ref": "#/a"}, "$defs": {"const": {"type": "integer"}}}
    own = {**CITY, "properties": {"enum": given}, "required": ["enum"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": own}}]
    (choice,) = ask(tools=tools, tool_choice="required", max_tokens=200).choices
    found = json.loads(choice.message.tool_calls[0].function.arguments)
    assert found["enum"] == {"$ref": "#/a"}


@pytest.mark.parametrize("own", [{}, {"properties": CITY["properties"]}, {"anyOf": [{}, CITY]}])
def test_arguments_are_an_object_also_where_the_schema_does_not_say_so(ask, own):
    tools = [{"type": "function", "function": {"name": "f", "parameters": own}}]
    # The tiny model says any value there may be, digits above all.
    bias = {str(ord(one)): 100 for one in "0123456789"}
    answer = ask(tools=tools, tool_choice="required", max_tokens=27, n=2, logit_bias=bias)
    before = '{"name": "f", "arguments": '
    assert {one.message.content for one in answer.choices} == {before}
    longer = ask(tools=tools, tool_choice="required", max_tokens=28, n=2, logit_bias=bias)
    assert {one.message.content for one in longer.choices} == {before + "{"}


@pytest.mark.parametrize("content", ["it is", [{"type": "text", "text": "it is"}]])
def test_words_beside_a_call_stay(ask, content):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    def counted(**message):
        messages = [*QUESTION, {"role": "assistant", **message}]
        return ask(messages=messages, max_tokens=1).usage.prompt_tokens

    alone = counted(content=None, tool_calls=[call])
    assert counted(content=content, tool_calls=[call]) == alone + len("it is\n")


def test_a_file_within_a_result_is_refused(ask):
    part = {"type": "file", "file": {"file_id": "file-1"}}
    messages = [*QUESTION, {"role": "tool", "tool_call_id": "a", "content": [part]}]
    with pytest.raises(openai.BadRequestError) as refused:
        ask(messages=messages)
    assert refused.value.param == "messages[1].content"


def test_no_depth_of_a_schema_is_a_defect():
    body = {"model": "m", "messages": QUESTION, "tools": [{"type": "function", "function": 0}]}
    before, after = json.dumps(body).split(" 0")
    found = set()
    for deep in range(900, 1000):
        own = '{"a":' * deep + "{}" + "}" * deep
        text = f'{before} {{"name": "f", "parameters": {own}}}{after}'
        try:
            chat_request(parsed(text.encode()))
        except ApiError as error:
            found.add(error.status)
    assert found == {400}


def test_the_model_is_told_of_functions(ask):
    plain, told = ask(max_tokens=1).usage, ask(max_tokens=1, tools=TOOLS).usage
    assert told.prompt_tokens > plain.prompt_tokens + 200
    messages = [{"role": "system", "content": "be brief"}, *QUESTION]
    more = ask(max_tokens=1, tools=TOOLS, messages=messages).usage
    # One system message, not two.
    assert more.prompt_tokens == told.prompt_tokens + len("be brief\n\n")


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('{"name": "f", "arguments": {"a": 1}}', ("f", '{"a": 1}')),
        ('{"name": "f"}', None),
        ('{"name": "f", "arguments": {', None),
        ("words", None),
    ],
)
def test_what_is_a_call(text, call):
    assert read_call(text) == call


# --- templates without a system role ---

# As those of Mistral's first models and Gemma's.
STRICT = (
    "{% for one in messages %}{% if (one['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "[{{ one['role'] }}]{{ one['content'] }}{% endfor %}"
)


@pytest.fixture(scope="module")
def strict(tmp_path_factory, cold_dir):
    """A server whose model's template takes turns of the user and the assistant alone."""
    folder = save_bytes(tmp_path_factory.mktemp("strict"), STRICT)
    with running(folder, cold_dir) as server, server.client() as client:
        yield server, client


def told_in(server, **asked):
    """Return the prompt that a chat becomes."""
    tokens = HTTP.post(f"{server.url}/tokenize", json={"model": "tiny"} | asked).json()["tokens"]
    told = HTTP.post(f"{server.url}/detokenize", json={"model": "tiny", "tokens": tokens})
    return told.json()["prompt"]


def test_tools_are_told_where_no_template_knows_a_system_message(strict):
    server, client = strict
    answer = server.ask(QUESTION, client, tools=TOOLS, tool_choice="required", max_tokens=96)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name in ("weather", "clock")
    # They are part of the prompt, with the question behind them.
    plain = server.ask(QUESTION, client, max_tokens=1).usage.prompt_tokens
    assert answer.usage.prompt_tokens > plain + 200


def test_a_system_message_begins_the_users_first_turn(strict, server):
    chat = [{"role": "system", "content": "be kind"}, *QUESTION]
    assert told_in(strict[0], messages=chat) == "[user]be kind\n\nwhat is it"
    assert told_in(strict[0], messages=chat[:1]) == "[user]be kind"
    # A template that knows it has it as it is.
    assert told_in(server, messages=chat) == "system: be kind\nuser: what is it\n"


def test_a_chat_that_no_template_takes_is_refused_with_what_a_client_can_do(strict):
    server, client = strict
    with pytest.raises(openai.BadRequestError) as refused:
        server.ask([*QUESTION, *QUESTION], client)
    assert refused.value.code == "chat_template"
    said = str(refused.value)
    assert "roles must alternate" in said
    assert "/v1/completions" in said
    assert "--prompt-style" not in said


# --- what is refused ---


def schema(own):
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": own}}}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (schema({"type": "nope"}), "response_format"),
        (schema({"$ref": "http://127.0.0.1/x"}), "response_format"),
        (schema({"anyOf": []}), "response_format"),
        (schema({"type": "string", "pattern": "(?=a)b"}), "response_format"),
        (schema({"enum": ["x" * 300_000]}), "response_format"),
        (schema("text"), "response_format.json_schema.schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": ASKED, "tools": TOOLS}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tools": [{"type": "search"}]}, "tools[0].type"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_with_its_name(ask, options, param):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(**options)
    assert refused.value.param == param
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    ("options", "param"),
    [({"max_tokens": 1 << 20}, "max_tokens"), ({"logit_bias": {"9999": 1}}, "logit_bias")],
)
def test_no_grammar_is_made_for_what_is_refused_anyway(ask, options, param):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(**schema({"type": "nope"}), **options)
    assert refused.value.param == param


def test_a_tokenizer_that_grammars_cannot_use_is_refused(tiny_server):
    with pytest.raises(openai.BadRequestError) as refused:
        tiny_server.ask("a", response_format=ASKED)
    assert refused.value.code == "unsupported_value"
    assert refused.value.param == "response_format"
    assert tiny_server.ask("a").choices[0].message.content is not None


def test_a_server_without_the_library_refuses_forms_and_answers_all_else(ask, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(openai.BadRequestError, match="llguidance"):
        ask(response_format=ASKED)
    assert ask(max_tokens=2).usage.completion_tokens == 2


class Slow:
    """Counts who is inside at once, and how many at most."""

    def __init__(self):
        self.lock, self.inside, self.most = threading.Lock(), 0, 0

    def __call__(self):
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        time.sleep(0.03)
        with self.lock:
            self.inside -= 1


@pytest.mark.parametrize(("most", "waiting"), [(1, 7), (3, 5)])
def test_work_that_takes_long_is_done_few_at_once(most, waiting):
    async def all_of_it():
        few, slow = FewAtOnce(most, waiting), Slow()
        works = [asyncio.ensure_future(few.do(slow)) for _ in range(most + waiting)]
        await asyncio.sleep(0.01)
        with pytest.raises(ApiError) as refused:
            await few.do(slow)
        await asyncio.gather(*works)
        # Those who have ended leave their places.
        await few.do(slow)
        return slow.most, few.inside, refused.value

    found, inside, refused = asyncio.run(all_of_it())
    assert (found, inside) == (most, 0)
    assert (refused.status, refused.code) == (429, "too_many_requests")


def test_few_grammars_are_made_at_once(server, ask, monkeypatch):
    grammars, slow, pairs = server.inference.served.grammars, Slow(), threading.Barrier(2)
    begin = grammars.begin

    def counted(asked):
        # Nobody goes on alone, so that two are inside at once however slow the machine is.
        pairs.wait(60)
        slow()
        return begin(asked)

    monkeypatch.setattr(grammars, "begin", counted)
    with ThreadPoolExecutor(6) as pool:
        options = {"response_format": ASKED, "max_tokens": 32}
        answers = list(pool.map(lambda _: ask(**options), range(6)))
    assert len(answers) == 6
    assert slow.most <= 2
