# SPDX-License-Identifier: Apache-2.0
"""Clients that people have, beside OpenAI's own: curl, LangChain, transformers' chat."""

import json
import subprocess

import pytest
from servers import CHAT, CHUNK, running
from waiting import until

from hillinfer.store.store import Store

QUESTION = CHAT[0]["content"]


def curl(*arguments, data=None):
    ended = subprocess.run(
        ["curl", "--silent", "--show-error", "--no-buffer", *arguments],
        input=data,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return ended.stdout


def body(**options):
    return json.dumps(
        {"model": "tiny", "messages": CHAT, "max_tokens": 6, "temperature": 0} | options
    )


@pytest.fixture
def expected(tiny_server):
    """What OpenAI's client gets."""
    return tiny_server.ask(QUESTION, max_tokens=6).choices[0].message.content


# --- curl ---


def test_curl_gets_an_answer_and_a_stream(tiny_server, expected):
    url = f"{tiny_server.url}/v1/chat/completions"
    asking = (url, "--header", "Content-Type: application/json", "--data", "@-")
    whole = json.loads(curl(*asking, data=body()))
    assert whole["choices"][0]["message"]["content"] == expected
    lines = curl(*asking, data=body(stream=True)).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    told = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    chunks = [json.loads(one) for one in told]
    deltas = [one["choices"][0]["delta"].get("content") or "" for one in chunks]
    assert "".join(deltas) == expected


def test_curl_sends_a_file(endless_folder, cold_dir, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("the cat sat on the mat. " * 20)
    Store.create(tmp_path / "store", 64 << 20)
    with Store(tmp_path / "store") as store, running(endless_folder, cold_dir, store) as server:
        form = ("--form", "purpose=user_data", "--form", f"file=@{book}")
        made = json.loads(curl(f"{server.url}/v1/files", *form))
        assert made["filename"] == "book.txt"
        place = f"{server.url}/v1/files/{made['id']}"
        until(lambda: json.loads(curl(place))["status"] == "processed")
        content = [
            {"type": "file", "file": {"file_id": made["id"]}},
            {"type": "text", "text": "where"},
        ]
        asked = body(messages=[{"role": "user", "content": content}])
        answer = json.loads(
            curl(
                f"{server.url}/v1/chat/completions",
                *("--header", "Content-Type: application/json", "--data", "@-"),
                data=asked,
            )
        )
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 20 * 20
        assert json.loads(curl(place, "--request", "DELETE"))["deleted"] is True


# --- LangChain ---


def test_langchain_asks_streams_and_sees_logprobs(tiny_server, expected):
    from langchain_openai import ChatOpenAI

    own = ChatOpenAI(
        model="tiny",
        base_url=f"{tiny_server.url}/v1",
        api_key="none",
        max_tokens=6,
        temperature=0,
        max_retries=0,
    )
    answer = own.invoke(QUESTION)
    assert answer.content == expected
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.usage_metadata["output_tokens"] == 6
    pieces = [one.content for one in own.stream(QUESTION)]
    assert "".join(pieces) == expected
    assert len(pieces) > 3
    told = own.bind(logprobs=True).invoke(QUESTION).response_metadata["logprobs"]["content"]
    assert "".join(one["token"] for one in told) == expected


# --- transformers' chat ---


CHAT_PROGRAM = """
import sys
from transformers.cli.chat import Chat
Chat("tiny", sys.argv[1], ["temperature=0.0"], user="someone")
"""


def test_transformers_chat_talks(tiny_server, tmp_path, warm_python):
    """It has the model loaded first, which is loaded here, and streams its answers."""
    before = len(tiny_server.passes.columns)
    told = subprocess.run(
        [*warm_python, "-c", CHAT_PROGRAM, f"{tiny_server.url}/v1"],
        # The tiny model's answers have no end: it asks whether to go on.
        input=f"{QUESTION}\nn\n!exit\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert told.returncode == 0, told.stderr
    assert "already loaded" in told.stdout
    assert len(tiny_server.passes.columns) > before + CHUNK
    assert tiny_server.logged("answered")[-1]["endpoint"] == "chat"


def test_a_model_that_is_not_here_is_not_loaded(tiny_server):
    told = json.loads(
        curl(
            f"{tiny_server.url}/load_model",
            *("--header", "Content-Type: application/json", "--data", "@-"),
            data='{"model": "other"}',
        )
    )
    assert told["error"]["code"] == "model_not_found"
