# SPDX-License-Identifier: Apache-2.0
"""The page at `/`: it stands alone, and its script reads what this server really sends.

No browser runs it here; its functions that need no page run in Node.
"""

import base64
import hashlib
import html.parser
import json
import re
import shutil
import subprocess

import pytest
from servers import CHAT, HTTP, running

from hillinfer.serve.rules import ApiKeys


@pytest.fixture(scope="module")
def page(tiny_server):
    return HTTP.get(f"{tiny_server.url}/")


class Elements(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def block(text, name):
    return re.search(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)[1]


def test_it_may_run_its_own_script_and_load_nothing(page):
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    for name, rule in (("script", "script-src"), ("style", "style-src")):
        digest = hashlib.sha256(block(page.text, name).encode()).digest()
        assert f"{rule} 'sha256-{base64.b64encode(digest).decode()}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    elements = Elements(page.text).found
    assert not any({"src", "href", "style", "onclick"} & {*attrs} for _, attrs in elements)
    assert "innerHTML" not in page.text
    assert not re.search(r"https?://", page.text)


def test_everything_that_is_filled_in_has_a_name(page):
    elements = Elements(page.text).found
    labelled = {attrs["for"] for tag, attrs in elements if tag == "label"}
    filled = {a["id"] for tag, a in elements if tag in ("input", "textarea", "progress")}
    assert filled == labelled
    names = {attrs["id"] for _, attrs in elements if "id" in attrs}
    told = {a["aria-labelledby"] for _, a in elements if "aria-labelledby" in a}
    assert told <= names
    # Names that the script asks for are there.
    assert {*re.findall(r"\$\(\"([\w-]+)\"\)", page.text)} <= names
    assert ("html", {"lang": "en"}) in elements
    assert any(attrs.get("aria-live") == "polite" for _, attrs in elements)


def test_it_comes_before_any_key(endless_folder, cold_dir):
    with running(endless_folder, cold_dir, keys=ApiKeys(["sk-of-anna-0001"])) as server:
        assert HTTP.get(f"{server.url}/").status_code == 200
        assert HTTP.get(f"{server.url}/v1/files").status_code == 401
        assert "sk-of" not in HTTP.get(f"{server.url}/").text


def in_node(page, program, given):
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node here")
    whole = block(page.text, "script") + program
    done = subprocess.run(
        [node, "-e", whole, json.dumps(given)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_it_reads_a_stream_in_any_pieces(page, tiny_server, size):
    body = {"model": "tiny", "messages": CHAT, "stream": True, "max_tokens": 8, "temperature": 0}
    text = HTTP.post(f"{tiny_server.url}/v1/chat/completions", json=body).text
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    program = """
    const told = [], read = eventReader(one => told.push(one));
    JSON.parse(process.argv[1]).forEach(read);
    console.log(JSON.stringify(told));
    """
    told = in_node(page, program, pieces)
    said = [one["data"]["choices"][0]["delta"] for one in told if "data" in one]
    whole = tiny_server.ask(CHAT, max_tokens=8).choices[0].message.content
    assert "".join(one.get("content", "") for one in said) == whole
    assert told[-1] == {"done": True}
    progress = [one["comment"] for one in told if "comment" in one]
    assert json.loads(progress[-1].removeprefix("progress "))["done"] == len(CHAT[0]["content"]) + 3


def test_it_shows_what_metrics_say(page, tiny_server):
    tiny_server.ask(CHAT)
    metrics = HTTP.get(f"{tiny_server.url}/metrics").text
    program = """
    console.log(JSON.stringify(figuresOf(metricsOf(JSON.parse(process.argv[1])))));
    """
    told = dict(in_node(page, program, metrics))
    assert told["Memory budget"] == "24.0 MiB"
    assert told["Requests now"] == 0
    assert float(told["Selected rows in memory"].removesuffix(" %")) > 0
    assert int(told["Prompt tokens"]) > 0
    assert "Written to the drive" in told
