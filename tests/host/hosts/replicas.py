# SPDX-License-Identifier: Apache-2.0
"""Replicas that compute nothing: they answer as told, die where they are told to, and count."""

import json
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from hillinfer.store.keys import group_keys, root_key
from hillinfer_hosts.choice import make_policy
from hillinfer_hosts.directory import Change, EmbeddedDirectory, Host
from hillinfer_hosts.fleet import Fleet
from hillinfer_hosts.router import Router, RouterRules
from hillinfer_hosts.running import Listening

SPACE = bytes(range(32))
# Reading certificates that nobody needs would take longer than most requests.
HTTP = httpx.Client(verify=False, timeout=30)
KEY = "a key that hosts share"


def wait_until(what, seconds=20.0):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.01)


class Replica(ThreadingHTTPServer):
    """Answers a prompt of characters with its words, each an event where that is asked for."""

    daemon_threads = True

    def __init__(self, name):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name = name
        self.words = ["one", " two", " three", " four"]
        # Words that it says before it dies; all where None.
        self.dies_after = None
        self.status = 200
        self.tokenizes = True
        # Seconds between two words.
        self.pause = 0.0
        self.held_up = threading.Event()
        self.held_up.set()
        # Of its answers beside their own.
        self.headers = []
        self.asked = []
        self.pairs = []
        self.connection = None
        self.fetched = []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def is_left(self):
        """Whether who asked last has closed the connection."""
        self.connection.setblocking(False)
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        finally:
            self.connection.setblocking(True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._whole({"path": self.path, "of": self.server.name})

    def do_POST(self):
        own = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        told = json.loads(body)
        if self.path == "/tokenize":
            if not own.tokenizes:
                return self._whole({"error": "no"}, 404)
            text = told.get("prompt") or "".join(one["content"] for one in told["messages"])
            return self._whole({"tokens": [ord(one) for one in text]})
        if self.path == "/fetch":
            own.fetched.append((told, self.headers.get("Authorization")))
            return self._whole({"new_tokens": 128, "bytes": 1000})
        own.asked.append((self.path, told, {key.lower(): one for key, one in self.headers.items()}))
        own.pairs += [(key.lower(), one) for key, one in self.headers.items()]
        own.connection = self.connection
        own.held_up.wait(20)
        if own.status != 200:
            return self._whole({"error": {"message": own.name}}, own.status)
        if not told.get("stream"):
            if own.dies_after is not None:
                return self._die()
            return self._whole({"choices": [{"text": "".join(own.words)}], "of": own.name})
        return self._streamed(self.path)

    def _streamed(self, path):
        own = self.server
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self._own_headers()
        self.end_headers()
        self._chunk(b": progress\n\n")
        is_chat = path.endswith("chat/completions")
        events = [{"delta": {"role": "assistant", "content": ""}}] if is_chat else []
        for word in own.words:
            events.append({"delta": {"content": word}} if is_chat else {"text": word})
        events.append(
            {"delta": {}, "finish_reason": "stop"}
            if is_chat
            else {"text": "", "finish_reason": "stop"}
        )
        for said, event in enumerate(events):
            if own.dies_after is not None and said > own.dies_after:
                return self._die()
            time.sleep(own.pause)
            choice = {"index": 0, "finish_reason": None, **event}
            told = {"id": own.name, "created": 7, "choices": [choice]}
            self._chunk(b"data: " + json.dumps(told).encode() + b"\n\n")
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")
        return None

    def _own_headers(self):
        for name, value in self.server.headers:
            self.send_header(name, value)

    def _chunk(self, data):
        self.wfile.write(b"%x\r\n" % len(data) + data + b"\r\n")

    def _die(self):
        self.close_connection = True
        self.wfile.flush()
        self.connection.close()

    def _whole(self, told, status=200):
        data = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        # So that nothing holds on to one that is shut down.
        self.send_header("Connection", "close")
        self.send_header("Content-Length", str(len(data)))
        self._own_headers()
        self.end_headers()
        self.wfile.write(data)


class Place:
    """A router before some replicas, and who holds what."""

    def __init__(self, url, router, directory, replicas):
        self.url, self.router, self.directory = url, router, directory
        self.replicas = {one.name: one for one in replicas}

    def holds(self, name, text, salt=b""):
        keys = group_keys(root_key(SPACE, salt), [ord(one) for one in text])
        replica = self.replicas[name]
        self.directory.announce(
            Host(name, replica.url, replica.url, "1", (SPACE,)), Change(keys, is_whole=True)
        )

    def ask(self, text, path="/v1/completions", **more):
        headers = more.pop("headers", {})
        told = (
            {"prompt": text}
            if path == "/v1/completions"
            else {"messages": [{"role": "user", "content": text}]}
        )
        return HTTP.post(self.url + path, json=told | more, headers=headers, timeout=30)

    def streamed(self, text, path="/v1/completions", **more):
        """The events of a streamed answer, its text, and the ids of the answer."""
        answer = self.ask(text, path, stream=True, **more)
        events = [one for one in answer.text.split("\n\n") if one]
        told = [json.loads(one[6:]) for one in events if one.startswith("data: {")]
        choices = [one["choices"][0] for one in told if "choices" in one]
        text = "".join(
            one.get("text") or one.get("delta", {}).get("content", "") for one in choices
        )
        return events, text, {one["id"] for one in told if "id" in one}

    @property
    def under_way(self):
        """Requests that each host is answering, as the router thinks."""
        return dict(+self.router._fleet._requests)

    def counted(self):
        return {name: len(one.asked) for name, one in self.replicas.items()}


@contextmanager
def placed(names="ab", policy="prefix", directory=None, **rules):
    """A router before as many replicas as there are names; all say that they hold nothing."""
    with ExitStack() as stack:
        replicas = [Replica(name) for name in names]
        for one in replicas:
            thread = threading.Thread(target=one.serve_forever, args=(0.02,), daemon=True)
            thread.start()
            stack.callback(one.server_close)
            stack.callback(one.shutdown)
        kept = directory or EmbeddedDirectory()
        fleet = Fleet(kept, make_policy(policy))
        router = Router(kept, fleet, RouterRules(**({"key": KEY} | rules)))
        listening = Listening(lambda _: router.application(), "127.0.0.1", 0)
        threading.Thread(target=listening.run, daemon=True).start()
        # Its end is not waited for, which would take longer than most tests.
        stack.callback(listening.end)
        wait_until(lambda: listening.has_begun)
        place = Place(listening.url, router, kept, replicas)
        for name in names:
            place.holds(name, "")
        yield place
