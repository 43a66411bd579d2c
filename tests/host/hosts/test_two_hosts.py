# SPDX-License-Identifier: Apache-2.0
"""Two replicas with a store each, two agents and a router, each a process of its command."""

import json
import os
import re
import subprocess
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from replicas import HTTP

KEY = "what the hosts of this test share"
CHAT = "/v1/chat/completions"
SERVE = "from hillinfer_command import main; main()"
PLUGIN = str(Path(__file__).parents[3] / "plugins/hillinfer_hosts")
HOSTS = "from hillinfer_hosts.cli import main; main()"
# Bits of an answer are those of reading all of it: whoever answers, it is the same.
MADE = (
    *("--alpha", "0.2", "--dram-budget", "24MiB", "--threads", "1", "--parallel", "1"),
    *("--reuse", "exact", "--prefill-chunk", "64", "--alias", "tiny", "--store-size", "64MiB"),
)
MANY = "the cat sat on the mat and the dog lay in the fog. " * 12


class Process:
    """A command under way, which says where it listens."""

    def __init__(self, python, program, *arguments):
        words = [*python, "-c", program, *(str(one) for one in arguments)]
        # The package of hosts is of a checkout that need not be installed.
        paths = (PLUGIN, os.environ.get("PYTHONPATH", ""))
        self.held = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        self.errors = []
        threading.Thread(target=lambda: self.errors.extend(self.held.stderr), daemon=True).start()
        line = self.held.stdout.readline()
        found = re.search(r"listening at (http://\S+?),?\s", line)
        assert found, (line, self.errors)
        self.url = found[1]

    def kill(self):
        self.held.kill()
        self.held.wait()

    def end(self):
        self.held.terminate()
        self.held.wait(20)


def wait_for(what, seconds=30.0):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            found = what()
        except httpx.HTTPError:
            found = None
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("it did not come")


class Hosts:
    """What a test asks: replicas by name, and the router before them."""

    def __init__(self, stack, python, folder, place):
        key_file = place / "key"
        key_file.write_text(KEY + "\n")
        key_file.chmod(0o600)

        def process(program, *arguments):
            made = Process(python, program, *arguments)
            stack.callback(made.kill)
            return made

        self.replicas = {}
        for name in ("a", "b"):
            arguments = ("serve", "--model", folder, "--port", "0", "--store", place / name)
            cold = place / f"cold-{name}"
            cold.mkdir()
            self.replicas[name] = process(SERVE, *arguments, "--cold-dir", cold, *MADE)
        own = ("--port", "0", "--key-file", key_file)
        self.router = process(HOSTS, "router", *own)
        for name, replica in self.replicas.items():
            wait_for(lambda url=replica.url: HTTP.get(f"{url}/health").status_code == 200)
            words = ("--replica", replica.url, "--directory", self.router.url, "--name", name)
            setattr(
                self,
                f"agent_{name}",
                process(HOSTS, "agent", "--store", place / name, *words, *own),
            )
        wait_for(lambda: [one["name"] for one in self.known()] == ["a", "b"])

    def known(self):
        headers = {"Authorization": f"Bearer {KEY}"}
        return HTTP.get(f"{self.router.url}/hosts", headers=headers).json()["hosts"]

    def ask(self, url, text, tokens=8):
        told = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
        told |= {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = HTTP.post(url + CHAT, json=told, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer

    def routed(self, text, tokens=8):
        """Who answered, how many tokens the store brought, and the answer."""
        answer = self.ask(self.router.url, text, tokens)
        return (answer.headers["X-HillInfer-Host"], *told_by(answer))


def told_by(answer):
    told = answer.json()
    cached = told["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return cached, told["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory, warm_python):
    from tiny_folder import character_tokenizer, save_tiny

    tokenizer = character_tokenizer()
    tokenizer.eos_token = None
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), tokenizer=tokenizer)
    with ExitStack() as stack:
        yield Hosts(stack, warm_python, folder, tmp_path_factory.mktemp("hosts"))


def test_a_prompt_goes_to_the_host_that_read_it(hosts):
    # Each host reads a document that the router has not seen.
    for name, replica in hosts.replicas.items():
        hosts.ask(replica.url, f"{name} {MANY}")
    wait_for(lambda: all(one["namespaces"] for one in hosts.known()))
    for _ in range(3):
        for name, replica in hosts.replicas.items():
            who, cached, said = hosts.routed(f"{name} {MANY}")
            assert who == name
            assert cached >= 512
            assert said == told_by(hosts.ask(replica.url, f"{name} {MANY}"))[1]


def test_rows_go_from_one_host_to_another(hosts):
    text = "c " + MANY
    answer = told_by(hosts.ask(hosts.replicas["a"].url, text))[1]
    told = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
    ids = HTTP.post(f"{hosts.replicas['a'].url}/tokenize", json=told).json()["tokens"]
    by_name = {one["name"]: one for one in wait_for(hosts.known)}
    body = {
        "source": by_name["a"]["agent"],
        "namespace": by_name["a"]["namespaces"][0],
        "salt": "",
        "ids": ids[: len(ids) // 64 * 64],
        "seconds": 20,
    }
    headers = {"Authorization": f"Bearer {KEY}"}
    url = by_name["b"]["agent"] + "/fetch"
    assert HTTP.post(url, json=body).status_code == 401
    brought = HTTP.post(url, json=body, headers=headers, timeout=30).json()
    assert brought["failure"] == ""
    assert brought["new_tokens"] == len(body["ids"])
    cached, said = told_by(hosts.ask(hosts.replicas["b"].url, text))
    assert cached >= 512
    assert said == answer


def test_a_host_killed_over_an_answer_costs_no_answer(hosts):
    text, tokens = "b " + MANY, 120
    whole = told_by(hosts.ask(hosts.replicas["a"].url, text, tokens))[1]
    told = {"model": "tiny", "messages": [{"role": "user", "content": text}], "stream": True}
    told |= {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    said, ids, is_killed, is_done = "", set(), False, False
    with HTTP.stream("POST", hosts.router.url + CHAT, json=told, timeout=60) as answer:
        # Both have read it by now: who answers is who is killed.
        name = answer.headers["X-HillInfer-Host"]
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                is_done |= line == "data: [DONE]"
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            ids.add(event["id"])
            said += event["choices"][0]["delta"].get("content") or ""
            if len(said) > 5 and not is_killed:
                hosts.replicas[name].kill()
                is_killed = True
    assert is_killed
    assert is_done
    assert said == whole
    assert len(ids) == 1
    counted = HTTP.get(f"{hosts.router.url}/metrics").text
    assert f'hillinfer_router_lost_hosts_total{{host="{name}"}} 1.0' in counted
    left = ({"a", "b"} - {name}).pop()
    wait_for(lambda: [one["name"] for one in hosts.known()] == [left])
    for text in ("a " + MANY, "b " + MANY, "d " + MANY):
        assert hosts.routed(text)[0] == left
